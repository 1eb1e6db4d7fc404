"""Bucket elimination: its plan for a network of tables, and one minimisation by it.

Eliminating a variable sums the tables that mention it and takes the minimum over its choices. The
cost is the largest such table, small because computation graphs have small treewidth (OptCNN's node
and edge elimination are the cases of width 1 and 2).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.remember import KEPT

# Per weighting, in float64: 32 MiB.
MAX_CELLS = 2**22

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Scope = tuple[int, ...]


def strides(shape: Sequence[int]) -> list[int]:
    """Return by how many cells a step along each axis of a table moves."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * size)
    return found[::-1]


def num_cells(sizes: Sequence[int], scope: Iterable[int]) -> int:
    """Return how many cells a table over some variables has."""
    return math.prod([sizes[variable] for variable in scope])


@dataclass(frozen=True, eq=False, slots=True)
class Buckets:
    """An elimination's order and tables, as ``kernels.eliminate`` takes them."""

    steps: tuple[Ints, ...]
    tables: tuple[Ints, ...]
    dims: tuple[Ints, ...]
    num_messages: int
    num_choices: int

    def minimise(self, cells: Floats, picks: NDArray[np.int32]) -> float:
        """Return the least sum of the tables; write each variable's choice into ``picks``.

        ``cells`` are the tables, and behind them room for ``num_messages`` more, which is written
        to. Ties go to the lower choice of the variable eliminated later.
        """
        from shardwright.planner.solve.kernels import eliminate

        choices = np.empty(self.num_choices, np.int16)
        return eliminate(cells, self.steps, self.tables, self.dims, picks, choices)


