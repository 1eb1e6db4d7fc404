"""Solve a wide problem: compaction, a lower bound by message passing, then neighbourhood search.

Anytime: the best solution so far is always at hand. Equal problem, seed and rounds give an equal
answer; the clock, if any, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shardwright.contest.branch import Branching
from shardwright.contest.compaction import compacted
from shardwright.contest.feasible import Feasibility, is_legal
from shardwright.contest.order import by_slack, order_of, relaid, reordered
from shardwright.planner.solve.wide.compact import Compact
from shardwright.planner.solve.wide.descent import REGION_NODES, Descent, capped_cost
from shardwright.planner.solve.wide.dual import PATIENCE, SLIGHT, Dual, tolerance
from shardwright.planner.solve.wide.net import BIG, FEW, WORK, net_of
from shardwright.planner.solve.wide.problem import Ints, WideProblem
from shardwright.planner.solve.wide.region import MOST_NODES, room_of

FEASIBLE = 0.25  # of the budget, at most, goes to a first legal choice before all else
# Of what is left of the budget, bounding goes on until the first share is used up, searching until the second; a proof
# has as much as the first search.
TURNS = ((0.08, 0.14), (0.36, 0.48), (0.58, 0.68))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a solve is: the best cost (infinite: none fits yet), the bound, and the stage."""

    cost: float
    bound: float
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WideSolution:
    """A strategy per node and its cost, and the bound that no solution can go below.

    ``is_impossible`` says that no choice is allowed and keeps the memory limit, proved.
    """

    choice: Ints
    cost: float
    bound: float
    is_impossible: bool = False

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
    if math.isinf(problem.limit):
        problem = replace(problem, limit=float(problem.usage.sum() + problem.base.max(initial=0)))
    order = order_of(problem)
    if order is not None:
        found = _solved(reordered(problem, order), spent, tell, seed)
        choice = np.empty_like(found.choice)
        choice[order] = found.choice
        return replace(found, choice=choice)
    return _solved(problem, spent, tell, seed)


