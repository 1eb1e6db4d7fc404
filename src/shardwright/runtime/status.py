"""What every rank is doing, written where the launcher can read it after the rank has died.

One small file per rank, mapped into memory: writing the current instruction costs one store, as long as the file
is in memory too. On a disk the system writes the page back again and again, and who writes it next waits: a fifth of
the step of a small model (24.9 for 20.1 ms, ext4). Also
the request to stop: the first Ctrl-C, or SIGTERM, only raises a flag, on which all ranks agree at
the end of a step, so that they can stop together and save.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STATUS_DIRECTORY = "SHARDWRIGHT_STATUS"
STATUS_FOLDER = "status"  # in that directory: of small files
LOOK_SECONDS = 0.1
_WORDS = 3  # step, instruction + 1 (0: none), stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a rank was last seen. ``instruction`` is its description, empty between steps."""

    step: int
    stage: int
    instruction: str


class StatusFile:
    """The rank's side. Without a launcher the words live in plain memory."""

    def __init__(self, rank: int) -> None:
        directory = os.environ.get(STATUS_DIRECTORY)
        self._texts: Path | None = None
        if directory is None:
            self.words = memoryview(bytearray(8 * _WORDS)).cast("q")
            return
        path = Path(directory, STATUS_FOLDER, f"{rank}.status")
        path.write_bytes(bytes(8 * _WORDS))
        self._texts = path.with_suffix(".instructions")
        with path.open("r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), 8 * _WORDS)).cast("q")

    def explain(self, texts: dict[int, str], stage: int) -> None:
        """Leave behind what the instruction numbers mean."""
        self.words[2] = stage
        if self._texts is not None:
            lines = (f"{index}\t{text}\n" for index, text in texts.items())
            self._texts.write_text("".join(lines))


def read_status(directory: Path, rank: int) -> Status | None:
    """Return what a rank was doing when it last said so, or None if it never began."""
    try:
        path = Path(directory, STATUS_FOLDER, f"{rank}.status")
        words = memoryview(path.read_bytes()).cast("q")
        lines = path.with_suffix(".instructions").read_text().splitlines()
    except (OSError, ValueError, TypeError):
        return None
    texts = dict(line.split("\t", 1) for line in lines if "\t" in line)
    instruction = texts.get(str(words[1] - 1), "") if words[1] else ""
    return Status(step=int(words[0]), stage=int(words[2]), instruction=instruction)


class Interruption:
    """Whether somebody asked to stop: the user, whose second Ctrl-C interrupts at once, or by
    SIGTERM a scheduler, which may send it more than once, by SIGHUP a terminal that is closed; or the
    launcher, by a file, since of an interruption that it alone got no rank knows."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal that asked
        self._is_asked = False
        self._file, self._looks_at = "", 0.0

    @property
    def requested(self) -> bool:
        """Whether to stop at the end of a step."""
        return self._is_asked or (bool(self._file) and self._is_told())

    def _is_told(self) -> bool:
        """Look for the file; not in every one of many short steps, of which that takes some 40 us."""
        now = time.monotonic()
        if now < self._looks_at:
            return False
        is_there = os.path.exists(self._file)
        if not is_there:
            self._looks_at = now + LOOK_SECONDS
        return is_there

    def ask(self, number: int = 0) -> None:
        """Stop at the end of a step, for a signal or without one."""
        self._is_asked, self.number = True, self.number or number

    def listen(self, *, termination: bool = False, file: Path | None = None) -> None:
        """Take over SIGINT, and SIGTERM where that asks to stop (main thread only), and look for a ``file``."""
        self._file, self._looks_at = str(file or ""), 0.0
        signal.signal(signal.SIGINT, self._note)
        if termination:
            signal.signal(signal.SIGTERM, self._note_termination)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
                signal.signal(signal.SIGHUP, self._note_termination)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            raise KeyboardInterrupt
        self.ask(number)

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        self.ask(number)


INTERRUPTION = Interruption()
