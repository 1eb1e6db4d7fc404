"""No rank outlives who watches it: a process ends with its parent, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

from shardwright.runtime.stopped import end_stopped_parent

_PR_SET_PDEATHSIG = 1  # of Linux' prctl.h
POLL_SECONDS = 0.5


def die_with_launcher() -> None:
    """End this process, which a fork server made, as soon as the process that asked for it is gone.

    Twice over: the kernel ends it with the fork server, even where it is stopped or stuck in C; and
    a thread watches the launcher's end of a pipe, since the fork server may have other clients.
    """
    # The fork server ends when nobody holds this pipe. Its children do, for servers of their own:
    # one that is stopped would keep it, and so itself, alive.
    held = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    parent = multiprocessing.parent_process()
    if parent is not None:

        def wait() -> None:
            multiprocessing.connection.wait([parent.sentinel])
            end_stopped_parent()  # the fork server, where it cannot see that end

        die_when(wait)


def die_with_agent() -> None:
    """End this rank of torchrun as soon as its parent, the agent, is gone, now where it is gone already.

    To be called before anything that takes long: a rank whose agent is gone would wait in C++ for ranks
    and a store that never come.
    """
    _watch_agent(os.getpid())


@cache
def _watch_agent(process: int) -> None:
    """Watch once in a process: what it forks has no threads yet."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)

    die_when(wait)
    # The agent starts ranks in sessions of their own. Where it is gone, somebody adopted this one; what a
    # script in between started has another leader.
    if os.getsid(0) == process and not _may_be_agent(parent):
        sys.exit(
            f"error: a rank ends with the agent of torchrun that started it, but its parent, process {parent}, "
            "is none; start all ranks again"
        )


def _may_be_agent(process: int) -> bool:
    """Whether torch is loaded in a process, as it is in agents, or nobody can tell."""
    if not Path("/proc/self/maps").exists():
        return True
    try:
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()
    except OSError:  # gone meanwhile, or another user's
        return False


def die_with_thread() -> None:
    """On Linux, have the kernel end this process with the parent's thread that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def die_with_pipe() -> None:
    """End this process as soon as the other end of its standard input closes."""

    def wait() -> None:
        # The descriptor, not sys.stdin: its lock would be held when the interpreter shuts down.
        while os.read(0, 1):
            pass

    die_when(wait)


def die_when(wait: Callable[[], object]) -> None:
    """End this process once ``wait`` returns, and on Linux with the parent's thread that started it."""
    die_with_thread()

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
