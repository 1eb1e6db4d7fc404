"""Simulating a changed Program again from where the change can first be felt, until it no longer is.

FlexFlow (Jia et al., MLSys 2019) repairs a timeline by a queue of tasks whose ready times may have
changed; that revisits tasks, and its order is not unique where ready times are equal. Here a run is
*restarted* from a checkpoint before the change can have begun, so that every instruction is visited
at most once, and *stops* where it coincides with the old run: same clock, same instructions under
way with the same work left, same ones to come. Times are then equal to the last bit to those of a
full simulation. Coinciding means at equal times: adding a constant to times rounds differently.

Two Programs are compared instruction by instruction from both ends; what lies between the common
beginning and the common end is the change. That costs a tenth of simulating them with a slow-down,
and more than simulating them without one, which is a single pass (``full.relax``).
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.compiled import compiled
from shardwright.planner.simulate import full
from shardwright.planner.simulate.full import Floats, Followers, Ints, Queues, Times, Wiring

# Of one run, how many checkpoints are kept.
CHECKPOINTS = 24


class Change(NamedTuple):
    """Instructions before ``first`` are alike; those of the new Program from ``stop`` on are those
    of the old one from ``old_stop`` on."""

    first: int
    stop: int
    old_stop: int


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Job:
    """What is simulated: a Program's wiring and durations.

    ``computes`` says which resources compute; ``names`` are the resources' names. ``spacing``: from
    checkpoint to checkpoint at least so many instructions complete.
    """

    wiring: Wiring
    seconds: Floats
    computes: NDArray[np.bool_]
    names: tuple[str, ...]
    num_groups: int
    slowdown: float
    spacing: int


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Run:
    """A finished simulation, and what it takes to simulate a changed Program from it.

    ``checkpoints`` are (time, queues) in order. ``visited`` instructions were really simulated.
    """

    job: Job
    times: Times
    checkpoints: tuple[tuple[float, Queues], ...]
    visited: int


def run(job: Job) -> Run:
    """Simulate from the beginning."""
    progress = full.begin(job.wiring, job.computes, job.num_groups)
    return _shared(job, progress, 0.0, None)


def run_again(before: Run, job: Job) -> Run:
    """Simulate a Program that differs from the one simulated before; equal to ``run`` in all bits."""
    old, known = before.job, before.checkpoints
    frames = [(one.names, one.num_groups, one.slowdown) for one in (old, job)]
    if frames[0] != frames[1] or not known:
        return run(job)
    change = Change(*compare(old.wiring, old.seconds, job.wiring, job.seconds))
    progress = full.begin(job.wiring, job.computes, job.num_groups)

    def is_late(number: int) -> bool:
        now, queues = known[number]
        return not _precedes(progress, queues, now, before, job, change.first)

    # Where the change has not begun at a checkpoint, it has not at any before.
    last = bisect_left(range(len(known)), True, key=is_late) - 1
    if last < 0:
        return _shared(job, progress, 0.0, _Old(before, change, 0))
    now, queues = known[last]
    restored = _restart(progress, queues, now, before, job, change.first)
    return _shared(job, progress, now, _Old(before, change, restored))


@compiled
def compare(
    old: Wiring, old_seconds: Floats, new: Wiring, new_seconds: Floats
) -> tuple[int, int, int]:
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
    return first, stop, old_stop


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


class _Old(NamedTuple):
    """The run to compare with, the change, and how many instructions had begun where it restarts."""

    run: Run
    change: Change
    restored: int


def _shared(job: Job, progress: full.Progress, now: float, old: _Old | None) -> Run:
    """Go on from ``now``, keeping checkpoints, until done or as in an old run."""
    count = len(job.seconds)
    step = max(job.spacing, count // CHECKPOINTS + 1)
    known = () if old is None else old.run.checkpoints
    checkpoints = [(time, _moved(saved, progress)) for time, saved in known if time <= now]
    moments = [pair for pair in known if pair[0] > now]
    restored = 0 if old is None else old.restored
    while now < np.inf:
        until = moments[0][0] if moments else np.inf
        now = full.go_on(job.wiring, job.seconds, progress, job.slowdown, (now, until, step))
        met = old if now == until < np.inf else None
        if met is not None and _coincides(progress, moments[0][1], met.change):
            times = (progress.start, progress.end, progress.cause)
            begun = take_over(times, met.run.times, now, met.change)
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
    return Run(job=job, times=times, checkpoints=kept, visited=visited)


def _precedes(
    progress: full.Progress, saved: Queues, now: float, before: Run, job: Job, first: int
) -> bool:
    """Whether no instruction from ``first`` on has begun at a checkpoint, old or new.

    One of the new that has not begun must be waiting still, for its queue or for another.
    """
    queues, running = progress.queues, saved["running"]
    room, ahead = queues["stop"] - queues["begin"], saved["place"] - saved["begin"]
    if (running >= first).any() or (ahead > room).any():
        return False
    ended = before.times[1]
    if np.count_nonzero(ended[:first] < now) != ahead.sum():
        return False
    idle = np.flatnonzero((running < 0) & (ahead < room))
    heads = progress.entries[queues["begin"][idle] + ahead[idle]]
    return not any_ready(job.wiring, ended, now, first, heads)


@compiled
def any_ready(wiring: Wiring, ended: Floats, now: float, first: int, heads: Ints) -> bool:
    """Whether an instruction among ``heads`` from ``first`` on waits for nothing: for none, at least,
    that is not among those before ``first`` which have ended."""
    for index in heads:
        if index >= first:
            is_ready = True
            for entry in range(wiring.offset[index], wiring.offset[index + 1]):
                other = wiring.predecessor[entry]
                if other >= first or ended[other] >= now:
                    is_ready = False
            if is_ready:
                return True
    return False


def _restart(
    progress: full.Progress, saved: Queues, now: float, before: Run, job: Job, first: int
) -> int:
    """Put a new simulation where the old one was; return how many instructions have begun there."""
    times = (progress.start, progress.end, progress.cause)
    running = saved["running"][saved["running"] >= 0]
    restored = restore(times, before.times, progress.followers, now, first, running)
    progress.queues[:] = _moved(saved, progress)
    full.relink(job.wiring, progress)
    return restored


@compiled
def restore(
    times: Times, old: Times, followers: Followers, now: float, first: int, running: Ints
) -> int:
    """Copy the times of what has begun, and let what waited for what has ended wait no more."""
    start, end, cause = times
    old_start, old_end, old_cause = old
    count = len(running)
    for index in range(first):
        if old_end[index] < now:
            count += 1
            start[index], end[index], cause[index] = (
                old_start[index], old_end[index], old_cause[index],
            )  # fmt: skip
            for entry in range(followers.offset[index], followers.offset[index + 1]):
                followers.waiting[followers.follower[entry]] -= 1
    for index in running:
        start[index], cause[index] = old_start[index], old_cause[index]
    return count


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


@compiled
def take_over(times: Times, old: Times, now: float, change: Change) -> int:
    """Copy what the old run did from here on; return how many instructions had begun."""
    start, end, cause = times
    old_start, old_end, old_cause = old
    shift, begun = change.stop - change.old_stop, len(start)
    for index in range(change.stop, len(start)):
        other = index - shift
        if old_end[other] >= now:
            end[index] = old_end[other]
        if old_start[other] >= now:
            begun -= 1
            start[index] = old_start[other]
            known = old_cause[other]
            cause[index] = known + shift if known >= change.old_stop else known
    return begun


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
