"""Several ranks: evaluation, measuring, and stopping together."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
TWO = [Seed(data=2, zero=3), Seed(stages=2, num_microbatches=2, recompute=True), Seed(tensor=2)]


def _executor(seed: Seed) -> Executor:
    module, _, captured = captured_of(zoo.gpt)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))
    mine = copy.deepcopy(module)
    return Executor(captured, program, mine, optimizer=partial(torch.optim.SGD, lr=0.1))


def evaluate_between_steps(seeds: list[Seed]) -> list[list[float]]:
    _, batch = zoo.gpt()
    losses = []
    for seed in seeds:
        executor = _executor(seed)
        losses.append(
            [float(run(batch)) for run in (executor.evaluate, executor.step, executor.evaluate)]
        )
    return losses


def measure(seed: Seed) -> tuple[bool, bool, float]:
    _, batch = zoo.gpt()
    executor = _executor(seed)
    executor.step(batch)
    timeline = executor.profile_step(batch)
    lasts = bool((timeline.end >= timeline.start).all())
    return bool(np.isnan(timeline.start).any()), lasts, timeline.worst_peak_bytes


def interrupt_one() -> list[bool]:
    _, batch = zoo.gpt()
    executor = _executor(Seed(data=2))
    executor.step(batch)
    seen = [executor.interrupted]
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)
    executor.step(batch)
    return [*seen, executor.interrupted]


def run_alone_in_a_world_of_two() -> str:
    try:
        _executor(Seed())
    except InputError as error:
        return str(error)
    return ""


def test_evaluation_agrees_with_training_on_every_rank() -> None:
    module, batch = zoo.gpt()
    expected = float(module(**batch).detach())
    for ranks in run_ranks(2, evaluate_between_steps, TWO):
        for before, trained, after in ranks:
            assert before == pytest.approx(expected, rel=1e-12)
            assert trained == pytest.approx(expected, rel=1e-12)
            assert after < before


@pytest.mark.parametrize("seed", TWO[:2], ids=lambda seed: seed.label)
def test_all_ranks_get_the_same_measured_timeline(seed: Seed) -> None:
    first, second = run_ranks(2, measure, seed)
    assert first == second
    assert first[:2] == (False, True)


def test_an_interrupt_on_one_rank_is_seen_by_all_after_the_same_step() -> None:
    assert run_ranks(2, interrupt_one) == [[False, True], [False, True]]


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    for message in run_ranks(2, run_alone_in_a_world_of_two):
        assert "the plan is for 1 ranks but 2 were started" in message
