"""What evaluation runs of a Program: that without which the loss could not be made."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.program import Kind
from shardwright.runtime.interpreter import Compiled, Compiler, Machine, Special


def compile_forward(machine: Machine, special: Special, goal: frozenset[int]) -> Compiled:
    """Compile what makes the slots in ``goal`` on this rank, for evaluation."""
    compiler = Compiler(machine, special, training=False)
    program = machine.program
    needed = needed_forward(compiler, range(program.num_instructions), goal)
    mine = [index for index in needed if int(program.group[index]) in machine.sites]
    return compiler.compile(mine, goal)


def needed_forward(compiler: Compiler, indices: Sequence[int], goal: frozenset[int]) -> list[int]:
    """Return, in order, the instructions without which the slots in ``goal`` could not be made.

    For the whole Program, so that every rank finds the same sends and receives; each read is
    traced to the last write before it.
    """
    program = compiler.program
    last: dict[int, int] = {}
    sent: dict[tuple[int, int], int] = {}
    causes: dict[int, set[int]] = {}
    for index in indices:
        kind = Kind(int(program.kind[index]))
        if kind in (Kind.RECOMPUTE, Kind.BACKWARD, Kind.CLIP, Kind.UPDATE):
            continue
        touch = compiler.touch(index)
        causes[index] = {last[slot] for slot in last.keys() & set(touch.reads)}
        message = (int(program.item[index]), int(program.microbatch[index]))
        if kind == Kind.RECEIVE:
            causes[index].add(sent[message])
        if kind == Kind.SEND:
            sent[message] = index
        last.update(dict.fromkeys(touch.writes, index))
        if goal <= last.keys():
            break
    wanted = {last[slot] for slot in goal}
    queue = list(wanted)
    while queue:
        for cause in causes[queue.pop()] - wanted:
            wanted.add(cause)
            queue.append(cause)
    return sorted(wanted)