@lru_cache(maxsize=KEPT)
def plan(sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> Buckets | None:
    """Order the variables and plan every table of the elimination, those of ``scopes`` lying one behind the other;
    None if one is too large. Other meshes and microbatches often leave the same choices."""
    draft = _Draft(sizes, scopes)
    for variable in elimination_order(sizes, scopes):
        if not draft.eliminate(variable):
            return None
    return draft.buckets()


class _Room:
    """Cells from ``end`` on, and spans before it that nothing lies in any more, in order: of these the first that is
    long enough is taken again."""

    def __init__(self, end: int) -> None:
        self.end = end
        self._spans: list[tuple[int, int]] = []

    def take(self, count: int) -> int:
        """Return where so many cells are free."""
        spans = self._spans
        for number, (begin, end) in enumerate(spans):
            if end - begin >= count:
                spans[number : number + 1] = [(begin + count, end)] if end - begin > count else []
                return begin
        begin = spans.pop()[0] if spans and spans[-1][1] == self.end else self.end
        self.end = begin + count
        return begin

    def give(self, begin: int, count: int) -> None:
        """Take back cells that nothing reads any more."""
        spans, end = self._spans, begin + count
        number = bisect_left(spans, (begin, end))
        if number < len(spans) and spans[number][0] == end:
            end = spans.pop(number)[1]
        if number and spans[number - 1][1] == begin:
            number -= 1
            begin = spans.pop(number)[0]
        spans.insert(number, (begin, end))


class _Draft:
    """The tables of an elimination while it is planned: ``known`` scopes, ``where`` their cells begin, and
    which ``mentions`` a variable; and the rows of its steps, their tables, dims and moves.

    What eliminations leave over the same variables, ``alike``, is added up as it comes: a tensor with many
    equal readers leaves dozens of such tables, which the elimination of a neighbour would each read for
    all choices of all its others.
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope]) -> None:
        self._sizes = sizes
        self._known: list[Scope] = []
        self._where: list[int] = []
        self._mentions: list[set[int]] = [set() for _ in sizes]
        self._alike: dict[Scope, int] = {}  # nothing of theirs is eliminated before they are used
        self._rows: list[list[int]] = []
        self._tables: list[tuple[int, int]] = []
        self._dims: list[tuple[int, int]] = []
        self._moves: list[int] = []
        self._given = 0  # cells of tables that are not made here
        for scope in scopes:
            self._enter(scope, self._given)
            self._given += num_cells(sizes, scope)
        self._room = _Room(self._given)
        self._num_picks = self._num_choices = 0

    def _enter(self, scope: Scope, place: int) -> None:
        for variable in scope:
            self._mentions[variable].add(len(self._known))
        self._known.append(scope)
        self._where.append(place)

    def _add_up(self, tables: Sequence[tuple[Scope, int]], variable: int, others: Scope) -> int:
        """Plan a step: sum tables, which nothing else reads, and minimise over a variable, -1 for none; return where
        its table begins."""
        sizes = self._sizes
        count = num_cells(sizes, others)
        begin = self._room.take(count)
        size = 1 if variable < 0 else sizes[variable]
        onto = -1 if variable < 0 else self._alike.get(others, -1)
        kept = self._num_picks
        self._num_choices = max(self._num_choices, kept + count)
        if variable >= 0:
            self._num_picks += count  # else the next step's lie there
        self._rows.append([variable, size, count, begin, *self._ends(), kept, onto])
        for scope, place in tables:
            moves = dict(zip(scope, strides([sizes[v] for v in scope]), strict=True))
            self._tables.append((place, moves.get(variable, 0)))
            self._moves += [moves.get(v, 0) for v in others]
            if place >= self._given:
                self._room.give(place, num_cells(sizes, scope))
        self._dims += [(v, sizes[v]) for v in others]
        if onto >= 0:
            self._room.give(begin, count)
        return begin

    def _ends(self) -> list[int]:
        return [len(self._tables), len(self._dims), len(self._moves)]

    def eliminate(self, variable: int) -> bool:
        """Plan a variable's elimination; tell whether its table is small enough."""
        touching = sorted(self._mentions[variable])
        if not touching:
            return True
        others = tuple(sorted({v for t in touching for v in self._known[t]} - {variable}))
        count = num_cells(self._sizes, others)
        if count * self._sizes[variable] > MAX_CELLS:
            return False
        begin = self._add_up(self._begun(touching, count), variable, others)
        for number in touching:
            for v in self._known[number]:
                self._mentions[v].discard(number)
        if others not in self._alike:
            self._alike[others] = begin
            self._enter(others, begin)
        return True

    def _begun(self, touching: Sequence[int], count: int) -> list[tuple[Scope, int]]:
        """Return the tables to be added up one by one, the first of them together where they have no more than so many
        cells: what all choices of the others share is added once."""
        tables = [(self._known[number], self._where[number]) for number in touching]
        while len(tables) > 1:
            both = tuple(sorted({*tables[0][0], *tables[1][0]}))
            if num_cells(self._sizes, both) > count:
                break
            tables[:2] = [(both, self._add_up(tables[:2], -1, both))]
        return tables

    def buckets(self) -> Buckets:
        """Return the plan in columns."""
        variable, *steps = _columns([*self._rows, [0, 0, 0, 0, *self._ends(), 0, -1]], 9)
        return Buckets(
            steps=(variable[:-1], *steps),
            tables=_columns(self._tables, 2),
            dims=(*_columns(self._dims, 2), np.array(self._moves, np.int64)),
            num_messages=self._room.end - self._given,
            num_choices=self._num_choices,
        )


def _columns(rows: Sequence[Sequence[int]], width: int) -> tuple[Ints, ...]:
    return tuple(map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, width).T))


def neighbours(count: int, scopes: Iterable[Scope]) -> list[set[int]]:
    """Return which other variables share a scope with each."""
    near: list[set[int]] = [set() for _ in range(count)]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    return near


def join(near: list[set[int]], variable: int) -> None:
    """Take a variable away: its neighbours then share a table."""
    for other in near[variable]:
        near[other] |= near[variable]
        near[other] -= {other, variable}


def elimination_order(sizes: Sequence[int], scopes: Sequence[Scope]) -> Iterator[int]:
    """Yield variables greedily by the size of the table their elimination makes, ties by index."""
    near = neighbours(len(sizes), scopes)
    logs = [math.log2(max(size, 1)) + 1e-9 for size in sizes]

    def table(variable: int) -> float:
        return logs[variable] + sum(logs[other] for other in sorted(near[variable]))

    weight = [table(variable) for variable in range(len(near))]
    queue = [(weight[variable], variable) for variable in range(len(near))]
    heapq.heapify(queue)
    done = [False] * len(near)
    while queue:
        known, variable = heapq.heappop(queue)
        if done[variable] or known != weight[variable]:
            continue
        done[variable] = True
        yield variable
        join(near, variable)
        for other in near[variable]:
            weight[other] = table(other)
            heapq.heappush(queue, (weight[other], other))
