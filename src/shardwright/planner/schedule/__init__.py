"""When work and messages happen: pipeline orders and gradient buckets."""

from shardwright.planner.schedule.merge import finish_time, merge_gradients
from shardwright.planner.schedule.pipeline import global_order, pipeline_order

__all__ = ["finish_time", "global_order", "merge_gradients", "pipeline_order"]
