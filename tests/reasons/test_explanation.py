"""Why a plan: standings read back, runners-up that are the best of their kind, prices that come true."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable, collective_key, link_label
from shardwright.core.plan import Plan
from shardwright.core.strategy import Pipeline
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training, room, search
from shardwright.planner.search.candidates import Candidate, explore, to_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.simulate import simulate
from shardwright.reasons import explain
from shardwright.reasons.decode import decode
from shardwright.reasons.neighbours import neighbours
from shardwright.reasons.sensitivity import price_choices, sensitivity
from shardwright.reasons.shadow import hardware_prices
from tests.planner.search.models import cluster, residual

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = residual(batch=16, width=32, depth=1, classes=16)
MACHINE = cluster(2, 2, flops=1e10, near=1e9, far=1e8)


@functools.cache
def context(machine: Cluster = MACHINE) -> Context:
    return Context.of(GRAPH, machine, CostTable(), Training())


@functools.cache
def planned(memory_bytes: float | None = None) -> Plan:
    limits = Limits(memory_bytes=memory_bytes, max_candidates=2)
    return search(GRAPH, MACHINE, CostTable(), limits=limits).best


def step_on(machine: Cluster, plan: Plan) -> float:
    program = lower(GRAPH, plan.strategy)
    prices = price(program, GRAPH, machine, CostTable())
    return simulate(program, prices.seconds, overlap_slowdown=machine.overlap_slowdown).step_seconds


@functools.cache
def candidates() -> list[Candidate]:
    shapes = [(1, 4, 1, 1, 1), (1, 2, 1, 2, 2), (1, 1, 1, 4, 1), (2, 2, 1, 1, 4), (2, 1, 1, 2, 4),
              (1, 1, 2, 2, 1)]  # fmt: skip
    found: list[Candidate] = []
    for stages, data, outer, tensor, m in shapes:
        one = Arrangement(stages=stages, data=data, outer=outer, tensor=tensor, microbatches=m)
        found += explore(context(), one, math.inf, enough=(0.0, 0.0)).candidates
    return found


def test_a_strategy_stands_where_it_came_from() -> None:
    for candidate in candidates():
        place = decode(context(), to_strategy(context(), candidate))
        assert place is not None
        assert (place.arrangement, place.starts) == (candidate.arrangement, candidate.starts)
        if len(set(candidate.assignments)) == 1:
            again = replace_choices(candidate, place.choices)
            assert to_strategy(context(), again) == to_strategy(context(), candidate)


def replace_choices(candidate: Candidate, choices: dict[int, int]) -> Candidate:
    """Overwrite every decision with what was read back, and all others with nonsense."""
    size = len(candidate.assignments[0])
    assignment = tuple(choices.get(v, candidate.assignments[0][v]) for v in range(size))
    return replace(candidate, assignments=(assignment,) * len(candidate.assignments))


def test_a_strategy_on_other_meshes_stands_nowhere() -> None:
    plan = search(GRAPH, MACHINE, CostTable(), seed_plan="summa").best
    assert decode(context(), plan.strategy) is None
    found = explain(GRAPH, MACHINE, CostTable(), plan, training=Training(), limit=room(MACHINE))
    assert not found.decisions
    assert math.isnan(found.byte_seconds)
    assert "no point of the additive model" in found.notes[0]
    assert found.prices


def test_an_order_of_ones_own_is_explained_without_runners_up() -> None:
    """What it keeps in memory the additive model cannot tell."""
    plan = search(GRAPH, MACHINE, CostTable(), seed_plan="1f1b:2x2").best
    order = ("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1")
    written = Pipeline(schedule="custom", num_microbatches=2, order=order)
    plan = replace(plan, strategy=replace(plan.strategy, pipeline=written))
    found = explain(GRAPH, MACHINE, CostTable(), plan, training=Training(), limit=room(MACHINE))
    assert not found.decisions
    assert found.prices


def test_no_other_choice_of_a_decision_is_cheaper_than_its_runner_up() -> None:
    # One of each arrangement: they have a problem each.
    for candidate in {one.arrangement: one for one in candidates()}.values():
        place = decode(context(), to_strategy(context(), candidate))
        assert place is not None
        strategy = to_strategy(context(), candidate)
        prices = price_choices(place, strategy, candidate.bytes, math.inf)
        assert prices.byte_seconds == 0.0
        for variable in place.problem.config_of.values():
            for value in range(place.problem.sizes[variable]):
                allowed = [np.arange(size) for size in prices.graph.sizes]
                allowed[variable] = np.array([value])
                solver = prices.graph.restrict(allowed).elimination()
                best = float(solver.solve(np.array([(1.0, 0.0)])).values[0])
                assert prices.of_splits[variable][value] == pytest.approx(best, rel=1e-9)


def test_simulated_runners_up_differ_from_the_plan() -> None:
    plan = planned()
    place = decode(context(), plan.strategy)
    assert place is not None
    prices = price_choices(place, plan.strategy, plan.predicted.peak_bytes, room(MACHINE))
    found = sensitivity(Pool(context(), room(MACHINE)), prices, 2)
    assert found
    assert all(one.chosen != one.runner_up for one in found)
    assert not math.isnan(found[0].step_seconds)
    assert all(math.isnan(one.step_seconds) for one in found[2:])


def test_neighbours_are_one_step_away_and_legal() -> None:
    home = Arrangement(stages=1, data=2, tensor=2, microbatches=2)
    found = {(one.what, one.other): one.arrangement for one in neighbours(context(), home)}
    assert found["tensor parallel degree", "4"].data == 1
    assert found["tensor parallel degree", "1"].data == 4
    assert found["devices", "2"].num_devices == 2
    assert found["pipeline stages", "2"].num_devices == 4
    assert found["microbatches", "4"] == replace(home, microbatches=4)
    assert all(16 % (one.data * one.microbatches) == 0 for one in found.values())


def test_neighbours_of_two_free_axes_move_devices_between_them() -> None:
    home = Arrangement(stages=1, data=1, outer=2, tensor=2, microbatches=1)
    found = {(one.what, one.other): one.arrangement for one in neighbours(context(), home)}
    assert found["outer degree", "1"] == replace(home, outer=1, tensor=4)
    assert found["outer degree", "4"] == replace(home, outer=4, tensor=1)
    assert found["devices", "2"].num_devices == 2
    assert found["tensor parallel degree", "1"] == replace(home, data=2, tensor=1)
    assert {one.num_devices for (what, _), one in found.items() if what != "devices"} == {4}


def test_a_price_of_memory_names_a_plan_that_needs_so_much_and_is_so_fast() -> None:
    wide = planned()
    limit = 0.5 * wide.predicted.peak_bytes
    tight = planned(limit)
    found = explain(GRAPH, MACHINE, CostTable(), tight, training=Training(), limit=limit)
    bought = [one for one in found.prices if "memory per device" in one.what]
    assert bought
    assert all(one.label and one.step_seconds < tight.predicted.step_seconds for one in bought)
    assert bought[-1].step_seconds >= wide.predicted.step_seconds * (1 - 1e-9)
    assert found.byte_seconds > 0


def test_where_memory_is_plenty_a_byte_is_worth_nothing() -> None:
    found = explain(
        GRAPH, MACHINE, CostTable(), planned(), training=Training(), limit=room(MACHINE)
    )
    assert found.byte_seconds == 0.0


def test_the_price_of_a_link_is_the_step_on_the_better_cluster() -> None:
    plan = planned()
    program = lower(GRAPH, plan.strategy)
    found = {
        one.what: one.step_seconds for one in hardware_prices(program, GRAPH, MACHINE, CostTable())
    }
    better = cluster(2, 2, flops=1e10, near=1e9, far=2e8)
    assert found["bandwidth between hosts x 2"] == pytest.approx(step_on(better, plan))
    better = cluster(2, 2, flops=1e10, near=2e9, far=1e8)
    assert found["bandwidth within hosts x 2"] == pytest.approx(step_on(better, plan))
    assert min(found.values()) < plan.predicted.step_seconds


def test_measured_messages_get_faster_as_modelled_ones_would() -> None:
    one = cluster(1, 2, flops=1e10, near=1e8)
    plan = search(GRAPH, one, CostTable(), seed_plan="megatron:2x1").best
    key = collective_key("all_reduce", 1, 2, link_label(one, (0, 1)))
    slow = CostTable(collectives=((key, ((1.0, 1.0, 0.0), (1e9, 2.0, 0.0))),))
    program = lower(GRAPH, plan.strategy)
    before = simulate(program, price(program, GRAPH, one, slow).seconds).step_seconds
    found = {p.what: p.step_seconds for p in hardware_prices(program, GRAPH, one, slow)}
    saved = before - found["bandwidth within hosts x 2"]
    assert 0 < saved <= before / 2
