"""Other orders of a pipeline: what is said of them holds in the simulator, and the search tries them."""

from __future__ import annotations

import math

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.schedules import NamedSchedule
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.candidates import Candidate, explore, rescheduled, to_strategy
from shardwright.planner.search.loop import run
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.schedules import schedules
from tests.planner.search.models import cluster, residual

GRAPH = residual(batch=32, width=64, depth=6)
NEAR = cluster(1, 2, flops=1e9, near=1e10)
FAR = cluster(2, 1, flops=1e9, far=2e6)


def pipeline(where, microbatches: int) -> tuple[Context, Candidate]:
    """The fastest pipeline of two stages in the additive model."""
    context = Context.of(GRAPH, where, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=microbatches)
    found = explore(context, arrangement, math.inf, math.inf, math.inf).candidates
    return context, min(found, key=lambda candidate: candidate.seconds)


def judged(context: Context, candidate: Candidate) -> Evaluation:
    return evaluate(context, to_strategy(context, candidate))


@pytest.mark.parametrize("where", [NEAR, FAR])
@pytest.mark.parametrize("order", ["gpipe", "1f1b-so", "interleaved"])
def test_a_pipeline_in_another_order_takes_no_less_than_is_said(
    where, order: NamedSchedule
) -> None:
    context, candidate = pipeline(where, 4)
    other = rescheduled(candidate, order)
    assert other is not None
    found = judged(context, other)
    assert found.strategy.pipeline.schedule == order
    assert 0 < other.least_seconds <= found.seconds


def test_interleaved_each_device_has_two_chunks_and_waits_less() -> None:
    context, candidate = pipeline(NEAR, 4)
    other = rescheduled(candidate, "interleaved")
    assert other is not None
    found, plain = judged(context, other), judged(context, candidate)
    assert [mesh.devices for mesh in found.strategy.meshes] == [(0,), (1,), (0,), (1,)]
    assert other.seconds < candidate.seconds
    assert found.seconds < plain.seconds
    # The additive model sees most of the gain: a chunk is a whole number of blocks.
    gain, promised = 1 - found.seconds / plain.seconds, 1 - other.seconds / candidate.seconds
    assert 0.3 < promised / gain < 3


@pytest.mark.parametrize(("where", "wanted"), [(NEAR, {"interleaved"}), (FAR, {"1f1b-so"})])
def test_orders_are_tried_where_they_promise_a_gain(where, wanted: set[str]) -> None:
    context, candidate = pipeline(where, 8)
    pool = Pool(context, math.inf)
    assert pool.try_candidate(candidate) is not None
    run(pool, schedules)
    tried = {one.strategy.pipeline.schedule for one in pool.evaluations}
    assert {"1f1b"} | wanted <= tried


def test_a_pipeline_of_too_few_blocks_is_not_interleaved() -> None:
    graph = residual(batch=8, width=16, depth=1)
    context = Context.of(graph, NEAR, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=4)
    found = explore(context, arrangement, math.inf, math.inf, math.inf).candidates
    blocks = len(context.facts.ties.ranges)
    assert (rescheduled(found[0], "interleaved") is None) == (blocks < 4)
