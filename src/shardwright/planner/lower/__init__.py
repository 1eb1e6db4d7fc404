"""Lower: from graph and strategy to the Program that both interpreters run, and proofs about it."""

from shardwright.planner.lower.check import check
from shardwright.planner.lower.lower import lower

__all__ = ["check", "lower"]
