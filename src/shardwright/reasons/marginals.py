"""Min-marginals: what every single choice of a factor graph costs when all others follow it.

Bucket elimination, then the same tables from the last variable back to the
first: a bucket's table plus the best of everything outside it holds, for each of its choices, the
optimum of the whole graph under that choice. Twice the work of one solve gives all of them, exactly
(max-product on a junction tree, in the semiring of min and +).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.buckets import Floats, Scope, elimination_order
from shardwright.planner.solve.tables import eliminate, merged, spread
from shardwright.reasons.factors import FactorGraph


def min_marginals(graph: FactorGraph, price: float) -> tuple[NDArray[np.float64], ...]:
    """Return, per variable and choice, the least seconds + ``price`` * bytes of all assignments.

    Forbidden choices are infinite. Nothing is pruned, so that dominated choices have their price
    too. Raises InputError where a table would be too large.
    """
    sizes = graph.sizes
    order = elimination_order(sizes, [factor.scope for factor in graph.factors])
    tables = [(scope, costs[0] + price * costs[1]) for scope, costs in merged(graph.tables)]
    buckets, left = eliminate(sizes, tables, order)
    ends = {entry.variable: float(entry.table) for entry in left}
    outside: dict[int, Floats] = {}
    found: list[NDArray[np.float64]] = [np.zeros(size) for size in sizes]
    for bucket in reversed(buckets):
        variable, scope = bucket.variable, bucket.scope
        # Beyond the last variable of a component lie the other components.
        rest = sum(value for number, value in ends.items() if number != variable)
        around = outside.get(variable, np.array(rest))
        around = np.expand_dims(around, scope.index(variable))
        found[variable] = _onto(bucket.table + around, scope, (variable,))
        for entry in bucket.told:
            if entry.variable >= 0:
                others = _less(bucket.table, spread(sizes, entry.scope, entry.table, scope))
                outside[entry.variable] = _onto(others + around, scope, entry.scope)
    return tuple(found)


def _onto(table: Floats, scope: Scope, kept: Scope) -> Floats:
    """Minimise over all variables but the kept ones."""
    return table.min(axis=tuple(axis for axis, v in enumerate(scope) if v not in kept))


def _less(table: Floats, message: Floats) -> Floats:
    """Take a message out of a table; where it allowed nothing, nothing is allowed."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(message), table - message, np.inf)
