"""Search: which strategies are best, and how good the best could be.

``search``, ``sample``, ``curve``, ``why_not`` and ``explain`` are the doors. One ``loop`` tries what ``proposers``
yield, best first, and a ``pool`` keeps what is known: the additive ``model`` proposes (``candidates``), ``judge``
brings it before the simulator, ``local`` changes the best decision by decision (so do Markov chains),
``reasons`` explains. ``steering`` has the numbers. Nothing here knows torch, the clock or the disk.
"""

from shardwright.planner.judge.evaluate import evaluate_closely
from shardwright.planner.judge.ties import is_simpler
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.alternative import Wish
from shardwright.planner.search.goals import MODES, Goal, grown
from shardwright.planner.search.limits import Limits, room
from shardwright.planner.search.local.mcmc import Chain
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.progress import Progress
from shardwright.planner.search.reasons.explanation import explain
from shardwright.planner.search.search import (
    best_of,
    curve,
    sample,
    search,
    some_plan,
    survey,
    why_not,
)
from shardwright.planner.search.survey import PLAIN_MICROBATCHES, Survey, surveyed

__all__ = [
    "MODES",
    "PLAIN_MICROBATCHES",
    "Chain",
    "Context",
    "Goal",
    "Limits",
    "Progress",
    "Survey",
    "Training",
    "Wish",
    "as_strategy",
    "best_of",
    "curve",
    "evaluate_closely",
    "explain",
    "grown",
    "is_simpler",
    "room",
    "sample",
    "search",
    "some_plan",
    "survey",
    "surveyed",
    "why_not",
]
