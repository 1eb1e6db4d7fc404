"""Large-neighbourhood search: trees of nodes are solved exactly, the rest held fixed.

A random subgraph without cycles is grown from a random node; dynamic programming finds its best
choices given the neighbours', with the memory priced. A result that breaks the limit is priced again
at its worst time point, a few times. Memory is within the limit after every move.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.compiled import compiled, inner
from shardwright.planner.solve.wide.net import Net
from shardwright.planner.solve.wide.problem import Floats, Ints
from shardwright.planner.solve.wide.region import MOST_AROUND, Room, solve_region
from shardwright.planner.solve.wide.usage import Usage, add, peak, peak_time

MOST_BUMPS = 8
MOST_EDGES = 4  # of a region, times the nodes it may have


class Search(NamedTuple):
    """What moves change (``choice``, ``usage``), and their scratch space.

    ``stamp[i]`` is the number of the last move whose tree node ``i`` was in, ``-number`` where it
    was looked at and left out. ``up[i]`` is the edge to its parent in the tree.
    """

    choice: Ints
    usage: Usage
    random: NDArray[np.uint64]
    stamp: Ints
    local: Ints
    frontier: Ints
    values: Floats
    bumps: Floats


class Manner(NamedTuple):
    """How moves are made: what memory costs (``prices`` are prefix sums over time, times
    ``scale``), the limit, and how large regions and their tables may get."""

    prices: Floats
    scale: float
    limit: float
    most_nodes: int
    most_cells: int


def search_of(net: Net, choice: Ints, usage: Usage, seed: int) -> Search:
    """Return a search that starts at ``choice``."""
    count = len(net.begin)
    return Search(
        choice=choice.copy(),
        usage=usage,
        random=np.array([seed * 2654435769 + 88172645463325252], dtype=np.uint64),
        stamp=np.zeros(count, dtype=np.int64),
        local=np.full(count, -1, dtype=np.int64),
        frontier=np.zeros(count, dtype=np.int64),
        values=np.zeros(len(net.cost)),
        bumps=np.zeros((MOST_BUMPS, 2)),
    )


@inner
def draw(random: NDArray[np.uint64], below: int) -> int:
    """Return a random integer from 0 to below - 1 (xorshift)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int((x >> np.uint64(11)) % np.uint64(below))


@inner
def grow(net: Net, search: Search, room: Room, root: int, size: int, number: int) -> int:
    """Grow a region of up to ``size`` nodes into ``room.node``; return how many it has."""
    count, waiting, num_edges = 0, 1, 0
    in_order = draw(search.random, 2) == 0
    taken = 0
    search.frontier[0] = root
    search.stamp[root] = number
    while taken < waiting and count < size and num_edges < MOST_EDGES * len(room.node):
        if not in_order:
            place = taken + draw(search.random, waiting - taken)
            other = search.frontier[place]
            search.frontier[place] = search.frontier[taken]
            search.frontier[taken] = other
        node = search.frontier[taken]
        taken += 1
        inside = 0
        is_free = True
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            v = search.local[net.ends[edge, 0] + net.ends[edge, 1] - node]
            if v >= 0:
                inside += 1
                is_free &= room.degree[v] < MOST_AROUND
        if inside > MOST_AROUND or not is_free:
            continue
        num_edges += inside
        room.node[count] = node
        room.degree[count] = inside
        search.local[node] = count
        count += 1
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            other = net.ends[edge, 0] + net.ends[edge, 1] - node
            if search.local[other] >= 0:
                room.degree[search.local[other]] += 1
            elif search.stamp[other] != number:
                search.stamp[other] = number
                search.frontier[waiting] = other
                waiting += 1
    return count


@inner
def _price(net: Net, search: Search, manner: Manner, num_bumps: int, node: int) -> float:
    """Return what a unit of usage of a node costs."""
    price = manner.scale * (manner.prices[net.end[node]] - manner.prices[net.begin[node]])
    for bump in range(num_bumps):
        if net.begin[node] <= search.bumps[bump, 0] < net.end[node]:
            price += search.bumps[bump, 1]
    return price


