"""The clock: from a Program and durations to a timeline."""

from shardwright.planner.simulate.cores import on_shared_cores
from shardwright.planner.simulate.loop import period
from shardwright.planner.simulate.simulation import simulate, simulate_on, with_input

__all__ = [
    "on_shared_cores",
    "period",
    "simulate",
    "simulate_on",
    "with_input",
]
