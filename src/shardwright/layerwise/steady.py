"""Step after step: a Program as the body of a loop, whose instructions may work for other minibatches
than their step's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program, ResourceClass
from shardwright.planner.simulate.columns import ranks_of_groups, shared_groups

if TYPE_CHECKING:
    from shardwright.planner.simulate.full import Wiring

STEPS = 8  # in which a rhythm shows
Ints = NDArray[np.int64]


def steady_seconds(
    program: Program,
    seconds: NDArray[np.float64],
    *,
    overlap_slowdown: float = 1.0,
) -> float:
    """Return the seconds from one step's end to the next's once that repeats, given the duration of
    every instruction.

    ``STEPS`` minibatches are played, with what comes before the first and after the last. An instruction of
    shift s works in step t for minibatch t - s, waits for its predecessors' work on that minibatch, and is
    skipped where there is no such minibatch. A step begins when all of the one before it is done, but
    for instructions of another shift, which begin when their step does and are waited for by who needs
    them. What fetches and copies input slows no computation down.
    """
    # Late, because importing Numba takes longer than planning a small model.
    from shardwright.planner.simulate.full import relax, share

    wiring, durations, closings = _unrolled(program, seconds, STEPS)
    count = len(program.resource_names) + 1
    if overlap_slowdown == 1.0:
        _, end, _ = relax(wiring, durations, count)
    else:
        # What closes a step takes no time, whatever it is.
        classes = np.append(program.resource_class, ResourceClass.HOST).astype(np.int8)
        ranks = np.append(ranks_of_groups(program), 0)
        _, end, _ = share(wiring, durations, classes, ranks, float(overlap_slowdown))
    ends = end[closings]
    half = len(ends) // 2
    return float((ends[-1] - ends[half]) / (len(ends) - 1 - half))


@dataclass(slots=True)
class _Rows:
    """Steps one behind the other: of every instruction its resource, group, seconds and what it waits for; by
    instruction and minibatch its place; and where each step is closed."""

    rows: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    waits: list[list[int]] = field(default_factory=list[list[int]])
    place: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    closings: list[int] = field(default_factory=list[int])

    def add(
        self, row: tuple[int, int, float], waits: Iterable[tuple[int, int]], *, begins: bool
    ) -> None:
        """Append an instruction; one that ``begins`` does so when its step does."""
        own = [self.place[one] for one in waits if one in self.place]
        self.rows.append(row)
        self.waits.append([*self.closings[-1:], *own] if begins else own)

    def wiring(self) -> Wiring:
        from shardwright.planner.simulate.full import Wiring

        resource, group, _ = zip(*self.rows, strict=True)
        return Wiring(
            resource=np.array(resource, dtype=np.int32),
            group=np.array(group, dtype=np.int32),
            offset=np.cumsum([0, *map(len, self.waits)], dtype=np.int64),
            predecessor=np.array(list(chain.from_iterable(self.waits)), dtype=np.int32),
        )


def _unrolled(
    program: Program, seconds: NDArray[np.float64], steps: int
) -> tuple[Wiring, NDArray[np.float64], Ints]:
    """Return all steps as one list of instructions, their durations, and where each step is closed: by
    an instruction that takes no time behind all of the step's own."""
    shift = [program.shift_of(index) for index in range(program.num_instructions)]
    waits = [program.predecessor[a:b].tolist() for a, b in pairwise(program.offset)]
    ends = zip(program.resource, shared_groups(program), seconds, strict=True)
    rows = [(int(resource), int(group), float(time)) for resource, group, time in ends]
    # Who waits for nobody of the same shift begins with its step.
    begins = [shift[i] not in {shift[one] for one in own} for i, own in enumerate(waits)]
    awaited = set(chain.from_iterable(waits))
    last = [i for i, lag in enumerate(shift) if lag == 0 and i not in awaited]
    found, closing = _Rows(), (len(program.resource_names), len(program.meshes), 0.0)
    for step in range(min(*shift, 0), steps + max(*shift, 0)):
        for index in program.turns.tolist():
            if 0 <= (minibatch := step - shift[index]) < steps:
                own = zip(waits[index], repeat(minibatch))
                found.add(rows[index], own, begins=begins[index])
                found.place[index, minibatch] = len(found.rows) - 1
        if 0 <= step < steps:
            found.add(closing, zip(last, repeat(step)), begins=False)
            found.closings.append(len(found.rows) - 1)
    durations = np.array([time for _, _, time in found.rows])
    return found.wiring(), durations, np.array(found.closings, dtype=np.int64)
