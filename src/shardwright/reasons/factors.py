"""Factor graphs with two costs: discrete variables, tables of seconds and bytes over a few of them.

The intra-stage problem under one way to pipeline is one of these, and so is every random instance of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import KEPT, Weights
from shardwright.planner.solve.buckets import Floats, Scope
from shardwright.planner.solve.network import Elimination, Network

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

    def elimination(self) -> Elimination:
        """Return the exact solver of the graph."""
        return Elimination(
            Network(self.sizes, self.tables), np.array([1.0, 0.0]), np.array([0.0, 1.0])
        )

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


def factor_graph(problem: Problem, weights: Weights) -> FactorGraph:
    """Add a problem's columns up; a transient of tied blocks counts once, all else per block."""
    factors: list[Factor] = []
    for term in problem.statement.terms:
        count = len(term.blocks)
        seconds = np.tensordot(weights.seconds * count, term.columns[:KEPT], axes=1)
        kinds = np.array([weights.kept * count, weights.flight * count, weights.transient])
        factors.append(
            Factor(term.scope, seconds, np.tensordot(kinds, term.columns[KEPT:], axes=1))
        )
    return FactorGraph(problem.sizes, tuple(factors))
