"""Checkpoints: exact resume, other plans, plain modules, damage, and saves that are cut short."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
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
from tests.runtime.equivalence import StrategyBuilder, batches, captured_of
from tests.runtime.strategies import strategy_of
from tests.runtime.world import run_ranks

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def _executor(strategy: StrategyBuilder, seed: int = 3) -> tuple[Executor, dict[str, Any]]:
    module, batch, captured = captured_of(zoo.gpt)
    program = lower(captured.graph, strategy(captured.graph))
    mine, options = copy.deepcopy(module), RunOptions(seed=seed)
    return Executor(captured, program, mine, optimizer=ADAM, options=options), batch


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


def load_train_and_save(seed: Seed, directory: str) -> list[float]:
    """Go on from the newest checkpoint for one step, save, and return the step's loss."""
    executor, batch = _executor(strategy_of(seed), seed=99)
    executor.load(directory)
    first = executor.steps
    losses = [float(executor.step(one)) for one in batches(batch, first + 1)[first:]]
    executor.save(directory)
    return losses


@pytest.mark.ranks
def test_any_plan_goes_on_from_a_checkpoint_of_any_other_in_any_world(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    expected = [float(executor.step(one)) for one in batches(batch, 5)]
    directory = str(tmp_path)
    first = run_ranks(2, train_and_save, strategy_of(Seed(tensor=2)), directory, 1, 1)
    assert first[0] == first[1]
    found = [
        first[0],
        run_ranks(2, load_train_and_save, Seed(stages=2, num_microbatches=2), directory)[0],
        run_ranks(2, load_train_and_save, Seed(data=2, zero=3), directory)[0],
        load_train_and_save(Seed(), directory),
        run_ranks(2, load_train_and_save, Seed(tensor=2), directory)[0],
    ]
    torch.testing.assert_close(
        found, [[loss] for loss in (expected[1], *expected[1:])], rtol=1e-10, atol=0
    )


def _grouped(parameters: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Make the groups that this rank has members of: their number differs between plans."""
    biases = [parameter for name, parameter in parameters if name.endswith("bias")]
    others = [parameter for name, parameter in parameters if not name.endswith("bias")]
    groups = [{"params": biases, "lr": 0.5}, {"params": others, "lr": 0.1, "momentum": 0.9}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=1.0)


def train_in_groups(seed: Seed, directory: str, until: int) -> tuple[list[float], set[float]]:
    """Go on to a step with rates that halve; return the losses and the rates in the end."""
    module, batch, captured = captured_of(zoo.gpt)
    program = lower(captured.graph, strategy_of(seed)(captured.graph))
    executor = Executor(captured, program, copy.deepcopy(module), optimizer=_grouped)
    if (Path(directory) / "latest").exists():
        executor.load(directory)
    losses: list[float] = []
    for one in batches(batch, until)[executor.steps :]:
        losses.append(float(executor.step(one)))
        for group in executor.optimizer.param_groups:
            group["lr"] /= 2
    executor.save(directory)
    return losses, {group["lr"] for group in executor.optimizer.param_groups}


@pytest.mark.ranks
def test_parameter_groups_keep_their_settings_through_other_plans(tmp_path: Path) -> None:
    expected, rates = train_in_groups(Seed(), str(tmp_path / "whole"), 4)
    directory = str(tmp_path / "parts")
    losses: list[float] = []
    for step, seed in enumerate(
        [Seed(data=2, zero=3), Seed(stages=2), Seed(tensor=2), Seed()], start=1
    ):
        if seed == Seed():
            found = [train_in_groups(seed, directory, step)]
        else:
            found = run_ranks(2, train_in_groups, seed, directory, step)
        losses += found[0][0]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert found[0][1] == rates == {0.5 / 16, 0.1 / 16}


@pytest.mark.torch
def test_a_precision_is_the_plans_and_not_the_checkpoints(tmp_path: Path) -> None:
    module, batch = zoo.mlp(dtype=torch.float32)
    executors: list[Executor] = []
    for precision in ("bfloat16", "float32"):
        captured = capture(module, batch, precision=precision)
        strategy = replace(strategy_of(Seed())(captured.graph), precision=precision)
        program = lower(captured.graph, strategy)
        fresh, _ = zoo.mlp(dtype=torch.float32)
        executors.append(Executor(captured, program, fresh, optimizer=ADAM))
    half, single = executors
    half.step(batch)
    half.save(tmp_path)
    single.load(tmp_path)
    masters = half.full_parameters()
    for name, parameter in single.full_parameters().items():
        assert parameter.dtype == masters[name].dtype == torch.float32
        assert torch.equal(parameter, masters[name])


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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 0x01
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.torch
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_damage_is_one_message_that_names_file_and_previous_checkpoint(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    before = executor.save(tmp_path)
    executor.step(batch)
    path = executor.save(tmp_path)
    damage(path / file)
    with pytest.raises(CheckpointError, match=f"{path / file}.*load the previous.*{before}"):
        executor.load(tmp_path)
    shutil.rmtree(path)
    executor.load(tmp_path)
    assert executor.steps == 0


def load_damaged(directory: str) -> str:
    executor, _ = _executor(strategy_of(Seed(data=2, zero=3)))
    executor.save(directory)
    if executor.rank == 0:
        flip(next(Path(directory).glob("step-*")) / "rank-00001.safetensors")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        executor.load(directory)
    return str(caught.value)


@pytest.mark.ranks
def test_all_ranks_complain_alike_about_the_file_of_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, load_damaged, str(tmp_path))
    assert first == second
    assert "rank-00001.safetensors is missing or damaged" in first


@pytest.mark.torch
def test_a_changed_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    executor.save(tmp_path)
    other, _ = zoo.gpt(width=64, dtype=torch.float32)
    del other.head
    other.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as caught:
        load_into_module(tmp_path, other)
    text = str(caught.value)
    assert "extra.weight: the checkpoint lacks it" in text
    assert "head.weight: only in the checkpoint" in text
    assert "embed.weight: shape (256, 32) saved, (256, 64) here" in text
    assert "embed.weight: dtype float64 saved, float32 here" in text


@pytest.mark.torch
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    path = executor.save(tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1', 1))
    with pytest.raises(CheckpointError, match=r"must have format 2, but .* has 1"):
        executor.load(tmp_path)


@pytest.mark.torch
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    path = executor.save(tmp_path) / "manifest.json"
    document = json.loads(path.read_text().replace("rank-00000.safetensors", "../other"))
    content = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(document | {"crc32": zlib.crc32(content.encode())}))
    with pytest.raises(CheckpointError, match="should match pattern"):
        executor.load(tmp_path)


@pytest.mark.torch
def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.step(batch)
    path = executor.save(tmp_path)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.torch
def test_the_scripts_own_state_comes_back_as_it_was(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(executor.optimizer, [1, 3], gamma=0.1)
    executor.step(batch)
    scheduler.step()
    state = {
        "scheduler": scheduler.state_dict(), "seen": (1, [2.5, None]), 3: float("inf"),
        "random": torch.get_rng_state(),
    }  # fmt: skip
    executor.save(tmp_path, extra=state)
    again, _ = _executor(strategy_of(Seed()))
    found = again.load(tmp_path)
    assert torch.equal(found.pop("random"), state.pop("random"))
    assert found == state
    other = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [7], gamma=0.5)
    other.load_state_dict(found["scheduler"])
    assert other.get_last_lr() == scheduler.get_last_lr()
    assert again.optimizer.param_groups[0]["lr"] == executor.optimizer.param_groups[0]["lr"]


@pytest.mark.torch
def test_state_that_is_no_data_is_refused(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    with pytest.raises(CheckpointError, match=r"extra/a/1 is a Adam.*state_dict"):
        executor.save(tmp_path, extra={"a": [1, executor.optimizer]})
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_a_save_that_is_cut_short_leaves_the_previous_one(tmp_path: Path) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.save(tmp_path)
    half = tmp_path / "step-00000001.tmp-dead"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    executor.step(batch)
    executor.load(tmp_path)
    assert executor.steps == 0


@pytest.mark.torch
def test_a_directory_without_the_word_for_the_newest_checkpoint_gives_the_newest(
    tmp_path: Path,
) -> None:
    executor, batch = _executor(strategy_of(Seed()))
    executor.save(tmp_path)
    executor.step(batch)
    executor.save(tmp_path)
    (tmp_path / "latest").unlink()
    executor.load(tmp_path)
    assert executor.steps == 1
    executor.load(tmp_path / "step-00000000")
    assert executor.steps == 0


@pytest.mark.torch
def test_saving_a_step_again_replaces_it_and_is_safe_between_the_renames(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    executor.save(tmp_path, extra={"turn": 1})
    path = executor.save(tmp_path, extra={"turn": 2})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", path.name]
    path.rename(tmp_path / f"{path.name}.replaced")
    assert executor.load(tmp_path) == {"turn": 2}


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
@pytest.mark.parametrize("place", range(4))
def test_wherever_a_disk_is_full_only_the_previous_checkpoint_is_left(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors, its manifest, the word for the newest one, and all of them by their names."""
    executor, batch = _executor(strategy_of(Seed()))
    executor.save(tmp_path)
    executor.step(batch)
    written, sync = iter(range(10)), os.fsync

    def full(handle: int) -> None:
        if next(written) == place:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device; earlier checkpoints"):
            executor.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000000"]
    executor.load(tmp_path)
    assert executor.steps == 0


def fill_the_disk_of_one(directory: str) -> tuple[str, list[str]]:
    executor, batch = _executor(strategy_of(Seed(data=2, zero=3)))
    executor.save(directory)
    executor.step(batch)
    if executor.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        executor.save(directory)
    if executor.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    torch.distributed.barrier()
    executor.load(directory)
    return str(caught.value), sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.ranks
def test_a_disk_that_is_full_on_one_host_fails_the_save_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, fill_the_disk_of_one, str(tmp_path))
    assert first == second
    assert "File too large" in first[0]
    assert first[1] == ["latest", "step-00000000"]


@pytest.mark.torch
def test_an_unwritable_directory_is_one_clear_error(tmp_path: Path) -> None:
    executor, _ = _executor(strategy_of(Seed()))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=f"could not be written: .*'{blocked}"):
        executor.save(blocked)
