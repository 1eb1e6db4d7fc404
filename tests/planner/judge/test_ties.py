"""Plans that a prediction cannot tell apart become one, the simplest; those it can tell stay."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.costs import CostTable
from shardwright.planner.judge.ties import UNLIKE, half_width_between
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search import Limits, Survey, complexity, survey
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from tests.planner.search.models import cluster, mlp, residual

DOUBTS = st.dictionaries(st.sampled_from(("compute", "all_reduce", "all_gather")), st.floats(0, 1))


@given(DOUBTS, DOUBTS)
def test_what_two_plans_have_in_common_cancels_but_for_a_share(one, other) -> None:
    width = half_width_between(one, other)
    assert width == pytest.approx(half_width_between(other, one))
    assert half_width_between(one, one) == pytest.approx(UNLIKE * sum(one.values()))
    assert width <= sum(one.values()) + sum(other.values()) + 1e-9
    assert width >= abs(sum(one.values()) - sum(other.values())) - 1e-9


def test_simpler_is_less_zero_fewer_microbatches_and_no_refinement() -> None:
    context = Context.of(mlp(), cluster(1, 4), CostTable(), Training())
    seeds = (
        Seed(data=4),
        Seed(data=4, num_microbatches=2),
        Seed(data=4, zero=1),
        Seed(data=4, zero=2),
        Seed(data=4, zero=3),
    )
    ordered = [as_strategy(context, seed) for seed in seeds]
    for simple, other in itertools.pairwise(ordered):
        assert complexity(simple) < complexity(other)
    refined = replace(ordered[0], label="data parallel x 4, refined")
    assert complexity(ordered[0]) < complexity(refined)


@pytest.fixture(scope="module", params=[1e9, 1e7])
def found(request, short_climbs) -> Survey:
    where = cluster(1, 4, flops=1e10, near=request.param, far=1e8)
    graph, few = residual(batch=16, width=64, depth=1, classes=16), Limits(max_candidates=2)
    return survey(graph, where, CostTable(), limits=few)


def test_the_chosen_plan_is_the_simplest_of_those_that_nobody_can_tell_from_the_fastest(
    found,
) -> None:
    frontier = found.settled().frontier
    chosen, fastest = frontier.best.strategy, found.findings.fitting[0].strategy

    def is_tie(strategy) -> bool:
        apart = found.weighed(strategy).seconds - found.weighed(fastest).seconds
        return apart <= found.half_width(strategy, fastest)

    assert is_tie(chosen)
    pool = [one.strategy for one in found.findings.fitting] + [one.strategy for one in found.plain]
    simpler = [one for one in pool if complexity(one) < complexity(chosen)]
    assert not any(is_tie(one) for one in simpler)


def test_fewer_devices_are_simpler_whatever_is_done_on_them(found) -> None:
    alone = replace(as_strategy(found.context, Seed()), label="single device, refined")
    assert len(alone.devices) == 1
    assert complexity(alone) < complexity(found.plain[0].strategy)


def test_lines_of_a_settled_frontier_differ_in_memory_or_time_by_more_than_the_doubt(found) -> None:
    settled = found.settled().frontier
    others = [plan for plan in settled.plans if plan is not settled.best]
    for place, plan in enumerate(others):
        for other in others[place + 1 :]:
            apart = other.predicted.step_seconds - plan.predicted.step_seconds
            is_tie = apart <= found.half_width(plan.strategy, other.strategy)
            is_near = other.predicted.peak_bytes > 0.95 * plan.predicted.peak_bytes
            assert not (is_tie and is_near)


def test_of_slower_plans_more_memory_is_asked_with_every_doubling_of_time(found) -> None:
    for one, other in itertools.permutations(found.settled().frontier.plans, 2):
        times = other.predicted.step_seconds / one.predicted.step_seconds
        if times > 1 and other.predicted.dollars >= one.predicted.dollars:
            least = 0.05 * (1 + math.log2(times))
            assert other.predicted.peak_bytes < (1 - least) * one.predicted.peak_bytes


def test_plain_data_parallelism_is_known_to_every_survey(found) -> None:
    counts = [plan.strategy.pipeline.num_microbatches for plan in found.plain]
    assert counts == [1, 2, 4]
    for plan in found.plain:
        assert all(
            one.rest == one.optimizer and all(p == -1 for p in one.rest)
            for one in plan.strategy.parameters
        )
