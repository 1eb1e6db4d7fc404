"""Pipelines of profiled layers: the exact planner beside PipeDream's and BaPipe's.

``study_pipelines`` is the door (``study_levels`` for hosts of devices): it runs all planners under
one cost model, which ``problem`` states.
"""

from shardwright.planner.search.pipelines.bapipe import STREAMING, SYNCHRONOUS, plan_bapipe
from shardwright.planner.search.pipelines.compare import (
    EXPLORED,
    study_levels,
    study_pipelines,
)
from shardwright.planner.search.pipelines.cuts import Cuts, find_cuts
from shardwright.planner.search.pipelines.exact import lower_bound, plan_exact
from shardwright.planner.search.pipelines.pipedream import Level, plan_pipedream
from shardwright.planner.search.pipelines.problem import (
    SCHEDULES,
    PipelineProblem,
    in_flight,
    measure,
)
from shardwright.planner.search.pipelines.relaxation import relaxations

__all__ = [
    "EXPLORED", "SCHEDULES", "STREAMING", "SYNCHRONOUS", "Cuts", "Level", "PipelineProblem",
    "find_cuts", "in_flight", "lower_bound", "measure", "plan_bapipe",
    "plan_exact", "plan_pipedream", "relaxations", "study_levels", "study_pipelines",
]  # fmt: skip
