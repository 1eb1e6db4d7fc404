"""Search: which strategies are best, and how good the best could be.

``search``, ``sample``, ``curve``, ``why_not`` and ``explain`` are the doors. ``elimination``, ``frontier`` and ``partition`` are exact solvers of
additive problems, ``problem`` states those problems, ``candidates`` and ``judge`` bring them
before the simulator. Nothing here knows torch, the clock or the disk.
"""

from shardwright.planner.search.additive.context import Training
from shardwright.planner.search.alternative import Wish
from shardwright.planner.search.existence import grown, some_plan
from shardwright.planner.search.goals import MODES, Goal
from shardwright.planner.search.local.mcmc import STARTS, Chain
from shardwright.planner.search.progress import Progress
from shardwright.planner.search.reasons.explanation import explain
from shardwright.planner.search.search import (
    Limits,
    best_of,
    curve,
    room,
    sample,
    search,
    why_not,
)

__all__ = [
    "MODES",
    "STARTS",
    "Chain",
    "Goal",
    "Limits",
    "Progress",
    "Training",
    "Wish",
    "best_of",
    "curve",
    "explain",
    "grown",
    "room",
    "sample",
    "search",
    "some_plan",
    "why_not",
]
