"""The compiled loop of ``partition``: least bottlenecks of so many stages up to every block."""

# Elements of typed arrays are arrays to the type checker.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Sums(NamedTuple):
    """Per place between blocks, sums over the blocks before: work, bytes kept, bytes in flight. Per
    block: transient bytes, and what receiving costs if a stage begins there."""

    work: Floats
    kept: Floats
    flight: Floats
    transient: Floats
    receiving: Floats


@compiled
def extend(sums: Sums, best: Floats, held: int, limit: float) -> tuple[Floats, Ints]:
    """Add a stage that holds so many microbatches: return per place the least bottleneck of stages
    that end there, and where the last of them begins (of equals the earliest).

    ``best`` is the same of one stage less. Neither work nor memory shrinks as a stage grows, so what
    is too large ends the search for its begin.
    """
    count = len(sums.transient)
    found = np.full(count + 1, np.inf)
    begin = np.zeros(count + 1, dtype=np.int64)
    for stop in range(1, count + 1):
        peak = -np.inf
        for start in range(stop - 1, -1, -1):
            peak = max(peak, sums.transient[start])
            memory = sums.kept[stop] - sums.kept[start] + peak
            if memory + held * (sums.flight[stop] - sums.flight[start]) > limit:
                break
            work = sums.work[stop] - sums.work[start]
            if work > found[stop]:
                break
            value = max(best[start], work + sums.receiving[start])
            if value < np.inf and value <= found[stop]:
                found[stop], begin[stop] = value, start
    return found, begin
