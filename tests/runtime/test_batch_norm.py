"""Batch norm over several ranks: synchronised equals one process, local equals DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import shardwright
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.files.planfile import read_plan, write_plan
from shardwright.planner.lower import lower
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import Run, assert_close, batches, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
SGD = partial(torch.optim.SGD, lr=1.0)


def train_planned(batch_norm: Literal["local", "synchronised"]) -> Run:
    module, batch = zoo.cnn()
    captured = capture(module, batch, batch_norm=batch_norm)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    executor = Executor(captured, program, module, optimizer=SGD)
    losses = [float(executor.step(one)) for one in batches(batch)]
    trained, _ = zoo.cnn()
    executor.to_module(trained)
    return _run(losses, trained)


def train_ddp() -> Run:
    rank = torch.distributed.get_rank()
    module, batch = zoo.cnn()
    wrapped = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = SGD(module.parameters())
    losses: list[float] = []
    for whole in batches(batch):
        optimizer.zero_grad()
        loss = wrapped(**{name: tensor.chunk(2)[rank] for name, tensor in whole.items()})
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / 2)
    return _run(losses, module)


def _run(losses: list[float], module: torch.nn.Module) -> Run:
    return Run(
        losses,
        {name: tensor.detach().clone() for name, tensor in module.named_parameters()},
        {name: tensor.clone() for name, tensor in module.named_buffers()},
    )


def train_local_beside_ddp() -> tuple[Run, Run]:
    return train_planned("local"), train_ddp()


def test_synchronised_statistics_train_as_one_process() -> None:
    expected = train_plain(zoo.cnn, SGD)
    for found in run_ranks(2, train_planned, "synchronised", timeout=120):
        assert_close(found, expected, "synchronised")
        for name, buffer in expected.buffers.items():
            torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-10, atol=1e-12)


def assert_trains_as_one(
    make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]],
    strategy_of: Callable[[OperatorGraph], Strategy],
    label: str,
    *others: str,
) -> None:
    """Train by a strategy with synchronised statistics; parameters and all buffers but ``others`` are one process's."""
    module, batch = make()
    captured = capture(module, batch, batch_norm="synchronised")
    expected = train_plain(make, SGD)
    runs, _ = train_rehearsed(captured, strategy_of(captured.graph), module, batch, SGD)
    for run in runs:
        assert_close(run, expected, label)
        for name in expected.buffers.keys() - set(others):
            buffer = expected.buffers[name]
            torch.testing.assert_close(run.buffers[name], buffer, rtol=1e-10, atol=1e-12)


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widen, norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.layers = torch.nn.Sequential(widen, norm, torch.nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _normed() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return _Normed().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}


@pytest.mark.parametrize(
    "grid",
    [
        Grid(name="summa", sizes=(1, 2)),
        Grid(name="summa", sizes=(2, 2)),
        Grid(name="tesseract", sizes=(1, 2, 2)),
        Grid(name="cube", sizes=(2, 2, 1)),
    ],
    ids=lambda grid: grid.label,
)
def test_grids_of_columns_write_synchronised_statistics(grid: Grid) -> None:
    """The operators that write a norm's buffers have no results whose dims a grid could follow."""
    assert_trains_as_one(_normed, lambda graph: grid_strategy(graph, grid), grid.label)


class _Standardised(torch.nn.Module):
    """Norms what comes with the batch, before anything is learned of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)).square().mean()


def _standardised() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return _Standardised().double(), {"x": 1 + torch.randn(8, 8, dtype=torch.float64)}


@pytest.mark.parametrize("seed", [Seed(num_microbatches=4), Seed(data=2, num_microbatches=2)])
def test_statistics_of_the_whole_batch_are_written_once_for_all_microbatches(seed: Seed) -> None:
    counter = "norm.num_batches_tracked"  # counts microbatches
    assert_trains_as_one(
        _standardised, lambda graph: seed_strategy(graph, seed), seed.label, counter
    )


def test_local_statistics_train_as_distributed_data_parallel_does() -> None:
    for found, expected in run_ranks(2, train_local_beside_ddp, timeout=120):
        assert_close(found, expected, "local")


def test_a_user_chooses_the_statistics_and_the_plan_says_so(tmp_path: Path) -> None:
    module, batch = zoo.cnn()
    frontier = shardwright.plan(
        module, "1x1xV100", batch=batch, precision="float64", batch_norm="synchronised"
    )
    frontier = read_plan(write_plan(tmp_path / "plan.json", frontier))
    assert {plan.strategy.batch_norm for plan in frontier.plans} == {"synchronised"}
    executor = shardwright.build(frontier, module, optimizer=SGD, batch=batch)
    found = [float(executor.step(one)) for one in batches(batch)]
    executor.close()
    assert found == pytest.approx(train_plain(zoo.cnn, SGD).losses, rel=1e-10)
