"""Factor graphs with two costs: discrete variables, tables of seconds and bytes over a few of them.

The intra-stage problem is one of these, and so is every random instance of the tests. Nothing here
knows about operators or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.buckets import Floats, Scope
from shardwright.planner.solve.tables import merged

Table = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Factor:
    """Costs of the joint choices of ``scope``, a strictly ascending tuple of variables.

    Both tables have one axis per variable. Forbidden choices cost infinite seconds; bytes are
    always finite.
    """

    scope: tuple[int, ...]
    seconds: Table
    bytes: Table

    def __post_init__(self) -> None:
        if list(self.scope) != sorted(set(self.scope)):
            raise ValueError(f"a factor's scope must ascend, not {self.scope}")
        if self.seconds.shape != self.bytes.shape or self.seconds.ndim != len(self.scope):
            raise ValueError("a factor needs one table axis per variable, equal for both costs")


@dataclass(frozen=True, eq=False)
class FactorGraph:
    """Variables by domain size, and the factors whose sum is to be kept small."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    @property
    def tables(self) -> list[tuple[Scope, Floats]]:
        """Scopes with both costs in one array each, as a network takes them."""
        return [(factor.scope, np.stack([factor.seconds, factor.bytes])) for factor in self.factors]

    def evaluate(self, assignment: Sequence[int]) -> tuple[float, float]:
        """Return (seconds, bytes) of one choice per variable."""
        seconds = memory = 0.0
        for factor in self.factors:
            place = tuple(assignment[variable] for variable in factor.scope)
            seconds += float(factor.seconds[place])
            memory += float(factor.bytes[place])
        return seconds, memory

    def restrict(self, allowed: Sequence[NDArray[np.intp]]) -> FactorGraph:
        """Return the graph in which variables only take the ``allowed`` choices, renumbered."""
        factors: list[Factor] = []
        for factor in self.factors:
            if all(len(allowed[v]) == self.sizes[v] for v in factor.scope):
                factors.append(factor)
                continue
            grid = np.ix_(*(allowed[variable] for variable in factor.scope))
            factors.append(Factor(factor.scope, factor.seconds[grid], factor.bytes[grid]))
        return FactorGraph(tuple(map(len, allowed)), tuple(factors))


def merge_scopes(graph: FactorGraph) -> FactorGraph:
    """Sum factors of equal scope."""
    return FactorGraph(graph.sizes, tuple(Factor(s, *both) for s, both in merged(graph.tables)))
