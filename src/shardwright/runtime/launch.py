"""Start ranks on this host, watch them, and say what went wrong when one fails.

The launcher starts one process per rank from a fork server that has imported torch already. When a
rank dies, by exception or by signal, the others are ended at once (they may be blocked in a
collective for ever), and the error names rank, stage and instruction from the rank's status file.
When the launcher dies, so do its ranks. The same entry functions run unchanged under ``torchrun``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

# Its functions take the world of the moment as default arguments. Imported later, by torch.export,
# they would keep the process group and its threads alive while the interpreter ends, and a thread
# that frees a tensor then aborts the process.
import torch.distributed.nn

from shardwright.errors import RunError
from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.cores import RANK, RANKS, settle
from shardwright.runtime.endings import cause, prepare_ending
from shardwright.runtime.failures import Failure, explain, failure, write_whole
from shardwright.runtime.lifeline import die_with_launcher
from shardwright.runtime.place import device_of, this_host
from shardwright.runtime.scratch import SHARED_MEMORY, claim_multiprocessing, scratch
from shardwright.runtime.status import INTERRUPTION, STATUS_DIRECTORY, STATUS_FOLDER, read_status
from shardwright.runtime.stopped import Patience, Stops, children, end

STORE_FILE = "SHARDWRIGHT_RENDEZVOUS"  # not the measurements' SHARDWRIGHT_STORE
STOP_FILE = "stop"  # in the launcher's folder, once it was interrupted
MARGIN = 1.25  # of a message's time: ranks that wait for who is stopped say so first
GRACE = 1.0  # seconds in which further failures are collected, to find the first cause
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
STOPPING = 120.0  # seconds the ranks may take to stop by themselves after Ctrl-C or SIGTERM
PRELOADED = (
    "shardwright.runtime.server", "torch", "torch.distributed", "shardwright.runtime.executor",
)  # fmt: skip
# Most ranks capture their model first. What torch.export imports then takes longer than starting
# a rank, so the fork server imports it once for all; with GPUs it imports as little as it can,
# since what it forks can only use CUDA as long as the fork server itself never did.
CAPTURING = (
    "torch._dynamo", "torch.export._trace", "shardwright.runtime.capture",
    "shardwright.planner.lower.kernels",
)  # fmt: skip


class Terminated(SystemExit):
    """SIGTERM came, as from a scheduler, or SIGHUP, as from a terminal that is closed. It unwinds to an
    exit with 143 or 129, the shell's numbers for them."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def join_world(*, timeout: float = 60.0, device: str | None = None) -> tuple[int, int]:
    """Initialise the process group from the environment; return (rank, number of ranks).

    ``device``: what ranks train on, which says by what they talk: NCCL for GPUs, gloo for the CPU. None:
    GPUs where each rank of the host has one, of which it makes its own the current one.

    The environment is the launcher's or torchrun's; without one this is a world of one rank, which
    needs no process group. A collective that takes longer than ``timeout`` seconds fails. The world
    ends with the interpreter, if not before.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    prepare_ending()
    if size > 1 and not dist.is_initialized():
        store = os.environ.get(STORE_FILE)
        place = device_of(device or "", "", this_host())
        if place.startswith("cuda"):
            torch.cuda.set_device(place)
        else:
            settle()
        try:
            dist.init_process_group(
                "nccl" if place.startswith("cuda") else "gloo",
                init_method=f"file://{store}" if store else "env://",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
            if not place.startswith("cuda"):
                dist.barrier()  # who is done at once would close connections that others still make
        except RuntimeError as error:  # a store that is gone, ranks that never came
            reason = str(error).strip().partition("\n")[0][:300]
            raise RunError(
                f"rank {rank} could not join the {size} ranks: {reason}; start all of them again"
            ) from None
        atexit.register(_leave_world)
        prepare_ending()
    return rank, size


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(where: str) -> None:
    """Wait for all ranks, as long as a message may take: one that ended while another is stopped would
    leave torchrun waiting for ever. Raises RunError with ``where`` it waited."""
    if not dist.is_initialized():
        return
    rank = dist.get_rank()
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RunError(cause(error, rank, where), rank=rank) from None


def launch(
    target: Callable[..., Any],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    collective_timeout: float = 60.0,
    backend: Literal["cpu", "cuda"] = "cpu",
    stops: Stops | None = None,
) -> list[Any]:
    """Run ``target(*args)`` on every rank and return what the ranks returned, in rank order.

    ``target`` must be importable. Each rank runs on one thread, in a world that is joined already;
    with ``backend`` cuda rank r has GPU r as its current device and talks over NCCL. Raises Stopped
    where ``stops`` asked for it, RunError when a rank fails or ``timeout`` seconds pass; no
    process is left behind.
    """
    starts = multiprocessing.get_start_method(allow_none=True)
    stops = stops or Stops()
    setting = _Setting(collective_timeout, backend, stops.saves, starts, _is_aside())
    with _terminable():
        return _launch(target, nprocs, args, setting, timeout, stops)


@dataclass(frozen=True, slots=True)
class _Setting:
    """How a rank runs; the fields are ``launch``'s options. ``starts``: how processes start in the launcher, None
    for Python's default. ``is_aside``: what is printed goes to standard error there, and so what ranks print."""

    collective_timeout: float
    backend: str
    saves: bool
    starts: str | None
    is_aside: bool


