"""A network of decisions with several kinds of cost, prepared for repeated exact minimisation.

Bucket elimination: eliminating a variable sums the tables that mention it and takes the minimum
over its choices. The cost is the largest such table, small because computation graphs have small
treewidth (OptCNN's node and edge elimination are the cases of width 1 and 2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError

# Per weighting, in float64: 32 MiB.
MAX_CELLS = 2**22

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Scope = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Minima:
    """Per mix of the kinds: the least cost, its choices, and their cost in every kind."""

    values: Floats
    assignments: NDArray[np.int32]
    totals: Floats


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Costs of the joint choices of ``scope`` (ascending): one axis of kinds, one per variable."""

    scope: Scope
    columns: Floats


class Network:
    """Variables and tables, whose dominated choices are dropped, with a planned elimination.

    The preparation is exact for every mix with no negative part; solving changes nothing. Kind 0 is
    infinite where choices are forbidden, the others are finite.
    """

    def __init__(self, sizes: Sequence[int], tables: Sequence[tuple[Scope, Floats]]) -> None:
        merged = _merged([Table(scope, columns) for scope, columns in tables])
        self._allowed = undominated(sizes, merged)
        kept = _merged([_restricted(sizes, table, self._allowed) for table in merged])
        self._sizes = tuple(map(len, self._allowed))
        self._columns, self._base = _flat(kept)
        self._is_forbidden = np.isinf(self._columns[0])
        self._forbidden = np.flatnonzero(self._is_forbidden)
        self._columns[0, self._forbidden] = 0.0
        self._scopes = [table.scope for table in kept]
        self._fixed = [int(self._base[n]) for n, scope in enumerate(self._scopes) if not scope]
        self._plan = _plan(self._sizes, self._scopes, self._base, self._columns.shape[1])

    def solve(self, mixes: Floats) -> Minima:
        """Minimise ``sum(mixes[i] * kinds)`` for every i, exactly.

        Ties go to the lower choice of the variable eliminated later, so the answer is
        deterministic.
        """
        from shardwright.planner.search.kernels import eliminate

        plan, count = self._plan, len(mixes)
        picks = np.zeros((count, len(self._sizes)), np.int32)
        values = np.zeros(count)
        base = self._columns.shape[1]
        cells, choices = np.empty(base + plan.num_messages), np.empty(plan.num_messages, np.int16)
        for row, mix in enumerate(mixes):
            np.dot(mix, self._columns, out=cells[:base])
            cells[self._forbidden] = np.inf
            values[row] = cells[self._fixed].sum()
            values[row] += eliminate(cells, plan.steps, plan.tables, plan.dims, picks[row], choices)
        return Minima(values, self._spelled_out(picks), self._totals(picks))

    def _totals(self, picks: NDArray[np.int32]) -> Floats:
        """Return the cost of choices in every kind, infinite in kind 0 where they are forbidden."""
        places = np.empty((len(picks), len(self._scopes)), np.int64)
        for number, scope in enumerate(self._scopes):
            place = np.zeros(len(picks), np.int64)
            for variable in scope:
                place = place * self._sizes[variable] + picks[:, variable]
            places[:, number] = place + self._base[number]
        totals = self._columns[:, places].sum(axis=2).T
        totals[self._is_forbidden[places].any(axis=1), 0] = np.inf
        return totals

    def _spelled_out(self, picks: NDArray[np.int32]) -> NDArray[np.int32]:
        full = np.empty_like(picks)
        for variable, allowed in enumerate(self._allowed):
            full[:, variable] = allowed[picks[:, variable]]
        return full


# -- preparation -----------------------------------------------------------------------------------


def _merged(tables: Sequence[Table]) -> list[Table]:
    """Sum tables of equal scope."""
    found: dict[Scope, Floats] = {}
    for table in tables:
        known = found.get(table.scope)
        found[table.scope] = table.columns if known is None else known + table.columns
    return [Table(scope, columns) for scope, columns in found.items()]


def _flat(tables: Sequence[Table]) -> tuple[Floats, Ints]:
    """Lay tables one after another; also return where each begins."""
    lengths = [math.prod(table.columns.shape[1:]) for table in tables]
    kinds = len(tables[0].columns) if tables else 2
    parts = [table.columns.reshape(kinds, -1) for table in tables]
    base = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return np.concatenate(parts, axis=1) if parts else np.zeros((kinds, 0)), base


def _strides(shape: Sequence[int]) -> list[int]:
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * size)
    return found[::-1]


def undominated(sizes: Sequence[int], tables: Sequence[Table]) -> list[NDArray[np.intp]]:
    """Return, per variable, the choices that some mix may need.

    A choice goes when another is nowhere worse in any kind whatever the neighbours choose (of
    equals the first stays), and repeats until nothing goes.
    """
    from shardwright.planner.search.kernels import prune

    columns, base = _flat(tables)
    touching: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for number, table in enumerate(tables):
        for axis, variable in enumerate(table.scope):
            touching[variable].append((number, axis))
    first: list[int] = [0]
    begin: list[int] = [0]
    low: list[int] = []
    steps: list[int] = []
    near: list[int] = []
    near_strides: list[int] = []
    for variable, mentions in enumerate(touching):
        for number, axis in mentions:
            scope = tables[number].scope
            strides = _strides([sizes[v] for v in scope])
            low.append(int(base[number]))
            steps.append(strides[axis])
            near += [v for v in scope if v != variable]
            near_strides += [s for v, s in zip(scope, strides, strict=True) if v != variable]
            begin.append(len(near))
        first.append(len(low))
    start = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    kept = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0, np.int64)])
    rows = tuple(np.array(row, np.int64) for row in (low, steps, begin, near, near_strides))
    if len(kept):
        prune(columns, np.array(first, np.int64), rows, (kept, start))
    found: list[NDArray[np.intp]] = []
    for variable in range(len(sizes)):
        mine = kept[start[variable] : start[variable + 1]]
        found.append(mine[mine >= 0] if touching[variable] else mine[:1])
    return found


