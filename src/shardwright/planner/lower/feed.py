"""The input of a step as instructions: fetched and copied while the step before computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Program, resource_classes
from shardwright.planner.cost.feed import input_bytes

Ints = NDArray[np.int64]


def fed(program: Program) -> Program:
    """Return a Program that also fetches its input, one step ahead.

    Every mesh that reads the batch gets a FETCH and a COPY behind it, both of shift -1 and by one thread of
    its host, in front of all else; what reads the batch waits for the COPY of its own minibatch. The shards of one more
    batch are in memory all the time.
    """
    readers = _readers(program)
    meshes = [mesh for mesh in range(len(program.meshes)) if len(readers[mesh])]
    added = 2 * len(meshes)
    kinds = np.tile([Kind.FETCH, Kind.COPY], len(meshes))
    resources = len(program.resource_names) + np.repeat(np.arange(len(meshes)), 2)
    names = (*program.resource_names, *(f"host:{mesh}" for mesh in meshes))
    copies = {mesh: 2 * place + 1 for place, mesh in enumerate(meshes)}
    waits = _with_waits(program, added, {i: copies[m] for m in meshes for i in readers[m].tolist()})
    none = np.zeros(added, dtype=np.int64)

    def column(ahead: object, name: str) -> NDArray[np.int32]:
        old = getattr(program, name)
        return np.concatenate([np.broadcast_to(np.asarray(ahead), added), old]).astype(old.dtype)

    lags = np.zeros(program.num_instructions) if program.shift is None else program.shift
    return replace(
        program,
        kind=column(kinds, "kind"),
        group=column(np.repeat(meshes, 2), "group"),
        item=column(-1, "item"),
        microbatch=column(-1, "microbatch"),
        resource=column(resources, "resource"),
        resource_names=names,
        resource_class=resource_classes(names),
        offset=waits[0],
        predecessor=waits[1],
        free_offset=np.concatenate([none, program.free_offset]),
        allocated=column(0, "allocated"),
        freed=column(0, "freed"),
        temporary=column(0, "temporary"),
        base_bytes=tuple(
            base + (input_bytes(program, mesh) if mesh in copies else 0)
            for mesh, base in enumerate(program.base_bytes)
        ),
        shift=np.concatenate([np.full(added, -1), lags]).astype(np.int32),
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
    program: Program, added: int, copies: dict[int, int]
) -> tuple[Ints, NDArray[np.int32]]:
    """Return the offsets and predecessors behind ``added`` instructions, each COPY waiting for the FETCH
    before it, and the keys of ``copies`` for their values too."""
    lists: list[list[int]] = [[] if place % 2 == 0 else [place - 1] for place in range(added)]
    offset, predecessor = program.offset.tolist(), (program.predecessor + added).tolist()
    for index in range(program.num_instructions):
        waits = predecessor[offset[index] : offset[index + 1]]
        lists.append([copies[index], *waits] if index in copies else waits)
    lengths = np.array([len(waits) for waits in lists], dtype=np.int64)
    flat = np.array([one for waits in lists for one in waits], dtype=np.int32)
    return np.concatenate([[0], np.cumsum(lengths)]), flat
