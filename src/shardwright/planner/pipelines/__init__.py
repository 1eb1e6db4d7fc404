"""Pipelines of profiled layers: the exact planner beside PipeDream's and BaPipe's.

``study_pipelines`` is the door (``study_levels`` for hosts of devices): it runs all planners under
one cost model, which ``problem`` states.
"""

from shardwright.planner.pipelines.bapipe import STREAMING, SYNCHRONOUS, plan_bapipe
from shardwright.planner.pipelines.compare import (
    EXPLORED,
    judged_as,
    study_levels,
    study_pipelines,
)
from shardwright.planner.pipelines.cuts import Cuts, find_cuts
from shardwright.planner.pipelines.exact import lower_bound, plan_exact
from shardwright.planner.pipelines.pipedream import Level, plan_pipedream
from shardwright.planner.pipelines.problem import (
    PipelineProblem,
    in_flight,
    measure,
)
from shardwright.planner.pipelines.relaxation import relaxations

__all__ = [
    "EXPLORED", "STREAMING", "SYNCHRONOUS", "Cuts", "Level", "PipelineProblem",
    "find_cuts", "in_flight", "judged_as", "lower_bound", "measure", "plan_bapipe",
    "plan_exact", "plan_pipedream", "relaxations", "study_levels", "study_pipelines",
]  # fmt: skip
