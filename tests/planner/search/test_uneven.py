"""Pipelines of stages with unequal devices, on clusters of several kinds, against every one that there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search import Goal, Limits, search
from shardwright.planner.search.limits import room
from shardwright.planner.search.loop import run
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.uneven import ORDERS, Cut, best_cuts, to_strategy, uneven
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.search.models import cluster, mlp


def mixed(fast: int, slow: int, ratio: float, memory: float = 80e9) -> Cluster:
    """So many devices of one kind, and of another that computes slower and has less memory."""
    whole = cluster(1, fast + slow, flops=1e10, near=1e10)
    kind = whole.kinds[0]
    other = replace(
        kind,
        name="slow",
        peak_flops=tuple((name, rate / ratio) for name, rate in kind.peak_flops),
        memory_bandwidth=kind.memory_bandwidth / ratio,
        memory_bytes=memory,
    )
    devices = tuple(replace(one, kind=int(i >= fast)) for i, one in enumerate(whole.devices))
    return replace(whole, kinds=(kind, other), devices=devices)


def data_parallel(graph: OperatorGraph, count: int) -> Strategy:
    return seed_strategy(graph, Seed(data=count))


def pool_of(graph: OperatorGraph, machine: Cluster) -> Pool:
    context = Context.of(graph, machine, CostTable(), Training())
    return Pool(context, room(machine, Limits()))


def every(pool: Pool, pieces: tuple[int, ...]) -> Iterator[Evaluation]:
    """Yield every pipeline of at least two stages, on all devices as they stand, that is legal."""
    blocks, devices = len(pool.context.graph.blocks), pool.context.num_devices
    order = tuple(range(devices))
    for more in range(1, devices):
        for own in combinations(range(1, blocks), more):
            for theirs in combinations(range(1, devices), more):
                places = ((0, 0), *zip(own, theirs, strict=True), (blocks, devices))
                for m, schedule in ((m, schedule) for m in pieces for schedule in ORDERS):
                    try:
                        cut = Cut(order, places, m, 0.0, 0.0, schedule)
                        strategy = to_strategy(pool.context, cut)
                    except ValueError:
                        continue
                    found = pool.judged(strategy)
                    if found is not None:
                        yield found


@pytest.mark.parametrize(("fast", "slow", "ratio"), [(1, 2, 2.0), (1, 2, 6.0), (2, 1, 3.0)])
def test_what_is_proposed_is_near_the_best_of_all(fast: int, slow: int, ratio: float) -> None:
    pool = pool_of(mlp(batch=24, width=64, depth=3), mixed(fast, slow, ratio))
    run(pool, uneven)
    best = min(one.seconds for one in every(pool, (2, 4)))
    assert pool.fastest <= 1.1 * best


def test_stages_are_balanced_over_devices_of_two_speeds() -> None:
    """Of twelve equal layers a device of twice the speed gets twice as many as each of the others."""
    context = pool_of(mlp(batch=8, width=256, depth=12), mixed(1, 2, 2.0)).context
    cuts = [one for one in best_cuts(context, float("inf")) if len(one.places) == 4]
    assert {cut.places for cut in cuts if cut.devices == (0, 1, 2)} >= {
        ((0, 0), (6, 1), (9, 2), (13, 3))
    }


def test_what_is_proposed_fits_the_smaller_memory() -> None:
    graph, roomy = mlp(batch=24, width=64, depth=4), mixed(1, 2, 4.0)
    free = pool_of(graph, roomy)
    run(free, uneven)
    fastest = min(free.evaluations, key=lambda one: one.seconds)
    small = mixed(1, 2, 4.0, memory=fastest.bytes)
    pool = pool_of(graph, small)
    assert fastest.bytes > pool.limit
    run(pool, uneven)
    assert pool.fitting
    smallest = min(one.bytes for one in every(pool, (2,)))
    assert pool.fitting[0].bytes <= pool.limit
    assert smallest <= pool.limit


@pytest.mark.parametrize("is_last", [False, True])
def test_devices_that_are_faster_alone_leave_much_slower_ones_idle(is_last: bool) -> None:
    machine, graph = mixed(2, 2, 50.0), mlp(batch=16, width=128, depth=1)
    if is_last:
        machine = replace(machine, devices=machine.devices[::-1])
    fast = cluster(1, 2, flops=1e10, near=1e10)
    few = Limits(max_candidates=2)
    found = search(graph, machine, CostTable(), limits=few).best
    alone = evaluate(Context.of(graph, fast, CostTable(), Training()), data_parallel(graph, 2))
    assert found.predicted.step_seconds <= alone.seconds * 1.001
    assert {machine.kind_of(device).name for device in found.strategy.devices} == {"test"}
    assert "on test" in found.strategy.label


def test_fewest_devices_are_looked_for_among_the_fast_ones_too() -> None:
    """Slow devices, by which work is priced where they take part, would make one fast one look too slow."""
    machine, graph = mixed(1, 1, 50.0), mlp(batch=16, width=128, depth=1)
    alone = evaluate(
        Context.of(graph, machine, CostTable(), Training()), data_parallel(graph, 1)
    ).seconds
    goal = Goal(mode="min-devices", deadline=alone * 1.01)
    for devices in (machine.devices, machine.devices[::-1]):
        where = replace(machine, devices=devices)
        best = search(graph, where, CostTable(), limits=Limits(max_candidates=2), goal=goal).best
        assert len(best.strategy.devices) == 1
        assert best.reason.startswith("The fewest devices that fit and meet the deadline: 1")


def test_where_devices_are_alike_or_too_many_nothing_is_proposed() -> None:
    alike = pool_of(mlp(), cluster(1, 3))
    many = pool_of(mlp(depth=40), mixed(16, 16, 2.0))
    for pool in (alike, many):
        assert best_cuts(pool.context, float("inf")) == []
