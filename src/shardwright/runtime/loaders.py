"""What goes wrong in a loader, in one line: what was raised, where, and which worker process is gone.

torch tells of a worker that died wherever the main thread happens to be: in a collective, or while a checkpoint is
written. Here it is told where the batch is drawn that the worker owes.
"""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from types import FrameType

from torch.utils.data._utils import signal_handling

from shardwright.runtime.capture.places import model_line
from shardwright.runtime.endings import is_exhaustion

_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d[\d, ]*)\) (?P<end>[^.]*)")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in ', re.MULTILINE)
_SEEN: list[str] = []  # what torch said of workers that died, the last of them last
RESUME = "all batches before it were trained on: resume from the last checkpoint"


def expect_deaths() -> None:
    """Once torch watches its workers: note what it says of one that died, and raise nothing."""
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


def complaint(error: Exception, rank: int, where: str) -> str:
    """Return rule, values and remedy for what a loader raised at a batch."""
    if (death := _WORKER.match(str(error))) is not None:
        process = death["pid"]
        told = next((one for one in reversed(_SEEN) if process in one), str(error))
        end = (_WORKER.match(told) or death)["end"].strip()
        end += ", as the system does when memory runs out," if end.endswith("Killed") else ""
        return (
            f"a loader's workers must live to its end, but rank {rank}'s worker process {process} {end} at {where}; "
            f"{RESUME}, with fewer workers or batches fetched ahead (num_workers, prefetch_factor) where memory was short"
        )
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


def raised(error: BaseException) -> tuple[str, str, str]:
    """Return kind, words and line of what was raised, in a worker process or here."""
    kind, text = type(error).__name__, str(error)
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
