"""Imported by the fork server, and by nobody else: it outlives SIGTERM and SIGHUP, and goes with its
clients.

A scheduler's SIGTERM, and a closed terminal's SIGHUP, reach every process of a job. The ranks save before they end, so what they
were forked from, with which the kernel ends them, must wait for them.
"""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

from shardwright.runtime.lifeline import die_with_thread

_SERVER, _CLIENT = os.getpid(), os.getppid()
LOOK_SECONDS = 1.0


def _stay(number: int, frame: FrameType | None) -> None:
    del frame
    if os.getpid() != _SERVER:  # what was forked ends as ever
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


# Ctrl-C is for its clients. Once it serves, a fork server ignores it by itself; while it imports, it would
# tell of it with a traceback.
def _ignore(*_: object) -> None:
    if os.getpid() != _SERVER:  # what was forked is interrupted as ever
        raise KeyboardInterrupt


for one in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(one) is signal.SIG_DFL:
        signal.signal(one, _stay)
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _ignore)


# The fork server ends when nobody holds a pipe that its children hold, too, until they know better. One
# that is stopped before keeps it alive, and itself by that; and while it imports, it looks at no pipe. So
# the server also looks for its client, and what it forks dies with it from the first moment on.
def _look(*_: object) -> None:
    if os.getpid() == _SERVER and os.getppid() != _CLIENT:
        os._exit(0)


def _forked() -> None:
    if os.getppid() == _SERVER:  # not what its children fork
        gc.freeze()  # what is inherited stays anyhow: collections need not visit it, nor copy its pages
        gc.enable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        die_with_thread()


signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)  # no child inherits it
os.register_at_fork(before=_look, after_in_child=_forked)

gc.disable()  # looking for cycles takes a fifth of importing torch
