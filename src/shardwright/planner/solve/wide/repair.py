"""Repair in rounds: what is broken weighs more wherever moves gain nothing."""

from __future__ import annotations

import numpy as np

from shardwright.planner.solve.wide.mend import Load, mend
from shardwright.planner.solve.wide.neighbourhood import Manner, search_of
from shardwright.planner.solve.wide.net import Net
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem
from shardwright.planner.solve.wide.region import Room
from shardwright.planner.solve.wide.usage import usage_of

MOVE_NODES = 20_000  # of all regions of a round together, at most
MOST_NODES, REGION_CELLS = 2_000, 20_000  # of a region
MORE = 1.5  # by what the weights of what is broken grow
MOST_WEIGHT = 1e12  # of a pair, in units of its first one


class Repair:
    """A choice on its way to a legal one; ``round`` makes some moves.

    ``weight`` is what a unit of memory over the limit costs at every time. ``net`` has a table of its
    own per edge, where forbidden pairs have weights and all others 0; they change.
    """

    def __init__(
        self, problem: WideProblem, net: Net, room: Room, choice: Ints, weight: Floats, seed: int
    ) -> None:
        self.problem = problem
        self._net, self._room = net, room
        used = problem.profile(choice)
        self._load = Load(used, weight.copy(), np.zeros(len(used) + 1))
        self._search = search_of(net, choice, usage_of(used), seed)
        self._manner = Manner(np.zeros(len(used) + 1), 1.0, problem.limit, MOST_NODES, REGION_CELLS)
        self._everywhere = np.flatnonzero(problem.sizes > 1)
        self._least = np.minimum.reduceat(problem.usage, problem.first[:-1])
        self._next = 1

    @property
    def choice(self) -> Ints:
        """Return the current choice; it changes with every round."""
        return self._search.choice

    def round(self) -> None:
        """Make some moves; where they gain nothing, weigh more what is broken."""
        if not len(self._everywhere):
            return
        roots = self._trouble()
        size = min(MOST_NODES, len(self._everywhere))
        numbers = (self._next, self._next + 1 + MOVE_NODES // max(size, 20))
        self._next = numbers[1]
        gained = mend(self._net, self._search, self._room, self._manner, self._load, roots, numbers)
        if gained <= 1e-9:
            self._weigh()

    def _is_over(self) -> np.ndarray:
        return self._load.used > self.problem.limit

    def _places(self) -> Ints:
        problem, choice = self.problem, self.choice
        one, two = problem.ends[:, 0], problem.ends[:, 1]
        return self._net.table + choice[one] * problem.sizes[two] + choice[two]

    def _broken(self) -> Ints:
        """Return the edges whose pair is forbidden."""
        return np.flatnonzero(self._net.cells[self._places()] > 0)

    def _trouble(self) -> Ints:
        """Return nodes that could use less where it is over the limit, and as often those at broken
        pairs."""
        problem = self.problem
        before = np.concatenate([[0], np.cumsum(self._is_over())])
        is_over = before[problem.end] > before[problem.begin]
        spare = problem.usage[problem.first[:-1] + self.choice] > self._least
        heavy = np.flatnonzero(is_over & spare)
        broken = problem.ends[self._broken()].ravel()
        roots = np.concatenate([heavy, np.repeat(broken, 1 + len(heavy) // max(1, len(broken)))])
        roots = roots[problem.sizes[roots] > 1]
        return roots if len(roots) else self._everywhere

    def _weigh(self) -> None:
        over = self._is_over()
        weight = self._load.weight
        weight[over] = np.minimum(weight[over] * MORE, MOST_WEIGHT)
        bad = self._places()[self._broken()]
        cells = self._net.cells
        cells[bad] = np.minimum(cells[bad] * MORE, MOST_WEIGHT)
