"""Large-neighbourhood search: regions of nodes are solved exactly, the rest held fixed.

A random subgraph is grown from a random node and solved by bounded elimination, given the choices
around it, with the memory priced. It may have patches that only share memory, which they exchange.
Half of the moves look only at strategies that bounds find likely, fewer or more of them, so that wide
regions are solved exactly. What memory over the limit costs is its weight at that time, so there is
one loop for two ends. With infinite weights a choice that keeps the limit goes on keeping it; with
finite ones memory may rise here to fall there, until everything fits (weighted repair, or breakout:
Morris, AAAI 1993). A result that costs more in all is priced again at its worst time, a few times.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner
from shardwright.planner.solve.wide.net import FEW, NEAR, Net, row_of
from shardwright.planner.solve.wide.problem import Floats, Ints
from shardwright.planner.solve.wide.region import MOST_AROUND, Room, solve_region

BUMP = 2.0  # by what a price grows that was too low
MOVES = 32  # of a round; twice in it prices follow what is used


class Search(NamedTuple):
    """What moves change (``choice``, ``used``: the memory at every time), and their scratch space.

    ``by_begin`` lists the nodes by the times at which they begin to live; ``begun[time]`` of them have.
    ``weight`` is what a unit over the limit costs at every time, ``slope`` has the prefix sums of the
    prices that follow from it. ``stamp[i]`` is the number of the last move whose region node ``i``
    was looked at for; ``number`` is that of the last move of all.
    """

    choice: Ints
    used: Floats
    weight: Floats
    slope: Floats
    random: NDArray[np.uint64]
    number: Ints
    stamp: Ints
    local: Ints
    frontier: Ints
    values: Floats
    change: Floats
    bumps: Floats
    by_begin: Ints
    begun: Ints


class Manner(NamedTuple):
    """How moves are made: what memory within the limit costs (``prices`` are prefix sums over time,
    times ``scale``), the limit, how large regions may get, and their tables: the ceiling is drawn
    between two, as small tables make many moves and large ones find what those do not."""

    prices: Floats
    scale: float
    limit: float
    most_nodes: int
    cells: tuple[int, int]


def search_of(net: Net, choice: Ints, used: Floats, weight: Floats, seed: int) -> Search:
    """Return a search that starts at ``choice``, which uses ``used``."""
    count, times = len(net.begin), len(used)
    return Search(
        choice=choice.copy(),
        used=used,
        weight=weight,
        slope=np.zeros(times + 1),
        random=np.array([seed * 2654435769 + 88172645463325252], dtype=np.uint64),
        number=np.zeros(1, dtype=np.int64),
        stamp=np.zeros(count, dtype=np.int64),
        local=np.full(count, -1, dtype=np.int64),
        frontier=np.zeros(count, dtype=np.int64),
        values=np.zeros(len(net.cost)),
        change=np.zeros(times + 1),
        bumps=np.zeros((FEW, 2)),
        by_begin=np.argsort(net.begin, kind="stable"),
        begun=np.searchsorted(np.sort(net.begin), np.arange(times), side="right"),
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
def _between(random: NDArray[np.uint64], low: int, high: int) -> int:
    """Return a random integer from low to high, even on a scale of logarithms."""
    return int(low * np.exp(np.log(high / low) * draw(random, 4096) / 4096.0))


@inner
def grow(net: Net, search: Search, room: Room, root: int, size: int, part: int, most: int) -> int:
    """Grow a region of up to ``size`` nodes into ``room.node``; return how many it has.

    After ``part`` nodes, or where a component ends, it goes on at a node that lives when the root
    does: what shares memory can be exchanged however far apart it is in the graph.
    """
    number = search.number[0]
    count, waiting, num_edges, num_passed = 0, 1, 0, 0
    in_order = draw(search.random, 2) == 0
    taken = 0
    stop = part
    search.frontier[0] = root
    search.stamp[root] = number
    time = _tight_time(net, search, root)
    most_edges, most_passed = FEW * len(room.node), FEW * size
    while count < size and num_edges < most_edges and num_passed < most_passed:
        if taken == waiting or count >= stop:
            if not _jump(net, search, time, taken, waiting):
                break
            taken, waiting, stop = 0, 1, count + part
        place = taken if in_order else taken + draw(search.random, waiting - taken)
        node = search.frontier[place]
        search.frontier[place] = search.frontier[taken]
        search.frontier[taken] = node
        taken += 1
        inside = _num_inside(net, search, room, node)
        if inside > MOST_AROUND:
            continue
        room.size[count] = _num_likely(net, search, node, most)
        if room.size[count] > 1:  # else it only leads on
            num_edges += inside
            room.node[count] = node
            room.degree[count] = inside
            search.local[node] = count
            count += 1
        else:
            num_passed += 1
        waiting = _look_around(net, search, room, node, waiting)
    return count


@inner
def _jump(net: Net, search: Search, time: int, taken: int, waiting: int) -> bool:
    """Go on at a node that lives at a time, if there is one; what waits is forgotten."""
    fellow = _fellow(net, search, time, search.number[0])
    if fellow < 0:
        return False
    for place in range(taken, waiting):
        search.stamp[search.frontier[place]] = 0
    search.frontier[0] = fellow
    search.stamp[fellow] = search.number[0]
    return True


@inner
def _num_inside(net: Net, search: Search, room: Room, node: int) -> int:
    """Return how many neighbours of a node are in the region, or too many where one of them has as many
    as it may."""
    inside = 0
    for link in range(net.start[node], net.start[node + 1]):
        edge = net.around[link]
        v = search.local[net.ends[edge, 0] + net.ends[edge, 1] - node]
        if v >= 0:
            inside += 1
            if room.degree[v] >= MOST_AROUND:
                return MOST_AROUND + 1
    return inside


@inner
def _look_around(net: Net, search: Search, room: Room, node: int, waiting: int) -> int:
    """Let what is around a node that was looked at wait for that, or know of it where it is in the region;
    return how many wait."""
    number = search.number[0]
    for link in range(net.start[node], net.start[node + 1]):
        edge = net.around[link]
        other = net.ends[edge, 0] + net.ends[edge, 1] - node
        if search.local[other] >= 0:
            room.degree[search.local[other]] += search.local[node] >= 0
        elif search.stamp[other] != number:
            search.stamp[other] = number
            search.frontier[waiting] = other
            waiting += 1
    return waiting


@inner
def _num_likely(net: Net, search: Search, node: int, most: int) -> int:
    """Return how many of a node's strategies have a rank below ``most`` or come before its choice."""
    begin, end = net.first[node], net.first[node + 1]
    if not len(net.rank):
        return end - begin
    stop = begin + search.choice[node] + 1
    while stop < end and net.rank[stop] < most:
        stop += 1
    return stop - begin


