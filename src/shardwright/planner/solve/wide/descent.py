"""From a choice to a good one that fits: rounds of moves, in which what is broken weighs ever more."""

from __future__ import annotations

import numpy as np

from shardwright.planner.solve.wide.neighbourhood import BUMP, Manner, improve, search_of
from shardwright.planner.solve.wide.net import BIG, FEW, WORK, Net
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem
from shardwright.planner.solve.wide.region import MOST_NODES, Room

REGION_NODES = MOST_NODES // FEW  # at most, where many moves are better than wide ones
REGION_CELLS = (
    20_000  # of a table in a region at most; of at least two edges' tables as they are on average
)
# What is broken weighs ``BUMP`` times as much where a round does not take half of its penalty away; sums of such
# weights times what is over the limit are still numbers.
MOST_WEIGHT = float(np.sqrt(np.finfo(np.float64).max))


class Descent:
    """A choice on its way to a better one; ``round`` makes some moves.

    ``prices`` are those of memory within the limit. Two ``penalties`` are for what is broken: what a
    unit over the limit costs at first, and from which cost on a pair counts as forbidden. The first
    grows where moves take little of it away; so does the second, unless it is ``BIG``, in tables
    that every edge of ``net`` has for itself. A choice that fits goes on fitting.
    """

    def __init__(
        self, problem: WideProblem, net: Net, room: Room, choice: Ints, seed: int,
        prices: Floats | None = None, penalties: tuple[float, float] = (0.0, BIG),
    ) -> None:  # fmt: skip
        self.problem, self._net, self._room = problem, net, room
        weight, self._forbidden = penalties
        used = problem.profile(choice)
        self._prices = np.zeros(len(used) + 1) if prices is None else prices
        self.fits = bool((used <= problem.limit).all())
        weight = max(
            weight, float(np.diff(self._prices).max(initial=0.0)), 1 / max(problem.limit, 1.0)
        )
        self._weights = np.full(len(used), weight)
        self._search = search_of(net, choice, used, self._weights.copy(), seed)
        self._harden()
        self._everywhere = np.flatnonzero(problem.sizes > 1)
        self._least = np.minimum.reduceat(problem.usage, problem.first[:-1])
        edges = problem.sizes[problem.ends].prod(axis=1)
        least = 2 * int(edges.mean()) if len(edges) else 1
        self._cells = least, max(REGION_CELLS, least)
        self.cost = capped_cost(problem, choice)

    @property
    def choice(self) -> Ints:
        """Return the current choice; it changes with every round."""
        return self._search.choice

    def round(self, scale: float, most_nodes: int) -> float:
        """Make a round of moves; return what was gained.

        ``scale`` is for the prices of memory while it fits; with 0 the cost never rises.
        """
        roots = self._trouble()
        roots = roots if len(roots) else self._everywhere
        if not len(roots):
            return 0.0
        scale = scale if self.fits else 1.0
        manner = Manner(self._prices, scale, self.problem.limit, most_nodes, self._cells)
        before = 0.0 if roots is self._everywhere and self.fits else self._penalty()
        gained = improve(self._net, self._search, self._room, manner, roots, WORK)
        if before or not self.fits:
            self._weigh(before)
        self.cost = capped_cost(self.problem, self.choice)
        return gained

    def _penalty(self) -> float:
        """Return what is broken costs."""
        cells = self._net.cells[self._places()]
        penalty = float(cells[cells >= self._forbidden].sum())
        if not self.fits:
            over = np.maximum(self._search.used - self.problem.limit, 0.0)
            penalty += float(over @ self._search.weight)
        return penalty

    def _weigh(self, before: float) -> None:
        """Let what is broken cost more if much is left of it; what has come to fit stays so."""
        search = self._search
        if not self.fits:
            search.used[:] = self.problem.profile(self.choice)  # without rounding errors
        if self._penalty() > 0.5 * before:
            if self._forbidden < BIG:
                bad = self._places()
                bad = bad[self._net.cells[bad] >= self._forbidden]
                self._net.cells[bad] = np.minimum(self._net.cells[bad] * BUMP, MOST_WEIGHT)
            if not self.fits:
                over = search.used > self.problem.limit
                search.weight[over] = np.minimum(search.weight[over] * BUMP, MOST_WEIGHT)
        if not self.fits and (search.used <= self.problem.limit).all():
            self.fits = True
            self._weights[:] = search.weight
            self._harden()

    def _harden(self) -> None:
        if self.fits:
            self._search.weight[:], self._search.slope[:] = np.inf, 0.0

    def loosen(self) -> None:
        """Let memory be over the limit again for a while, at what it cost three bumps ago."""
        self._search.weight[:] = self._weights / BUMP**3
        self.fits = False

    def _places(self) -> Ints:
        """Return where every edge's cost is."""
        return self._net.table + self.problem.places(self.choice)

    def _trouble(self) -> Ints:
        """Return nodes at forbidden edges, and about as often nodes that could use less where memory
        is over the limit."""
        problem = self.problem
        broken = problem.ends[self._net.cells[self._places()] >= self._forbidden].ravel()
        heavy = broken[:0]
        if not self.fits:
            over = self._search.used > problem.limit
            before = np.concatenate([[0], np.cumsum(over)])
            spare = problem.usage[problem.first[:-1] + self.choice] > self._least
            heavy = np.flatnonzero((before[problem.end] > before[problem.begin]) & spare)
        roots = np.concatenate([heavy, np.repeat(broken, 1 + len(heavy) // max(1, len(broken)))])
        return roots[problem.sizes[roots] > 1]


def capped_cost(problem: WideProblem, choice: Ints) -> float:
    """Return the cost with ``BIG`` for everything forbidden."""
    return float(np.minimum(problem.costs(choice), BIG).sum())
