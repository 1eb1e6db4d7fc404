"""Where threads of ranks on CPUs run, and whom they interrupt.

Each rank of a host keeps to cores of its own: what moves from core to core leaves its caches behind, and
a message of one rank waits while the other computes on the core that its thread was woken on (decision 0085).

Gloo's event loop asks for a connection that another thread holds again and again (pytorch/gloo, issue
246). Where cores are shared, the loop that a message wakes often interrupts just the thread that holds
it, and asks until the scheduler's next tick: 4 ms, for some 20 us of work (decision 0083).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

RANK, RANKS = "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # as torchrun names them
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
# The cores that the ranks of this host share, and this rank's share of them; of the process, as affinity is.
_HOSTS, _OWN = set[int](), set[int]()


def settle(environment: Mapping[str, str] = os.environ) -> None:
    """Let all threads of this rank, and those that they begin, wait where they are woken, on cores of its own."""
    wait_when_woken()
    with suppress(ValueError):  # whoever started the rank did not say which of how many it is
        keep_to_share(int(environment.get(RANK, "")), int(environment.get(RANKS, "")))


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
            for thread in _threads():
                with suppress(OSError):  # one that has ended
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            return os.sched_getscheduler(0) == os.SCHED_BATCH
    return False


def keep_to_share(rank: int, ranks: int) -> bool:
    """Keep this process to its share of the host's logical cores, whole cores first; return whether that was done.

    What it forks from then on, as a loader's workers, has all cores again: they are no part of what ranks wait for
    each other with. Nothing is changed where ranks outnumber cores, or where somebody has chosen some cores already.
    """
    if not hasattr(os, "sched_setaffinity") or not 0 <= rank < ranks or ranks == 1:
        return False
    with suppress(OSError):
        allowed = os.sched_getaffinity(0)
        if ranks <= len(allowed) == os.cpu_count():
            mine = share(allowed, rank, ranks)
            for thread in _threads():
                with suppress(OSError):
                    os.sched_setaffinity(thread, mine)
            _HOSTS.update(allowed)
            _OWN.update(mine)
            os.register_at_fork(after_in_child=_leave_share)
            # Of more workers than this rank has cores; they have the host's.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            return True
    return False


def of_host() -> set[int]:
    """Return the cores on which this process and what it begins may run, those of all ranks that share them."""
    if hasattr(os, "sched_getaffinity"):
        return _HOSTS or os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def leave_share() -> None:
    """Let this thread run on all cores of the host again; not where somebody has chosen others since."""
    with suppress(OSError):
        if _OWN and os.sched_getaffinity(0) == _OWN:
            os.sched_setaffinity(0, _HOSTS)


def _leave_share() -> None:
    leave_share()
    _HOSTS.clear()  # a child is no rank: what it chooses stays with its own children
    _OWN.clear()


def give_way() -> None:
    """Let a thread that waits for this one's core have it now, not at the next tick: of a rank that has just told gloo
    to send something and goes on computing (decision 0085)."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def share(cores: Iterable[int], rank: int, ranks: int) -> set[int]:
    """Return a rank's part of logical cores: neighbours, so that those of one core or socket stay together."""
    ordered = sorted(cores, key=lambda core: (_place(core), core))
    count = len(ordered)
    return set(ordered[rank * count // ranks : (rank + 1) * count // ranks])


def _place(core: int) -> tuple[int, int]:
    """Return the socket of a logical core, and its core there."""
    try:
        socket, inside = (
            int(Path(_TOPOLOGY.format(core, name)).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core
    return socket, inside


def _threads() -> list[int]:
    return [int(one) for one in os.listdir("/proc/self/task")]
