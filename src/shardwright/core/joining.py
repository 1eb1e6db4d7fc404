"""Which backwards of segments run as one: autograd is entered once for several that nothing lies between.

The runtime enters it so, and the prices and the memory of a Program count it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import SEGMENT_KINDS, Kind, Message, Program


def joined(program: Program) -> NDArray[np.bool_]:
    """Return, by instruction, whether it is a backward that runs as one with the instruction before it.

    Autograd hands gradients on within what it is entered for, and gives those of its inputs at the end. So a backward
    joins if it waits for no message, and if no gradient of the one before goes through a message: what forward
    brought there by one, such as a value in another layout, may lie in the gradient that this one begins with. What
    is made again stays alone, and so do the backwards of several microbatches: gradients of parameters would be
    there twice, in the sum and, all of those joined, beside it.
    """
    found = np.zeros(program.num_instructions, dtype=np.bool_)
    pipeline, meshes = program.strategy.pipeline, program.meshes
    if len(meshes) > 1 or pipeline.num_microbatches > 1 or pipeline.splits_backward:
        return found
    backward = program.kind == Kind.BACKWARD
    both = np.flatnonzero(backward[1:] & backward[:-1]) + 1
    if not len(both):
        return found
    hears = _hears(program)
    again = np.array([segment.recomputed for segment in program.segments], dtype=np.bool_)
    brought = again.copy()
    brought[program.item[(program.kind == Kind.FORWARD) & hears]] = True
    item = program.item
    apart = hears[both] | again[item[both]] | brought[item[both - 1]]
    found[both[~apart]] = True
    return found


def runs(program: Program) -> list[tuple[int, ...]]:
    """Return the backwards that run as one, each time several, in the order in which they run."""
    starts = ~joined(program)
    found = np.split(np.arange(program.num_instructions), np.flatnonzero(starts))
    return [tuple(run.tolist()) for run in found if len(run) > 1]


def together(program: Program) -> dict[int, tuple[int, ...]]:
    """Return, by segment, those whose backwards run as one with its own, in the order of their forwards."""
    items = [tuple(program.item[list(run)].tolist()) for run in runs(program)]
    return {item: run[::-1] for run in items for item in run}


def _hears(program: Program) -> NDArray[np.bool_]:
    """Return which instructions wait for something else than a segment that has to do with gradients."""
    carries = np.array([_carries(program, one) for one in program.messages], dtype=np.bool_)
    counts = ~np.isin(program.kind, SEGMENT_KINDS)
    messages = np.flatnonzero(program.kind == Kind.MESSAGE)
    counts[messages] = carries[program.item[messages]]
    waiting = np.repeat(np.arange(program.num_instructions), np.diff(program.offset))
    found = np.zeros(program.num_instructions, dtype=np.bool_)
    found[waiting[counts[program.predecessor]]] = True
    return found


def _carries(program: Program, message: Message) -> bool:
    """Whether a message brings gradients, or what they flow back through."""
    if message.purpose in ("gradient", "synchronise"):
        return True
    return any(program.values[value].gradient >= 0 for value in message.results)
