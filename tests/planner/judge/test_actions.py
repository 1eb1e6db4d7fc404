"""Orders laid out for what a plan's actions are predicted to take."""

from __future__ import annotations

from collections import Counter
from math import nan

import numpy as np
import pytest

from shardwright.core.costs import CostTable
from shardwright.core.program import Kind
from shardwright.planner.judge.actions import stage_times, timed
from shardwright.planner.judge.evaluate import evaluate, evaluate_program, priced
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.schedule import order_of
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from tests.planner.search.models import cluster, residual


def named(schedule, stages, chunks, far=1e9, microbatches=6):
    graph = residual(batch=24, width=128, depth=9)
    where = cluster(stages, 1, flops=1e10, far=far)
    context = Context.of(graph, where, CostTable(), Training())
    seed = Seed(stages=stages, chunks=chunks, schedule=schedule, num_microbatches=microbatches)
    return context, as_strategy(context, seed)


@pytest.mark.parametrize("schedule", ["zb-v", "zb-interleaved", "v-min"])
def test_an_order_by_times_is_shorter_and_keeps_no_more(schedule):
    """In the simulator, of stages that are unequal and links that take their time."""
    gains = []
    for far in (1e9, 3e7):
        context, strategy = named(schedule, 3, 2, far)
        before, other = evaluate(context, strategy), timed(context, strategy)
        if other is None:
            continue
        found = evaluate(context, other)
        assert f"{schedule} by times" in other.label
        assert found.bytes <= before.bytes * 1.02
        gains.append(1 - found.seconds / before.seconds)
        every = [
            Counter(action for line in order_of(one) for action in line)
            for one in (strategy, other)
        ]
        assert every[0] == every[1]
    assert gains
    assert min(gains) > 0


def test_what_actions_take_is_what_their_instructions_take():
    """Of a stage that nobody sends anything to while it computes."""
    context, strategy = named("zb-h1", 2, 1)
    program, prices = priced(context, strategy)
    timeline, _ = evaluate_program(context, program, prices, nan)
    found = stage_times(program, prices, timeline)
    kinds = {"F": Kind.FORWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}
    for mesh, one in enumerate(found):
        for phase, kind in kinds.items():
            mine = (program.group == mesh) & (program.kind == kind) & (program.microbatch == 1)
            assert one.seconds(phase) == pytest.approx(
                float(np.sum(prices.seconds[mine])), rel=0.05
            )
    assert found[0].receive == 0 < found[1].receive
