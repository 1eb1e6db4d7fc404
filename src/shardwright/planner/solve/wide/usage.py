"""Memory over time, kept up to date while choices change: range add and the overall maximum.

Time is cut into blocks. A change of a range touches the cells of its two outer blocks and one
number per inner block, so it costs about the square root of the number of time points.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.planner.compiled import compiled, inner
from shardwright.planner.solve.wide.problem import Floats

BLOCK = 64


class Usage(NamedTuple):
    """The usage at time ``t`` is ``cells[t] + shift[t // BLOCK]``; ``top`` has the blocks' maxima."""

    cells: Floats
    shift: Floats
    top: Floats


def usage_of(profile: Floats) -> Usage:
    """Return the structure for a profile of usages."""
    blocks = max(1, -(-len(profile) // BLOCK))
    cells = np.zeros(blocks * BLOCK)
    cells[: len(profile)] = profile
    return Usage(cells, np.zeros(blocks), cells.reshape(-1, BLOCK).max(axis=1))


@compiled
def add(usage: Usage, begin: int, end: int, change: float) -> None:
    """Add ``change`` at the times ``begin <= t < end``."""
    if begin >= end:
        return
    head, tail = begin // BLOCK, (end - 1) // BLOCK
    if head == tail:
        _add_inside(usage, head, begin, end, change)
        return
    _add_inside(usage, head, begin, (head + 1) * BLOCK, change)
    for block in range(head + 1, tail):
        usage.shift[block] += change
        usage.top[block] += change
    _add_inside(usage, tail, tail * BLOCK, end, change)


@inner
def _add_inside(usage: Usage, block: int, begin: int, end: int, change: float) -> None:
    for time in range(begin, end):
        usage.cells[time] += change
    top = usage.cells[block * BLOCK]
    for time in range(block * BLOCK + 1, (block + 1) * BLOCK):
        top = max(top, usage.cells[time])
    usage.top[block] = top + usage.shift[block]


@compiled
def peak(usage: Usage) -> float:
    """Return the largest usage at any time."""
    most = usage.top[0]
    for block in range(1, len(usage.top)):
        most = max(most, usage.top[block])
    return most


@compiled
def peak_time(usage: Usage) -> int:
    """Return the first time of the largest usage."""
    widest = 0
    for block in range(1, len(usage.top)):
        if usage.top[block] > usage.top[widest]:
            widest = block
    best = widest * BLOCK
    for time in range(best + 1, (widest + 1) * BLOCK):
        if usage.cells[time] > usage.cells[best]:
            best = time
    return best
