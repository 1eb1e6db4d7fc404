"""Other orders of a pipeline: what is said of them holds in the simulator, and the search tries them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache, cached_property, partial

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.schedules import NamedSchedule
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.model.arrangements import Arrangement, shape_of
from shardwright.planner.model.context import Context
from shardwright.planner.model.decisions import Statement
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import EACH, GATHER, ONCE, SYNC, Term
from shardwright.planner.model.training import Training
from shardwright.planner.search.answer import Findings, answer
from shardwright.planner.search.candidates import Candidate, explore, to_strategy
from shardwright.planner.search.loop import run
from shardwright.planner.search.looped import least_looped
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.additive import of_shape, on_all
from shardwright.planner.search.proposers.schedules import (
    SPLIT,
    chains_of,
    reordered,
    schedules,
)
from tests.planner.search.models import cluster, residual

GRAPH = residual(batch=32, width=64, depth=6)
NEAR = cluster(1, 2, flops=1e9, near=1e10)
FAR = cluster(2, 1, flops=1e9, far=2e6)


@cache
def pipeline(where, microbatches: int) -> tuple[Context, Candidate]:
    """The fastest pipeline of two stages in the additive model."""
    context = Context.of(GRAPH, where, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=microbatches)
    found = explore(context, arrangement, math.inf).candidates
    return context, min(found, key=lambda candidate: candidate.seconds)


def judged(context: Context, candidate: Candidate) -> Evaluation:
    return evaluate(context, to_strategy(context, candidate))


@pytest.mark.parametrize("where", [NEAR, FAR])
@pytest.mark.parametrize("order", ["gpipe", "1f1b-so", "interleaved"])
def test_a_pipeline_in_another_order_takes_no_less_than_is_said(
    where, order: NamedSchedule
) -> None:
    context, candidate = pipeline(where, 4)
    other = reordered(candidate, chains_of(candidate), order)
    assert other is not None
    found = judged(context, other)
    assert found.strategy.pipeline.schedule == order
    assert 0 < other.least_seconds <= found.seconds


def test_interleaved_each_device_has_two_chunks_and_waits_less() -> None:
    context, candidate = pipeline(NEAR, 4)
    other = reordered(candidate, chains_of(candidate), "interleaved")
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
    found = explore(context, arrangement, math.inf).candidates
    blocks = len(context.facts.ties.ranges)
    assert (reordered(found[0], chains_of(found[0]), "interleaved") is None) == (blocks < 4)


def test_split_backwards_are_planned_where_they_are_clearly_faster_and_fit() -> None:
    """And the bounds beside them hold for every plan of their kind."""
    graph, where = residual(batch=32, width=256, depth=8), cluster(4, 1, flops=1e10, far=3e7)
    context = Context.of(graph, where, CostTable(), Training())
    free = planned(context, math.inf)
    whole = [one for one in free.fitting if not one.strategy.pipeline.splits_backward]
    # Nothing was weighed here, so that whatever is faster is kept.
    split = {
        name: one for one in free.fitting[::-1] for name in SPLIT if name in one.strategy.label
    }
    assert {"zb-v", "zb-h2", "zb-interleaved"} <= split.keys()
    plain = split["zb-h2"]
    # Half-widths are some 5 % of a step here.
    assert plain.seconds < 0.97 * whole[0].seconds
    # Where that does not fit, an order that keeps less.
    pipeline = replace(plain.strategy.pipeline, schedule="zb-h1")
    smaller = evaluate(context, replace(plain.strategy, pipeline=pipeline)).bytes
    assert smaller < plain.bytes
    tight = planned(context, smaller)
    assert tight.fitting[0].strategy.pipeline.splits_backward
    plans = answer(free, 0).plans
    for plan in plans:
        assert plan.bound is not None
        splits = plan.strategy.pipeline.splits_backward
        alike = free.fitting if splits else whole
        assert plan.bound.step_seconds <= min(one.seconds for one in alike)
        assert ("whatever devices wait for" in plan.bound.model) is splits


def test_deep_models_get_more_chunks_a_device_where_few_microbatches_fill_a_pipeline() -> None:
    """And each plan's bound holds for all with no more chunks than it has."""
    graph, where = residual(batch=8, width=512, depth=24), cluster(4, 1, flops=1e9, far=1e8)
    pool = Pool(Context.of(graph, where, CostTable(), Training()), math.inf)
    run(pool, partial(of_shape, shape_of(4, 1, 1, (4,))))
    run(pool, schedules)
    found = pool.findings()
    whole = [one for one in found.fitting if not one.strategy.pipeline.splits_backward]
    chunks = {one.strategy.chunks for one in whole}
    assert {1, 2} < chunks
    best = whole[0]
    assert best.strategy.chunks == max(chunks)
    two = min(one.seconds for one in whole if one.strategy.chunks == 2)
    assert best.seconds < 0.97 * two
    assert f"(interleaved x {best.strategy.chunks})" in best.strategy.label
    for few in sorted(chunks):
        alike = [one.seconds for one in whole if one.strategy.chunks <= max(few, 2)]
        assert found.bounds.least(max(few, 2)) <= min(alike)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_what_an_arrangement_takes_at_least_is_true_of_every_cut(chunks: int) -> None:
    """Of whole stages and of chunks, in every order without a split backward, by brute force."""
    context = Context.of(residual(batch=8, width=64, depth=5), NEAR, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=2)
    explored = explore(context, arrangement, math.inf)
    judge, least = Incremental(context).evaluate, explored.bound.seconds(chunks)
    blocks = len(context.facts.ties.ranges)
    orders: tuple[NamedSchedule, ...] = ("interleaved", "looped-bfs")
    if chunks == 1:
        orders = ("1f1b", "gpipe", "1f1b-so")
    fastest = math.inf
    for found in explored.candidates:
        for starts in itertools.combinations(range(1, blocks), 2 * chunks - 1):
            for order in orders:
                other = replace(arrangement, schedule=order)
                cut = replace(found, starts=(0, *starts), arrangement=other)
                fastest = min(fastest, judge(to_strategy(context, cut)).seconds)
    assert 0.5 * fastest < least <= fastest


