"""The input of a step as instructions: fetched, prepared, drawn and copied while the steps before compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import INPUT_KINDS, Kind, Program, resource_classes
from shardwright.planner.cost.feed import Feeding, input_bytes

Ints = NDArray[np.int64]


def fed(program: Program, feeding: Sequence[Feeding]) -> Program:
    """Return a Program that also brings its input, in front of all else.

    A batch is copied for the next step (shift -1), and what is done to it before works one step further ahead each. So
    every resource has a step's time for its part; what reads the batch waits for the COPY of its own minibatch on every host. The
    shards of one more batch are in memory all the time.
    """
    readers = _readers(program)
    added = len(feeding)
    names = (*program.resource_names, *(one.resource for one in feeding))
    resources = len(program.resource_names) + np.arange(added)
    lists = _with_waits(program, feeding, readers)
    none = np.zeros(added, dtype=np.int64)
    ahead = np.array([INPUT_KINDS.index(one.kind) - len(INPUT_KINDS) for one in feeding])
    meshes = {mesh for one in feeding for mesh in one.meshes}

    def column(first: object, name: str) -> NDArray[np.int32]:
        old = getattr(program, name)
        return np.concatenate([np.broadcast_to(np.asarray(first), added), old]).astype(old.dtype)

    lags = np.zeros(program.num_instructions) if program.shift is None else program.shift
    return replace(
        program,
        kind=column([one.kind for one in feeding], "kind"),
        group=column([one.meshes[0] for one in feeding], "group"),
        item=column(-1, "item"),
        microbatch=column(-1, "microbatch"),
        resource=column(resources, "resource"),
        resource_names=names,
        resource_class=resource_classes(names),
        offset=np.cumsum([0, *map(len, lists)], dtype=np.int64),
        predecessor=np.array([one for waits in lists for one in waits], dtype=np.int32),
        free_offset=np.concatenate([none, program.free_offset]),
        allocated=column(0, "allocated"),
        freed=column(0, "freed"),
        temporary=column(0, "temporary"),
        base_bytes=tuple(
            base + (input_bytes(program, mesh) if mesh in meshes else 0)
            for mesh, base in enumerate(program.base_bytes)
        ),
        shift=np.concatenate([ahead, lags]).astype(np.int32),
        position=None if program.position is None else column(-1, "position"),
    )


def _readers(program: Program) -> list[Ints]:
    """Return, per mesh, the instructions that run a segment which reads the batch."""
    reads = np.array(
        [any(program.values[v].role == "input" for v in one.inputs) for one in program.segments],
        dtype=np.bool_,
    )
    runs = np.flatnonzero(np.isin(program.kind, (Kind.FORWARD, Kind.RECOMPUTE)))
    runs = runs[reads[program.item[runs]]]
    return [runs[program.group[runs] == mesh] for mesh in range(len(program.meshes))]


def _with_waits(
    program: Program, feeding: Sequence[Feeding], readers: list[Ints]
) -> list[list[int]]:
    """Return what every instruction waits for: input for what is done to it before on the same host, readers of it for
    every COPY to their mesh."""
    lists: list[list[int]] = []
    copies: dict[int, list[int]] = {}  # by who waits for them
    for place, one in enumerate(feeding):
        follows = place > 0 and feeding[place - 1].host == one.host
        lists.append([place - 1] if follows else [])
        if one.kind == Kind.COPY:
            for index in (index for mesh in one.meshes for index in readers[mesh].tolist()):
                copies.setdefault(index, []).append(place)
    offset, predecessor = program.offset.tolist(), (program.predecessor + len(feeding)).tolist()
    for index in range(program.num_instructions):
        waits = predecessor[offset[index] : offset[index + 1]]
        lists.append([*copies.get(index, ()), *waits])
    return lists
