"""Where the time of this process goes: at work, waiting for a core, or blocked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Account:
    """Seconds of a stretch of work, without those in which other processes had the core, and those of processors."""

    own: float = 0.0
    work: float = 0.0

    @property
    def blocked(self) -> float:
        """Seconds in which nobody worked: storage, the network or a clock was waited for."""
        return max(0.0, self.own - self.work)


@contextlib.contextmanager
def accounting() -> Iterator[Account]:
    """Measure what is done inside, by this process and those that it started."""
    account = Account()
    wall, work, waited = time.perf_counter(), _work(), delay()
    yield account
    account.own = time.perf_counter() - wall - (delay() - waited)
    account.work = _work() - work


def _work() -> float:
    """Return the seconds of processors that this process and its living descendants have used."""
    return time.process_time() + living()


def living() -> float:
    """Return the seconds of processors that living descendants of this process have used."""
    return sum(map(_used, _descendants(os.getpid())))


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
