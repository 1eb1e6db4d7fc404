"""Search: which strategies are best, and how good the best could be.

``search``, ``survey`` and ``curve`` are the doors; ``begun`` is that of other ways to search. One ``loop`` tries what ``proposers``
yield, best first, and a ``pool`` keeps what is known: the additive ``model`` proposes (``candidates``), ``judge``
brings it before the simulator, ``local`` changes the best decision by decision.
``steering`` has the numbers. Nothing here knows torch, the clock or the disk.
"""

from shardwright.planner.judge.evaluate import evaluate_closely
from shardwright.planner.judge.ties import complexity
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.goals import MODES, Goal
from shardwright.planner.search.limits import Limits, room
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Progress
from shardwright.planner.search.search import (
    begun,
    best_of,
    curve,
    search,
    survey,
)
from shardwright.planner.search.survey import PLAIN_MICROBATCHES, Survey, surveyed

__all__ = [
    "MODES",
    "PLAIN_MICROBATCHES",
    "Context",
    "Goal",
    "Limits",
    "Progress",
    "Survey",
    "Training",
    "as_strategy",
    "begun",
    "best_of",
    "complexity",
    "curve",
    "evaluate_closely",
    "room",
    "search",
    "survey",
    "surveyed",
]