@inner
def _tight_time(net: Net, search: Search, node: int) -> int:
    """Return the time of most use of a few at which a node lives, or -1."""
    begin, end = net.begin[node], net.end[node]
    best = -1
    if begin < end:
        for _ in range(FEW):
            time = begin + draw(search.random, end - begin)
            if best < 0 or search.used[time] > search.used[best]:
                best = time
    return best


@inner
def _fellow(net: Net, search: Search, time: int, number: int) -> int:
    """Return a node that lives at a time and is not looked at yet, or -1 where few tries find none;
    what began of late is as likely as what began long ago."""
    begun = search.begun[time] if time >= 0 else 0
    if begun > 0:
        for _ in range(FEW):
            node = search.by_begin[begun - _between(search.random, 1, begun)]
            if net.end[node] > time and search.stamp[node] != number:
                return node
    return -1


@inner
def _price(net: Net, search: Search, manner: Manner, num_bumps: int, node: int) -> float:
    """Return what a unit of usage of a node costs."""
    begin, end = net.begin[node], net.end[node]
    price = manner.scale * (manner.prices[end] - manner.prices[begin])
    price += search.slope[end] - search.slope[begin]
    for bump in range(num_bumps):
        if begin <= search.bumps[bump, 0] < end:
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
        begin = net.first[node]
        price = _price(net, search, manner, num_bumps, node)
        for s in range(begin, begin + room.size[place]):
            values[s] = net.cost[s] + price * net.usage[s]
        for link in range(net.start[node], net.start[node + 1]):
            edge = net.around[link]
            other = net.ends[edge, 0] + net.ends[edge, 1] - node
            if search.local[other] >= 0:
                continue
            _, _, cell, step = row_of(net, edge, other, search.choice[other])
            for s in range(room.size[place]):
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
            other, _, was, step = row_of(net, edge, node, old)
            _, _, now, _ = row_of(net, edge, node, new)
            before = after = search.choice[other]
            if search.local[other] >= 0:
                if net.ends[edge, 0] != node:
                    continue  # its first end counts it
                after = room.answer[search.local[other]]
            less += net.cells[was + before * step]
            less -= net.cells[now + after * step]
    return less


@inner
def _saved(net: Net, search: Search, room: Room, manner: Manner, count: int) -> float:
    """Return how much less the answers' memory costs at the given prices."""
    saved = 0.0
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        if old != new:
            price = manner.prices[net.end[node]] - manner.prices[net.begin[node]]
            saved += price * (net.usage[net.first[node] + old] - net.usage[net.first[node] + new])
    return manner.scale * saved


