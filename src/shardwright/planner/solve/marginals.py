"""Min-marginals: what every single choice of a factor graph costs when all others follow it.

Bucket elimination as in ``elimination``, then the same tables from the last variable back to the
first: a bucket's table plus the best of everything outside it holds, for each of its choices, the
optimum of the whole graph under that choice. Twice the work of one solve gives all of them, exactly
(max-product on a junction tree, in the semiring of min and +).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError
from shardwright.planner.solve.buckets import MAX_CELLS, elimination_order
from shardwright.planner.solve.factors import FactorGraph, Table, merge_scopes

Scope = tuple[int, ...]


@dataclass(slots=True)
class _Bucket:
    """One eliminated variable: the table over its ``scope``, and the buckets it was told by."""

    variable: int
    scope: Scope
    table: Table
    children: list[int]
    message: Table
    outside: Table


def min_marginals(graph: FactorGraph, price: float) -> tuple[NDArray[np.float64], ...]:
    """Return, per variable and choice, the least seconds + ``price`` * bytes of all assignments.

    Forbidden choices are infinite. Nothing is pruned, so that dominated choices have their price
    too. Raises InputError where a table would be too large.
    """
    buckets = _gather(graph, price)
    ends = {number: float(one.message) for number, one in buckets.items() if not one.message.ndim}
    alone = sum(float(f.seconds + price * f.bytes) for f in graph.factors if not f.scope)
    found: list[NDArray[np.float64]] = [np.zeros(size) for size in graph.sizes]
    for variable in reversed(buckets):
        bucket = buckets[variable]
        if variable in ends:  # beyond the last variable of a component lie the other components
            rest = alone + sum(value for number, value in ends.items() if number != variable)
            bucket.outside = np.array(rest)
        outside = np.expand_dims(bucket.outside, bucket.scope.index(variable))
        found[variable] = _onto(bucket.table + outside, bucket.scope, (variable,))
        for number in bucket.children:
            told = tuple(v for v in buckets[number].scope if v != number)
            message = buckets[number].message
            others = _less(bucket.table, _spread(message, told, bucket.scope, graph.sizes))
            buckets[number].outside = _onto(others + outside, bucket.scope, told)
    return tuple(found)


def _onto(table: Table, scope: Scope, kept: Scope) -> Table:
    """Minimise over all variables but the kept ones."""
    return table.min(axis=tuple(axis for axis, v in enumerate(scope) if v not in kept))


def _less(table: Table, message: Table) -> Table:
    """Take a message out of a table; where it allowed nothing, nothing is allowed."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(message), table - message, np.inf)


def _gather(graph: FactorGraph, price: float) -> dict[int, _Bucket]:
    """Eliminate every variable, keeping the tables."""
    tables: list[tuple[Scope, Table, int]] = [
        (factor.scope, factor.seconds + price * factor.bytes, -1)
        for factor in merge_scopes(graph).factors
    ]
    buckets: dict[int, _Bucket] = {}
    for variable in elimination_order(graph.sizes, [factor.scope for factor in graph.factors]):
        mine = [entry for entry in tables if variable in entry[0]]
        tables = [entry for entry in tables if variable not in entry[0]]
        scope = tuple(sorted({v for entry in mine for v in entry[0]} | {variable}))
        if math.prod(graph.sizes[v] for v in scope) > MAX_CELLS:
            raise InputError(
                f"pricing every choice needs tables of at most {MAX_CELLS} cells, this graph one "
                f"over {len(scope)} decisions; explain a plan with fewer mesh axes"
            )
        table = np.zeros([graph.sizes[v] for v in scope])
        for own, values, _ in mine:
            table = table + _spread(values, own, scope, graph.sizes)
        message = table.min(axis=scope.index(variable))
        children = [number for _, _, number in mine if number >= 0]
        buckets[variable] = _Bucket(variable, scope, table, children, message, np.zeros(()))
        if message.ndim:
            tables.append((tuple(v for v in scope if v != variable), message, variable))
    return buckets


def _spread(table: Table, own: Scope, scope: Scope, sizes: Sequence[int]) -> Table:
    """Reshape a table so that it broadcasts over a larger scope."""
    return table.reshape([sizes[v] if v in own else 1 for v in scope])
