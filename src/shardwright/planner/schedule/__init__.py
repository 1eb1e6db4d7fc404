"""When work and messages happen: pipeline orders and gradient buckets."""

from shardwright.planner.schedule.merge import finish_time, merge_gradients
from shardwright.planner.schedule.pipeline import Action, global_order, held, pipeline_order
from shardwright.planner.schedule.program import order_of, program_order

__all__ = [
    "Action", "finish_time", "global_order", "held", "merge_gradients", "order_of",
    "pipeline_order", "program_order",
]  # fmt: skip
