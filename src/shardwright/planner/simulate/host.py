"""Bytes on one device over time, compiled.

Import this module late, as ``full``.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np

from shardwright.compiled import compiled
from shardwright.planner.simulate.columns import Bytes, Floats, Ints


@compiled
def device_rows(bytes_: Bytes, start: Floats, end: Floats, mine: Ints, base: int) -> Floats:
    """Return rows (seconds, bytes) of a device whose instructions are ``mine``, in index order.

    Four changes to an instruction, in the order of the host: what is copied out of messages completed before
    it; what that lets go of; what it brings; what goes with it. What is completed by no instruction of the
    device goes at the end. O(n log n).
    """
    count = len(mine)
    changes = np.zeros(4 * count + 2, dtype=np.int64)
    moments = np.empty(4 * count + 2)
    passed = 0.0
    for place in range(count):
        index = mine[place]
        until, lent = bytes_.until[index], bytes_.lent[index]
        held, copied, freed = bytes_.held[index], bytes_.copied[index], bytes_.freed[index]
        changes[4 * place + 2] += bytes_.allocated[index] + held
        if not lent:
            changes[4 * place + 3] -= freed
            freed = 0
        if until == index:
            changes[4 * place] += copied
            changes[4 * place + 3] -= held + copied + freed
        elif held != 0 or copied != 0 or freed != 0:
            completed = 4 * np.searchsorted(mine, until)
            changes[completed] += copied
            changes[completed + 1] -= held + copied + freed
        begins = passed
        if bytes_.local[index]:
            begins = max(start[index], passed)
            passed = max(passed, end[index])
        moments[4 * place : 4 * place + 3] = begins
        moments[4 * place + 3] = max(begins, passed)
    moments[4 * count :] = passed
    rows = np.empty((np.count_nonzero(changes) + 1, 2))
    rows[0, 0], rows[0, 1] = 0.0, base
    alive, row = base, 0
    for change in range(4 * count + 2):
        if changes[change] != 0:
            alive += changes[change]
            row += 1
            rows[row, 0], rows[row, 1] = moments[change], alive
    return rows
