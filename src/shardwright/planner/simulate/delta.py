"""Simulating a changed Program again from where the change can first be felt, until it no longer is.

FlexFlow (Jia et al., MLSys 2019) repairs a timeline by a queue of tasks whose ready times may have
changed; that revisits tasks, and its order is not unique where ready times are equal. Here a run is
*restarted* from a checkpoint before the change can have begun, so that every instruction is visited
at most once, and *stops* where it coincides with the old run: same clock, same instructions under
way with the same work left, same ones to come. Times are then equal to the last bit to those of a
full simulation. Coinciding means at equal times: adding a constant to times rounds differently.

Two Programs are compared instruction by instruction from both ends; what lies between the common
beginning and the common end is the change.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.compiled import compiled
from shardwright.planner.simulate import full
from shardwright.planner.simulate.full import Floats, Ints, Queues, Times, Wiring

# Of one run, how many checkpoints are kept, and for how small a Program none are.
CHECKPOINTS = 24
FEWEST_INSTRUCTIONS = 32
NEVER = np.zeros(0, dtype=np.int64)


class Change(NamedTuple):
    """Instructions before ``first`` are alike; those of the new Program from ``stop`` on are those
    of the old one from ``old_stop`` on, of which ``reach`` is the last to wait for others than
    these."""

    first: int
    stop: int
    old_stop: int
    reach: int


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Job:
    """What is simulated: a Program's wiring and durations.

    ``computes`` says which resources compute; ``names`` are the resources' names.
    """

    wiring: Wiring
    seconds: Floats
    computes: NDArray[np.bool_]
    names: tuple[str, ...]
    num_groups: int
    slowdown: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Run:
    """A finished simulation, and what it takes to simulate a changed Program from it.

    ``checkpoints`` are (time, queues) in order; ``needed_until`` is, per instruction, the last one
    that waits for it, where there is no slow-down. ``visited`` instructions were really simulated.
    """

    job: Job
    times: Times
    checkpoints: tuple[tuple[float, Queues], ...]
    needed_until: Ints
    visited: int


def run(job: Job) -> Run:
    """Simulate from the beginning."""
    if job.slowdown == 1.0:
        times = full.relax(job.wiring, job.seconds, len(job.names))
        return _relaxed(job, times, len(job.seconds))
    progress = full.begin(job.wiring, job.computes, job.num_groups)
    return _shared(job, progress, 0.0, None)


def run_again(before: Run, job: Job) -> Run:
    """Simulate a Program that differs from the one simulated before; equal to ``run`` in all bits."""
    old = before.job
    frames = [(one.names, one.num_groups, one.slowdown) for one in (old, job)]
    if frames[0] != frames[1]:
        return run(job)
    change = Change(*compare(old.wiring, old.seconds, job.wiring, job.seconds))
    if job.slowdown == 1.0:
        start, end, cause, visited = relax_change(
            job.wiring, job.seconds, before.times, before.needed_until, change, len(job.names)
        )
        return _relaxed(job, (start, end, cause), visited)
    progress = full.begin(job.wiring, job.computes, job.num_groups)
    for now, queues in reversed(before.checkpoints):
        restored = _restart(progress, queues, now, before, job, change.first)
        if restored >= 0:
            return _shared(job, progress, now, _Old(before, change, restored))
    return _shared(job, progress, 0.0, _Old(before, change, 0))


def _relaxed(job: Job, times: Times, visited: int) -> Run:
    needed = last_needs(job.wiring, len(job.names))
    return Run(job=job, times=times, checkpoints=(), needed_until=needed, visited=visited)


@compiled
def compare(
    old: Wiring, old_seconds: Floats, new: Wiring, new_seconds: Floats
) -> tuple[int, int, int, int]:
    """Find the change between two Programs whose resources and groups have the same numbers."""
    count, old_count = len(new_seconds), len(old_seconds)
    first = 0
    while first < min(count, old_count) and _alike(
        old, old_seconds, first, new, new_seconds, first, first
    ):
        first += 1
    stop, old_stop = count, old_count
    while stop > first and old_stop > first:
        if not _alike(old, old_seconds, old_stop - 1, new, new_seconds, stop - 1, first):
            break
        stop, old_stop = stop - 1, old_stop - 1
    for index in range(count - 1, stop - 1, -1):
        for entry in range(new.offset[index], new.offset[index + 1]):
            if first <= new.predecessor[entry] < stop:
                return first, stop, old_stop, index
    return first, stop, old_stop, stop - 1


@compiled
def _alike(
    old: Wiring, old_seconds: Floats, one: int, new: Wiring, new_seconds: Floats, other: int,
    first: int,
) -> bool:  # fmt: skip
    """Whether two instructions agree, predecessors from ``first`` on counted from themselves."""
    if old_seconds[one] != new_seconds[other] or old.resource[one] != new.resource[other]:
        return False
    length = old.offset[one + 1] - old.offset[one]
    if old.group[one] != new.group[other] or new.offset[other + 1] - new.offset[other] != length:
        return False
    for entry in range(length):
        here = old.predecessor[old.offset[one] + entry]
        there = new.predecessor[new.offset[other] + entry]
        if (here >= first) != (there >= first):
            return False
        if here != there - (other - one if here >= first else 0):
            return False
    return True


@compiled
def last_needs(wiring: Wiring, num_resources: int) -> Ints:
    """Return, per instruction, the last one that waits for it, by its queue or otherwise."""
    count = len(wiring.resource)
    needed = np.full(count, -1, dtype=np.int64)
    last = np.full(num_resources, -1, dtype=np.int64)
    for index in range(count):
        for entry in range(wiring.offset[index], wiring.offset[index + 1]):
            needed[wiring.predecessor[entry]] = index
        before = last[wiring.resource[index]]
        if before >= 0:
            needed[before] = max(needed[before], index)
        last[wiring.resource[index]] = index
    return needed


@compiled
def relax_change(
    wiring: Wiring, seconds: Floats, old: Times, needed: Ints, change: Change, num_resources: int
) -> tuple[Floats, Floats, Ints, int]:
    """Without slow-down: begin at the change, and end where nothing that differs is waited for."""
    first, stop, old_stop, reach = change
    old_start, old_end, old_cause = old
    count, shift = len(seconds), stop - old_stop
    start, end = np.empty(count), np.empty(count)
    cause = np.empty(count, dtype=np.int64)
    start[:first], end[:first], cause[:first] = (
        old_start[:first], old_end[:first], old_cause[:first],
    )  # fmt: skip
    last = np.full(num_resources, -1, dtype=np.int64)
    for index in range(first):
        last[wiring.resource[index]] = index
    # The queues of the common end begin behind whatever ran there before, old and new.
    seen = np.zeros(num_resources, dtype=np.bool_)
    for index in range(stop, count):
        if not seen[wiring.resource[index]]:
            seen[wiring.resource[index]] = True
            reach = max(reach, index)
    for index in range(first, count):
        if index > reach:
            start[index:], end[index:] = old_start[index - shift :], old_end[index - shift :]
            for later in range(index, count):
                known = old_cause[later - shift]
                cause[later] = known + shift if known >= old_stop else known
            return start, end, cause, index - first
        time, latest = full.latest_end(wiring, end, last[wiring.resource[index]], index)
        start[index], cause[index] = time, latest
        end[index] = time + seconds[index]
        last[wiring.resource[index]] = index
        if index >= stop and end[index] != old_end[index - shift]:
            reach = max(reach, needed[index - shift] + shift)
    return start, end, cause, count - first


class _Old(NamedTuple):
    """The run to compare with, the change, and how many instructions had begun where it restarts."""

    run: Run
    change: Change
    restored: int


def _shared(job: Job, progress: full.Progress, now: float, old: _Old | None) -> Run:
    """Go on from ``now``, keeping checkpoints, until done or as in an old run."""
    count = len(job.seconds)
    step = count + 1 if count < FEWEST_INSTRUCTIONS else count // CHECKPOINTS + 1
    known = () if old is None else old.run.checkpoints
    checkpoints = [(time, _moved(saved, progress)) for time, saved in known if time <= now]
    moments = [pair for pair in known if pair[0] > now]
    restored = 0 if old is None else old.restored
    while now < np.inf:
        until = moments[0][0] if moments else np.inf
        now = full.go_on(job.wiring, job.seconds, progress, job.slowdown, (now, until, step))
        met = old if now == until < np.inf else None
        if met is not None and _coincides(progress, moments[0][1], met.change):
            begun = _take_over(progress, now, met.run, met.change)
            shift = met.change.stop - met.change.old_stop
            checkpoints += [(t, _moved(saved, progress, shift)) for t, saved in moments]
            return _run(job, progress, checkpoints, begun - restored)
        if now < np.inf:
            checkpoints.append((now, progress.queues.copy()))
        moments = [pair for pair in moments if pair[0] > now]
    return _run(job, progress, checkpoints, count - restored)


def _run(
    job: Job, progress: full.Progress, checkpoints: list[tuple[float, Queues]], visited: int
) -> Run:
    times = (progress.start, progress.end, progress.cause)
    kept = tuple(checkpoints[:: len(checkpoints) // (2 * CHECKPOINTS) + 1])
    return Run(job=job, times=times, checkpoints=kept, needed_until=NEVER, visited=visited)


def _restart(
    progress: full.Progress, saved: Queues, now: float, before: Run, job: Job, first: int
) -> int:
    """Put a new simulation where the old one was; return how many instructions have begun there,
    or -1 where one that changed may have.

    One that has not begun must be waiting still, for its queue or for another.
    """
    started, ended, causes = before.times
    queues, running = progress.queues, saved["running"]
    room, ahead = queues["stop"] - queues["begin"], saved["place"] - saved["begin"]
    done = np.zeros(len(job.seconds), dtype=np.bool_)
    done[:first] = ended[:first] < now
    if (running >= first).any() or (ahead > room).any() or done.sum() != ahead.sum():
        return -1
    waiting = _waiting(job.wiring, done)
    idle = np.flatnonzero((running < 0) & (ahead < room))
    heads = progress.entries[queues["begin"][idle] + ahead[idle]]
    if ((waiting[heads] == 0) & (heads >= first)).any():
        return -1
    queues[:] = _moved(saved, progress)
    progress.followers.waiting[:] = waiting
    finished = np.flatnonzero(done)
    begun = np.append(finished, running[running >= 0])
    progress.start[begun], progress.cause[begun] = started[begun], causes[begun]
    progress.end[finished] = ended[finished]
    full.relink(job.wiring, progress)
    return len(begun)


def _waiting(wiring: Wiring, done: NDArray[np.bool_]) -> Ints:
    """Return how many predecessors each instruction waits for still."""
    undone = np.concatenate([[0], np.cumsum(~done[wiring.predecessor])])
    return undone[wiring.offset[1:]] - undone[wiring.offset[:-1]]


def _coincides(progress: full.Progress, saved: Queues, change: Change) -> bool:
    """Whether a simulation is where the old one was, with only the common end left to do."""
    queues, shift = progress.queues, change.stop - change.old_stop
    left, busy = queues["stop"] - queues["place"], saved["running"] >= 0
    alike = left == saved["stop"] - saved["place"]
    alike &= queues["running"] == np.where(busy, saved["running"] + shift, -1)
    for name in ("remaining", "since", "stretch", "finish"):
        alike &= (queues[name] == saved[name]) | ~busy
    heads = progress.entries[queues["place"][left > 0]]
    return bool(alike.all() and (heads >= change.stop).all())


def _take_over(progress: full.Progress, now: float, before: Run, change: Change) -> int:
    """Copy what the old run did from here on; return how many instructions had begun."""
    start, end, cause = before.times
    shift, count = change.stop - change.old_stop, len(progress.start)
    rest = np.arange(change.stop, count)
    open_ = rest[end[rest - shift] >= now]
    fresh = open_[start[open_ - shift] >= now]
    progress.end[open_] = end[open_ - shift]
    progress.start[fresh] = start[fresh - shift]
    known = cause[fresh - shift]
    progress.cause[fresh] = np.where(known >= change.old_stop, known + shift, known)
    return count - len(fresh)


def _moved(saved: Queues, progress: full.Progress, shift: int | None = None) -> Queues:
    """Return a checkpoint of the old run as one of the new: as far from the beginning or, where
    instructions are ``shift`` further on, from the end."""
    queues, own = saved.copy(), progress.queues
    queues["begin"], queues["stop"] = own["begin"], own["stop"]
    if shift is None:
        queues["place"] = own["begin"] + (saved["place"] - saved["begin"])
    else:
        queues["place"] = own["stop"] - (saved["stop"] - saved["place"])
        queues["running"] = np.where(saved["running"] >= 0, saved["running"] + shift, -1)
    return queues
