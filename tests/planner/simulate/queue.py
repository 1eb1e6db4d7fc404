"""The published simulation: FlexFlow's queue of ready tasks (Jia et al., MLSys 2019, Algorithm 1).

For comparison; ``simulate`` does not use it. There a device runs whatever became ready first, here
every resource runs its instructions in index order, as the runtime issues them. With
``in_program_order`` that order is added to what instructions wait for, and the queue gives the
times of ``plain.relax_plain``.

The paper leaves out that ready times may be equal: then the order, and with it the times, depends on
how the queue breaks the tie. Here the lower index goes first. Two more traps: a task is ready only
when its *last* predecessor has been taken from the queue, not when its ready time is first known;
and tasks of no duration are ready at the very moment at which their predecessors begin.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program


def queue_ends(
    program: Program, seconds: NDArray[np.float64], *, in_program_order: bool = False
) -> NDArray[np.float64]:
    """Return when every instruction ends. Without slow-down; O(n log n)."""
    duration: list[float] = seconds.tolist()
    resource: list[int] = program.resource.tolist()
    waits: list[list[int]] = [program.predecessor[a:b].tolist() for a, b in _rows(program)]
    if in_program_order:
        last: dict[int, int] = {}
        for index, queue in enumerate(resource):
            waits[index] += [last[queue]] if queue in last else []
            last[queue] = index
    followers: list[list[int]] = [[] for _ in waits]
    for index, before in enumerate(waits):
        for other in before:
            followers[other].append(index)
    waiting = [len(before) for before in waits]
    ready, end = [0.0] * len(waits), [0.0] * len(waits)
    free = [0.0] * len(program.resource_names)
    queue = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(queue)
    while queue:
        time, index = heapq.heappop(queue)
        end[index] = max(time, free[resource[index]]) + duration[index]
        free[resource[index]] = end[index]
        for other in followers[index]:
            ready[other] = max(ready[other], end[index])
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(queue, (ready[other], other))
    return np.array(end, dtype=np.float64)


def _rows(program: Program) -> list[tuple[int, int]]:
    return list(zip(program.offset[:-1].tolist(), program.offset[1:].tolist(), strict=True))
