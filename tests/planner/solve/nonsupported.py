"""What lies between the corners of a factor graph's hull: phase 2 of the two-phase method.

Phase 1 is ``frontier.hull``. This looks into the triangle below two neighbouring corners, where the
frontier's other points must lie. Variables are assigned in the reverse of the elimination order; the
tables of that elimination then say exactly what the rest costs at best, in seconds, in bytes, and in the
weighting under which the two corners tie. A partial assignment goes when one of the three keeps it out
of the triangle, or when another one that agrees on all variables the rest can see is nowhere worse.
All partial assignments of a step are rows of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.buckets import Scope, elimination_order
from shardwright.planner.solve.frontier import Point, falling, slope
from shardwright.planner.solve.network import undominated
from shardwright.planner.solve.tables import eliminate, merged
from shardwright.reasons.factors import Factor, FactorGraph, Table

# Rows of one step; beyond them a gap stays open and the answer says so.
MAX_ROWS = 2**20
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class _Step:
    """Assign ``variable``, whose table under each weighting has ``scope`` with it at ``axis``.

    ``ready`` are the factors whose variables are then all assigned. ``seen`` are the assigned
    variables that later factors still mention.
    """

    variable: int
    axis: int
    scope: tuple[int, ...]
    ready: tuple[int, ...]
    seen: tuple[int, ...]


class NonSupported:
    """A factor graph prepared for filling gaps between its corners."""

    def __init__(self, graph: FactorGraph, max_rows: int = MAX_ROWS) -> None:
        graph = merge_scopes(graph)
        self._allowed = undominated(graph.sizes, graph.tables)
        self._graph = graph.restrict(self._allowed)
        scopes = [factor.scope for factor in self._graph.factors]
        self._order = tuple(elimination_order(self._graph.sizes, scopes))
        self._steps = _steps(self._graph, self._order)
        self._max_rows = max_rows

    def fill(
        self,
        fast: Point,
        small: Point,
        epsilon: float,
        wanted: tuple[float, float] = (math.inf, math.inf),
    ) -> list[Point] | None:
        """Return the frontier's points between two corners; None where there are too many rows.

        With ``epsilon`` points within that factor of a corner or of a returned point may be
        missing, half of it by coverage and half by thinning. Only points of at most the seconds and
        bytes ``wanted`` are looked for.
        """
        half = math.sqrt(1 + epsilon)
        rate = slope(fast, small)
        most = np.array([*np.minimum((small.seconds / half, fast.bytes / half), wanted), 0.0])
        most[2] = most[0] + rate * most[1]
        if most[2] <= fast.seconds + rate * fast.bytes:
            return []  # the triangle is covered
        grid = 0.0
        if epsilon:
            grid = (half ** (1 / len(self._order)) - 1) * small.bytes
        weights = ((1.0, 0.0), (0.0, 1.0), (1.0, rate))
        tables, least = zip(*(self._eliminate(*weight) for weight in weights), strict=True)
        rows = _Rows.first(np.array(least))
        trail: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        for number, step in enumerate(self._steps):
            parent, choice = rows.grow(step, [own[number] for own in tables], self._graph)
            inside = rows.inside(most, rows.least)
            rows.keep(inside)
            parent, choice = parent[inside], choice[inside]
            best = rows.undominated(step.seen, grid)
            rows.keep(best)
            trail.append((parent[best], choice[best]))
            if len(best) > self._max_rows:
                return None
        return self._points(rows, trail)

    def _eliminate(self, first: float, second: float) -> tuple[list[Table], float]:
        """Return each variable's table less its minimum, in the order of assignment, and the
        optimum: how much a choice adds to the best of the rest."""
        sizes = self._graph.sizes
        costs = [(factor.scope, _weigh(factor, first, second)) for factor in self._graph.factors]
        buckets, left = eliminate(sizes, costs, self._order)
        found: list[Table] = []
        for bucket in reversed(buckets):
            least = bucket.table.min(axis=bucket.scope.index(bucket.variable), keepdims=True)
            with np.errstate(invalid="ignore"):
                more = np.nan_to_num(bucket.table - least, nan=np.inf, posinf=np.inf)
            found.append(more)
        return found, sum(float(entry.table) for entry in left)

    def _points(
        self, rows: _Rows, trail: list[tuple[NDArray[np.intp], NDArray[np.intp]]]
    ) -> list[Point]:
        """Follow the rows that are left back to their first step."""
        count = len(rows.costs)
        full = np.empty((count, len(self._graph.sizes)), dtype=np.intp)
        place = np.arange(count)
        for step, (parent, choice) in zip(reversed(self._steps), reversed(trail), strict=True):
            full[:, step.variable] = self._allowed[step.variable][choice[place]]
            place = parent[place]
        return falling(
            sorted(
                Point(seconds=float(a), bytes=float(b), assignment=tuple(map(int, picks)))
                for (a, b), picks in zip(rows.costs, full, strict=True)
            )
        )


def merge_scopes(graph: FactorGraph) -> FactorGraph:
    """Sum factors of equal scope."""
    return FactorGraph(graph.sizes, tuple(Factor(s, *both) for s, both in merged(graph.tables)))


def _weigh(factor: Factor, first: float, second: float) -> Table:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(factor.seconds), first * factor.seconds, np.inf) + (
            second * factor.bytes
        )


def _met(scopes: Sequence[Scope], order: Sequence[int]) -> dict[int, Scope]:
    """Return with which variables, itself among them, each is eliminated."""
    met: dict[int, Scope] = {}
    live = list(scopes)
    for variable in order:
        mine = [scope for scope in live if variable in scope]
        scope = tuple(sorted({variable}.union(*mine)))
        met[variable] = scope
        live = [one for one in live if variable not in one]
        live.append(tuple(v for v in scope if v != variable))
    return met


def _steps(graph: FactorGraph, order: tuple[int, ...]) -> tuple[_Step, ...]:
    """Plan the assignment of all variables, the last eliminated first."""
    scopes = [factor.scope for factor in graph.factors]
    met = _met(scopes, order)
    steps: list[_Step] = []
    assigned: set[int] = set()
    open_scopes = {number: scope for number, scope in enumerate(scopes) if scope}
    for variable in reversed(order):
        assigned.add(variable)
        ready = tuple(number for number, scope in open_scopes.items() if assigned.issuperset(scope))
        for number in ready:
            del open_scopes[number]
        later = set[int]().union(*open_scopes.values())
        scope = met[variable]
        steps.append(
            _Step(variable, scope.index(variable), scope, ready, tuple(sorted(assigned & later)))
        )
    return tuple(steps)


class _Rows:
    """Partial assignments: what their factors cost, and the least that each becomes in seconds,
    bytes and the gap's weighting."""

    def __init__(
        self,
        costs: NDArray[np.float64],
        least: NDArray[np.float64],
        picks: dict[int, NDArray[np.intp]],
    ) -> None:
        self.costs, self.least, self.picks = costs, least, picks

    @classmethod
    def first(cls, least: NDArray[np.float64]) -> _Rows:
        """Return the one row in which nothing is assigned."""
        return cls(np.zeros((1, 2)), least[None, :], {})

    def grow(
        self, step: _Step, tables: list[Table], graph: FactorGraph
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Assign a variable in every way; return which row and choice each new one came from."""
        size, count = graph.sizes[step.variable], len(self.costs)
        parent, choice = np.repeat(np.arange(count), size), np.tile(np.arange(size), count)
        self.picks = {variable: rows[parent] for variable, rows in self.picks.items()}
        self.picks[step.variable] = choice
        place = tuple(self.picks[variable] for variable in step.scope)
        added = np.stack([table[place] for table in tables], axis=1)
        self.least = self.least[parent] + added
        self.costs = self.costs[parent]
        for number in step.ready:
            factor = graph.factors[number]
            where = tuple(self.picks[variable] for variable in factor.scope)
            self.costs[:, 0] += factor.seconds[where]
            self.costs[:, 1] += factor.bytes[where]
        return parent, choice

    def inside(self, most: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the rows that may still end inside the triangle."""
        return np.flatnonzero((least <= most * (1 + ROUNDING)).all(axis=1))

    def keep(self, rows: NDArray[np.intp]) -> None:
        """Forget all other rows."""
        self.costs, self.least = self.costs[rows], self.least[rows]
        self.picks = {variable: picks[rows] for variable, picks in self.picks.items()}

    def undominated(self, seen: tuple[int, ...], grid: float) -> NDArray[np.intp]:
        """Return the rows which no other that looks the same to the rest beats in both costs.

        With a ``grid`` bytes are compared by cell, so that one row stays in each. Variables that
        nobody asks for again are forgotten.
        """
        self.picks = {variable: self.picks[variable] for variable in seen}
        count = len(self.costs)
        if not count:
            return np.zeros(0, dtype=np.intp)
        group = np.zeros(count, dtype=np.intp)
        for picks in self.picks.values():
            group = np.unique(group * (int(picks.max()) + 1) + picks, return_inverse=True)[1]
        seconds, memory = self.costs[:, 0], self.costs[:, 1]
        # Of rows in one cell the fastest stays, and none that is slower in a cell with more.
        memory = np.floor(memory / grid) if grid else memory
        order = np.lexsort((memory, seconds, group))
        return _stairs(group[order], memory[order], order)


def _stairs(
    group: NDArray[np.intp], second: NDArray[np.float64], order: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return the rows whose second cost is below those of all before them in their group.

    Ranks make one running minimum serve all groups: a later group's ranks are all smaller.
    """
    rank = np.unique(second, return_inverse=True)[1]
    shifted = rank - group * (int(rank.max()) + 1)
    before = np.minimum.accumulate(np.concatenate(([np.iinfo(np.int64).max], shifted)))[:-1]
    return np.sort(order[shifted < before])
