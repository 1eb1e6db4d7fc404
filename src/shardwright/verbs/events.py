"""What ranks tell while they run: lines of JSON that rank 0 appends to a file, read from outside."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from shardwright.verbs.request import Watch

POLL_SECONDS = 0.2


@contextlib.contextmanager
def following(folder: Path, watch: Watch) -> Iterator[None]:
    """Show every event that rank 0 writes to ``folder`` while the block runs, and pass on the wish
    to stop."""
    over = threading.Event()

    def follow() -> None:
        shown = 0
        while not over.wait(POLL_SECONDS):
            if watch.stop():
                (folder / "stop").touch()
            lines = read_events(folder / "events")
            for event in lines[shown:]:
                watch.step(event)
            shown = len(lines)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_events(path: Path) -> list[dict[str, float]]:
    """Return the complete lines written so far."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
