"""Goals: fewest devices, least money, and the curve of time against devices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.errors import InputError, NoPlan
from shardwright.planner.search import Goal, Limits, best_of, curve, search
from shardwright.planner.search.goals import device_numbers
from tests.planner.search.models import cluster, mlp

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_climbs")]

SLOW = {"flops": 1e10, "near": 1e9, "far": 1e8}
FEW = Limits(max_candidates=2)


def problem(hosts: int, devices: int) -> tuple[OperatorGraph, Cluster, CostTable]:
    graph = mlp(batch=16, width=128, depth=2)
    return graph, cluster(hosts, devices, **SLOW), CostTable()


@lru_cache
def points(hosts: int, devices: int) -> tuple[Plan, ...]:
    """The curve of that problem."""
    return curve(*problem(hosts, devices), limits=FEW)


def unpriced(one: Cluster) -> Cluster:
    switches = tuple(replace(switch, dollars_per_second=0.0) for switch in one.switches)
    return replace(one, switches=switches)


@pytest.mark.parametrize(
    ("hosts", "devices", "numbers"),
    [
        (1, 1, (1,)),
        (1, 6, (1, 2, 3, 4, 5, 6)),
        (2, 8, (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)),
        (3, 10, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 30)),
    ],
)
def test_small_numbers_rounds_and_whole_hosts_are_tried(
    hosts: int, devices: int, numbers: tuple[int, ...]
) -> None:
    assert device_numbers(cluster(hosts, devices)) == numbers


def test_a_point_of_the_curve_is_the_fastest_plan_of_so_many_devices() -> None:
    graph, _, table = problem(1, 4)
    plans = points(1, 4)
    assert [len(plan.strategy.devices) for plan in plans] == [1, 2, 3, 4]
    for count in (2, 4):
        alone = search(graph, cluster(1, count, **SLOW), table, limits=FEW).plans
        wanted = [p.predicted.step_seconds for p in alone if len(p.strategy.devices) == count]
        assert plans[count - 1].predicted.step_seconds == pytest.approx(min(wanted))


def test_the_frontier_of_a_curve_holds_what_no_other_beats() -> None:
    plans = points(1, 4)
    frontier = best_of(plans)
    objectives = [plan.predicted for plan in plans]
    kept = [one for one in objectives if not any(o.dominates(one) for o in objectives)]
    assert [plan.predicted for plan in frontier.plans] == sorted(set(kept))
    with pytest.raises(NoPlan, match="must end within"):
        best_of(plans, Goal(mode="curve", deadline=1e-9))


def test_fewest_devices_meet_the_deadline_and_no_fewer_do() -> None:
    graph, machine, table = problem(1, 4)
    times = {len(p.strategy.devices): p.predicted.step_seconds for p in points(1, 4)}
    for deadline in (times[1] * 1.01, times[2] * 1.01, times[4] * 1.01):
        chosen = search(
            graph, machine, table, limits=FEW, goal=Goal(mode="min-devices", deadline=deadline)
        ).best
        fewest = min(count for count, seconds in times.items() if seconds <= deadline)
        assert len(chosen.strategy.devices) == fewest
        assert chosen.predicted.step_seconds <= deadline
        assert chosen.reason.startswith(
            f"The fewest devices that fit and meet the deadline: {fewest}"
        )


def test_fewest_devices_fit_a_memory_limit() -> None:
    graph, machine, table = problem(1, 4)
    one = points(1, 4)[0].predicted.peak_bytes
    limits = replace(FEW, memory_bytes=one / 3)
    chosen = search(graph, machine, table, limits=limits, goal=Goal(mode="min-devices")).best
    assert len(chosen.strategy.devices) > 1
    assert chosen.predicted.peak_bytes <= one / 3
    with pytest.raises(NoPlan, match="too much"):
        search(
            graph,
            machine,
            table,
            limits=replace(FEW, memory_bytes=1e3),
            goal=Goal(mode="min-devices"),
        )


def test_no_number_of_devices_meets_an_impossible_deadline() -> None:
    with pytest.raises(NoPlan, match=r"tried 4 devices: every step must end within 1e-09 s.*allow"):
        search(*problem(1, 4), limits=FEW, goal=Goal(mode="min-devices", deadline=1e-9))


def test_least_money_is_the_cheapest_that_meets_the_deadline() -> None:
    graph, machine, table = problem(1, 4)
    goal = Goal(mode="min-money")
    chosen = search(graph, machine, table, limits=FEW, goal=goal).best
    assert chosen.predicted.dollars <= min(plan.predicted.dollars for plan in points(1, 4))
    assert "is the cheapest of" in chosen.reason
    deadline = min(plan.predicted.step_seconds for plan in points(1, 4)) * 1.001
    goal = replace(goal, deadline=deadline)
    hurried = search(graph, machine, table, limits=FEW, goal=goal).best
    assert hurried.predicted.step_seconds <= deadline
    assert hurried.predicted.dollars >= chosen.predicted.dollars


def test_least_money_needs_prices() -> None:
    graph, machine, table = problem(1, 2)
    with pytest.raises(InputError, match=r"needs prices.*price ="):
        search(graph, unpriced(machine), table, goal=Goal(mode="min-money"))


@pytest.mark.parametrize("wrong", [{"mode": "fastest"}, {"deadline": 0.0}, {"deadline": math.nan}])
def test_a_goal_is_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Goal(**wrong)
