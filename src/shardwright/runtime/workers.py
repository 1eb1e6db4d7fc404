"""Processes of our own that measure at the same time: started fresh, timed out, always reaped.

A fresh interpreter per worker: forking would copy thread pools, and multiprocessing would run the
user's script again. Jobs and results travel as files in a private directory that is removed.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import RunError
from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.cores import RANK, RANKS
from shardwright.runtime.scratch import scratch
from shardwright.runtime.stopped import is_stopped

Progress = Callable[[int, int], None]
Stop = Callable[[], bool]
_POLL_SECONDS = 0.05
# Starting Python takes so long at most; beside much other work measuring takes so many times its budget.
_START_SECONDS, _SLOWER = 60.0, 10.0
# A worker depends on its parent before it imports torch, which takes seconds. Ctrl-C reaches every process
# of a terminal: what it means is the parent's to say.
_ENTRY = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from shardwright.runtime.lifeline import die_with_pipe
die_with_pipe()
from shardwright.runtime.workers import main
main()
"""


class Reporter:
    """Tells the parent how far a worker is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, done: int, total: int) -> None:
        # Replaced in one go, so that the parent never reads half a number.
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f"{done} {total}")
        fresh.replace(self.path)


def run_workers(
    function: str,
    jobs: Sequence[object],
    *,
    timeout_seconds: float,
    progress: Progress | None = None,
    stop: Stop = lambda: False,
) -> list[Any]:
    """Run ``function(rank, job, directory, report)`` in one process per job, all at once.

    ``function`` is written ``module:name``. Returns the results in order, or none once ``stop`` says
    so. Raises RunError when a worker fails or the time is over; no process outlives the call.
    """
    with scratch() as directory:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, job in enumerate(jobs):
                (directory / f"job-{rank}").write_bytes(pickle.dumps((function, job)))
                processes.append(_start(directory, rank, len(jobs)))
            if not _wait(processes, directory, timeout_seconds, progress, stop):
                return []
            return [_result(directory, rank) for rank in range(len(jobs))]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for stream in (process.stdin, process.stderr):
                    if stream is not None:
                        stream.close()


def patience(budget_seconds: float) -> float:
    """Return after how many seconds workers that should have measured for so long are not waited for."""
    return _START_SECONDS + _SLOWER * budget_seconds


def _start(directory: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        RANK: str(rank),
        RANKS: str(ranks),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    errors = (directory / f"errors-{rank}").open("wb")
    try:
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                _ENTRY,
                str(directory),
                str(rank),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
    finally:
        errors.close()


def _wait(
    processes: list[subprocess.Popen[bytes]],
    directory: Path,
    timeout_seconds: float,
    progress: Progress | None,
    stop: Stop,
) -> bool:
    """Wait for all; return whether they ended before somebody asked to stop."""
    deadline = time.monotonic() + timeout_seconds
    seen = ""
    while True:
        codes = [process.poll() for process in processes]
        _check(codes, directory)
        if None not in codes:
            return True
        if stop():
            return False
        if time.monotonic() > deadline:
            raise RunError(
                f"measuring took longer than {timeout_seconds:.0f} s and was ended; "
                + _remedy_for(processes)
            )
        now = _read(directory / "progress-0")
        if progress is not None and now and now != seen:
            seen = now
            done, total = map(int, now.split())
            progress(done, total)
        time.sleep(_POLL_SECONDS)


def _remedy_for(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    for rank, process in enumerate(processes):
        if is_stopped(process.pid, os.getpid()):
            return (
                f"measuring process {rank} (process {process.pid}) was stopped, as SIGSTOP does: run the command "
                "again, and let it go on"
            )
    return "end other programs on this machine, and run the command again"


def _check(codes: Sequence[int | None], directory: Path) -> None:
    """Raise for a worker that failed, at once: the others may wait for it in vain."""
    for rank, code in enumerate(codes):
        if code:
            raise RunError(_complaint(directory, rank, code), rank=rank)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _result(directory: Path, rank: int) -> Any:
    try:
        return pickle.loads((directory / f"result-{rank}").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        raise RunError(_complaint(directory, rank, 0), rank=rank) from None


def _complaint(directory: Path, rank: int, status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"measuring process {rank} was killed by {name}; run the command again"
    lines = _read(directory / f"errors-{rank}").strip().splitlines()
    reason = lines[-1][:300] if lines else f"exit status {status}"
    return f"measuring process {rank} failed: {reason}"


def main() -> None:
    """Run one job: the entry of a worker process."""
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    gc.disable()  # looking for cycles takes a fifth of importing torch
    keep_freed_memory()
    function, job = pickle.loads((directory / f"job-{rank}").read_bytes())
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    gc.freeze()
    gc.enable()
    result = work(rank, job, directory, Reporter(directory / f"progress-{rank}"))
    (directory / f"result-{rank}").write_bytes(pickle.dumps(result))
