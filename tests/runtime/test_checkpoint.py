"""Checkpoints: exact resume, other plans, plain modules, damage, and saves that are cut short."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.errors import CheckpointError
from shardwright.planner.lower import lower
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed
from shardwright.runtime.capture import capture
from shardwright.runtime.checkpoint import load_into_module
from shardwright.runtime.executor import Executor, RunOptions
from tests import zoo
from tests.runtime.equivalence import StrategyBuilder, batches
from tests.runtime.strategies import strategy_of
from tests.runtime.world import run_ranks

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def _executor(strategy: StrategyBuilder, seed: int = 3) -> tuple[Executor, dict[str, Any]]:
    module, batch = zoo.gpt()
    captured = capture(module, batch)
    program = lower(captured.graph, strategy(captured.graph))
    executor = Executor(captured, program, module, optimizer=ADAM, options=RunOptions(seed=seed))
    return executor, batch


def train_and_save(
    strategy: StrategyBuilder, directory: str, before: int, after: int
) -> list[float]:
    executor, batch = _executor(strategy)
    losses = []
    for number, one in enumerate(batches(batch, before + after)):
        if number == before:
            executor.save(directory, extra={"epoch": 7})
        losses.append(float(executor.step(one)))
    return losses[before:]


def load_and_train(
    strategy: StrategyBuilder, directory: str, before: int, after: int
) -> list[float]:
    executor, batch = _executor(strategy, seed=99)
    assert executor.load(directory) == {"epoch": 7}
    assert executor.steps == before
    return [float(executor.step(one)) for one in batches(batch, before + after)[before:]]


@pytest.mark.torch
def test_resuming_on_one_rank_is_bit_identical(tmp_path: Path) -> None:
    one = strategy_of(Seed())
    expected = train_and_save(one, str(tmp_path), 2, 2)
    assert load_and_train(one, str(tmp_path), 2, 2) == expected


@pytest.mark.ranks
def test_resuming_with_zero_three_is_bit_identical(tmp_path: Path) -> None:
    zero = strategy_of(Seed(data=2, zero=3))
    expected = run_ranks(2, train_and_save, zero, str(tmp_path), 2, 2)
    assert run_ranks(2, load_and_train, zero, str(tmp_path), 2, 2) == expected


@pytest.mark.ranks
@pytest.mark.parametrize(
    "other", [Seed(tensor=2), Seed(stages=2, num_microbatches=2)], ids=lambda seed: seed.label
)
def test_another_plan_and_world_goes_on_from_a_checkpoint(tmp_path: Path, other: Seed) -> None:
    expected = run_ranks(2, train_and_save, strategy_of(Seed(data=2, zero=3)), str(tmp_path), 2, 2)
    alone = load_and_train(strategy_of(Seed()), str(tmp_path), 2, 2)
    torch.testing.assert_close(alone, expected[0], rtol=1e-10, atol=0)
    found = run_ranks(2, load_and_train, strategy_of(other), str(tmp_path), 2, 2)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=0)


def _grid(grid: Grid, graph: OperatorGraph) -> Strategy:
    return grid_strategy(graph, grid)


@pytest.mark.ranks
def test_a_cube_goes_on_from_any_plan_and_any_plan_from_a_cube(tmp_path: Path) -> None:
    cube = partial(_grid, Grid(name="cube", sizes=(2, 2, 1)))
    plane = partial(_grid, Grid(name="summa", sizes=(2, 2)))
    expected = run_ranks(4, train_and_save, cube, str(tmp_path / "cube"), 2, 2)
    run_ranks(2, train_and_save, strategy_of(Seed(data=2, zero=3)), str(tmp_path / "zero"), 2, 2)
    alone = load_and_train(strategy_of(Seed()), str(tmp_path / "cube"), 2, 2)
    found = [
        run_ranks(4, load_and_train, cube, str(tmp_path / "zero"), 2, 2)[0],
        run_ranks(4, load_and_train, plane, str(tmp_path / "cube"), 2, 2)[0],
    ]
    for losses in (alone, *found):
        torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=0)


@pytest.mark.torch
def test_a_plain_module_loads_a_checkpoint(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.step(batch)
    executor.save(tmp_path)
    module, _ = zoo.gpt()
    assert load_into_module(tmp_path, module) == 1
    expected = executor.full_parameters()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.torch
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    path = executor.save(tmp_path) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content if file != "manifest.json" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        executor.load(tmp_path)


@pytest.mark.torch
def test_a_save_that_is_cut_short_leaves_the_previous_one(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.save(tmp_path)
    half = tmp_path / "step-00000001.tmp-dead"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    executor.step(batch)
    executor.load(tmp_path)
    assert executor.steps == 0


@pytest.mark.torch
def test_a_disk_that_fills_up_is_one_clear_error_and_leaves_only_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.step(batch)
    executor.save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    executor.step(batch)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written: .*free space"):
            executor.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.torch
def test_an_unwritable_directory_is_one_clear_error(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        executor.save(blocked)
