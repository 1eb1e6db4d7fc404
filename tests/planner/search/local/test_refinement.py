"""Refinement: never worse, within memory, deterministic, and it does find what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.program import Program
from shardwright.core.strategy import ParameterConfig, Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.judge.actions import timed
from shardwright.planner.judge.evaluate import Evaluation, evaluate, run
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.search.local.moves import Space, resplit
from shardwright.planner.search.local.refinement import Effort, bottlenecks, improve
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers import refine
from shardwright.planner.space import Seed
from shardwright.proofs import check
from tests.planner.search.models import cluster, residual

SLOW = {"flops": 1e10, "near": 1e9, "far": 1e8}
FEW = Limits(max_candidates=2)
HERE = Context.of(
    residual(batch=16, width=64, depth=3), cluster(2, 2, **SLOW), CostTable(), Training()
)


def data_parallel(**seed: int) -> Strategy:
    return as_strategy(HERE, Seed(data=4, **seed))


@pytest.mark.parametrize("seed", [{}, {"zero": 3}, {"zero": 2, "num_microbatches": 2}])
def test_refinement_is_never_worse_and_its_plans_are_sound(seed: dict[str, int]) -> None:
    before = evaluate(HERE, data_parallel(**seed))
    after = improve(Pool(HERE, math.inf), before, Effort(30))
    assert after.seconds <= before.seconds
    check(lower(HERE.graph, after.strategy))
    assert evaluate(HERE, after.strategy).objective == after.objective


def test_refinement_keeps_the_memory_limit() -> None:
    before = evaluate(HERE, data_parallel(zero=3))
    after = improve(Pool(HERE, before.bytes), before, Effort(30))
    assert after.bytes <= before.bytes
    free = improve(Pool(HERE, math.inf), before, Effort(30))
    assert free.seconds < before.seconds


def test_weights_gathered_once_overlap_what_zero_1_gathers_after_the_update() -> None:
    """Equal traffic, and the same memory; but the gathers of ZeRO-1 come when nothing else runs."""
    first, kept = (
        evaluate(HERE, data_parallel(**seed)) for seed in ({"zero": 1}, {"zero": 3, "keeps": True})
    )
    assert kept.seconds < first.seconds
    assert kept.bytes <= first.bytes


def test_an_operator_that_every_device_repeats_is_found_and_split() -> None:
    whole = data_parallel()
    index = next(i for i, o in enumerate(HERE.graph.operators) if "gelu" in o.kind)
    spoilt = resplit(Space(HERE), whole, {index: ("",) * len(whole.meshes[0].sizes)})
    before = evaluate(HERE, spoilt)
    assert before.seconds > evaluate(HERE, whole).seconds
    program, timeline, _ = run(HERE, spoilt, math.nan)
    assert bottlenecks(HERE, program, timeline)
    after = improve(Pool(HERE, math.inf), before, Effort(40))
    assert after.seconds <= evaluate(HERE, whole).seconds * (1 + 1e-9)
    assert after.strategy.label.endswith("refined")


def test_what_needs_no_recomputation_stops_recomputing() -> None:
    spoilt = replace(data_parallel(), recompute=tuple(range(len(HERE.graph.blocks) - 1)))
    after = improve(Pool(HERE, math.inf), evaluate(HERE, spoilt), Effort(40))
    assert len(after.strategy.recompute) < len(spoilt.recompute)


def test_a_parameter_gathered_in_vain_is_kept_whole() -> None:
    whole = data_parallel()
    sharded = as_strategy(HERE, Seed(data=4, zero=3)).parameters
    largest = max(range(len(sharded)), key=lambda n: sharded[n].rest != whole.parameters[n].rest)
    spoilt: tuple[ParameterConfig, ...] = tuple(
        sharded[n] if n == largest else one for n, one in enumerate(whole.parameters)
    )
    before = evaluate(HERE, replace(whole, parameters=spoilt))
    after = improve(Pool(HERE, math.inf), before, Effort(60))
    assert after.seconds <= evaluate(HERE, whole).seconds * (1 + 1e-9)


def test_no_more_moves_are_simulated_than_allowed() -> None:
    seen: list[Strategy] = []

    def counted(strategy: Strategy, least: float) -> tuple[Program, Timeline, Evaluation]:
        seen.append(replace(strategy, label=""))
        return run(HERE, strategy, least)

    begin = data_parallel()
    pool = Pool(HERE, math.inf)
    pool.evaluator = SimpleNamespace(run=counted)
    improve(pool, evaluate(HERE, begin), Effort(7))
    # Those it goes on from are simulated once more, for their critical chains.
    assert len({*seen} - {replace(begin, label="")}) == 7


def test_an_order_of_ones_own_stays_as_it_is() -> None:
    """Under another schedule its halves of backwards were left, which that schedule has not."""
    where = cluster(3, 1, flops=1e10, far=3e7)
    here = Context.of(residual(batch=24, width=128, depth=9), where, CostTable(), Training())
    seed = Seed(stages=3, chunks=2, schedule="zb-v", num_microbatches=6)
    own = timed(here, as_strategy(here, seed))
    assert own is not None
    seen: list[Strategy] = []

    def kept(strategy: Strategy, least: float) -> tuple[Program, Timeline, Evaluation]:
        seen.append(strategy)
        return run(here, strategy, least)

    pool = Pool(here, math.inf)
    pool.evaluator = SimpleNamespace(run=kept)
    improve(pool, evaluate(here, own), Effort(40))
    assert len(seen) > 1
    assert {one.pipeline for one in seen} == {own.pipeline}


def test_the_search_finds_more_with_refinement_than_without(monkeypatch) -> None:
    graph, where = residual(batch=16, width=64, depth=3, classes=16), cluster(2, 2, **SLOW)
    refined = search(graph, where, CostTable(), limits=FEW).best
    monkeypatch.setattr(refine, "improve", lambda pool, evaluation, effort: evaluation)
    plain = search(graph, where, CostTable(), limits=FEW).best
    assert refined.predicted.step_seconds < 0.98 * plain.predicted.step_seconds
