"""Solve a wide problem: compaction, a lower bound by message passing, then neighbourhood search.

Anytime: the best solution so far is always at hand. Equal problem, seed and rounds give an equal
answer; the clock, if any, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwright.planner.search.wide.compact import Compact, compact
from shardwright.planner.search.wide.dual import Dual
from shardwright.planner.search.wide.neighbourhood import Search, improve, search_of
from shardwright.planner.search.wide.net import BIG, net_of
from shardwright.planner.search.wide.problem import Floats, Ints, WideProblem
from shardwright.planner.search.wide.region import room_of
from shardwright.planner.search.wide.usage import usage_of

DUAL_SHARE = 0.35  # of the budget, before the neighbourhood search
REGION_NODES = 500
REGION_CELLS = 20_000
MOVES = 25  # per round


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a solve is: the best cost (infinite: none fits yet), the bound, and the stage."""

    cost: float
    bound: float
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WideSolution:
    """A strategy per node and its cost, and the bound that no solution can go below.

    ``is_within`` is false when nothing was found that keeps the memory limit.
    """

    choice: Ints
    cost: float
    bound: float
    is_within: bool

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; 0 where the solution is proved optimal."""
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / self.cost if math.isfinite(self.cost) else math.inf


Spent = Callable[[int], float]


def solve(
    problem: WideProblem,
    spent: Spent,
    tell: Callable[[Standing], None] = lambda standing: None,
    seed: int = 0,
) -> WideSolution:
    """Find a cheap solution within the memory limit.

    ``spent`` says which fraction of the budget is used after a number of rounds; at 1 the search
    stops. ``tell`` hears of progress. Costs are taken to be whole numbers: the bound is rounded up.
    """
    smaller = compact(problem)
    run = _Run(problem, smaller, spent, tell, seed)
    if smaller.problem.num_nodes:
        run.bound_below()
        run.search()
    return run.solution()


class _Run:
    """One solve in progress."""

    def __init__(
        self,
        original: WideProblem,
        smaller: Compact,
        spent: Spent,
        tell: Callable[[Standing], None],
        seed: int,
    ) -> None:
        self.original, self.smaller, self.seed = original, smaller, seed
        self.problem = smaller.problem
        self.net = net_of(self.problem)
        self.dual = Dual(self.problem, self.net)
        self.best = _frugal(self.problem)
        self.cost = self._capped(self.best) if self._fits(self.best) else math.inf
        self.num_rounds = 0
        self._spent, self._tell = spent, tell
        self.moves = 1

    def is_over(self, share: float, stage: str) -> bool:
        """Count a round; say whether the share of the budget is used up or nothing is left to
        find."""
        self.num_rounds += 1
        bound = self.dual.bound + self.smaller.constant
        cost = self.cost + self.smaller.constant
        self._tell(Standing(cost=cost if cost < BIG else math.inf, bound=bound, stage=stage))
        return self._spent(self.num_rounds) >= share or self.cost <= _whole(self.dual.bound)

    def bound_below(self) -> None:
        """Raise the lower bound for a while."""
        while not self.is_over(DUAL_SHARE, "bounding"):
            self.dual.advance(self.cost if self.cost < BIG else math.inf)

    def search(self) -> None:
        """Improve the choice that the messages propose."""
        choice = self.dual.choice.copy()
        prices = self.dual.prices()
        limit = self.problem.limit
        found = search_of(self.net, choice, usage_of(self._held(choice)), self.seed)
        room = room_of(8 * REGION_NODES, 8_000_000, int(self.problem.sizes.max()))
        everywhere = np.flatnonzero(self.problem.sizes > 1)
        extra = np.zeros(len(self.problem.base))
        while not self.is_over(1.0, "searching"):
            over = self.problem.profile(found.choice) > limit
            if over.any():
                extra[over] += max(prices[-1] / len(over), 1e-9)
                found = found._replace(usage=usage_of(self._held(found.choice)))
            scale = 1.0 if over.any() or self.moves // 10_000 % 2 == 0 else 0.0
            now = prices + np.concatenate([[0.0], np.cumsum(extra)]) if over.any() else prices
            roots = self._trouble(found, over)
            if roots is None or self.moves // MOVES % 2:
                roots = everywhere
            steps = (self.moves, self.moves + MOVES)
            improve(
                self.net, found, room, now, scale, limit, REGION_NODES, REGION_CELLS, roots, steps
            )
            self.moves += MOVES
            self._note(found.choice)

    def _trouble(self, found: Search, over: Floats) -> Ints | None:
        """Return nodes at forbidden edges, or alive when memory is over the limit."""
        costs = self.problem.costs(found.choice)
        count = self.problem.num_nodes
        bad = np.flatnonzero(costs[count:] >= BIG)
        if len(bad):
            return self.problem.ends[bad].ravel()
        if over.any():
            before = np.concatenate([[0], np.cumsum(over)])
            return np.flatnonzero(before[self.problem.end] > before[self.problem.begin])
        return None

    def _held(self, choice: Ints) -> Floats:
        """Return the profile with what is over the limit cut off: moves cannot make it worse."""
        return np.minimum(self.problem.profile(choice), self.problem.limit)

    def _note(self, choice: Ints) -> None:
        cost = self._capped(choice)
        if cost < self.cost and self._fits(choice):
            self.best, self.cost = choice.copy(), cost

    def _capped(self, choice: Ints) -> float:
        return float(np.minimum(self.problem.costs(choice), BIG).sum())

    def _fits(self, choice: Ints) -> bool:
        return bool(self.problem.profile(choice).max(initial=0.0) <= self.problem.limit)

    def solution(self) -> WideSolution:
        """Return the best choice, in the original problem's numbers."""
        choice = self.smaller.expand(self.best)
        bound = self.smaller.constant + max(_whole(self.dual.bound), 0.0)
        if not self.problem.num_nodes:
            bound = self.smaller.constant
        within = bool(self.original.profile(choice).max(initial=0.0) <= self.original.limit)
        cost = self.original.evaluate(choice)
        return WideSolution(choice=choice, cost=cost, bound=bound, is_within=within)


def _whole(bound: float) -> float:
    """Round a bound of whole numbers up, allowing for rounding errors of sums."""
    return math.ceil(bound - max(1e-3, abs(bound) * 1e-11)) if math.isfinite(bound) else bound


def _frugal(problem: WideProblem) -> Ints:
    """Return every node's strategy of least usage, the cheaper of equals."""
    picks = [
        np.lexsort((problem.cost[a:b], problem.usage[a:b]))[0]
        for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)
    ]
    return np.array(picks, dtype=np.int64)
