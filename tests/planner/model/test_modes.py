"""Where memory binds, the search makes as little again as will do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.strategy import Mesh, Strategy
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.modes import KEEP, find_modes
from shardwright.planner.search import Limits, Training, search
from tests.planner.lower.test_lower import transformer_like
from tests.planner.search.models import cluster, mlp

pytestmark = pytest.mark.usefixtures("short_climbs")

GRAPH = transformer_like(layers=6)
FEW = Limits(max_candidates=2)


def planned(training: Training, memory: float) -> Strategy:
    limits = replace(FEW, memory_bytes=memory)
    found = search(GRAPH, cluster(1, 2), CostTable(), training=training, limits=limits)
    chosen = found.plans[found.chosen]
    assert chosen.predicted.peak_bytes <= memory
    lower(GRAPH, chosen.strategy)
    return chosen.strategy


def test_modes_are_those_that_differ() -> None:
    context = Context.of(GRAPH, cluster(1, 2), CostTable(), Training())
    names = [
        mode.name for mode in find_modes(context, Mesh(axes=("data",), sizes=(2,), devices=(0, 1)))
    ]
    assert names == ["keep", "recompute (selective)", "recompute"]
    split = Mesh(axes=("data", "tensor"), sizes=(1, 2), devices=(0, 1))
    assert [mode.name for mode in find_modes(context, split)][:2] == [
        "keep",
        "re-gather activations in backward",
    ]
    pinned = Context.of(mlp(), cluster(1, 2), CostTable(), Training(recompute="none"))
    assert find_modes(pinned, split)[0] == KEEP


def test_a_mode_that_was_asked_for_is_that_of_every_plan() -> None:
    for name in ("selective", "blocks"):
        training = Training(recompute=name)
        found = search(GRAPH, cluster(1, 2), CostTable(), training=training, limits=FEW)
        for plan in found.plans:
            chosen = plan.strategy
            assert bool(chosen.recompute_operators) == (name == "selective")
            assert bool(chosen.recompute) == (name == "blocks")


def test_tighter_memory_makes_more_again() -> None:
    loose = planned(Training(), 1e9)
    assert (loose.recompute, loose.recompute_operators) == ((), ())
    found = search(GRAPH, cluster(1, 2), CostTable(), training=Training(), limits=FEW)
    used = [
        (len(plan.strategy.recompute), len(plan.strategy.recompute_operators))
        for plan in found.plans
    ]
    assert any(operators for _, operators in used)
