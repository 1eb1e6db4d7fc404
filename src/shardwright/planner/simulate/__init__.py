"""The clock: from a Program and durations to a timeline."""

from shardwright.planner.simulate.loop import period
from shardwright.planner.simulate.memory import Traits
from shardwright.planner.simulate.simulation import DeltaSimulator, simulate
from shardwright.planner.simulate.statistics import ProgramStatistics, program_statistics
from shardwright.planner.simulate.steady import steady_seconds

__all__ = [
    "DeltaSimulator",
    "ProgramStatistics",
    "Traits",
    "period",
    "program_statistics",
    "simulate",
    "steady_seconds",
]
