"""The simulator in plain Python: the readable twin of its kernels (``full``, ``host``), and their oracle.

Both do the same floating-point operations in the same order, so that their results are equal to the
last bit. This one looks at every queue at every event; ``full`` keeps a tree and lists instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program, ResourceClass
from shardwright.planner.simulate.columns import ALIKE, Bytes, Floats, Ints, Ways, shared_groups
from shardwright.planner.simulate.full import Times
from shardwright.planner.simulate.memory import device_kinds, touched

# Classes of resources that slow each other down.
SLOWED = frozenset({ResourceClass.COMPUTE, ResourceClass.LINK})


def simulate_plain(
    program: Program,
    seconds: NDArray[np.float64],
    *,
    overlap_slowdown: float = 1.0,
    cores: float = math.inf,
    ways: Ways = ALIKE,
    scatter_copies: float = 0.0,
) -> tuple[Times, list[Floats]]:
    """Return start, end and cause of each instruction, and every mesh's bytes over time."""
    if overlap_slowdown == 1.0 and cores == math.inf and ways.far is None:
        times = relax_plain(program, seconds)
    else:
        times = share_plain(program, seconds, (overlap_slowdown, cores), ways)
    return times, _memory(program, times, touched(program, scatter_copies))


def _memory(program: Program, times: Times, bytes_: Bytes) -> list[Floats]:
    touches = (bytes_.allocated != 0) | (bytes_.freed != 0) | (bytes_.held != 0) | bytes_.local
    found: list[Floats] = []
    for kinds in device_kinds(program):
        sorts = [
            plain_rows(
                bytes_, times[0], times[1],
                np.flatnonzero(touches & np.isin(program.group, list(meshes))),
                sum(program.base_bytes[mesh] for mesh in meshes),
            )
            for meshes in kinds
        ]  # fmt: skip
        found.append(max(sorts, key=lambda rows: rows[:, 1].max()))
    return found


def relax_plain(program: Program, seconds: NDArray[np.float64]) -> Times:
    """Return start, end and cause of each instruction when nothing slows anything down.

    The cause is what an instruction waited for longest: the one before it in its queue or, if that
    ended earlier, its first predecessor among those that ended last; -1 if it waited for nothing.
    """
    resource: list[int] = program.resource.tolist()
    duration: list[float] = seconds.tolist()
    waits = _predecessors(program)
    last = [-1] * len(program.resource_names)
    start, end, cause = [0.0] * len(waits), [0.0] * len(waits), [-1] * len(waits)
    for index, needed in enumerate(waits):
        start[index], cause[index] = _latest([last[resource[index]], *needed], end)
        end[index] = start[index] + duration[index]
        last[resource[index]] = index
    return _columns(start, end, cause)


@dataclass(slots=True)
class _Running:
    """An instruction in progress: work left at time ``since``, and by what factor it stretches."""

    instruction: int
    remaining: float
    since: float
    finish: float
    seconds: float
    stretch: float = -1.0  # unset: its group's share is not settled yet

    def settle(self, now: float, stretch: float) -> None:
        """Go on at another rate from ``now``."""
        if stretch != self.stretch:
            self.remaining = max(0.0, self.remaining - (now - self.since) / self.stretch)
            self.since = now
            self.stretch = stretch
            self.finish = now + self.remaining * stretch


def share_plain(
    program: Program,
    seconds: NDArray[np.float64],
    limits: tuple[float, float],
    ways: Ways,
) -> Times:
    """Return start, end and cause of each instruction under processor sharing.

    ``limits`` are the slow-down and the number of cores. While a group computes and communicates at once, what
    does either advances at rate 1/slowdown, and all else at 1; meshes of the same devices are one group
    (``shared_groups``). ``ways`` are which resources are far, and their waits. While more devices compute than there are
    cores, they share these evenly, and a message of s seconds goes as one of s and its resource's wait; messages of
    a group on resources that are far share its uplinks. Completions at one instant come before starts, and starts before rates are settled, so that nothing depends on the order of queues.
    """
    (slowdown, cores), (far, longer) = limits, ways
    duration: list[float] = seconds.tolist()
    waits = _predecessors(program)
    count = len(waits)
    shares: list[bool] = [False] * len(program.resource_names) if far is None else far.tolist()
    delays: list[float] = [0.0] * len(shares) if longer is None else longer.tolist()
    queues: list[list[int]] = [
        np.flatnonzero(program.resource == queue).tolist()
        for queue in range(len(program.resource_names))
    ]
    position = [0] * len(queues)
    classes: list[int] = program.resource_class.tolist()
    group: list[int] = shared_groups(program).tolist()
    running: dict[int, _Running] = {}
    start, end, cause, done = [0.0] * count, [0.0] * count, [-1] * count, [False] * count
    now: float = 0.0
    while True:
        for index in [task.instruction for task in running.values() if task.finish <= now]:
            queue = int(program.resource[index])
            del running[queue]
            end[index], done[index] = now, True
            position[queue] += 1
        for queue, order in enumerate(queues):
            if queue in running or position[queue] == len(order):
                continue
            index = order[position[queue]]
            if all(done[other] for other in waits[index]):
                before = order[position[queue] - 1] if position[queue] else -1
                start[index], cause[index] = now, _latest([before, *waits[index]], end)[1]
                finish = math.inf if duration[index] > 0 else now
                running[queue] = _Running(index, duration[index], now, finish, duration[index])
        if not running:
            return _columns(start, end, cause)
        if all(task.finish > now for task in running.values()):
            computing = {
                device
                for queue, task in running.items()
                if classes[queue] == ResourceClass.COMPUTE
                for device in program.meshes[group[task.instruction]].devices
            }
            crowd = max(1.0, len(computing) / cores)
            _settle_rates(group, running, (classes, shares, delays), now, (slowdown, crowd))
            now = min(task.finish for task in running.values())


