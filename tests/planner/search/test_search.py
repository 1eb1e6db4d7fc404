"""The whole search: legal, never worse than data parallel, deterministic, honest in failure."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.errors import NoPlan
from shardwright.planner.cost import price
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.lower import lower
from shardwright.planner.model import arrangements
from shardwright.planner.model.arrangements import (
    Arrangement,
    device_counts,
    microbatch_counts,
    shapes,
)
from shardwright.planner.model.context import Context
from shardwright.planner.search import (
    Limits,
    Progress,
    Training,
    search,
    survey,
    surveyed,
)
from shardwright.planner.search.candidates import explore, to_strategy
from shardwright.planner.search.goals import Goal
from shardwright.planner.search.named import as_strategy, named_strategies
from shardwright.planner.search.proposers import shortlist
from shardwright.planner.simulate import simulate_on
from shardwright.planner.space import Seed
from tests.planner.search.models import cluster, mlp, residual

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_climbs")]
SLOW = {"flops": 1e10, "near": 1e9, "far": 1e8}
FEW = Limits(max_candidates=2)


def large() -> OperatorGraph:
    return residual(batch=16, width=64, depth=1, classes=16)


@lru_cache
def answered(build: Callable[[], OperatorGraph], hosts: int) -> Frontier:
    """The answer for four devices on so many hosts, at which several tests look."""
    return search(build(), cluster(hosts, 4 // hosts, **SLOW), CostTable(), limits=FEW)


def simulated(graph: OperatorGraph, plan: Plan, where) -> tuple[float, float]:
    program = lower(graph, plan.strategy)
    prices = price(program, graph, where, CostTable())
    timeline = simulate_on(where, CostTable(), program, prices.seconds)
    return timeline.step_seconds, timeline.worst_peak_bytes


@pytest.mark.parametrize("build", [mlp, large])
@pytest.mark.parametrize("hosts", [1, 2])
def test_no_named_strategy_that_fits_beats_the_chosen_plan(build, hosts) -> None:
    graph, where = build(), cluster(hosts, 4 // hosts, **SLOW)
    best = answered(build, hosts).best
    context = Context.of(graph, where, CostTable(), Training())
    for named in named_strategies(context):
        for strategy in named:
            program = lower(graph, strategy)
            seconds = price(program, graph, where, CostTable()).seconds
            other = simulate_on(where, CostTable(), program, seconds)
            assert best.predicted.step_seconds <= other.step_seconds * (1 + 1e-9)


def test_every_plan_predicts_what_simulating_it_again_gives() -> None:
    graph, where = large(), cluster(1, 4, **SLOW)
    frontier = answered(large, 1)
    for plan in frontier.plans:
        assert (plan.predicted.step_seconds, plan.predicted.peak_bytes) == pytest.approx(
            simulated(graph, plan, where), rel=1e-9
        )
    assert frontier.chosen == 0


def test_where_input_binds_a_step_takes_its_time_and_fewer_devices_cost_less() -> None:
    graph, training = mlp(), Training()
    where = cluster(2, 1, **SLOW)
    free = search(graph, where, CostTable(), training=training, limits=FEW)
    size = graph.tensors[graph.inputs[0]].shape[0]
    given = 3 * max(plan.predicted.step_seconds for plan in free.plans)
    fed = search(
        graph, replace(where, input_rate=size / given), CostTable(), training=training, limits=FEW
    )
    assert fed.best.predicted.step_seconds == pytest.approx(given)
    assert min(plan.predicted.step_seconds for plan in fed.plans) == fed.best.predicted.step_seconds
    cheapest = min(fed.plans, key=lambda plan: plan.predicted.dollars)
    assert len(cheapest.strategy.devices) == 1
    assert fed.best.bound is not None
    assert fed.best.bound.step_seconds == pytest.approx(given)


def test_a_loader_that_binds_changes_the_chosen_plan_and_the_frontier_says_so() -> None:
    graph, training, money = mlp(), Training(), Goal(mode="min-money")
    where = cluster(2, 1, **SLOW)
    size = graph.tensors[graph.inputs[0]].shape[0]
    free = search(graph, where, CostTable(), training=training, limits=FEW)
    alone = min(p.predicted.step_seconds for p in free.plans if len(p.strategy.devices) == 1)
    assert len(free.best.strategy.devices) == 1
    assert not any("input" in note for note in free.best.notes)
    # Storage that all hosts share: a second host is paid for and gains nothing.
    shared = replace(where, input_rate=size / (3 * alone))
    bound = search(graph, shared, CostTable(), training=training, limits=FEW, goal=money)
    assert len(bound.best.strategy.devices) == 1
    assert "loader takes" in bound.best.notes[-1]
    assert "of 1 rank on 1 host" in bound.best.notes[-1]
    # Loaders of a rank each: two ranks read half each, and the step is as long as that.
    each = replace(where, rank_input_rate=size / (20 * alone))
    split = search(graph, each, CostTable(), training=training, limits=FEW)
    assert split.best.predicted.step_seconds == pytest.approx(10 * alone)
    assert "of 2 ranks on 2 hosts" in split.best.notes[-1]
    assert split.best.bound is not None
    assert split.best.bound.step_seconds == pytest.approx(10 * alone)


def test_plans_with_gradients_in_fewer_bytes_are_found_under_a_bound_that_is_true() -> None:
    graph, where = mlp(), cluster(2, 1, **SLOW)
    training = Training(gradient_dtype="bfloat16", error_feedback=True)
    half = search(graph, where, CostTable(), training=training, limits=FEW)
    context = Context.of(graph, where, CostTable(), training)
    known = [strategy for named in named_strategies(context) for strategy in named]
    assert {one.gradient_sync.dtype for one in known} == {"bfloat16"}
    least = min(simulated(graph, replace(half.best, strategy=one), where)[0] for one in known)
    assert half.best.predicted.step_seconds <= least * (1 + 1e-9)
    assert half.best.bound is not None
    assert half.best.bound.step_seconds <= half.best.predicted.step_seconds
    for plan in half.plans:
        assert plan.strategy.gradient_sync.dtype == "bfloat16"
        assert plan.strategy.gradient_sync.error_feedback
        assert (plan.predicted.step_seconds, plan.predicted.peak_bytes) == pytest.approx(
            simulated(graph, plan, where)
        )


def test_plans_with_compressed_gradients_are_found_under_a_bound_that_is_true() -> None:
    graph, where = large(), cluster(2, 1, **SLOW)
    training = Training(compressor="1-bit")
    found = search(graph, where, CostTable(), training=training, limits=FEW)
    context = Context.of(graph, where, CostTable(), training)
    for strategy in [strategy for named in named_strategies(context) for strategy in named]:
        packed = simulated(graph, replace(found.best, strategy=strategy), where)[0]
        assert found.best.predicted.step_seconds <= packed * (1 + 1e-9)
        if strategy.label.startswith("data parallel x 2, summed"):
            bare = replace(
                strategy, gradient_sync=replace(strategy.gradient_sync, compressor="none")
            )
            assert packed < simulated(graph, replace(found.best, strategy=bare), where)[0]
    for plan in found.plans:
        assert plan.strategy.gradient_sync.compressor == "1-bit"
        assert plan.bound is not None
        assert plan.bound.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)
        assert (plan.predicted.step_seconds, plan.predicted.peak_bytes) == pytest.approx(
            simulated(graph, plan, where)
        )


def test_gradients_are_compressed_where_that_pays_and_what_is_lost_is_an_axis() -> None:
    graph, slow, fast = large(), cluster(2, 1, **SLOW), cluster(2, 1)
    allowing = Training(least_sent=0.1)
    there = search(graph, fast, CostTable(), training=allowing, limits=FEW)
    assert [one.strategy for one in there.plans] == [
        one.strategy for one in search(graph, fast, CostTable(), limits=FEW).plans
    ]
    found = search(graph, slow, CostTable(), training=allowing, limits=FEW)
    without = search(graph, slow, CostTable(), limits=FEW)
    assert found.best.predicted.step_seconds < 0.95 * without.best.predicted.step_seconds
    assert found.best.predicted.lost > 0
    assert without.best.strategy in [one.strategy for one in found.plans]
    for plan in found.plans:
        sync = plan.strategy.gradient_sync
        assert (plan.predicted.lost > 0) is bool(sync.compressors)
        hows = {one: sync.of(one) for one in graph.parameters if graph.tensors[one].numel >= 1024}
        assert all(one.density >= 0.1 for one in hows.values())
        assert plan.bound is not None
        assert plan.bound.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)
        assert (plan.predicted.step_seconds, plan.predicted.peak_bytes) == pytest.approx(
            simulated(graph, plan, slow)
        )
        if plan.predicted.lost:  # as counted by hand; all these are float32 on two devices
            kept = {"int8": 1 / 4, "1-bit": 1 / 32}
            lost = sum(
                graph.tensors[one].numel * (1 - kept.get(how.compressor, how.density))
                for one, how in hows.items()
                if how.compressor != "powersgd"
            )
            for one, how in hows.items():
                if how.compressor == "powersgd":
                    rows, columns = graph.tensors[one].shape
                    factors = (rows + columns) * how.feedback.rank
                    lost += rows * columns - factors if 2 * factors < rows * columns else 0
            total = sum(graph.tensors[one].numel for one in graph.parameters)
            assert plan.predicted.lost == pytest.approx(lost / total, rel=0.02)


def test_the_bound_lies_below_every_simulated_plan() -> None:
    for frontier in (answered(mlp, 1), answered(large, 1)):
        for plan in frontier.plans:
            assert plan.bound is not None
            assert 0 < plan.bound.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)
            gap = 1 - plan.bound.step_seconds / plan.predicted.step_seconds
            assert plan.bound.gap == pytest.approx(gap, abs=1e-9)


def test_on_one_device_the_additive_model_is_the_simulation() -> None:
    graph, where = large(), cluster(1, 1, **SLOW)
    context = Context.of(graph, where, CostTable(), Training())
    arrangement = Arrangement(stages=1, data=1, tensor=1, microbatches=1)
    fastest = min(
        explore(context, arrangement, math.inf).candidates,
        key=lambda c: c.seconds,
    )
    best = search(graph, where, CostTable(), limits=FEW).best
    # The update's one kernel launch is all that the additive model leaves out.
    assert best.predicted.step_seconds == pytest.approx(fastest.seconds, abs=1.1e-5)


def test_a_memory_limit_is_kept_and_costs_time() -> None:
    graph, where, free = large(), cluster(1, 4, **SLOW), answered(large, 1)
    limit = 0.5 * free.best.predicted.peak_bytes
    tight = search(graph, where, CostTable(), limits=replace(FEW, memory_bytes=limit))
    assert all(plan.predicted.peak_bytes <= limit for plan in tight.plans)
    assert tight.best.predicted.step_seconds >= free.best.predicted.step_seconds


def test_a_limit_that_nothing_meets_says_how_much_is_missing_where() -> None:
    limits = replace(FEW, memory_bytes=1000.0)
    with pytest.raises(
        NoPlan, match=r"[KMG]iB on stage \d+, .* [KMG]iB too much; use about \d+ such devices"
    ):
        search(large(), cluster(1, 2, **SLOW), CostTable(), limits=limits)


def test_stopping_at_once_still_returns_a_complete_plan_that_says_so() -> None:
    graph, where = large(), cluster(1, 4, **SLOW)
    best = search(graph, where, CostTable(), stop=lambda: True).best
    assert best.bound is None
    assert any("did not end" in note for note in best.notes)
    assert simulated(graph, best, where)[0] == pytest.approx(best.predicted.step_seconds)


def test_progress_never_goes_back() -> None:
    heard: list[Progress] = []
    search(large(), cluster(1, 2, **SLOW), CostTable(), limits=FEW, progress=heard.append)
    assert [p.fraction for p in heard] == sorted(p.fraction for p in heard)
    assert [p.best_seconds for p in heard] == sorted((p.best_seconds for p in heard), reverse=True)
    assert heard[-1].bound_seconds > 0


def test_arrangements_divide_the_batch() -> None:
    context = Context.of(mlp(batch=6), cluster(1, 4), CostTable(), Training())
    found = [a for shape in shapes(context, 4) for a in shape]
    assert {a.num_devices for a in found} == {4}
    assert all(6 % (a.data * a.microbatches) == 0 for a in found)
    assert not any(a.data == 4 for a in found)
    assert any(a.stages == 2 for a in found)


def test_batches_that_are_no_powers_of_two_are_cut_as_far_as_they_divide() -> None:
    context = Context.of(mlp(batch=36), cluster(1, 2), CostTable(), Training())
    assert microbatch_counts(context, 1, 1) == (1, 2, 4, 9, 18, 36)
    assert microbatch_counts(context, 2, 5) == (6, 18)
    assert microbatch_counts(context, 12, 4) == (3,)  # no more fill four stages
    assert microbatch_counts(context, 5, 1) == ()


def test_stages_that_no_power_of_two_fills_make_a_pipeline() -> None:
    graph, where = mlp(batch=7, width=64, depth=6), cluster(3, 1, flops=1e8, near=1e9, far=1e7)
    found = search(graph, where, CostTable(), limits=FEW).best
    context = Context.of(graph, where, CostTable(), Training())
    seed = Seed(stages=3, num_microbatches=7)
    assert found.predicted.step_seconds <= evaluate(context, as_strategy(context, seed)).seconds
    assert len(found.strategy.meshes) > 1


def test_one_of_three_hosts_may_be_enough() -> None:
    graph, where = mlp(width=64), cluster(3, 2, flops=1e8, near=1e10, far=1e5)
    assert device_counts(Context.of(graph, where, CostTable(), Training())) == (6, 3, 2, 1)
    assert search(graph, where, CostTable(), limits=FEW).best.strategy.devices == (0, 1)


def test_a_device_alone_is_looked_at_where_starting_operators_is_most_of_a_step() -> None:
    """The additive model takes it and four devices that all do the same for equals."""
    graph, where = mlp(batch=36, width=32, depth=12), cluster(8, 4, far=1e9)
    best = search(graph, where, CostTable(), limits=Limits(max_candidates=4)).best
    assert best.strategy.label == "single device"
    context = Context.of(graph, where, CostTable(), Training())
    for count in (1, 2, 4):
        plain = evaluate(context, as_strategy(context, Seed(data=count)))
        assert best.predicted.step_seconds <= plain.seconds


def test_heavy_layers_on_slow_links_are_not_split_and_on_fast_links_are() -> None:
    graph = mlp(batch=64, width=512, depth=3)
    slow = search(graph, cluster(2, 1, flops=1e12, far=1e5), CostTable(), limits=FEW).best
    fast = search(graph, cluster(1, 2, flops=1e10, near=1e12), CostTable(), limits=FEW).best
    assert len(slow.strategy.devices) == 1
    assert len(fast.strategy.devices) == 2


def test_small_batches_split_large_layers_over_all_hosts() -> None:
    graph = mlp(batch=16, width=1024, depth=2, classes=1024)
    where = cluster(4, 4, flops=5e10, near=10e9, far=1e9)
    context = Context.of(graph, where, CostTable(), Training())
    best = search(graph, where, CostTable(), limits=FEW).best
    beside_data = [
        simulated(graph, replace(best, strategy=to_strategy(context, candidate)), where)[0]
        for shape in shapes(context, 16)
        for arrangement in shape[:2]
        for candidate in explore(context, arrangement, math.inf).candidates
    ]
    assert best.predicted.step_seconds < 0.85 * min(beside_data)
    weights = [p for t, p in zip(graph.parameters, best.strategy.parameters, strict=True)
               if len(graph.tensors[t].shape) == 2]  # fmt: skip
    shards = [math.prod(n for n, p in zip(best.strategy.meshes[0].sizes, w.rest, strict=True) if p >= 0)
              for w in weights]  # fmt: skip
    assert max(shards) == 16


def test_a_second_free_axis_is_searched_and_finds_what_one_does_not(monkeypatch) -> None:
    graph = residual(batch=32, width=128, depth=1, classes=32768)
    where = cluster(2, 4, flops=1e11, near=20e9, far=1e9)
    best = search(graph, where, CostTable(), limits=FEW).best
    assert best.strategy.meshes[0].axes[0] == "outer"
    for module in (arrangements, shortlist):
        monkeypatch.setattr(module, "SMALL_GRAPH", 0)
    less = search(graph, where, CostTable(), limits=FEW).best
    assert best.predicted.step_seconds < less.predicted.step_seconds


def test_segments_begin_where_gradients_should_leave_earlier() -> None:
    graph = residual(batch=64, width=256, depth=2)
    where = cluster(1, 4, flops=5e11, near=2e9, far=2e9)
    best = search(graph, where, CostTable(), limits=FEW).best
    starts = best.strategy.segment_starts
    assert starts
    assert not {block.start for block in graph.blocks} & set(starts)
    longer = replace(best, strategy=replace(best.strategy, segment_starts=()))
    assert best.predicted.step_seconds < simulated(graph, longer, where)[0]


def test_training_options_reach_every_plan() -> None:
    training = Training(precision="bfloat16", optimizer_states=1, clips=True)
    frontier = search(mlp(), cluster(1, 2), CostTable(), training=training, limits=FEW)
    for plan in frontier.plans:
        strategy = plan.strategy
        assert (strategy.precision, strategy.optimizer_states, strategy.clips) == (
            "bfloat16",
            1,
            True,
        )


def test_a_survey_taken_up_again_keeps_as_much_memory_free() -> None:
    graph, where, table = mlp(), cluster(1, 2), CostTable()
    before = survey(graph, where, table, seed_plan="megatron:1x2")
    again = surveyed(graph, where, table, before.frontier, Training())
    assert again.room == before.room < where.kinds[0].memory_bytes