def test_what_devices_must_keep_bounds_every_cut_into_chunks_that_fits() -> None:
    """Within tight and wide limits, by brute force over orders, cuts and what runs again."""
    context = Context.of(residual(batch=4096, width=64, depth=4), NEAR, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=2)
    explored = explore(context, arrangement, math.inf)
    blocks = len(context.facts.ties.ranges)
    judge, found = Incremental(context).evaluate, list[tuple[float, float]]()
    for candidate in explored.candidates:
        for starts in itertools.combinations(range(1, blocks), 3):
            for order in ("interleaved", "looped-bfs"):
                other = replace(arrangement, schedule=order)
                cut = replace(candidate, starts=(0, *starts), arrangement=other)
                one = judge(to_strategy(context, cut))
                found.append((one.bytes, one.seconds))
    found.sort()
    problem = Problem.of(context, arrangement.mesh(0), arrangement.microbatches)
    limits = [one.bytes for one in explored.candidates] + [size for size, _ in found[::8]]
    rises = 0
    for limit in limits:
        fastest = min([seconds for size, seconds in found if size <= limit], default=math.inf)
        least = least_looped(problem, arrangement, 2, limit)
        assert 0 < least <= fastest
        if least < math.inf:  # no more is proved than is useful
            some = least_looped(problem, arrangement, 2, limit, (0.0, 0.9 * least))
            assert 0.9 * least <= some <= least * (1 + 1e-9)
        loose = explore(context, arrangement, limit).bound
        rises += least > 1.01 * loose.seconds(2)
    assert rises


UNIT = 2.0**34


class InUnits(Problem):
    """A problem with times in another unit."""

    @cached_property
    def statement(self) -> Statement:
        statement = super().statement
        terms = list[Term]()
        for term in statement.terms:
            columns = term.columns.copy()
            columns[[EACH, ONCE, GATHER, SYNC]] /= UNIT
            terms.append(replace(term, columns=columns))
        return Statement(tuple(statement.sizes), tuple(terms))


def test_what_is_proved_of_chunks_does_not_depend_on_the_unit_of_time() -> None:
    """The solver of linear programs refuses factors below 1e-9, and such come of fast devices."""
    context = Context.of(residual(batch=4096, width=64, depth=4), NEAR, CostTable(), Training())
    arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=2)
    explored = explore(context, arrangement, math.inf)
    limit = min(one.bytes for one in explored.candidates)
    least, scaled = (
        least_looped(kind.of(context, arrangement.mesh(0), 2), arrangement, 2, limit)
        for kind in (Problem, InUnits)
    )
    assert scaled * UNIT == pytest.approx(least)


def planned(context: Context, limit: float) -> Findings:
    pool = Pool(context, limit)
    run(pool, on_all)
    run(pool, schedules)
    return pool.findings()


def test_no_order_or_cut_of_a_small_pipeline_beats_the_devices_own_work() -> None:
    """What is printed as the bound of plans that split their backward, by brute force."""
    context = Context.of(residual(batch=16, width=64, depth=2), NEAR, CostTable(), Training())
    count = 0
    for microbatches in (2, 4, 16):
        arrangement = Arrangement(stages=2, data=1, tensor=1, microbatches=microbatches)
        explored = explore(context, arrangement, math.inf)
        least = explored.bound.own
        assert least > context.prices.serial_seconds / 2
        for found in explored.candidates:
            for start in range(1, len(context.facts.ties.ranges)):
                for order in ("1f1b", "gpipe", "1f1b-so", "zb-h1", "zb-h2"):
                    cut = replace(
                        found,
                        starts=(0, start),
                        arrangement=replace(arrangement, schedule=order),
                    )
                    count += 1
                    assert judged(context, cut).seconds >= least
    assert count > 50
