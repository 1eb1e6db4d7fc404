"""When work and messages happen: pipeline orders and gradient buckets."""

from shardwright.planner.schedule.clock import Replay, StageTimes, replay
from shardwright.planner.schedule.folded import folded
from shardwright.planner.schedule.generators import pipeline_order
from shardwright.planner.schedule.merge import finish_time, merge_gradients
from shardwright.planner.schedule.pipeline import (
    Action,
    Crews,
    Line,
    OrderError,
    check_order,
    global_order,
    held,
    meshes_of,
    most_bytes,
    written,
)
from shardwright.planner.schedule.play import Room
from shardwright.planner.schedule.program import crews_of, order_of, program_order
from shardwright.planner.schedule.searched import search_order, timed_order

__all__ = [
    "Action", "Crews", "Line", "OrderError", "Replay", "Room", "StageTimes", "check_order", "crews_of",
    "finish_time", "folded", "global_order", "held", "merge_gradients", "meshes_of", "most_bytes", "order_of",
    "pipeline_order", "program_order", "replay", "search_order", "timed_order", "written",
]  # fmt: skip
