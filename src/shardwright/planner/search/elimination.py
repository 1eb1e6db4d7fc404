"""Exact optimum of a factor graph by eliminating one variable after another (bucket elimination).

Eliminating a variable sums the tables that mention it and takes the minimum over its choices. The
cost is the largest such table, small because computation graphs have small treewidth
(OptCNN's node and edge elimination are the cases of width 1 and 2). Several weightings of the two
costs are solved in one pass: every table has a leading axis of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError
from shardwright.planner.search.factors import FactorGraph, merge_scopes, undominated

# Per weighting, in float64: 32 MiB.
MAX_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class Solutions:
    """Per weighting: the least weighted cost, its choices, and their seconds and bytes."""

    values: NDArray[np.float64]
    assignments: NDArray[np.int32]
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Step:
    """Eliminate ``variable``: add up ``tables`` (each reshaped to broadcast) and keep the minimum.

    ``scope`` is the table's scope with ``variable`` at ``axis``; the result is table ``result``.
    """

    variable: int
    axis: int
    scope: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    result: int


class Elimination:
    """A factor graph prepared for repeated solving: pruned, ordered, with every broadcast planned.

    The preparation is exact for all weightings; ``solve`` changes nothing.
    """

    def __init__(self, graph: FactorGraph) -> None:
        merged = merge_scopes(graph)
        self._allowed = undominated(merged)
        self._graph = merged.restrict(self._allowed)
        self._steps = _plan(self._graph)

    def solve(self, weights: NDArray[np.float64]) -> Solutions:
        """Minimise ``weights[i, 0] * seconds + weights[i, 1] * bytes`` for every i, exactly.

        Ties go to the lower choice of the variable eliminated later, so the answer is
        deterministic.
        """
        count = len(weights)
        tables: dict[int, NDArray[np.float64]] = {}
        for index, factor in enumerate(self._graph.factors):
            shape = (count,) + (1,) * factor.seconds.ndim
            first, second = weights[:, 0].reshape(shape), weights[:, 1].reshape(shape)
            tables[index] = _weighted(factor.seconds, first) + second * factor.bytes
        chosen: list[NDArray[np.intp]] = []
        for step in self._steps:
            total: NDArray[np.float64] | None = None
            for table, shape in step.tables:
                term = tables.pop(table).reshape((count, *shape))
                total = term if total is None else total + term
            assert total is not None
            chosen.append(total.argmin(axis=step.axis + 1))
            tables[step.result] = total.min(axis=step.axis + 1)
        values = np.zeros(count)
        for table in tables.values():
            values = values + table
        return self._expand(chosen, values, count)

    def _expand(
        self, chosen: list[NDArray[np.intp]], values: NDArray[np.float64], count: int
    ) -> Solutions:
        """Walk the steps backwards, reading off each variable's choice."""
        picks = np.zeros((count, len(self._graph.sizes)), dtype=np.intp)
        rows = np.arange(count)
        for step, table in zip(reversed(self._steps), reversed(chosen), strict=True):
            rest = tuple(picks[:, variable] for variable in step.scope if variable != step.variable)
            picks[:, step.variable] = table[(rows, *rest)]
        seconds, memory = np.zeros(count), np.zeros(count)
        for factor in self._graph.factors:
            place = tuple(picks[:, variable] for variable in factor.scope)
            seconds += factor.seconds[place]
            memory += factor.bytes[place]
        full = np.empty(picks.shape, dtype=np.int32)
        for variable, allowed in enumerate(self._allowed):
            full[:, variable] = allowed[picks[:, variable]]
        return Solutions(values, full, seconds, memory)


def _weighted(seconds: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply so that a forbidden choice stays forbidden even when seconds weigh nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(seconds), weight * seconds, np.inf)


def _plan(graph: FactorGraph) -> tuple[_Step, ...]:
    """Order the variables and plan every table of the elimination."""
    scopes = {index: factor.scope for index, factor in enumerate(graph.factors)}
    fresh = len(scopes)
    steps: list[_Step] = []
    for variable in elimination_order(graph):
        touching = [index for index, scope in scopes.items() if variable in scope]
        if not touching:
            continue
        scope = tuple(sorted({v for index in touching for v in scopes[index]}))
        if math.prod(graph.sizes[v] for v in scope) > MAX_CELLS:
            raise InputError(
                f"the exact search needs tables of at most {MAX_CELLS} cells, this graph one over "
                f"{len(scope)} operators; search fewer mesh axes or a coarser graph"
            )
        tables = tuple(
            (index, tuple(graph.sizes[v] if v in scopes[index] else 1 for v in scope))
            for index in touching
        )
        for index in touching:
            del scopes[index]
        scopes[fresh] = tuple(v for v in scope if v != variable)
        steps.append(_Step(variable, scope.index(variable), scope, tables, fresh))
        fresh += 1
    return tuple(steps)


def elimination_order(graph: FactorGraph) -> tuple[int, ...]:
    """Order variables greedily by the size of the table their elimination makes, ties by index."""
    near = [set(others) for others in graph.neighbours]
    logs = [math.log2(max(size, 1)) + 1e-9 for size in graph.sizes]

    def table(variable: int) -> float:
        return logs[variable] + sum(logs[other] for other in near[variable])

    weight = {variable: table(variable) for variable in range(len(near))}
    order: list[int] = []
    while weight:
        variable = min(weight, key=lambda v: (weight[v], v))
        order.append(variable)
        del weight[variable]
        around = near[variable]
        for other in around:
            near[other] |= around
            near[other] -= {other, variable}
        for other in around:
            weight[other] = table(other)
    return tuple(order)
