"""Processes that are stopped (SIGSTOP, a Ctrl-Z elsewhere): they neither end nor answer, so whoever waits
for them waits for ever. Linux tells of them in /proc; elsewhere nobody is seen to be stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shardwright.errors import RunError
from shardwright.runtime.status import read_status

LOOK_SECONDS = 0.5


def is_stopped(process: int, parent: int) -> bool:
    """Whether a process is stopped, and that child of its parent: numbers are used again."""
    state, above = _state(process)
    return state == "T" and above == parent


def end_stopped_parent() -> None:
    """End this process's parent if it is stopped."""
    if _state(parent := os.getppid())[0] == "T":
        end(parent)


def _state(process: int) -> tuple[str, int]:
    """Return the state of a process as Linux writes it, and its parent."""
    with suppress(OSError, ValueError):
        state, above, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        return state, int(above)
    return "", 0


def stopped_neighbours() -> tuple[int, ...]:
    """Return the processes of this one's parent that are stopped."""
    parent = os.getppid()
    return tuple(number for number in children(parent) if is_stopped(number, parent))


def children(process: int) -> tuple[int, ...]:
    """Return the processes that a process has started."""
    numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return tuple(number for number in numbers if _state(number)[1] == process)


class Stopped(Exception):
    """Whoever wanted the ranks asked to stop before they were done."""


@dataclass(frozen=True, slots=True)
class Stops:
    """How ranks are stopped before they are done: at once by who interrupts the launcher, or ``asks``, until
    all have built an executor. From then on they ``heed`` ``INTERRUPTION`` and end by themselves, at SIGTERM
    only where each ``saves`` first.
    """

    asks: Callable[[], bool] = lambda: False
    heed: bool = True
    saves: bool = False

    def ask(self, directory: Path, ranks: int) -> bool:
        """Whether somebody asks for their end, whom they do not heed."""
        return self.asks() and not self.are_heeded(directory, ranks)

    def are_heeded(self, directory: Path, ranks: int) -> bool:
        """Whether all ranks look at ``INTERRUPTION``. While one does not, no step ends, and nothing is lost."""
        return self.heed and all(read_status(directory, rank) for rank in range(ranks))


class Patience:
    """Ends processes that are seen stopped for so many seconds, and knows of which; and all but the first,
    or that where it is alone, once somebody asks for it.

    Looks are counted, not the clock: while everything is stopped, as by Ctrl-Z or by a machine that
    sleeps, nobody looks.
    """

    def __init__(self, seconds: float, asks: Callable[[], bool] = lambda: False) -> None:
        self.seconds = seconds
        self._asks, self._is_asked = asks, False
        self._ended = ""
        self._watched: dict[int, tuple[int, str]] = {}
        self._looks: dict[int, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def watch(self, process: int, parent: int, what: str) -> None:
        """Look at a process from now on; ``what`` it is, for the message."""
        self._watched[process] = parent, what

    def give_up(self) -> None:
        """End who is stopped from now on at once."""
        self.seconds = 0.0

    def error(self) -> Exception | None:
        """Return what there is to say once it has ended somebody."""
        if self._is_asked:
            return Stopped()
        if not self._ended:
            return None
        return RunError(
            f"all processes of a run must go on, but {self._ended} was stopped, as SIGSTOP does, for "
            f"{self.seconds:.0f} s; all ranks were ended. Stop the launcher and its ranks together, or "
            "continue in time (kill -CONT), and resume from the last checkpoint"
        )

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            if self._watched and self._asks():
                self._is_asked = True
                self._end_all()
                return
            seen = set(self._seen())
            self._looks = {process: self._looks.get(process, 0) + 1 for process in seen}
            for process, looks in self._looks.items():
                if looks * LOOK_SECONDS >= self.seconds:
                    self._ended = self._ended or f"{self._watched[process][1]} (process {process})"
                    end(process)

    def _end_all(self) -> None:
        first, *others = tuple(self._watched)
        for process in others or [first]:
            if _state(process)[1] in (0, self._watched[process][0]):  # 0: where nobody can tell
                end(process)

    def _seen(self) -> Iterator[int]:
        for process, (parent, _) in tuple(self._watched.items()):
            if is_stopped(process, parent):
                yield process


def end(process: int) -> None:
    """End a process, unless it has ended."""
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
