"""Lower: from graph and strategy to the Program that both interpreters run."""

from shardwright.planner.lower.lower import lower

__all__ = ["lower"]
