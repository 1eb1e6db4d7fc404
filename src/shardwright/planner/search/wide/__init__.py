"""Wide graphs: problems too wide to eliminate, with memory limited at every time point.

``solve`` is the door.
"""

from shardwright.planner.search.wide.problem import WideProblem
from shardwright.planner.search.wide.solver import Standing, WideSolution, solve

__all__ = ["Standing", "WideProblem", "WideSolution", "solve"]
