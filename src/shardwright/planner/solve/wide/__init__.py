"""Wide graphs: problems too wide to eliminate, with memory limited at every time point.

``solve`` is the door.
"""

from shardwright.planner.solve.wide.problem import WideProblem
from shardwright.planner.solve.wide.solver import Standing, WideSolution, solve

__all__ = ["Standing", "WideProblem", "WideSolution", "solve"]
