"""Judging strategies from those before: the same evaluations, and what is remembered stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Mesh, Strategy
from shardwright.planner.cost import price
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.lower import lower, memo
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.simulate import simulate
from shardwright.planner.space import Seed, seed_strategy
from tests.laws.moves import moved, redrawn
from tests.planner.search.models import cluster, images, mlp, residual

SEEDS = (
    Seed(data=4),
    Seed(data=2, tensor=2),
    Seed(data=2, tensor=2, zero=3),
    Seed(data=2, stages=2, num_microbatches=2),
    Seed(tensor=2, stages=2, num_microbatches=2, schedule="gpipe", recompute=True),
)


def evaluation(judged: Evaluation) -> tuple[object, ...]:
    return judged.objective, judged.stage_bytes, judged.sources


def outcome(act: Callable[[Strategy], Evaluation], strategy: Strategy) -> object:
    """Return the evaluation, or how the strategy is refused."""
    try:
        return evaluation(act(strategy))
    except ValueError:
        return "refused"  # a whole lowering checks more, and sooner


def walk(graph: OperatorGraph, seed: Seed, moves: int, where: Cluster | None = None) -> Incremental:
    """Judge a chain of strategies both ways; every fourth is the one before the last again."""
    context = Context.of(graph, where or cluster(2, 2), CostTable(), Training())
    incremental, random = Incremental(context), Random(7)
    strategy = seed_strategy(graph, seed, context.facts.samples)
    iterations = [context.facts.iteration(index) for index in range(len(graph.operators))]
    for number in range(moves):
        other = moved(graph, strategy, random) if number % 5 == 4 else strategy
        other = redrawn(graph, context.facts.samples, iterations, other, random)
        known = outcome(partial(evaluate, context), other)
        assert outcome(incremental.evaluate, other) == known
        if isinstance(known, str):
            continue
        strategy = strategy if number % 4 == 3 else other
    return incremental


@pytest.mark.parametrize("build", [residual, images])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_a_chain_of_changed_strategies_is_judged_as_each_alone(build, seed) -> None:
    walk(build(), seed, moves=25)


def test_other_meshes_and_microbatches_begin_anew_or_where_they_were() -> None:
    graph = residual()
    context = Context.of(graph, cluster(2, 2), CostTable(), Training())
    incremental = Incremental(context)
    for _ in range(2):
        for seed in SEEDS:
            strategy = seed_strategy(graph, seed, context.facts.samples)
            assert evaluation(incremental.evaluate(strategy)) == evaluation(
                evaluate(context, strategy)
            )


def test_input_that_only_strategies_before_read_is_not_counted() -> None:
    where = replace(cluster(2, 2), rank_batch_seconds=1e-4, copy_bandwidth=1e9)
    walk(mlp(), Seed(data=2, tensor=2), moves=25, where=where)


def test_what_is_remembered_is_forgotten_before_it_grows_without_bound(monkeypatch) -> None:
    monkeypatch.setattr(memo, "MOST_REMEMBERED", 400)
    walk(mlp(), Seed(data=2, tensor=2), moves=60)


def wide(graph: OperatorGraph, devices: int) -> Strategy:
    """Return data parallelism over all devices."""
    strategy = seed_strategy(graph, Seed(data=2, tensor=2))
    mesh = Mesh(axes=("data", "tensor"), sizes=(devices // 2, 2), devices=tuple(range(devices)))
    return replace(strategy, meshes=(mesh,))


def test_ten_thousand_devices_are_as_many_instructions_as_four() -> None:
    few, many = residual(batch=8), residual(batch=16_384)
    programs = [lower(graph, wide(graph, n)) for graph, n in ((few, 4), (many, 16_384))]
    assert programs[0].num_instructions == programs[1].num_instructions
    assert len(programs[0].values) == len(programs[1].values)
    where = cluster(2048, 8)
    seconds = price(programs[1], many, where, CostTable()).seconds
    timeline = simulate(programs[1], seconds)
    assert timeline.start.shape == (programs[0].num_instructions,)
    assert len(timeline.peak_bytes) == 1
