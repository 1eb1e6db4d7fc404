"""From one step to the next, where the next does not wait until all parameters are back at rest.

After the update parameters are gathered again, block by block in the order of forward (ZeRO-1 and 2).
A Program ends with that. Frameworks that overlap it (Megatron's ``--overlap-param-gather``) begin the next
forward at once, each block waiting for its own parameters only.
"""

from __future__ import annotations

import numpy as np

from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline


def period(program: Program, timeline: Timeline) -> float:
    """Return the seconds from one step's start to the next's, gathers running beneath its forward.

    The next step begins when all else is done, and late enough for every parameter to be there when
    it is first read. Delays are not made up for later, and no other message of forward wants the link.
    """
    returned = _returned(program)
    if not returned:
        return timeline.step_seconds
    others = np.ones(program.num_instructions, dtype=np.bool_)
    others[returned] = False
    wanted, turns = _first_reads(program, timeline), dict[int, int]()
    begins = float(timeline.end[others].max(initial=0.0))
    for index in returned:
        item = int(program.item[index])
        turns[item] = turn = turns.get(item, -1) + 1
        reads = [wanted[value] for value in program.messages[item].results if value in wanted]
        first = min((starts[min(turn, len(starts) - 1)] for starts in reads), default=np.inf)
        begins = max(begins, float(timeline.end[index]) - first)
    return begins


def _returned(program: Program) -> list[int]:
    """Return the instructions that bring parameters back to rest: gathers behind their update."""
    updates = np.flatnonzero(program.kind == Kind.UPDATE).tolist()
    after = {int(program.group[index]): index for index in updates}
    return [
        index
        for index in np.flatnonzero(program.kind == Kind.MESSAGE).tolist()
        if index > after.get(int(program.group[index]), program.num_instructions)
        and program.messages[int(program.item[index])].purpose == "parameter"
    ]


def _first_reads(program: Program, timeline: Timeline) -> dict[int, list[float]]:
    """Return when the first microbatch reads each parameter, by its value at rest: several times
    where the value stands for those of equal blocks, in their order."""
    found: dict[int, tuple[int, list[float]]] = {}
    ahead = (program.kind == Kind.FORWARD) & (program.microbatch <= 0)
    for index in np.flatnonzero(ahead):
        item = int(program.item[index])
        for value in program.segments[item].inputs:
            entry = program.values[value]
            if entry.role == "parameter":
                rest = value if entry.alias < 0 else entry.alias
                reader, starts = found.setdefault(rest, (item, []))
                if reader == item:
                    starts.append(float(timeline.start[index]))
    return {rest: starts for rest, (_, starts) in found.items()}
