"""Repair by weighted penalties: regions are solved exactly while what is over the limit only costs.

The penalty of a choice is its cost plus, for every time point over the limit, what is over times that
point's weight. A move solves one region under prices that follow the penalty's slope and is taken when
the true penalty does not grow, so memory may rise here to fall there. Weights are the caller's, who
raises them where a search is stuck (breakout: Morris, AAAI 1993).
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.planner.compiled import compiled, inner
from shardwright.planner.solve.wide.neighbourhood import (
    MOST_BUMPS,
    Manner,
    Search,
    draw,
    gain,
    grow,
    surround,
)
from shardwright.planner.solve.wide.net import Net
from shardwright.planner.solve.wide.problem import Floats, Ints
from shardwright.planner.solve.wide.region import Room, solve_region

REFRESH = 16  # moves before prices follow what is used
SOFT = 0.01  # of the limit: how far below it memory begins to have a price


class Load(NamedTuple):
    """What is used at every time, the weight of a unit over the limit there, and scratch space."""

    used: Floats
    weight: Floats
    change: Floats


@inner
def _refresh(load: Load, manner: Manner) -> None:
    """Set the prices (prefix sums) to the slope of the penalty, smoothed below the limit."""
    softness = max(SOFT * manner.limit, 1.0)
    total = 0.0
    for time in range(len(load.used)):
        below = (load.used[time] - manner.limit) / softness
        if below >= 0:
            total += load.weight[time]
        elif below > -20:
            total += load.weight[time] * np.exp(below)
        manner.prices[time + 1] = total


@inner
def _rise(
    net: Net, search: Search, room: Room, load: Load, limit: float, count: int
) -> tuple[float, int, int, int]:
    """Return how much more the answers are over the limit, weighted; where most; and the times
    between which ``load.change`` has the steps of usage."""
    low, high = len(load.used), 0
    for place in range(count):
        node = room.node[place]
        old, new = search.choice[node], room.answer[place]
        begin, end = net.begin[node], net.end[node]
        step = net.usage[net.first[node] + new] - net.usage[net.first[node] + old]
        if step != 0 and begin < end:
            load.change[begin] += step
            load.change[end] -= step
            low, high = min(low, begin), max(high, end)
    rise = most = total = 0.0
    worst = -1
    for time in range(low, high):
        total += load.change[time]
        if total != 0:
            used = load.used[time]
            more = max(0.0, used + total - limit) - max(0.0, used - limit)
            if more != 0:
                more *= load.weight[time]
                rise += more
                if more > most:
                    most, worst = more, time
    return rise, worst, low, high


@inner
def _take(search: Search, room: Room, load: Load, count: int, low: int, high: int) -> None:
    """Take the answers."""
    total = 0.0
    for time in range(low, high):
        total += load.change[time]
        load.used[time] += total
    for place in range(count):
        search.choice[room.node[place]] = room.answer[place]


@inner
def _mend_one(
    net: Net, search: Search, room: Room, manner: Manner, load: Load, count: int
) -> float:
    """Solve one region; take the answer if the penalty does not grow; return by how much it
    falls."""
    num_bumps = 0
    for _ in range(MOST_BUMPS + 1):
        surround(net, search, room, manner, num_bumps, count)
        solve_region(
            net, room, count, search.local, search.values, search.choice, manner.most_cells
        )
        gained = gain(net, search, room, count)
        rise, worst, low, high = _rise(net, search, room, load, manner.limit, count)
        is_good = gained >= rise
        if is_good:
            _take(search, room, load, count, low, high)
        for time in range(low, high + 1):
            load.change[time] = 0.0
        if is_good:
            return gained - rise
        bump = 0
        while bump < num_bumps and search.bumps[bump, 0] != worst:
            bump += 1
        if worst < 0 or bump == MOST_BUMPS:
            return 0.0
        if bump == num_bumps:
            search.bumps[bump, 0] = worst
            search.bumps[bump, 1] = load.weight[worst]
            num_bumps += 1
        else:
            search.bumps[bump, 1] *= 4.0
    return 0.0


@compiled
def mend(
    net: Net,
    search: Search,
    room: Room,
    manner: Manner,
    load: Load,
    roots: Ints,
    numbers: tuple[int, int],
) -> float:
    """Make the moves ``numbers[0] <= number < numbers[1]`` on regions grown from random ``roots``;
    return by how much the penalty fell."""
    total = 0.0
    for number in range(numbers[0], numbers[1]):
        if (number - numbers[0]) % REFRESH == 0:
            _refresh(load, manner)
        share = draw(search.random, 4096) / 4096.0
        wanted = 1 + int(np.exp(np.log(manner.most_nodes) * share))
        root = roots[draw(search.random, len(roots))]
        count = grow(net, search, room, root, wanted, number)
        total += _mend_one(net, search, room, manner, load, count)
        for place in range(count):
            search.local[room.node[place]] = -1
    return total
