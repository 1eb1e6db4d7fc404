"""Imported by the fork server, and by nobody else: it outlives SIGTERM, and goes with its clients.

A scheduler's SIGTERM reaches every process of a job. The ranks save before they end, so what they
were forked from, with which the kernel ends them, must wait for them.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_SERVER = os.getpid()


def _stay(number: int, frame: FrameType | None) -> None:
    del frame
    if os.getpid() != _SERVER:  # what was forked ends as ever
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _stay)
