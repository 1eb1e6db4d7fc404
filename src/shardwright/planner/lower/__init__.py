"""Lower: from graph and strategy to the Program that both interpreters run, and proofs about it."""

from shardwright.planner.lower.check import check
from shardwright.planner.lower.complete import check_complete
from shardwright.planner.lower.lower import lower

__all__ = ["check", "check_complete", "lower"]
