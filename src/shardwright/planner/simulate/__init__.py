"""The clock: from a Program and durations to a timeline."""

from shardwright.planner.simulate.loop import period
from shardwright.planner.simulate.memory import Traits
from shardwright.planner.simulate.simulation import simulate, simulate_on, with_input

__all__ = [
    "Traits",
    "period",
    "simulate",
    "simulate_on",
    "with_input",
]
