"""Groups and ways of gradients: as good as the best of all, and never denser than it pays to be sparse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from shardwright.planner.schedule.merge import Cost, Sizes
from shardwright.planner.schedule.packing import Groups, Way, choose_ways


def line(start: float, rate: float) -> Cost:
    def cost(sizes: Sizes) -> Sizes:
        return start + rate * sizes

    return cost


def drawn(random: Random, count: int) -> tuple[list[float], float, list[Way]]:
    """Return ready times, the end of computation and three ways; some gradients only travel whole."""
    ready = sorted(random.random() * 5 for _ in range(count))
    sizes = [random.random() * 3 for _ in range(count)]
    zeros = [0.0] * count
    load = line(0.02, 0.4)
    ways = [Way(packs=zeros, sums=zeros, sizes=sizes, cost=line(0.1, 1.0), load=load)]
    for density in (0.3, 0.1):
        packs = [
            one * 0.3 * random.random() if random.random() < 0.8 else math.inf for one in sizes
        ]
        sums, sent = [one * 0.1 for one in sizes], [one * density for one in sizes]
        ways.append(Way(packs=packs, sums=sums, sizes=sent, cost=line(0.15, 1.2)))
    return ready, ready[-1] + random.random(), ways


def every(count: int, num_ways: int) -> Iterator[Groups]:
    for cuts in itertools.product((False, True), repeat=count - 1):
        edges = [0, *(place for place, cut in enumerate(cuts, 1) if cut), count]
        for chosen in itertools.product(range(num_ways), repeat=len(edges) - 1):
            yield tuple(zip(edges[:-1], edges[1:], chosen, strict=True))


def finish(groups: Groups, ready: list[float], end: float, ways: list[Way]) -> float:
    """Follow the groups one by one."""
    delay = free = sums = last = 0.0
    for first, stop, number in groups:
        way = ways[number]
        delay += sum(way.packs[first:stop])
        if delay == math.inf:
            return math.inf
        size = np.array([sum(way.sizes[first:stop])])
        free = max(free, ready[stop - 1] + delay) + float(way.cost(size)[0])
        delay += float(way.load(size)[0]) if way.load else 0.0
        last = sum(way.sums[first:stop])
        sums += last
    return max(end + delay + sums, free + last)


def test_ways_are_as_good_as_the_best_of_all_and_as_dense_as_hides() -> None:
    random = Random(5)
    for turn in range(24):
        count = turn % 5 + 1
        ready, end, ways = drawn(random, count)
        found = choose_ways(ready, end, ways)
        least = min(finish(one, ready, end, ways) for one in every(count, len(ways)))
        assert finish(found, ready, end, ways) == pytest.approx(least, rel=1e-9)
        for place, (first, stop, way) in enumerate(found):
            for denser in range(way):
                other = (*found[:place], (first, stop, denser), *found[place + 1 :])
                assert finish(other, ready, end, ways) > least


def test_where_sending_is_quick_nothing_is_compressed() -> None:
    ready, end, ways = drawn(Random(1), 8)
    quick = Way(packs=ways[0].packs, sums=ways[0].sums, sizes=ways[0].sizes, cost=line(0.0, 1e-6))
    assert {way for _, _, way in choose_ways(ready, end, [quick, *ways[1:]])} == {0}
    assert choose_ways([], 1.0, ways) == ()


def test_of_ten_layers_no_grouping_ends_earlier_where_all_select_where_backward_runs() -> None:
    for seed in range(6):
        ready, end, ways = drawn(Random(seed), 10)
        sparse = [replace(ways[1], packs=[0.1 * one for one in ways[0].sizes])]
        found = finish(choose_ways(ready, end, sparse), ready, end, sparse)
        ends = {one: finish(one, ready, end, sparse) for one in every(10, 1)}
        assert found == pytest.approx(min(ends.values()), rel=1e-9)
        assert len(ends) == 2**9  # each layer alone (LAGS) and all at once among them
