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
        at = 0
        while not over.wait(POLL_SECONDS):
            if watch.stop():
                (folder / "stop").touch()
            events, at = _read(folder / "events", at)
            for event in events:
                watch.step(event)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def read_events(path: Path) -> list[dict[str, float]]:
    """Return the complete lines written so far."""
    return _read(path, 0)[0]


def _read(path: Path, start: int) -> tuple[list[dict[str, float]], int]:
    """Return the complete lines from a byte on, and where the next one begins: of a million steps all lines
    are read once, not in every look."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)
