"""Ranks on CPUs let the threads of gloo finish what they have begun.

Gloo's event loop asks for a connection that another thread holds again and again (pytorch/gloo, issue
246). Where cores are shared, the loop that a message wakes often interrupts just the thread that holds
it, and asks until the scheduler's next tick: 4 ms, for some 20 us of work (decision 0083).
"""

from __future__ import annotations

import os
from contextlib import suppress


def wait_when_woken() -> bool:
    """Let the threads of this process, and those that they begin, interrupt none where they are woken: Linux's batch
    policy. Return whether that was done.

    What is woken takes an idle core, or waits for one until the next tick. Nothing is changed where the user has
    chosen a policy.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    with suppress(OSError):  # where a container forbids it, or has no /proc
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):  # one that has ended
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            return os.sched_getscheduler(0) == os.SCHED_BATCH
    return False
