"""How a rank ends that nobody watches but torchrun: one line on standard error, and soon.

torchrun's agent shows what its ranks print, and gives every rank half a minute to end by itself. A
rank that is stopped (SIGSTOP) would use all of it, so who gave up waiting for it wakes it.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
from contextlib import suppress
from types import TracebackType

import torch

from shardwright.errors import ShardwrightError, said
from shardwright.runtime.cores import RANK
from shardwright.runtime.lifeline import die_with_agent
from shardwright.runtime.stopped import stopped_neighbours

# gloo's words, where it waits and where another message's wait closed the connection; NCCL's; the
# store's.
_LATE = ("Timed out waiting", "Application timeout", "timed out after", "Wait timeout")
INTERRUPTED = "interrupted; the last checkpoint is unharmed"


class _Ending:
    """What this process does when it ends."""

    def __init__(self) -> None:
        self.is_prepared = False
        self.stopped: tuple[int, ...] = ()
        self.is_interrupted = False

    def last(self) -> None:
        """Wake who was stopped. Interrupted, end by that signal, as Python does, but at once: threads
        of a message under way would be destroyed while they run, which aborts with a line of its own."""
        for process in self.stopped:
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)
        if self.is_interrupted:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


_ENDING = _Ending()


def prepare_ending() -> None:
    """Under torchrun: end with the agent, and in one line. To be called before what else ends at
    exit is made, and again when torch.distributed has taken over how errors are shown."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if not _ENDING.is_prepared:
        _ENDING.is_prepared = True
        die_with_agent()
        atexit.register(_ENDING.last)  # the first registered is the last to run
    hook = sys.excepthook
    if hook is not sys.__excepthook__ and not hook.__module__.startswith("torch."):
        return  # the script shows errors in a way of its own

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ShardwrightError):
            sys.stderr.write(f"error: {error}\n")
        elif not issubclass(kind, KeyboardInterrupt):
            hook(kind, error, trace)
        else:
            _ENDING.is_interrupted = True
            if os.environ.get(RANK, "0") == "0":  # all ranks got the same signal
                sys.stderr.write(f"error: {INTERRUPTED}\n")

    sys.excepthook = show


def cause(error: Exception, rank: int, where: str) -> str:
    """Say what ended a step of a rank, where that was, and what to do."""
    if is_exhaustion(error):
        return (
            f"rank {rank} is out of memory {where}; plan for less (--memory-limit, a "
            "smaller global batch, more devices) and resume from the last checkpoint, which "
            "any plan can load"
        )
    return lateness(error, rank, where) or (
        f"rank {rank} failed {where}: {error}; "
        "the last checkpoint is unharmed: resume from it once the cause is removed"
    )


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error means that memory ran out: of Python, of a GPU, or of torch's CPU
    allocator, which has no class of its own for it."""
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        word in said(error) for word in words
    )


def lateness(error: Exception, rank: int, where: str) -> str:
    """Say that other ranks did not answer in time, if that is what an error means, else nothing.

    Neighbours that are stopped are named; under torchrun they are woken when this process ends.
    """
    if not any(word in str(error) for word in _LATE):
        return ""
    _ENDING.stopped = stopped_neighbours()
    listed = ", ".join(map(str, _ENDING.stopped))
    who = f"process {listed} on this host is stopped" if listed else "one is stopped, stuck or gone"
    reason = re.sub(r"^\[\S*\] ", "", str(error).strip().splitlines()[0])
    return (
        f"rank {rank} waited for other ranks longer than a message may take, {where}: {reason}; "
        f"{who}: mend that, or allow more time (join_world, RunOptions), and resume from the last "
        "checkpoint"
    )