def _solved(
    problem: WideProblem, spent: Spent, tell: Callable[[Standing], None], seed: int
) -> WideSolution:
    smaller = compacted(problem)
    run = _Run(problem, smaller, spent, tell, seed)
    if smaller.problem.num_nodes:
        run.work()
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
        self.best = frugal(self.problem)
        self.cost = math.inf
        least = self.problem.profile(self.best).max(initial=0.0)
        self.is_impossible = smaller.is_impossible or least > self.problem.limit
        self.num_rounds = 0
        self._dual: Dual | None = None
        self._feasibility: Feasibility | None = None
        self._spent, self._tell = spent, tell
        self._room = room_of(MOST_NODES, 8_000_000)

    @property
    def dual(self) -> Dual:
        """What bounds: a copy of all tables, whose costs grow. It waits until something is legal."""
        if self._dual is None:
            self._dual = Dual(self.problem, net_of(self.problem))
        return self._dual

    @property
    def bound(self) -> float:
        """What everything costs at least, as far as is known."""
        return -math.inf if self._dual is None else self._dual.bound

    def is_over(self, share: float, stage: str) -> bool:
        """Count a round; say whether the share of the budget is used up or nothing is left to
        find."""
        self.num_rounds += 1
        bound = min(self.bound, self.cost) + self.smaller.constant
        cost = self.cost + self.smaller.constant
        self._tell(Standing(cost=cost if cost < BIG else math.inf, bound=bound, stage=stage))
        return self._spent(self.num_rounds) >= share or self.cost <= _whole(self.bound)

    def work(self) -> None:
        """Find something legal; raise the bound, search and, where the gap is small enough, prove,
        by turns; then polish the best."""
        if self.is_impossible:
            return
        self.offer(self.best)
        self.make_legal(FEASIBLE)
        # Messages that settle for a proposal before prices have moved enough hold up the bound for
        # long, so the turns share what is left of the budget.
        begun = min(self._spent(self.num_rounds), 1.0)
        for turn in TURNS:
            bounded, searched = (begun + share * (1 - begun) for share in turn)
            self.raise_bound(bounded)
            if self.is_impossible or self.is_over(searched, "searching"):
                continue
            self.descend(self._proposal((bounded + searched) / 2), searched)
            if self.cost < BIG:
                self.prove(searched + TURNS[0][1] - TURNS[0][0])
            else:  # without anything legal all else is worth nothing
                self.make_legal(1.0)
        self.make_legal(1.0)
        if self.cost < BIG:
            self.descend(self.best, 1.0, "polishing")

    def raise_bound(self, share: float) -> None:
        """Bound until the share of the budget is used up or steps have become tiny."""
        self.dual.is_settled = False
        while not (self.is_over(share, "bounding") or self.dual.is_settled):
            self.dual.advance(self.cost if self.cost < BIG else math.inf)

    def _proposal(self, share: float) -> Ints:
        """Return the choice on which messages have settled, or nearly, as the share is used up."""
        proposals = self.dual.propose(PATIENCE)
        proposal = next(proposals)
        while (further := next(proposals, None)) is not None:
            proposal = further
            if self.is_over(share, "searching"):
                break
        return proposal

    def make_legal(self, share: float) -> None:
        """Look for a legal choice until the share of the budget is used up, but one round at least while
        any of it is left: getting ready may have taken that share alone."""
        if self.cost < math.inf:
            return
        feasibility = self._feasibility = self._feasibility or Feasibility(self.problem, self.seed)
        is_over = self.is_over(1.0, "looking for anything legal")
        while not (is_over or feasibility.is_found or feasibility.is_impossible):
            feasibility.round()
            is_over = self.is_over(share, "looking for anything legal")
        self.is_impossible = feasibility.is_impossible
        if feasibility.is_found:
            self.offer(feasibility.choice)

    def offer(self, choice: Ints) -> None:
        """Keep a choice if it is legal and the cheapest so far."""
        cost = capped_cost(self.problem, choice)
        if cost < self.cost and is_legal(self.problem, choice):
            self.best, self.cost = choice.copy(), cost

    def prove(self, share: float) -> None:
        """Search all that the bound leaves open, if that is little."""
        dual = self.dual
        dual.advance(self.cost)
        count = np.add.reduceat(dual.allowed, self.problem.first[:-1])
        cells = int(count[self.problem.ends].prod(axis=1).sum())
        if cells > WORK:
            return
        open_costs = np.where(dual.allowed, self.problem.cost, np.inf)
        rest = compacted(replace(self.problem, cost=open_costs))
        if not rest.problem.num_nodes:  # what is left open is settled
            self.offer(rest.expand(np.zeros(0, np.int64)))
            dual.bound = max(dual.bound, self.cost)
            return
        cost = self.cost - rest.constant
        below = Dual(rest.problem, net_of(rest.problem))
        for _ in range(PATIENCE):
            below.advance(cost)
        branching = Branching(rest.problem, below, cost)
        while not (branching.is_done or self.is_over(share, "proving")):
            branching.round(lambda: self._spent(self.num_rounds) < share)
            if branching.best is not None and branching.cost + rest.constant < self.cost:
                choice = rest.expand(branching.best)
                self.best, self.cost = choice, capped_cost(self.problem, choice)
            dual.bound = max(dual.bound, branching.bound + rest.constant)

    def descend(self, choice: Ints, share: float, stage: str = "searching") -> None:
        """Search from a choice until the share of the budget is used up or, but for ``polishing``, little is
        gained."""
        self._sort()
        descent, pace = self._descent(choice), _Pace(self.problem.num_nodes)
        num, polishing = 0, stage == "polishing"
        while not self.is_over(share, stage):
            priced = num // 60 % 2 == 0 and not polishing
            most_nodes = MOST_NODES if polishing and num % 4 == 0 else REGION_NODES
            descent.round(1.0 if priced else 0.0, most_nodes)
            num += 1
            pace.note(descent)
            self._keep(descent, pace)
            if pace.is_lost and descent.fits:
                if pace.loosens():
                    descent.loosen()
                elif polishing:
                    descent = self._descent(self.best)
                else:
                    break

    def _keep(self, descent: Descent, pace: _Pace) -> None:
        """Keep what a descent has come to, if it is the cheapest so far."""
        if descent.fits and descent.cost < min(self.cost, BIG):
            first = self.problem.first[:-1]
            self.best = self._order[first + descent.choice] - first
            self.cost, pace.loosened = descent.cost, 0

    def _sort(self) -> None:
        """Put strategies in the order in which the bound asks for them."""
        self._order, rank = by_slack(self.dual)
        self._place = np.argsort(self._order)
        self._sorted = relaid(self.problem, self._order)
        self._net = net_of(self._sorted, rank)

    def _descent(self, choice: Ints) -> Descent:
        self.seed += 1
        first = self.problem.first[:-1]
        start = self._place[first + choice] - first
        prices = self.dual.prices()
        return Descent(self._sorted, self._net, self._room, start, self.seed, prices)

    def solution(self) -> WideSolution:
        """Return the best choice, in the original problem's numbers."""
        choice = self.smaller.expand(self.best)
        bound = self.smaller.constant + min(_whole(self.bound), self.cost)
        if not self.problem.num_nodes:
            bound = self.smaller.constant
        cost = self.original.evaluate(choice)
        return WideSolution(choice=choice, cost=cost, bound=bound, is_impossible=self.is_impossible)


class _Pace:
    """How a descent gets on: rounds in a row that gained little, and how often memory was loosened."""

    def __init__(self, num_nodes: int) -> None:
        self._patience = FEW + num_nodes // MOST_NODES
        self._idle, self._mark = 0, math.inf
        self.loosened = 0

    def note(self, descent: Descent) -> None:
        """Take note of a round."""
        self._idle += 1
        if descent.fits and descent.cost < min(self._mark * (1 - SLIGHT), BIG):
            self._mark, self._idle = descent.cost, 0

    @property
    def is_lost(self) -> bool:
        """Whether nothing comes of it any more."""
        return self._idle >= self._patience

    def loosens(self) -> bool:
        """Begin anew; tell whether memory may be over the limit once more, or that was so too often in a row."""
        self._idle, self._mark = 0, math.inf
        self.loosened = (self.loosened + 1) % (2 * FEW + 1)
        return self.loosened > 0


def _whole(bound: float) -> float:
    """Round a bound of whole numbers up, allowing for rounding errors of sums."""
    return math.ceil(bound - tolerance(bound)) if math.isfinite(bound) else bound


def frugal(problem: WideProblem) -> Ints:
    """Return every node's strategy of least usage, the cheaper of equals."""
    picks = [
        np.lexsort((problem.cost[a:b], problem.usage[a:b]))[0]
        for a, b in zip(problem.first[:-1], problem.first[1:], strict=True)
    ]
    return np.array(picks, dtype=np.int64)
