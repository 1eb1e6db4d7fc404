"""In which ways a plan's gradients are tried: merged selections and factors, where they may pay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shardwright.core.compression import MERGED, SPARSE, is_compressed, sent_density
from shardwright.core.costs import CostTable, beneath_key, collective_key
from shardwright.core.strategy import GradientSync
from shardwright.planner.judge.compress import packings
from shardwright.planner.judge.evaluate import evaluate, run
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.search.models import cluster, residual

SLOW = {"flops": 1e10, "near": 1e9, "far": 1e7}


def offered(hosts: int, least_sent: float) -> dict[GradientSync, float]:
    """Return what is tried for data parallelism over hosts on slow links, and the seconds of each."""
    graph, where = residual(batch=48, width=128, depth=2), cluster(hosts, 1, **SLOW)
    context = Context.of(graph, where, CostTable(), Training())
    whole = evaluate(context, seed_strategy(graph, Seed(data=hosts)))
    found = packings(context, whole, least_sent, partial(run, context))
    return {
        sync: evaluate(context, replace(whole.strategy, gradient_sync=sync)).seconds
        for sync in found
    }


def test_merged_selections_are_tried_where_merging_takes_fewer_messages_than_there_are_packs() -> (
    None
):
    for hosts in (2, 3, 4, 16):
        tried = {one.compressor for one in offered(hosts, 0.001)}
        # Rounds of doubling, two more beyond a power of two, against the packs of the others.
        rounds = {2: 1, 3: 3, 4: 2, 16: 4}[hosts]
        assert bool(tried & MERGED) is (rounds < hosts - 1)
        assert "powersgd" in tried


def test_on_many_hosts_merging_is_predicted_to_beat_gathering_as_the_formulas_say() -> None:
    seconds = dict[tuple[str, float], float]()
    for sync, one in offered(16, 0.001).items():
        if not sync.apart and sync.compressor in SPARSE:
            key = (sync.compressor, sync.density)
            seconds[key] = min(one, seconds.get(key, one))
    # 2 k (P - 1) against 2 k log2 P elements: 30 against 8 times k.
    for density in (0.01, 0.004):
        assert seconds["gtop-k", density] < seconds["top-k", density]


@pytest.mark.parametrize("held", [1e-5, 1e-4, 1e-3])
def test_selections_travel_in_groups_no_slower_than_alone_or_all_at_once(held: float) -> None:
    graph, where = residual(batch=16, width=64, depth=6), cluster(2, 1, flops=1e10, far=1e8)
    ends, found = (2, 2, "0.8Gbit/s"), dict[str, float]()
    for name in ("all_reduce", "all_gather"):
        found[collective_key(name, *ends)] = 1e-4
        found[beneath_key("held", name, *ends)] = held
        found[beneath_key("stolen", name, *ends)] = 1e-5
        found[beneath_key("waited", name, *ends)] = 1e-4
    lines = {name: ((1.0, one, 0.0), (1e6, 2 * one, 0.0)) for name, one in found.items()}
    context = Context.of(graph, where, CostTable(collectives=tuple(lines.items())), Training())
    whole = evaluate(context, seed_strategy(graph, Seed(data=2)))
    tried = packings(context, whole, 0.01, partial(run, context))
    chosen = next(one for one in tried if one.compressor == "top-k" and one.density == 0.01)

    def is_large(one: int) -> bool:
        return is_compressed(chosen, "float32", graph.tensors[one].shape)

    every = [one for bucket in chosen.buckets for one in bucket]
    large, small = (tuple(filter(of, every)) for of in (is_large, lambda one: not is_large(one)))
    rest = (small,) if small else ()
    groups = {
        "chosen": chosen.buckets,
        "alone": (*[(one,) for one in large], *rest),
        "single": (large, *rest),
    }
    seconds = {
        name: evaluate(
            context, replace(whole.strategy, gradient_sync=replace(chosen, buckets=buckets))
        ).seconds
        for name, buckets in groups.items()
    }
    assert seconds["chosen"] <= min(seconds.values()) * 1.01  # segments that are cut are not priced


def test_nothing_is_tried_that_sends_less_than_is_allowed() -> None:
    graph = residual(batch=48, width=128, depth=2)
    shapes = {graph.tensors[one].shape for one in graph.parameters}
    ranks = set[int]()
    for sync in offered(16, 0.01):
        if sync.compressor == "powersgd":
            ranks.add(sync.feedback.rank)
            shares = [
                sent_density(sync, one) for one in shapes if is_compressed(sync, "float32", one)
            ]
            assert min(shares) >= 0.01
        if sync.compressor in SPARSE:
            assert sync.density >= 0.01
    assert ranks == {1, 2, 4}  # (128 + 128) / 128^2 is 0.016
    assert not {one.feedback.rank for one in offered(16, 0.05) if one.compressor == "powersgd"} & {
        1,
        2,
    }
