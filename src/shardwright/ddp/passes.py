"""One pass over memory on CPUs that adds what is owed, and finds what may be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.compiled import compiled
from shardwright.ddp.selecting import BLOCK

FEW = BLOCK // 2  # at most one element of so many is found
Floats = NDArray[Any]  # of 4 or 8 bytes


def add_and_find(one: Tensor, other: Tensor, out: Tensor, least: float) -> Tensor | None:
    """Put the sum of two flat tensors in a third, and return where it reaches a magnitude or is not a number; None
    where it does in too many places for those to be worth having."""
    found = np.empty(len(out) // FEW, np.int64)
    mine, theirs, sums = (part.numpy() for part in (one, other, out))
    count = _add_and_find(mine, theirs, sums, sums.dtype.type(least), found)
    return torch.from_numpy(found[:count]) if count <= len(found) else None


@compiled
def _add_and_find(
    one: Floats, other: Floats, out: Floats, least: float, found: NDArray[np.int64]
) -> int:
    """Return in how many places, and the first of them. Blocks as views are added without checks of places, several
    elements at a time; few have anything to find."""
    count = 0
    for begin in range(0, len(out), BLOCK):
        end = begin + BLOCK
        mine, theirs, sums = one[begin:end], other[begin:end], out[begin:end]
        hits = np.int32(0)
        for at in range(len(sums)):
            total = mine[at] + theirs[at]
            sums[at] = total
            hits += np.int32(not abs(total) < least)
        if hits == 0:
            continue
        for at in range(len(sums)):
            if not abs(sums[at]) < least:
                if count < len(found):
                    found[count] = begin + at
                count += 1
    return count
