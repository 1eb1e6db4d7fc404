"""Asynchronous pipelines on processes: the slots' numbers, exact resuming, and ranks that die."""

from __future__ import annotations

import copy
import math
import os
import signal
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.core.staleness import Extrapolation
from shardwright.core.strategy import Strategy
from shardwright.errors import RunError
from shardwright.planner.lower import lower
from shardwright.runtime.capture import Captured
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.launch import launch
from tests.runtime.equivalence import captured_of
from tests.runtime.slots import Rule
from tests.runtime.test_asynchronous import SEED, asynchronous, batches, emulate, row
from tests.runtime.world import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.torch]
RATE = 0.02


# On four ranks: staleness, and the sizes of stages.
PLANS: tuple[tuple[str, dict[str, int]], ...] = (
    ("stale", {"stages": 4}),
    ("stash", {"stages": 2, "data": 2}),
    ("spectrain-v2", {"stages": 2, "tensor": 2}),
    ("spectrain-v1", {"stages": 4}),
)
BOUND = 0.1  # of the gradients of a stage of several devices


def planned(captured: Captured, mode: str, sizes: dict[str, int]) -> Strategy:
    strategy, clips = asynchronous(captured, staleness=mode, **sizes), len(sizes) > 1
    return replace(strategy, clips=clips, max_norm=BOUND * clips)


def executor_of(mode: str, stages: int, **sizes: int) -> Executor:
    module, _, captured = captured_of(row, 4)
    program = lower(captured.graph, planned(captured, mode, {"stages": stages, **sizes}))
    optimizer = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1)
    course = "difference" if mode == "spectrain-v1" else "last"
    options = RunOptions(seed=SEED, extrapolation=Extrapolation(course=course))
    mine = copy.deepcopy(module)
    return Executor(captured, program, mine, optimizer=optimizer, options=options)


Found = tuple[list[float], dict[str, Tensor]]


def train_many(count: int, folder: str) -> tuple[list[Found], list[list[float]]]:
    """Train by executors that take turns, each with batches under way; then the last two and others that go on
    where these were saved."""
    executors = [executor_of(mode, **sizes) for mode, sizes in PLANS]
    losses: list[list[float]] = [[] for _ in PLANS]
    loops = [executor.train(batches(count)) for executor in executors]
    for turn in (5, count - 5):
        for told, loop in zip(losses, loops, strict=True):
            told += [float(step.loss) for step in islice(loop, turn) if step.left]
    found, more = list[Found](), list[list[float]]()
    for executor, told in zip(executors, losses, strict=True):
        told += [float(left.loss) for left in executor.flush()]
        whole = executor.full_parameters()
        found.append((told, {name: tensor.clone() for name, tensor in whole.items()}))
    for place in (-2, -1):
        executors[place].save(f"{folder}/{place}")
    for place in (-2, -1):
        mode, sizes = PLANS[place]
        executors.append(executor_of(mode, **sizes))
        executors[-1].load(f"{folder}/{place}")
    for executor in executors[-4:]:
        more.append([float(executor.step(batch)) for batch in batches(6)])
        more[-1] += [float(left.loss) for left in executor.flush()]
    for executor in executors:
        executor.close()
    return found, more


def test_processes_train_as_the_slots_do(tmp_path: Path) -> None:
    """Executors that take turns do not take each other's messages; what was saved goes on to the last bit."""
    count = 20
    module, _, captured = captured_of(row, 4)
    everyone = run_ranks(4, train_many, count, str(tmp_path))
    for place, (mode, sizes) in enumerate(PLANS):
        strategy = planned(captured, mode, sizes)
        bound = strategy.max_norm or math.inf
        course = "difference" if mode == "spectrain-v1" else "last"
        rule = Rule("adamw", lambda _: RATE, decay=0.1, max_norm=bound, course=course)
        losses, weights, _ = emulate(captured, strategy, module, rule, batches(count))
        for found, _ in everyone:
            told = torch.tensor(found[place][0], dtype=torch.float64)
            wanted = torch.tensor(losses, dtype=torch.float64)
            torch.testing.assert_close(told, wanted, rtol=1e-12, atol=1e-12)
            for name, tensor in weights.items():
                torch.testing.assert_close(found[place][1][name], tensor, rtol=1e-12, atol=1e-12)
    for _, more in everyone:
        for stages, kept, resumed in zip((2, 4), more, more[2:], strict=False):
            assert kept[stages:] == resumed[stages:]  # the first are NaN: it fills
            assert all(math.isfinite(loss) for loss in kept[stages:])


def train_on(folder: str, victim: int = -1) -> list[tuple[int, float]]:
    """Train 12 batches, and save after every fourth; ``victim`` dies with the tenth under way."""
    executor = executor_of("spectrain-v1", 2)
    if (Path(folder) / "latest").exists():
        executor.load(folder)
    losses: list[tuple[int, float]] = []
    for batch in batches(12)[executor.steps :]:
        if executor.steps == 9 and executor.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = float(executor.step(batch))
        if executor.left is not None:
            losses.append((executor.left, loss))
        if executor.steps % 4 == 0:
            executor.save(folder)
    return losses + [(left.number, float(left.loss)) for left in executor.flush()]


def test_a_rank_that_dies_stops_all_and_resuming_goes_on_exactly(tmp_path: Path) -> None:
    whole = run_ranks(2, train_on, str(tmp_path / "whole"))[0]
    assert [number for number, _ in whole] == list(range(1, 13))
    with pytest.raises(RunError, match="rank 1"):
        launch(train_on, 2, (str(tmp_path / "cut"), 1), timeout=60, collective_timeout=30)
    for found in run_ranks(2, train_on, str(tmp_path / "cut")):
        assert found == whole[8:]
