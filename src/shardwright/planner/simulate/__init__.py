"""The clock: from a Program and durations to a timeline."""

from shardwright.planner.simulate.simulation import DeltaSimulator, simulate
from shardwright.planner.simulate.statistics import ProgramStatistics, program_statistics

__all__ = ["DeltaSimulator", "ProgramStatistics", "program_statistics", "simulate"]
