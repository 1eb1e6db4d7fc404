"""Whether a plan exists: what is found fits, what was missed is rescued, clusters grow as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardwright.core.costs import CostTable
from shardwright.errors import NoPlan
from shardwright.planner.search import Limits, Training, search
from shardwright.reasons import grown, some_plan
from tests.planner.search.models import cluster, residual

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = residual(batch=16, width=32, depth=1, classes=16)
MACHINE = cluster(2, 1, flops=1e10, near=1e9, far=1e8)
BASE = {"training": Training()}
FEW = Limits(max_candidates=2)


@cache
def smallest_bytes() -> float:
    with pytest.raises(NoPlan) as refused:
        search(GRAPH, MACHINE, CostTable(), limits=replace(FEW, memory_bytes=1000.0))
    assert refused.value.nearest is not None
    return refused.value.nearest.predicted.peak_bytes


def test_the_nearest_plan_of_a_refusal_is_found_once_memory_allows_it() -> None:
    needed = smallest_bytes()
    limits = replace(FEW, memory_bytes=needed)
    assert search(GRAPH, MACHINE, CostTable(), limits=limits).best.predicted.peak_bytes <= needed
    plan = some_plan(GRAPH, MACHINE, CostTable(), limits=Limits(memory_bytes=2 * needed), **BASE)
    assert plan is not None
    assert plan.predicted.peak_bytes <= 2 * needed
    tight = Limits(memory_bytes=1000.0)
    assert some_plan(GRAPH, MACHINE, CostTable(), limits=tight, **BASE) is None


def test_a_deadline_is_met_or_nothing_is_returned() -> None:
    best = search(GRAPH, MACHINE, CostTable(), limits=FEW).best.predicted.step_seconds
    plan = some_plan(GRAPH, MACHINE, CostTable(), deadline=1.2 * best, limits=FEW, **BASE)
    assert plan is not None
    assert plan.predicted.step_seconds <= 1.2 * best
    for share in (0.9, 1e-6):
        plan = some_plan(GRAPH, MACHINE, CostTable(), deadline=share * best, limits=FEW, **BASE)
        assert plan is None


def test_clusters_grow_by_whole_hosts_like_the_last() -> None:
    machine = cluster(2, 2)
    larger = grown(machine, 6)
    assert larger is not None
    assert [device.host for device in larger.devices] == [1, 1, 2, 2, 3, 3]
    assert larger.switches[3].link == machine.switches[2].link
    assert len({switch.name for switch in larger.switches}) == len(larger.switches)
    assert grown(machine, 5) is None


def test_more_devices_help_where_memory_is_short() -> None:
    needed = smallest_bytes()
    larger = grown(MACHINE, 4)
    assert larger is not None
    limits = Limits(memory_bytes=0.8 * needed)
    assert some_plan(GRAPH, MACHINE, CostTable(), limits=limits, **BASE) is None
    plan = some_plan(GRAPH, larger, CostTable(), limits=limits, **BASE)
    assert plan is not None
    assert plan.predicted.peak_bytes <= 0.8 * needed
