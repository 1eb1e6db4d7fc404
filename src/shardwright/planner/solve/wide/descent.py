"""From a proposed choice to a good one that fits: repair, then neighbourhood search in rounds."""

from __future__ import annotations

import numpy as np

from shardwright.planner.solve.wide.neighbourhood import Manner, improve, search_of
from shardwright.planner.solve.wide.net import BIG, Net
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem
from shardwright.planner.solve.wide.region import Room
from shardwright.planner.solve.wide.usage import usage_of

MOVE_NODES = 12_500  # of all regions of a round together, at most
MOST_PRICE = 1e100
MOST_ROOTS = 100  # of the nodes that use the most memory where it is over the limit


class Descent:
    """One start of the neighbourhood search; ``round`` makes some moves.

    Where the choice is over the limit, moves may not make it worse, and the price of memory there
    doubles from round to round.
    """

    def __init__(
        self, problem: WideProblem, net: Net, room: Room, choice: Ints, prices: Floats, seed: int
    ) -> None:
        self.problem, self.net, self.room, self.prices = problem, net, room, prices
        self._search = search_of(net, choice, usage_of(self._held(choice)), seed)
        self._everywhere = np.flatnonzero(problem.sizes > 1)
        self._extra = np.zeros(len(problem.base))
        self._next = 1
        self._num_rounds = 0
        self._least = np.minimum.reduceat(problem.usage, problem.first[:-1])
        self.excess = self._over()
        self.cost = capped_cost(problem, choice)

    @property
    def choice(self) -> Ints:
        """Return the current choice; it changes with every round."""
        return self._search.choice

    @property
    def fits(self) -> bool:
        """Whether the current choice keeps the limit."""
        return not self.excess.any()

    def round(self, scale: float, most_nodes: int, most_cells: int) -> float:
        """Make a round of moves; return what was gained.

        ``scale`` is for the prices of memory while it fits; with 0 the cost never rises.
        """
        prices = self.prices
        is_over = not self.fits
        if is_over:
            self._raise_prices()
            prices = prices + np.concatenate([[0.0], np.cumsum(self._extra)])
            scale = 1.0
        manner = Manner(prices, scale, self.problem.limit, most_nodes, most_cells)
        numbers = (self._next, self._next + max(1, MOVE_NODES // most_nodes))
        roots = self._trouble()
        self._num_rounds += 1
        if not len(roots) or self._num_rounds % 2:
            roots = self._everywhere
        gained = improve(self.net, self._search, self.room, manner, roots, numbers)
        self._next = numbers[1]
        if is_over:
            self.excess = self._over()
            self._search = self._search._replace(usage=usage_of(self._held(self.choice)))
        self.cost = capped_cost(self.problem, self.choice)
        return gained

    def _over(self) -> Floats:
        used = self.problem.profile(self.choice)
        return np.maximum(used - self.problem.limit, 0.0)

    def _held(self, choice: Ints) -> Floats:
        """Return the profile with what is over the limit cut off: moves cannot make it worse."""
        return np.minimum(self.problem.profile(choice), self.problem.limit)

    def _raise_prices(self) -> None:
        over = self.excess > 0
        first = max(float(self.prices[-1]), 1.0 / max(self.problem.limit, 1.0)) / len(over)
        # Where nothing fits they would grow for ever.
        self._extra[over] = np.clip(2.0 * self._extra[over], first, MOST_PRICE)

    def _trouble(self) -> Ints:
        """Return nodes at forbidden edges, or using much memory where it is over the limit."""
        problem = self.problem
        costs = problem.costs(self.choice)
        bad = np.flatnonzero(costs[problem.num_nodes :] >= BIG)
        if len(bad):
            return problem.ends[bad].ravel()
        if self.fits:
            return bad
        before = np.concatenate([[0.0], np.cumsum(self.excess > 0)])
        spare = problem.usage[problem.first[:-1] + self.choice] - self._least
        spare *= before[problem.end] - before[problem.begin]
        most = np.argsort(-spare, kind="stable")[:MOST_ROOTS]
        return most[spare[most] > 0]


def capped_cost(problem: WideProblem, choice: Ints) -> float:
    """Return the cost with ``BIG`` for everything forbidden."""
    return float(np.minimum(problem.costs(choice), BIG).sum())


def fits(problem: WideProblem, choice: Ints) -> bool:
    """Return whether a choice keeps the limit."""
    return bool(problem.profile(choice).max(initial=0.0) <= problem.limit)
