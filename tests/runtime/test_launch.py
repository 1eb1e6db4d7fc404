"""Starting, watching and ending ranks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.errors import RunError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed
from shardwright.runtime.agreement import gathered
from shardwright.runtime.executor import Executor
from shardwright.runtime.launch import launch
from shardwright.runtime.scratch import SHARED_MEMORY, scratch
from shardwright.runtime.status import STATUS_DIRECTORY, STATUS_FOLDER, StatusFile
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.strategies import strategy_of


def add_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def start_method() -> str:
    return multiprocessing.get_start_method()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the batch is empty")
    dist.barrier()


def die_mid_step(victim: int) -> None:
    module, batch, captured = captured_of(zoo.mlp)
    strategy = strategy_of(Seed(stages=2, num_microbatches=2))(captured.graph)
    program = lower(captured.graph, strategy)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    executor = Executor(captured, program, module, optimizer=optimizer)
    executor.step(batch)
    if dist.get_rank() == victim:
        action = executor._training.actions[3]
        deadly = (action[0], lambda: os.kill(os.getpid(), signal.SIGKILL))
        actions = (*executor._training.actions[:3], deadly, *executor._training.actions[3:])
        object.__setattr__(executor._training, "actions", actions)
    for _ in range(100):
        executor.step(batch)


def sleep_for_ever() -> None:
    time.sleep(1000)


@pytest.mark.ranks
def test_a_ranks_own_processes_start_as_the_launchers_do() -> None:
    """Workers of its loaders, above all: those of a fork server would import torch anew."""
    assert launch(start_method, 1, timeout=60) == [multiprocessing.get_start_method()]


@pytest.mark.ranks
def test_results_come_back_in_rank_order() -> None:
    assert launch(add_ranks, 2, timeout=60) == [1.0, 1.0]


def folder_of_status() -> Path:
    StatusFile(dist.get_rank())
    return Path(os.environ[STATUS_DIRECTORY], STATUS_FOLDER).resolve(strict=True)


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs shared memory")
def test_the_status_that_every_instruction_writes_lies_in_memory_and_goes_with_the_ranks() -> None:
    first, second = launch(folder_of_status, 2)
    assert first == second
    assert first.parent == SHARED_MEMORY
    assert not first.exists()


def test_a_private_folder_lies_among_temporary_files_where_its_parent_cannot_be_written(
    tmp_path: Path,
) -> None:
    with scratch(tmp_path) as folder, scratch(tmp_path / "missing") as other:
        assert (folder.parent, other.parent) == (tmp_path, Path(tempfile.gettempdir()))
    assert not folder.exists()
    assert not other.exists()


LONGEST = 4095  # bytes of a path: Linux' PATH_MAX, less its end


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux' PATH_MAX")
def test_a_folder_that_cannot_be_claimed_is_gone(tmp_path: Path) -> None:
    """As on a full disk; here the file in it would have too long a path."""
    parent = tmp_path
    while (left := LONGEST - 30 - len(str(parent))) > 1:
        parent /= "x" * min(left - 1, 250)
        parent.mkdir()
    with pytest.raises(OSError, match="too long"):
        scratch(parent).__enter__()
    assert not list(parent.iterdir())


def imported_by_capturing() -> int:
    from tests.runtime import warm  # which the fork server of tests has done already

    return warm.IMPORTED


@pytest.mark.ranks
def test_a_rank_captures_with_what_the_fork_server_has_imported() -> None:
    (count,) = launch(imported_by_capturing, 1, timeout=60)
    assert count < 200  # alone it would be 1,200


def looked_for() -> tuple[bool, bool]:
    return gc.isenabled(), gc.get_freeze_count() > 1000


def test_ranks_look_for_cycles_except_in_what_they_inherit() -> None:
    assert launch(looked_for, 1) == [(True, True)]


@pytest.mark.ranks
def test_an_exception_on_one_rank_ends_all_and_is_told() -> None:
    with pytest.raises(RunError, match=r"rank 1.*the batch is empty") as caught:
        launch(raise_on_one, 2, timeout=60)
    assert caught.value.rank == 1


class Mute(BaseException):
    """No Exception, and one that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def leave(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "mute":
            sys.stdout.close()
            raise Mute
        os._exit(int(how)) if how else sys.exit()
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("0", "ended with exit code 0"),
        ("3", "exit code 3"),
        ("", "SystemExit"),
        ("mute", r"raised Mute: no reason given, at test_launch.py:\d+;"),
    ],
)
def test_a_rank_that_leaves_before_it_is_done_is_named_whatever_its_exit_code(
    how: str, says: str
) -> None:
    with pytest.raises(RunError, match=f"rank 1 .*{says}") as caught:
        launch(leave, 2, (how,), timeout=60)
    assert caught.value.rank == 1


def write_to_a_full_disk() -> None:
    Path("/dev/full").write_text("what nobody can keep")


@pytest.mark.ranks
def test_what_the_system_refuses_a_rank_is_one_line() -> None:
    with pytest.raises(
        RunError, match=r"raised OSError: .*No space left on device; free"
    ) as caught:
        launch(write_to_a_full_disk, 1, timeout=60)
    assert "\n" not in str(caught.value)


def fail_beside_a_full_disk() -> None:
    """What is written for the launcher is written there first."""
    Path(os.environ["SHARDWRIGHT_STATUS"], "0.partial").symlink_to("/dev/full")
    Path("/dev/full").write_text("what nobody can keep")


@pytest.mark.ranks
def test_a_rank_says_why_it_ended_though_the_launchers_folder_is_on_a_full_disk() -> None:
    with pytest.raises(RunError, match=r"raised OSError: .*No space left on device; free"):
        launch(fail_beside_a_full_disk, 1, timeout=60)


def prints_into() -> tuple[int, int]:
    return os.fstat(1).st_ino, os.fstat(2).st_ino


@pytest.mark.ranks
def test_ranks_print_to_standard_error_where_their_launcher_does() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        ((out, err),) = launch(prints_into, 1, timeout=60)
    assert out == err


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_with_stage_and_instruction(victim: int) -> None:
    with pytest.raises(RunError, match=f"rank {victim} .*was killed by SIGKILL") as caught:
        launch(die_mid_step, 2, (victim,), timeout=60)
    assert (caught.value.rank, caught.value.stage) == (victim, victim)
    assert f"stage {victim}" in caught.value.instruction


def agree_with_nobody() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    gathered(0)


@pytest.mark.ranks
def test_a_rank_that_agrees_to_nothing_in_time_is_one_line_for_the_others() -> None:
    with pytest.raises(RunError, match="rank 0 waited for other ranks longer than a") as caught:
        launch(agree_with_nobody, 2, collective_timeout=2)
    assert "where all ranks must agree" in str(caught.value)
    assert "\n" not in str(caught.value)


def agree_with_who_left() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RunError) as caught:
        gathered(0)
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_ends_while_all_agree_is_one_line_for_the_others() -> None:
    said = launch(agree_with_who_left, 2, collective_timeout=20)[0]
    assert said.startswith("rank 0 failed where all ranks must agree")
    assert said.endswith("resume from it once the cause is removed")


@pytest.mark.ranks
def test_a_time_limit_ends_everything() -> None:
    with pytest.raises(RunError, match="time limit"):
        launch(sleep_for_ever, 2, timeout=3)
