"""Imported by the fork server, and by nobody else: it outlives SIGTERM and SIGHUP, and goes with its
clients.

A scheduler's SIGTERM, and a closed terminal's SIGHUP, reach every process of a job. The ranks save before they end, so what they
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


for one in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(one) is signal.SIG_DFL:
        signal.signal(one, _stay)
