"""Problems of the contest on operator placement (IOPDDL): anytime, by the parts of ``planner.solve.wide``.

``solve`` is the door. The planner's own wide graphs go by ``planner.solve.core``.
"""

from shardwright.contest.solver import Standing, WideSolution, solve

__all__ = ["Standing", "WideSolution", "solve"]
