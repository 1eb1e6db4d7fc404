"""Step after step: a Program as the body of a loop, whose instructions may work for other minibatches
than their step's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program, ResourceClass
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.feed import Feeding, input_bytes, input_seconds
from shardwright.planner.simulate.columns import shared_groups

if TYPE_CHECKING:
    from shardwright.planner.simulate.full import Wiring

STEPS = 8
Ints = NDArray[np.int64]


def steady_seconds(
    program: Program,
    seconds: NDArray[np.float64],
    *,
    overlap_slowdown: float = 1.0,
    steps: int = STEPS,
) -> float:
    """Return the seconds from one step's end to the next's once that repeats, given the duration of
    every instruction.

    ``steps`` minibatches are played, with what comes before the first and after the last. An instruction of
    shift s works in step t for minibatch t - s, waits for its predecessors' work on that minibatch, and is
    skipped where there is no such minibatch. A step begins when all of the one before it is done, but
    for instructions of another shift, which begin when their step does and are waited for by who needs
    them. What fetches and copies input slows no computation down.
    """
    if steps < 4:
        raise ValueError(f"a rhythm shows in 4 steps or more, not {steps}")
    # Late, because importing Numba takes longer than planning a small model.
    from shardwright.planner.simulate.full import relax, share

    wiring, durations, closings = _unrolled(program, seconds, steps)
    count = len(program.resource_names) + 1
    if overlap_slowdown == 1.0:
        _, end, _ = relax(wiring, durations, count)
    else:
        # What closes a step takes no time, whatever it is.
        classes = np.append(program.resource_class, ResourceClass.HOST).astype(np.int8)
        groups = len(program.meshes) + 1
        _, end, _ = share(wiring, durations, classes, groups, float(overlap_slowdown))
    ends = end[closings]
    half = len(ends) // 2
    return float((ends[-1] - ends[half]) / (len(ends) - 1 - half))


def with_input(program: Program, timeline: Timeline, feeding: Sequence[Feeding]) -> Timeline:
    """Return the timeline of a step that is given its input while others run.

    Such a step takes the longest of its own and of each of ``feeding``, as ``steady_seconds`` finds of a Program that is
    ``fed``; the next one's shards are there all the time.
    """
    if not feeding:
        return timeline
    meshes = {mesh for one in feeding for mesh in one.meshes}
    ahead = [
        input_bytes(program, mesh) if mesh in meshes else 0 for mesh in range(len(program.meshes))
    ]
    memory = [
        rows + np.array([0.0, size]) for rows, size in zip(timeline.memory, ahead, strict=True)
    ]
    return replace(
        timeline,
        step_seconds=max(timeline.step_seconds, input_seconds(feeding)),
        memory=tuple(memory),
        peak_bytes=tuple(
            peak + size for peak, size in zip(timeline.peak_bytes, ahead, strict=True)
        ),
    )


def _unrolled(
    program: Program, seconds: NDArray[np.float64], steps: int
) -> tuple[Wiring, NDArray[np.float64], Ints]:
    """Return all steps as one list of instructions, their durations, and where each step is closed: by
    an instruction that takes no time behind all of the step's own."""
    from shardwright.planner.simulate.full import Wiring

    count = program.num_instructions
    shift = np.zeros(count, dtype=np.int64) if program.shift is None else program.shift
    offset, predecessor = program.offset, program.predecessor
    waits = [predecessor[offset[i] : offset[i + 1]].tolist() for i in range(count)]
    awaited = {one for own in waits for one in own}
    own_ends = [i for i in range(count) if shift[i] == 0 and i not in awaited]
    groups = shared_groups(program)
    place: dict[tuple[int, int], int] = {}  # by instruction and minibatch
    rows: list[tuple[int, int, float]] = []
    lists: list[list[int]] = []
    closings: list[int] = []
    for step in range(min(int(shift.min()), 0), steps + max(int(shift.max()), 0)):
        for index in program.turns.tolist():
            minibatch = step - int(shift[index])
            if not 0 <= minibatch < steps:
                continue
            found = [place[one, minibatch] for one in waits[index] if (one, minibatch) in place]
            begins = not any(shift[one] == shift[index] for one in waits[index])
            lists.append([*closings[-1:], *found] if begins else found)
            place[index, minibatch] = len(rows)
            rows.append((int(program.resource[index]), int(groups[index]), float(seconds[index])))
        if 0 <= step < steps:
            lists.append([place[one, step] for one in own_ends])
            closings.append(len(rows))
            rows.append((len(program.resource_names), len(program.meshes), 0.0))
    lengths = np.array([len(own) for own in lists], dtype=np.int64)
    resource, group, durations = zip(*rows, strict=True)
    wiring = Wiring(
        resource=np.array(resource, dtype=np.int32),
        group=np.array(group, dtype=np.int32),
        offset=np.concatenate([[0], np.cumsum(lengths)]),
        predecessor=np.array([one for own in lists for one in own], dtype=np.int32),
    )
    return wiring, np.array(durations), np.array(closings, dtype=np.int64)
