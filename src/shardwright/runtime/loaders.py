"""What goes wrong in a loader, in one line: what was raised, where, and which worker process is gone.

torch tells of a worker that died wherever the main thread happens to be: in a collective, or while a checkpoint is
written. Here it is told where the batch is drawn that the worker owes.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from torch.utils.data._utils import signal_handling

from shardwright.errors import said
from shardwright.runtime.capture.places import model_line
from shardwright.runtime.endings import is_exhaustion

_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d[\d, ]*)\) (?P<end>[^.]*)")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in ', re.MULTILINE)
_SEEN: list[str] = []  # what torch said of workers that died, the last of them last
_CAUSES = {
    "Killed": ", as the system does when memory runs out,",
    "Bus error": ", as it is where shared memory (/dev/shm) is full,",
}
_ENDING = 0.5  # seconds that a process takes to end at most
LIVES = "a loader's workers must live to its end, but"
FEWER = (
    "fewer workers or batches fetched ahead (num_workers, prefetch_factor) where memory was short"
)
RESUME = "all batches before it were trained on: resume from the last checkpoint"


def expect_deaths() -> None:
    """Note what torch says of workers that die, from now on, and raise nothing."""
    signal_handling._set_SIGCHLD_handler()  # torch's, which it sets with its first worker
    _SEEN.clear()
    theirs = signal.getsignal(signal.SIGCHLD)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or getattr(theirs, "__module__", "") != signal_handling.__name__:
        return

    def note(number: int, frame: FrameType | None) -> None:
        try:
            theirs(number, frame)  # type: ignore[operator]
        except RuntimeError as error:
            _SEEN.append(str(error))

    signal.signal(signal.SIGCHLD, note)


def complaint(error: BaseException, rank: int, where: str) -> str:
    """Return rule, values and remedy for what a loader raised at a batch."""
    if gone := death(error):
        return f"{LIVES} rank {rank}'s {gone} at {where}; {RESUME}, with {FEWER}"
    kind, words, place = raised(error)
    at = f", at {place}" if place else ""
    remedy = (
        "with fewer workers, smaller samples, or more memory"
        if is_exhaustion(error)
        else "once the loader gives that batch"
    )
    return (
        f"a loader must go on to its end, but rank {rank}'s raised {kind} at {where}: {words}{at}; "
        f"{RESUME} {remedy}"
    )


def death(error: BaseException) -> str:
    """Return which worker process an error says is gone, and how it ended; nothing for an error that says no such thing."""
    found = _WORKER.match(said(error)) or _broken_off(error)
    if found is None:
        return ""
    told = next((one for one in reversed(_SEEN) if found["pid"] in one), said(error))
    end = (_WORKER.match(told) or found)["end"].strip()
    cause = next((why for sign, why in _CAUSES.items() if end.endswith(sign)), "")
    return f"worker process {found['pid']} {end}{cause}"


def _broken_off(error: BaseException) -> re.Match[str] | None:
    """Return what torch says of a worker that is gone, where a batch of it cannot be received."""
    if not isinstance(error, (ConnectionError, EOFError)) or "\nOriginal Traceback" in said(error):
        return None
    deadline = time.monotonic() + _ENDING
    while not _SEEN and time.monotonic() < deadline:  # its pipes close before it is gone
        try:
            signal_handling._error_if_any_worker_fails()
        except RuntimeError as told:
            _SEEN.append(str(told))
        else:
            time.sleep(_ENDING / 20)
    return _WORKER.match(_SEEN[-1]) if _SEEN else None


def raised(error: BaseException) -> tuple[str, str, str]:
    """Return kind, words and line of what was raised, in a worker process or here."""
    kind, text = type(error).__name__, said(error)
    begin, _, trace = text.partition("\nOriginal Traceback")
    if not trace:
        return kind, " ".join(text.split()) or "no reason given", model_line(error)
    caught = re.match(r"'?Caught (\w+)", begin)
    kind = caught[1] if caught else kind
    *_, words = re.split(rf"^[\w.]*\b{kind}(?:: |$)", trace, flags=re.MULTILINE)
    frames = _FRAME.findall(trace)
    own = [one for one in frames if "-packages" not in one[0]] or frames
    place = ":".join((Path(own[-1][0]).name, own[-1][1])) if own else ""
    return kind, " ".join(words.split()) or "no reason given", place
