"""Asynchronous pipelines on processes: the slots' numbers, exact resuming, and ranks that die."""

from __future__ import annotations

import os
import signal
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import RunError
from shardwright.planner.lower import lower
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.launch import launch
from tests.runtime.slots import Rule
from tests.runtime.test_asynchronous import SEED, asynchronous, batches, emulate, row
from tests.runtime.world import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.torch]
RATE = 0.02


def executor_of(mode: str, stages: int) -> Executor:
    module, batch = row(4)
    captured = capture(module, batch)
    program = lower(captured.graph, asynchronous(captured, stages, mode))
    optimizer = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1)
    options = RunOptions(seed=SEED)
    return Executor(captured, program, module, optimizer=optimizer, options=options)


def train_many(modes: tuple[str, ...], count: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Train by executors that take turns, each with batches under way."""
    executors = [executor_of(mode, dist.get_world_size()) for mode in modes]
    losses: list[list[float]] = [[] for _ in modes]
    loops = [executor.train(batches(count)) for executor in executors]
    for turn in (5, count - 5):
        for told, loop in zip(losses, loops, strict=True):
            told += [float(step.loss) for step in islice(loop, turn) if step.left]
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for executor, told in zip(executors, losses, strict=True):
        told += [float(left.loss) for left in executor.flush()]
        whole = executor.full_parameters()
        found.append((told, {name: tensor.clone() for name, tensor in whole.items()}))
        executor.close()
    return found


def test_processes_train_as_the_slots_do() -> None:
    """Executors that take turns do not take each other's messages."""
    modes, count = ("stale", "stash", "spectrain-v1", "spectrain-v2"), 20
    module, batch = row(4)
    captured = capture(module, batch)
    everyone = run_ranks(3, train_many, modes, count)
    rule = Rule("adamw", lambda _: RATE, decay=0.1)
    for place, mode in enumerate(modes):
        strategy = asynchronous(captured, 3, mode)
        losses, weights, _ = emulate(captured, strategy, module, rule, batches(count))
        for found in everyone:
            told = torch.tensor(found[place][0], dtype=torch.float64)
            wanted = torch.tensor(losses, dtype=torch.float64)
            torch.testing.assert_close(told, wanted, rtol=1e-12, atol=1e-12)
            for name, tensor in weights.items():
                torch.testing.assert_close(found[place][1][name], tensor, rtol=1e-12, atol=1e-12)


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
