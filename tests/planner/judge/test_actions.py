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
from shardwright.planner.schedule import most_bytes, order_of
from shardwright.planner.search.asked import asked_for
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


@pytest.mark.parametrize("memory", [1, 2])
def test_a_searched_order_is_no_longer_than_a_named_one_within_its_limit(memory):
    """In the simulator, of stages that are unequal: ZB-H1 keeps what 1F1B does."""
    gains = []
    for stages, pieces in ((3, 6), (4, 12)):
        context, strategy = named("zb-h1", stages, 1, microbatches=pieces)
        other = asked_for(context, f"zb-{memory}p:{stages}x{pieces}").few
        assert f"zb-{memory}p" in other.label
        most = most_bytes(order_of(other), [1.0] * stages, [0.0] * stages)
        assert max(most) <= memory * stages
        gains.append(1 - evaluate(context, other).seconds / evaluate(context, strategy).seconds)
    assert min(gains) > -1e-3  # transfers share links there
    assert max(gains) > 1e-3


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
