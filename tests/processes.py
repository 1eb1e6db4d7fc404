"""Whether processes run, as Linux tells it, and waiting for what comes about."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def states(process: int) -> list[str]:
    """Return the state of every thread of a process, of none where it is gone and reaped.

    Of a process that is killed the first thread may be gone while others still answer, or hold its files and
    the locks on them.
    """
    found: list[str] = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # gone since it was listed
            found.append(thread.read_text().rpartition(") ")[2][0])
    return found


def is_alive(process: int) -> bool:
    """Whether any of a process runs, or may go on; one that nobody has reaped does not."""
    return any(state not in "ZX" for state in states(process))


def wait_until(reached: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait until something is so; return whether it is."""
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(reached())