def _is_aside() -> bool:
    """Whether what is printed goes to standard error, as where a command answers in JSON."""
    try:
        return sys.stdout.fileno() == sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # no files, or closed ones
        return False


def _launch(
    target: Callable[..., Any],
    nprocs: int,
    args: Sequence[Any],
    setting: _Setting,
    timeout: float | None,
    stops: Stops,
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(CAPTURING if setting.backend == "cpu" else ())])
    claim_multiprocessing()
    processes: list[BaseProcess] = []
    seconds = MARGIN * setting.collective_timeout
    with (
        scratch() as directory,
        scratch(SHARED_MEMORY) as memory,
        Patience(seconds, partial(stops.ask, directory, nprocs)) as patience,
    ):
        (directory / STATUS_FOLDER).symlink_to(memory)
        try:
            for rank in range(nprocs):
                process = context.Process(
                    target=_rank_main,
                    args=(target, tuple(args), rank, nprocs, directory, setting),
                    daemon=False,
                )
                _start(process, rank, patience)
                processes.append(process)
            _watch(processes, directory, timeout, stops, patience)
            return [_result(directory, rank) for rank in range(nprocs)]
        finally:
            _end(processes, patience)


def _start(process: BaseProcess, rank: int, patience: Patience) -> None:
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    patience.watch(server, os.getpid(), "the process that ranks are started from")
    try:
        process.start()
    except (EOFError, ConnectionError):
        raise patience.error() or RunError(
            "ranks are started by a process that has imported torch, but it was ended meanwhile; run the "
            "command again, with more free memory if the system ended it"
        ) from None
    except BaseException:  # interrupted: what is forked later would find nobody
        end(server)
        raise
    assert process.pid is not None
    patience.watch(process.pid, server, f"rank {rank}")


def _result(directory: Path, rank: int) -> Any:
    with Path(directory, f"{rank}.result").open("rb") as file:
        return pickle.load(file)


# -- the rank's side -----------------------------------------------------------------------------