def _restricted(sizes: Sequence[int], table: Table, allowed: Sequence[NDArray[np.intp]]) -> Table:
    """Keep the allowed choices; variables with one choice left are no longer in the scope."""
    columns = table.columns
    for axis, variable in enumerate(table.scope):
        if len(allowed[variable]) < sizes[variable]:
            columns = columns.take(allowed[variable], axis=axis + 1)
    scope = tuple(v for v in table.scope if len(allowed[v]) > 1)
    shape = (len(columns), *(len(allowed[v]) for v in scope))
    return Table(scope, np.ascontiguousarray(columns).reshape(shape))


# -- the elimination -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What ``kernels.eliminate`` takes."""

    steps: tuple[Ints, ...]
    tables: tuple[Ints, Ints]
    dims: tuple[Ints, Ints, Ints]
    num_messages: int


def _plan(sizes: Sequence[int], scopes: Sequence[Scope], base: Ints, first_free: int) -> _Plan:
    """Order the variables and plan every table of the elimination."""
    known = list(scopes)
    where = [int(place) for place in base[: len(known)]]
    mentions: list[set[int]] = [set() for _ in sizes]
    for number, scope in enumerate(known):
        for variable in scope:
            mentions[variable].add(number)
    rows: list[list[int]] = []
    tables: list[tuple[int, int]] = []
    dims: list[tuple[int, int]] = []
    strides: list[int] = []
    free = first_free
    for variable in elimination_order(sizes, scopes):
        touching = sorted(mentions[variable])
        if not touching:
            continue
        others = tuple(sorted({v for t in touching for v in known[t]} - {variable}))
        count = math.prod(sizes[v] for v in others)
        if count * sizes[variable] > MAX_CELLS:
            raise InputError(
                f"the exact search needs tables of at most {MAX_CELLS} cells, this graph one over "
                f"{len(others) + 1} operators; search fewer mesh axes or a coarser graph"
            )
        rows.append([variable, sizes[variable], count, free, len(tables), len(dims), len(strides)])
        for number in touching:
            scope = known[number]
            steps = dict(zip(scope, _strides([sizes[v] for v in scope]), strict=True))
            tables.append((where[number], steps[variable]))
            strides += [steps.get(v, 0) for v in others]
            for v in scope:
                mentions[v].discard(number)
        dims += [(v, sizes[v]) for v in others]
        for v in others:
            mentions[v].add(len(known))
        known.append(others)
        where.append(free)
        free += count
    return _packed(rows, tables, dims, strides, (first_free, free))


def _packed(
    rows: list[list[int]], tables: list[tuple[int, int]], dims: list[tuple[int, int]],
    strides: list[int], messages: tuple[int, int],
) -> _Plan:  # fmt: skip
    begin, end = messages
    ended = [*rows, [0, 0, 0, end, len(tables), len(dims), len(strides)]]
    steps = np.array(ended, np.int64).reshape(-1, 7).T
    out = steps[3]
    ready = [np.ascontiguousarray(row) for row in steps]
    fixed = (ready[0][:-1], ready[1], ready[2], ready[3], ready[4], ready[5], ready[6])
    places = np.array(tables, np.int64).reshape(-1, 2).T
    sized = np.array(dims, np.int64).reshape(-1, 2).T
    return _Plan(
        steps=(*fixed, np.ascontiguousarray(out - begin)),
        tables=(np.ascontiguousarray(places[0]), np.ascontiguousarray(places[1])),
        dims=(
            np.ascontiguousarray(sized[0]),
            np.ascontiguousarray(sized[1]),
            np.array(strides, np.int64),
        ),
        num_messages=end - begin,
    )


def elimination_order(sizes: Sequence[int], scopes: Sequence[Scope]) -> tuple[int, ...]:
    """Order variables greedily by the size of the table their elimination makes, ties by index."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    logs = [math.log2(max(size, 1)) + 1e-9 for size in sizes]

    def table(variable: int) -> float:
        return logs[variable] + sum(logs[other] for other in sorted(near[variable]))

    weight = [table(variable) for variable in range(len(near))]
    queue = [(weight[variable], variable) for variable in range(len(near))]
    heapq.heapify(queue)
    order: list[int] = []
    done = [False] * len(near)
    while queue:
        known, variable = heapq.heappop(queue)
        if done[variable] or known != weight[variable]:
            continue
        order.append(variable)
        done[variable] = True
        around = near[variable]
        for other in around:
            near[other] |= around
            near[other] -= {other, variable}
        for other in around:
            weight[other] = table(other)
            heapq.heappush(queue, (weight[other], other))
    return tuple(order)
