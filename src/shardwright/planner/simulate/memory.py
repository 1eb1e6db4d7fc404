"""Bytes alive over time, from when instructions ran."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program


def memory_over_time(
    program: Program, start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Return, per mesh, rows (seconds, bytes alive on each of its devices) in time order.

    The first row is the base at time 0. An instruction's ``allocated`` and ``temporary`` bytes
    appear together at its start; ``temporary`` and ``freed`` disappear at its end. At one instant
    what ends goes first, then what starts in index order; an instruction that takes no time appears
    and disappears before the next one starts.
    """
    touches = (program.allocated != 0) | (program.freed != 0) | (program.temporary != 0)
    return tuple(
        _mesh_memory(program, start, end, np.flatnonzero(touches & (program.group == mesh)), base)
        for mesh, base in enumerate(program.base_bytes)
    )


def _mesh_memory(
    program: Program,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    instructions: NDArray[np.int64],
    base: int,
) -> NDArray[np.float64]:
    """Sort one mesh's changes by time and sum them up."""
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
