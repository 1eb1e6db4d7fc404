"""Bytes alive over time, from when instructions ran."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program


def memory_over_time(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return, per mesh, rows (seconds, bytes alive on its fullest device) in time order.

    The devices of a mesh are alike, unless some belong to further meshes: those hold more.

    The first row is the base at time 0. An instruction's ``allocated`` and ``temporary`` bytes
    appear together at its start; ``temporary`` and ``freed`` disappear at its end. At one instant
    what ends goes first, then what starts in index order; an instruction that takes no time appears
    and disappears before the next one starts.
    """
    touches = (program.allocated != 0) | (program.freed != 0) | (program.temporary != 0)
    rows: dict[frozenset[int], NDArray[np.float64]] = {}
    result: list[NDArray[np.float64]] = []
    for kinds in device_kinds(program):
        for meshes in kinds - rows.keys():
            mine = np.flatnonzero(touches & np.isin(program.group, list(meshes)))
            base = sum(program.base_bytes[mesh] for mesh in meshes)
            rows[meshes] = _device_memory(program, start, end, mine, base)
        result.append(max((rows[meshes] for meshes in kinds), key=lambda found: found[:, 1].max()))
    return tuple(result)


def device_kinds(program: Program) -> list[frozenset[frozenset[int]]]:
    """Return, per mesh, its devices' sorts: the sets of meshes that they belong to."""
    meshes_of: dict[int, set[int]] = {}
    for number, mesh in enumerate(program.meshes):
        for device in mesh.devices:
            meshes_of.setdefault(device, set()).add(number)
    return [
        frozenset(frozenset(meshes_of[device]) for device in mesh.devices)
        for mesh in program.meshes
    ]


def _device_memory(
    program: Program,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    instructions: NDArray[np.int64],
    base: int,
) -> NDArray[np.float64]:
    """Sort one device's changes by time and sum them up."""
    begins, ends = start[instructions], end[instructions]
    grows = program.allocated[instructions] + program.temporary[instructions]
    shrinks = -program.freed[instructions] - program.temporary[instructions]
    lasts = ends > begins
    # Stable sorting keeps this order at equal times: ends, then starts by index, each start of an
    # instant instruction followed by its own end.
    present = np.column_stack([np.ones_like(lasts), ~lasts])
    times = np.concatenate([ends[lasts], np.column_stack([begins, ends])[present]])
    changes = np.concatenate([shrinks[lasts], np.column_stack([grows, shrinks])[present]])
    order = np.argsort(times, kind="stable")
    alive = base + np.cumsum(changes[order])
    rows = np.empty((len(times) + 1, 2))
    rows[0] = 0.0, base
    rows[1:, 0] = times[order]
    rows[1:, 1] = alive
    return rows