@inner
def _follow(search: Search, limit: float) -> None:
    """Set the prices that follow from the weights: the slope of what is over the limit costs,
    smoothed below it. Where nothing may be over it there are none."""
    softness = max(NEAR * limit, 1.0)
    total = 0.0
    for time in range(len(search.used)):
        below = (search.used[time] - limit) / softness
        if below > -20 and search.weight[time] < np.inf:
            total += search.weight[time] * np.exp(min(0.0, below))
        search.slope[time + 1] = total


@inner
def _rise(
    net: Net, search: Search, room: Room, limit: float, count: int
) -> tuple[float, int, float, int, int]:
    """Return what the answers' memory over the limit costs more; where most, and how much is over it
    more there; and the times between which ``search.change`` has the steps of usage."""
    low, high = len(search.used), 0
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        begin, end = net.begin[node], net.end[node]
        step = net.usage[net.first[node] + new] - net.usage[net.first[node] + old]
        if step != 0 and begin < end:
            search.change[begin] += step
            search.change[end] -= step
            low, high = min(low, begin), max(high, end)
    rise = total = most = excess = 0.0
    worst = -1
    for time in range(low, high):
        total += search.change[time]
        if total != 0:
            used = search.used[time]
            more = max(0.0, used + total - limit) - max(0.0, used - limit)
            if more != 0:
                weight = search.weight[time]
                rise += more * weight
                weighed = more * weight if weight < np.inf else more
                if weighed > most:
                    most, worst, excess = weighed, time, more
    return rise, worst, excess, low, high


@inner
def _take(search: Search, room: Room, count: int, low: int, high: int) -> None:
    """Take the answers."""
    total = 0.0
    for time in range(low, high):
        total += search.change[time]
        search.used[time] += total
    for place in range(count):
        search.choice[room.node[place]] = room.answer[place]


@inner
def _move(net: Net, search: Search, room: Room, manner: Manner, count: int, cells: int) -> float:
    """Solve one region and take the answer if it costs no more in all; return what was gained."""
    num_bumps = 0
    for _ in range(FEW + 1):
        surround(net, search, room, manner, num_bumps, count)
        solve_region(net, room, count, search.local, search.values, search.choice, cells)
        gained = gain(net, search, room, count)
        merit = gained + _saved(net, search, room, manner, count)
        rise, worst, excess, low, high = _rise(net, search, room, manner.limit, count)
        is_good = merit > rise or (merit == rise and gained >= 0)
        if is_good:
            _take(search, room, count, low, high)
        for time in range(low, high + 1):
            search.change[time] = 0.0
        if is_good:
            return gained - rise
        if merit <= 0 or worst < 0:
            return 0.0
        num_bumps = _raise_price(search, num_bumps, worst, 0.5 * merit / excess)
        if num_bumps > FEW:
            return 0.0
    return 0.0


@inner
def _raise_price(search: Search, num_bumps: int, worst: int, price: float) -> int:
    """Make memory at the worst time dearer, by a price at first; return how many times have one, more
    than ``FEW`` where that would be too many."""
    for bump in range(num_bumps):
        if search.bumps[bump, 0] == worst:
            search.bumps[bump, 1] *= BUMP
            return num_bumps
    if num_bumps < FEW:
        search.bumps[num_bumps, 0] = worst
        search.bumps[num_bumps, 1] = min(price, search.weight[worst])
    return num_bumps + 1


@compiled
def improve(net: Net, search: Search, room: Room, manner: Manner, roots: Ints, work: int) -> float:
    """Make a round of moves on regions grown from random ``roots``, fewer where they have looked at
    ``work`` cells before; return what was gained.

    A move is taken when cost, priced memory and weighted memory over the limit do not grow in all.
    """
    total = 0.0
    room.work[0] = 0
    for move in range(MOVES):
        if move % (MOVES // 2) == 0:
            _follow(search, manner.limit)
        if room.work[0] >= work:
            break
        search.number[0] += 1
        wanted = 1 + _between(search.random, 1, manner.most_nodes)
        cells = _between(search.random, manner.cells[0], manner.cells[1])
        root = roots[draw(search.random, len(roots))]
        part, most = wanted, len(net.cost)
        if net.begin[root] < net.end[root] and draw(search.random, 2):
            part = _between(search.random, 1, wanted)
        if len(net.rank) and draw(search.random, 2):
            most = _between(search.random, len(net.begin), most)
        count = grow(net, search, room, root, wanted, part, most)
        total += _move(net, search, room, manner, count, cells)
        for place in range(count):
            search.local[room.node[place]] = -1
    return total
