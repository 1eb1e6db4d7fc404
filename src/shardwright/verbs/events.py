"""What ranks tell while they run: lines of JSON that rank 0 appends to a file, read from outside."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from shardwright.verbs.request import Watch

POLL_SECONDS = 0.2


class Events:
    """What rank 0 writes to ``folder``, a line an event. Raises OSError that names the file where its disk is full."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "events").open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def tell(self, event: Mapping[str, float]) -> None:
        """Write an event, to be read at once."""
        line = json.dumps(event).encode() + b"\n"
        try:
            while line:  # of a line that fits in part the rest is refused
                line = line[self._file.write(line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None


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
