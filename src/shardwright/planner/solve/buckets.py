"""Bucket elimination: its plan for a network of tables, and one minimisation by it.

Eliminating a variable sums the tables that mention it and takes the minimum over its choices. The
cost is the largest such table, small because computation graphs have small treewidth (OptCNN's node
and edge elimination are the cases of width 1 and 2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, eq=False, slots=True)
class Buckets:
    """An elimination's order and tables, as ``kernels.eliminate`` takes them."""

    steps: tuple[Ints, ...]
    tables: tuple[Ints, Ints]
    dims: tuple[Ints, Ints, Ints]
    num_messages: int

    def minimise(self, cells: Floats, picks: NDArray[np.int32]) -> float:
        """Return the least sum of the tables; write each variable's choice into ``picks``.

        ``cells`` are the tables, and behind them room for ``num_messages`` more, which is written
        to. Ties go to the lower choice of the variable eliminated later.
        """
        from shardwright.planner.solve.kernels import eliminate

        choices = np.empty(self.num_messages, np.int16)
        return eliminate(cells, self.steps, self.tables, self.dims, picks, choices)


def plan(
    sizes: Sequence[int], scopes: Sequence[Scope], base: Ints, first_free: int
) -> Buckets | None:
    """Order the variables and plan every table of the elimination; None if one is too large.

    What eliminations leave over the same variables is added up as it comes: a tensor with many equal
    readers leaves dozens of such tables, which the elimination of a neighbour would each read for
    all choices of all its others.
    """
    known = list(scopes)
    alike: dict[Scope, int] = {}  # messages: nothing of theirs is eliminated before they are used
    where = [int(place) for place in base[: len(known)]]
    mentions: list[set[int]] = [set() for _ in sizes]
    for number, scope in enumerate(known):
        for variable in scope:
            mentions[variable].add(number)
    rows: list[list[int]] = []
    tables: list[tuple[int, int]] = []
    dims: list[tuple[int, int]] = []
    steps: list[int] = []
    free = first_free
    for variable in elimination_order(sizes, scopes):
        touching = sorted(mentions[variable])
        if not touching:
            continue
        others = tuple(sorted({v for t in touching for v in known[t]} - {variable}))
        count = math.prod(sizes[v] for v in others)
        if count * sizes[variable] > MAX_CELLS:
            return None
        onto = where[alike[others]] if others in alike else -1
        rows.append(
            [variable, sizes[variable], count, free, len(tables), len(dims), len(steps), onto]
        )
        for number in touching:
            scope = known[number]
            moves = dict(zip(scope, strides([sizes[v] for v in scope]), strict=True))
            tables.append((where[number], moves[variable]))
            steps += [moves.get(v, 0) for v in others]
            for v in scope:
                mentions[v].discard(number)
        dims += [(v, sizes[v]) for v in others]
        if onto < 0:
            alike[others] = len(known)
            for v in others:
                mentions[v].add(len(known))
            known.append(others)
            where.append(free)
        free += count
    return _packed(rows, tables, dims, steps, (first_free, free))


def _packed(
    rows: list[list[int]], tables: list[tuple[int, int]], dims: list[tuple[int, int]],
    moves: list[int], messages: tuple[int, int],
) -> Buckets:  # fmt: skip
    begin, end = messages
    ended = [*rows, [0, 0, 0, end, len(tables), len(dims), len(moves), -1]]
    steps = np.array(ended, np.int64).reshape(-1, 8).T
    out = steps[3]
    ready = [np.ascontiguousarray(row) for row in steps]
    fixed = (ready[0][:-1], ready[1], ready[2], ready[3], ready[4], ready[5], ready[6])
    places = np.array(tables, np.int64).reshape(-1, 2).T
    sized = np.array(dims, np.int64).reshape(-1, 2).T
    return Buckets(
        steps=(*fixed, np.ascontiguousarray(out - begin), ready[7]),
        tables=(np.ascontiguousarray(places[0]), np.ascontiguousarray(places[1])),
        dims=(
            np.ascontiguousarray(sized[0]),
            np.ascontiguousarray(sized[1]),
            np.array(moves, np.int64),
        ),
        num_messages=end - begin,
    )


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


def elimination_order(sizes: Sequence[int], scopes: Sequence[Scope]) -> tuple[int, ...]:
    """Order variables greedily by the size of the table their elimination makes, ties by index."""
    near = neighbours(len(sizes), scopes)
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
        join(near, variable)
        for other in near[variable]:
            weight[other] = table(other)
            heapq.heappush(queue, (weight[other], other))
    return tuple(order)
