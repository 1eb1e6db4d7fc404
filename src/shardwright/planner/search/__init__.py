"""Search: which strategies are best, and how good the best could be.

``search`` is the door. ``elimination``, ``frontier`` and ``partition`` are exact solvers of
additive problems, ``problem`` states those problems, ``candidates`` and ``judge`` bring them
before the simulator. Nothing here knows torch, the clock or the disk.
"""

from shardwright.planner.search.context import Training
from shardwright.planner.search.search import Limits, Progress, search

__all__ = ["Limits", "Progress", "Training", "search"]
