"""Measured memory: every byte that comes is seen to go, and peaks are those that were predicted."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=0.1)


def left_over(seeds: list[Seed]) -> list[float]:
    """Return how many bytes more than before the recording says are alive after one step."""
    module, batch = zoo.gpt(length=32, width=64)
    captured = capture(module, batch)
    found: list[float] = []
    for seed in seeds:
        program = lower(captured.graph, seed_strategy(captured.graph, seed))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        memory = executor.profile_step(batch).memory[0]
        found.append(float(memory[-1, 1] - memory[0, 1]))
        executor.close()
    return found


@pytest.mark.ranks
def test_what_a_thread_of_gloo_was_the_last_to_hold_is_seen_to_go() -> None:
    seeds = [
        Seed(tensor=2, sequence=True),
        Seed(stages=2, num_microbatches=2),
        Seed(data=2, zero=3),
    ]
    for found in run_ranks(2, left_over, seeds):
        assert found == [0.0, 0.0, 0.0]