def _settle_rates(
    group: list[int],
    running: dict[int, _Running],
    sorts: tuple[list[int], list[bool], list[float]],
    now: float,
    stretches: tuple[float, float],
) -> None:
    """Give every running instruction the rate that its group's mix of work, its uplinks and the crowd allow."""
    (classes, far, delays), (slowdown, crowd) = sorts, stretches
    senders = [group[task.instruction] for queue, task in running.items() if far[queue]]
    busy: dict[int, set[int]] = {}
    for queue, task in running.items():
        busy.setdefault(group[task.instruction], set()).add(classes[queue])
    for queue, task in running.items():
        overlaps = classes[queue] in SLOWED and busy[group[task.instruction]] >= SLOWED
        stretch = slowdown if overlaps else 1.0
        if classes[queue] == ResourceClass.COMPUTE:
            stretch *= crowd
        if crowd > 1.0 and delays[queue] > 0.0 and task.seconds > 0.0:
            stretch *= 1.0 + delays[queue] / task.seconds
        if far[queue]:
            stretch *= senders.count(group[task.instruction])
        task.settle(now, stretch)


def _predecessors(program: Program) -> list[list[int]]:
    """Return what each instruction waits for besides its queue."""
    offset: list[int] = program.offset.tolist()
    predecessor: list[int] = program.predecessor.tolist()
    return [predecessor[first:stop] for first, stop in pairwise(offset)]


def _latest(candidates: list[int], end: list[float]) -> tuple[float, int]:
    """Return the latest end among instructions and the first that has it; (0, -1) for none."""
    time, latest = 0.0, -1
    for index in candidates:
        if index >= 0 and (latest < 0 or end[index] > time):
            time, latest = end[index], index
    return time, latest


def _columns(start: list[float], end: list[float], cause: list[int]) -> Times:
    return np.array(start), np.array(end), np.array(cause, dtype=np.int64)


def plain_rows(bytes_: Bytes, start: Floats, end: Floats, mine: Ints, base: int) -> Floats:
    """Sum up one device's changes in the order of its host, four to an instruction.

    What is copied out of messages completed before it; what that lets go of; what it brings; what
    goes with it. What is completed by no instruction of the device goes at the end.
    """
    begins, ends = _host_times(start, end, bytes_.local, mine)
    count = len(mine)
    freed, held, copied = bytes_.freed[mine], bytes_.held[mine], bytes_.copied[mine]
    lent = bytes_.lent[mine]
    own = bytes_.until[mine] == mine
    completed = 4 * np.searchsorted(mine, bytes_.until[mine])
    changes = np.zeros(4 * count + 2, dtype=np.int64)
    changes[2:-2:4] = bytes_.allocated[mine] + held
    changes[3:-2:4] = -np.where(lent, 0, freed)
    np.add.at(changes, completed, copied)
    gone = np.where(own, 4 * np.arange(count) + 3, completed + 1)
    np.subtract.at(changes, gone, held + copied + np.where(lent, freed, 0))
    moments = np.full(len(changes), ends.max(initial=0.0))
    moments[:-2].reshape(-1, 4)[:, :3] = begins[:, None]
    moments[3:-2:4] = ends
    seen = np.flatnonzero(changes)
    rows = np.empty((len(seen) + 1, 2))
    rows[0] = 0.0, base
    rows[1:, 0] = moments[seen]
    rows[1:, 1] = base + np.cumsum(changes[seen])
    return rows


def _host_times(
    start: Floats, end: Floats, local: NDArray[np.bool_], mine: Ints
) -> tuple[Floats, Floats]:
    """Return when a device's host begins and ends each of its instructions.

    It stays with what it computes, and issues the rest in passing.
    """
    passed = np.maximum.accumulate(np.where(local[mine], end[mine], 0.0))
    before = np.concatenate([[0.0], passed])[:-1]
    begins = np.where(local[mine], np.maximum(start[mine], before), before)
    return begins, np.maximum(begins, passed)
