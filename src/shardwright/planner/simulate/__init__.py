"""The clock: from a Program and durations to a timeline."""

from shardwright.planner.simulate.loop import period
from shardwright.planner.simulate.simulation import simulate, simulate_on, with_input

__all__ = [
    "period",
    "simulate",
    "simulate_on",
    "with_input",
]