@inner
def surround(
    net: Net, search: Search, room: Room, manner: Manner, num_bumps: int, count: int
) -> None:
    """Set the values of the region's nodes: own cost, priced usage, edges to the outside."""
    values = search.values
    for place in range(count):
        node = room.node[place]
        begin, size = net.first[node], net.first[node + 1] - net.first[node]
        price = _price(net, search, manner, num_bumps, node)
        for s in range(begin, begin + size):
            values[s] = net.cost[s] + price * net.usage[s]
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            is_first = net.ends[edge, 0] == node
            other = net.ends[edge, 1] if is_first else net.ends[edge, 0]
            if search.local[other] >= 0:
                continue
            if is_first:
                step = net.first[other + 1] - net.first[other]
                cell = net.table[edge] + search.choice[other]
            else:
                cell, step = net.table[edge] + search.choice[other] * size, 1
            for s in range(size):
                values[begin + s] += net.cells[cell + s * step]


@inner
def gain(net: Net, search: Search, room: Room, count: int) -> float:
    """Return how much less the answers of the region cost."""
    less = 0.0
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        less += net.cost[net.first[node] + old] - net.cost[net.first[node] + new]
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            one, two = net.ends[edge, 0], net.ends[edge, 1]
            other = one + two - node
            before = after = search.choice[other]
            if search.local[other] >= 0:
                if one != node:
                    continue  # its first end counts it
                after = room.answer[search.local[other]]
            width = net.first[two + 1] - net.first[two]
            if one == node:
                less += net.cells[net.table[edge] + old * width + before]
                less -= net.cells[net.table[edge] + new * width + after]
            else:
                less += net.cells[net.table[edge] + before * width + old]
                less -= net.cells[net.table[edge] + after * width + new]
    return less


@inner
def _shift(net: Net, search: Search, room: Room, count: int, sign: float) -> None:
    """Put the answers' usages in the place of the old ones', or (-1) take that back."""
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        if old != new:
            change = net.usage[net.first[node] + new] - net.usage[net.first[node] + old]
            if change != 0:
                add(search.usage, net.begin[node], net.end[node], sign * change)


@inner
def _saved(net: Net, search: Search, room: Room, manner: Manner, count: int) -> float:
    """Return how much less the answers' memory costs at the given prices."""
    saved = 0.0
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        if old != new:
            price = _price(net, search, manner, 0, node)
            saved += price * (net.usage[net.first[node] + old] - net.usage[net.first[node] + new])
    return saved


@inner
def _move(net: Net, search: Search, room: Room, manner: Manner, count: int) -> float:
    """Solve one region and take the answer if it is good and fits; return what was gained."""
    num_bumps = 0
    for _ in range(MOST_BUMPS + 1):
        surround(net, search, room, manner, num_bumps, count)
        solve_region(
            net, room, count, search.local, search.values, search.choice, manner.most_cells
        )
        gained = gain(net, search, room, count)
        merit = gained + _saved(net, search, room, manner, count)
        if merit < 0 or (merit == 0 and gained < 0):
            return 0.0
        _shift(net, search, room, count, 1.0)
        excess = peak(search.usage) - manner.limit
        if excess <= 0:
            for place in range(count):
                search.choice[room.node[place]] = room.answer[place]
            return gained
        time = peak_time(search.usage)
        _shift(net, search, room, count, -1.0)
        bump = 0
        while bump < num_bumps and search.bumps[bump, 0] != time:
            bump += 1
        if merit == 0 or bump == MOST_BUMPS:
            return 0.0
        if bump == num_bumps:
            search.bumps[bump, 0] = time
            search.bumps[bump, 1] = 0.5 * merit / excess
            num_bumps += 1
        else:
            search.bumps[bump, 1] *= 2.0
    return 0.0


@compiled
def improve(
    net: Net, search: Search, room: Room, manner: Manner, roots: Ints, numbers: tuple[int, int]
) -> float:
    """Make the moves ``numbers[0] <= number < numbers[1]``, on regions grown from random ``roots``;
    return what was gained.

    A move is taken when cost plus priced memory does not grow. Numbers start at 1 and are never
    used twice with the same ``search``.
    """
    total = 0.0
    for number in range(numbers[0], numbers[1]):
        share = draw(search.random, 4096) / 4096.0
        wanted = 2 + int(np.exp(np.log(manner.most_nodes) * share))
        root = roots[draw(search.random, len(roots))]
        count = grow(net, search, room, root, wanted, number)
        total += _move(net, search, room, manner, count)
        for place in range(count):
            search.local[room.node[place]] = -1
    return total
