"""Where the time of this process goes: at work, waiting for a core, or blocked."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_SLEEPS, _MOST_SLEEP = 16, 0.01


@dataclass(slots=True)
class Account:
    """Seconds of a stretch of work, without those in which other processes had the core, and those of processors;
    how often it was waited."""

    own: float = 0.0
    work: float = 0.0
    waits: float = 0

    @property
    def blocked(self) -> float:
        """Seconds in which nobody worked: storage, the network or a clock was waited for."""
        return max(0.0, self.own - self.work)


@contextlib.contextmanager
def accounting(wait: float = 0.0) -> Iterator[Account]:
    """Measure what is done inside, by this process and those that it started; what this thread waits for takes so
    many seconds of processors each time, which are no work."""
    account = Account()
    wall, waits, work, waited = time.perf_counter(), _waits(), _work(wait), delay()
    yield account
    account.own = time.perf_counter() - wall - (delay() - waited)
    account.work = _work(wait) - work
    account.waits = _waits() - waits


def worked(wait: float) -> float:
    """Return the seconds of processors that this process has used, but for waiting."""
    return time.process_time() - wait * _waits()


def cost_of_waiting(seconds: float) -> float:
    """Return what to wait so long takes of processors: to fall asleep and wake up, what threads that have nothing to do
    with it do meanwhile, and what comes next takes longer with cold caches."""
    spent: list[float] = []
    for pause in (0.0, min(seconds, _MOST_SLEEP)):
        begin = time.process_time()
        for _ in range(_SLEEPS):
            time.sleep(pause)
            torch.tensor([0.0])
        spent.append(time.process_time() - begin)
    return max(0.0, spent[1] - spent[0]) / _SLEEPS


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _work(wait: float) -> float:
    """Return the seconds of processors that this process and its living descendants have used, but for waiting."""
    return worked(wait) + sum(map(_used, _descendants(os.getpid())))


def _descendants(process: int) -> Iterator[int]:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, _words(path)):
            yield child
            yield from _descendants(child)


def _used(process: int) -> float:
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(words[0]) * 1e-9 for path in tasks if (words := _words(path)))


def delay() -> float:
    """Return how long this thread was ready to run and had no core, 0 where the system does not tell."""
    words = _words(Path("/proc/thread-self/schedstat"))
    return int(words[1]) * 1e-9 if len(words) > 1 else 0.0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it ended meanwhile, or the system has no such file
        return []
