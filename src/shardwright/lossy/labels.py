"""What a packet's values say of it: how urgent it is, whether it must arrive, whether it may be dropped.

Priority is the DSCP class selector (7 for the most urgent), droppability the two ECN bits of IP: a
switch that marks packets which are ECN-capable drops those that are not.
"""

from __future__ import annotations

import math

import numpy as np

from shardwright.lossy.messages import Labels
from shardwright.lossy.packets import Shape
from shardwright.lossy.settings import Tolerance

PRIORITIES = 8
ECN_CAPABLE = 0x02


def labelled(
    values: np.ndarray, shape: Shape, allowed: int, tolerance: Tolerance, priority: int
) -> Labels:
    """Return the labels of a message of which ``allowed`` packets may be lost.

    Priorities up to 3 are those of front layers, whose loss is tolerated and whose delay is not.
    """
    magnitudes = np.maximum.reduceat(np.abs(values), np.arange(0, shape.elements, shape.values))
    ranked = np.argsort(magnitudes, kind="stable")  # not a number counts as the largest
    important = np.zeros(shape.packets, np.bool_)
    if allowed and tolerance.important:
        important[ranked[-math.ceil(tolerance.important * shape.packets) :]] = True
    is_front = priority < PRIORITIES // 2
    offered = {"magnitude": 4, "layer": 4 * is_front, "both": 4 if is_front else 2, "none": 0}
    by_magnitude = tolerance.droppable in ("magnitude", "both")
    candidates = ranked if by_magnitude else np.arange(shape.packets)[::-1]
    droppable = np.zeros(shape.packets, np.bool_)
    chosen = candidates[~important[candidates]]
    droppable[chosen[: offered[tolerance.droppable] * allowed]] = True
    queue = (PRIORITIES - 1 - priority) << 5
    tos = np.where(droppable, queue, queue | ECN_CAPABLE)
    return Labels(important, tos.astype(np.uint8))
