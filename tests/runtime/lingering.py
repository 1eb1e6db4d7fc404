"""What ranks do whose end a test waits for: nothing. Imports as little as they need."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from shardwright.runtime.status import INTERRUPTION, StatusFile


def linger(folder: str) -> None:
    """Say which process this rank is, and do nothing until it is ended."""
    _say(folder)
    time.sleep(1000)


def heed(folder: str) -> None:
    """Say which process this rank is, and end once it is asked to, as training does."""
    StatusFile(dist.get_rank()).explain({}, 0)  # as an executor does
    _say(folder)
    while not INTERRUPTION.requested:
        time.sleep(0.01)


def _say(folder: str) -> None:
    fresh = Path(folder, f"{dist.get_rank()}.new")
    fresh.write_text(str(os.getpid()))
    fresh.rename(Path(folder, str(dist.get_rank())))
