"""What measuring processes do in tests: imported by each of them, so it imports little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stopped(rank: int, job: object, directory: Path, report: object) -> None:
    """Be stopped alone."""
    del rank, job, directory, report
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupted(rank: int, job: object, directory: Path, report: object) -> str:
    """Be told by Ctrl-C, as every process of a terminal is."""
    del rank, job, directory, report
    os.kill(os.getpid(), signal.SIGINT)
    return "measured"


def endless(rank: int, job: object, directory: Path, report: object) -> None:
    """Say which process this is, and measure for ever."""
    del rank, job, report
    fresh = Path(os.environ["ENDLESS_FILE"] + ".new")
    fresh.write_text(str(os.getpid()))
    fresh.rename(os.environ["ENDLESS_FILE"])
    time.sleep(1000)


def killed_or_waiting(rank: int, job: object, directory: Path, report: object) -> None:
    """Be killed, or wait for who was."""
    del job, directory, report
    os.kill(os.getpid(), signal.SIGHUP) if rank else time.sleep(1000)
