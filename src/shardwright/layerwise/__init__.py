"""Pipelines of profiled layers: the exact planner beside PipeDream's and BaPipe's.

``study_pipelines`` is the door (``study_levels`` for hosts of devices): it runs all planners under
one cost model, which ``problem`` states.
"""

from shardwright.layerwise.bapipe import plan_bapipe
from shardwright.layerwise.compare import (
    judged_as,
    study_levels,
    study_pipelines,
)
from shardwright.layerwise.cuts import Cuts, find_cuts
from shardwright.layerwise.exact import lower_bound, plan_exact
from shardwright.layerwise.ordered import NoRoom, plan_order, study_orders
from shardwright.layerwise.pipedream import Level, plan_pipedream
from shardwright.layerwise.problem import (
    PipelineProblem,
    in_flight,
    measure,
)
from shardwright.layerwise.relaxation import relaxations

__all__ = [
    "Cuts", "Level", "NoRoom", "PipelineProblem",
    "find_cuts", "in_flight", "judged_as", "lower_bound", "measure", "plan_bapipe",
    "plan_exact", "plan_order", "plan_pipedream", "relaxations", "study_levels", "study_orders",
    "study_pipelines",
]  # fmt: skip