def _rank_main(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    directory: Path,
    setting: _Setting,
) -> None:
    """Run one rank and leave its result, or how it failed, in the launcher's directory."""
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.SIG_DFL)
    die_with_launcher()
    if setting.is_aside:
        os.dup2(2, 1)
    # Else workers of a rank's loaders were children of a fork server of its own, which import torch anew.
    multiprocessing.set_start_method(setting.starts, force=True)
    os.environ |= {
        "RANK": str(rank), RANK: str(rank), "WORLD_SIZE": str(size),
        RANKS: str(size),
        STATUS_DIRECTORY: str(directory), STORE_FILE: str(directory / "store"),
    }  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    INTERRUPTION.listen(termination=setting.saves, file=directory / STOP_FILE)
    backend = setting.backend
    try:
        if backend == "cuda":
            torch.cuda.set_device(rank)
        join_world(timeout=setting.collective_timeout, device=backend)
        result = target(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        write_whole(directory / f"{rank}.result", result)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the launcher must be told
        Failure.of(rank, error).leave(directory)
        with suppress(
            OSError, ValueError, AttributeError
        ):  # code of the user's may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        for child in multiprocessing.active_children():  # a loader's, which look for us seldom
            child.kill()
        os._exit(1)  # not a clean exit: a peer that is gone would make the backend wait


# -- the launcher's side ---------------------------------------------------------------------------


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind while there are ranks, so that they end and no folder is left; only
    where nobody else answers them (as ``nohup`` does). Each may come twice, to this process and to
    its group, and both may: once counts."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = [one for one in ENDINGS if is_main and signal.getsignal(one) is signal.SIG_DFL]

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        for one in ours:
            signal.signal(one, signal.SIG_IGN)
        raise Terminated(number)

    for one in ours:
        signal.signal(one, handle)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def _watch(
    processes: Sequence[BaseProcess],
    directory: Path,
    timeout: float | None,
    stops: Stops,
    patience: Patience,
) -> None:
    """Wait for all ranks; raise on the first that fails, or when time is up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    wish: BaseException | None = None
    while True:
        try:
            running = [process.sentinel for process in processes if process.exitcode is None]
            if any(_has_failed(process, rank, directory) for rank, process in enumerate(processes)):
                failures = _collect(processes, directory)
                raise wish or patience.error() or explain(failures, directory)
            if not running:
                return
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise wish or _too_long(processes, directory)
            multiprocessing.connection.wait(running, left)
        except (KeyboardInterrupt, Terminated) as asked:
            heeded = stops.saves or not isinstance(asked, Terminated)
            if wish or not heeded or not stops.are_heeded(directory, len(processes)):
                raise
            # The ranks stop after this step, and save first where they do. Of a terminal's Ctrl-C they got
            # the signal too, and a second one would end them; whoever else sent it may have told nobody else.
            wish, deadline = asked, time.monotonic() + STOPPING
            if isinstance(asked, Terminated):
                _ask_to_stop(processes, asked.number)
            else:
                (directory / STOP_FILE).touch()


def _ask_to_stop(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _has_failed(process: BaseProcess, rank: int, directory: Path) -> bool:
    """Whether a rank ended without a result: code of the user's may end it with 0, too."""
    is_over = process.exitcode is not None
    return is_over and not (process.exitcode == 0 and (directory / f"{rank}.result").exists())


def _collect(processes: Sequence[BaseProcess], directory: Path) -> list[Failure]:
    """Give the other ranks a moment to fail too, then tell what each failure was."""
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(process.exitcode is None for process in processes):
        alive = [process.sentinel for process in processes if process.exitcode is None]
        multiprocessing.connection.wait(alive, max(end - time.monotonic(), 0))
    failed = [rank for rank, one in enumerate(processes) if _has_failed(one, rank, directory)]
    return [failure(processes[rank].exitcode or 0, rank, directory) for rank in failed]


def _too_long(processes: Sequence[BaseProcess], directory: Path) -> RunError:
    seen = []
    for rank, process in enumerate(processes):
        status = read_status(directory, rank)
        if process.exitcode is None:
            where = status.instruction if status and status.instruction else "outside a step"
            seen.append(f"rank {rank}: {where}")
    return RunError(f"the run took longer than its time limit ({'; '.join(seen)}); raise the limit")


def _end(processes: Sequence[BaseProcess], patience: Patience) -> None:
    """End what still runs, and reap everything. Nothing gentler ends a rank that is stopped, or that
    takes SIGTERM for the wish to save. How they ended is told by what they were started from, or by
    its end."""
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            theirs = children(process.pid)
            process.kill()
            for one in theirs:  # workers of a loader, which look for their rank seldom
                end(one)
    patience.give_up()
    for process in processes:
        process.join()
        process.close()
