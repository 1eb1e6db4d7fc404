"""Feasibility first: a choice that forbids nothing and keeps the limit, or a proof that there is none.

Costs do not matter here, only which pairs are allowed and how much memory is used, so what remains
after compaction is far smaller. Three ways, cheapest first: compaction alone may decide; multiplicative
weights price the time points (Arora, Hazan and Kale, 2012) while messages bound what every allowed
choice must pay, which proposes choices and may prove that none fits; a descent in which what is broken
has a weight goes on from the best proposal.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardwright.contest.compaction import compacted
from shardwright.planner.solve.wide.descent import Descent
from shardwright.planner.solve.wide.dual import Messages
from shardwright.planner.solve.wide.net import Net, net_of
from shardwright.planner.solve.wide.problem import Ints, WideProblem
from shardwright.planner.solve.wide.region import MOST_NODES, room_of

# What a forbidden pair costs, in limits, while prices of memory add up to 1. Noise over all nodes, which breaks
# ties, is its inverse: bounds lie as much lower, beyond all rounding.
CEILING = 1e4


class Feasibility:
    """The search for a legal choice of ``problem``; ``round`` makes a step of it.

    ``choice`` is the answer once ``is_found``; ``is_impossible`` says that there is none.
    """

    def __init__(self, problem: WideProblem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.is_found = self.is_impossible = False
        self._smaller = compacted(without_costs(problem))
        self.inner = self._smaller.problem
        self.choice = np.zeros(problem.num_nodes, np.int64)
        self.is_impossible = self._smaller.is_impossible
        self._num_rounds = 0
        if self.is_impossible:
            return
        if not self.inner.num_nodes:
            self._offer(np.zeros(0, np.int64))
            self.is_impossible = not self.is_found
            return
        self._prices = TimePrices(self.inner, seed)
        self._descent: Descent | None = None

    def round(self) -> None:
        """Move the prices some times, then repair the best that they proposed, by turns."""
        prices = self._prices
        self._num_rounds += 1
        for _ in range(10):
            prices.advance()
            self._offer(prices.best)
            if self.is_found:
                return
            if prices.bound > 0:
                self.is_impossible = True
                return
        if self._descent is None or self._num_rounds % 32 == 0:
            self._descent = self._new_descent()
        self._descent.round(0.0, MOST_NODES // 2)
        self._offer(self._descent.choice)

    def _new_descent(self) -> Descent:
        """Return a descent from the best proposal."""
        problem = self.inner
        most = np.maximum.reduceat(problem.usage, problem.first[:-1])
        least = np.minimum.reduceat(problem.usage, problem.first[:-1])
        # A unit of memory weighs such that what nodes can spare compares with a broken pair.
        typical = float(np.mean((most - least) * np.maximum(problem.end - problem.begin, 1)))
        room = room_of(MOST_NODES // 2 + 2, 4_000_000)
        return Descent(
            problem, own_tables(problem), room, self._prices.best, self.seed + self._num_rounds,
            penalties=(1.0 / max(typical, 1.0), 1.0),
        )  # fmt: skip

    def _offer(self, choice: Ints) -> None:
        if self.is_found:
            return
        full = self._smaller.expand(choice)
        if is_legal(self.problem, full):
            self.choice, self.is_found = full.copy(), True


class TimePrices(Messages):
    """Prices of time points that add up to 1, messages under them, and the ``best`` choice on the way."""

    def __init__(self, problem: WideProblem, seed: int) -> None:
        super().__init__(problem, net_of(problem))
        for values in (self.net.cost, self.net.cells):
            np.minimum(values, CEILING, out=values)
        noise = np.random.default_rng(seed).random(len(problem.cost))
        self.net.cost[:] += noise * (1 / CEILING / max(1, problem.num_nodes))
        self._logs = np.zeros(len(problem.base))
        self.weights = np.full(len(problem.base), 1.0 / len(problem.base))
        self.best, self.least = self.choice, (math.inf, math.inf)
        self.bound = -math.inf
        self._count = 0

    def advance(self) -> None:
        """Sweep forth and back, and make dearer what is over the limit."""
        problem = self.problem
        self.bound = max(self.bound, *[found - 1 / CEILING for found in self.pass_on(self.weights)])
        over = (problem.profile(self.choice) - problem.limit) / self.room
        merit = float(num_broken(problem, self.choice)), float(np.maximum(over, 0.0).sum())
        if merit < self.least:
            self.least, self.best = merit, self.choice.copy()
        self._count += 1
        # The rate of weights over so many points that need not know for how long (Cesa-Bianchi and Lugosi, 2006).
        speed = math.sqrt(8 * math.log(len(over)) / self._count)
        self._logs += speed * np.maximum(over, -1.0)
        self._logs -= self._logs.max()
        self.weights = np.exp(self._logs)
        self.weights /= self.weights.sum()


def own_tables(problem: WideProblem) -> Net:
    """Return a net in which every edge has a table of its own: 1 where a pair is forbidden."""
    net = net_of(problem)
    lengths = problem.sizes[problem.ends].prod(axis=1)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = np.repeat(problem.table - starts[:-1], lengths) + np.arange(int(starts[-1]))
    cost = np.where(np.isfinite(problem.cost), 0.0, 1.0)
    return net._replace(
        cost=cost, table=starts[:-1], cells=np.where(np.isfinite(problem.cells[rows]), 0.0, 1.0)
    )


def without_costs(problem: WideProblem) -> WideProblem:
    """Return the problem in which everything allowed costs nothing, without edges that allow all."""
    sizes = problem.sizes[problem.ends].prod(axis=1)
    kinds, place = np.unique(np.stack([problem.table, sizes], axis=1), axis=0, return_inverse=True)
    is_infinite = np.isinf(problem.cells)
    forbids = np.array(
        [is_infinite[start : start + size].any() for start, size in kinds.tolist()], dtype=bool
    )
    kept = forbids[place.ravel()] if len(kinds) else np.zeros(0, dtype=bool)
    return replace(
        problem,
        cost=np.where(np.isfinite(problem.cost), 0.0, np.inf),
        ends=problem.ends[kept],
        table=problem.table[kept],
        cells=np.where(is_infinite, np.inf, 0.0),
    )


def num_broken(problem: WideProblem, choice: Ints) -> int:
    """Return how many strategies and pairs of a choice are forbidden."""
    return int(np.isinf(problem.costs(choice)).sum())


def fits(problem: WideProblem, choice: Ints) -> bool:
    """Return whether a choice keeps the limit."""
    return bool(problem.profile(choice).max(initial=0.0) <= problem.limit)


def is_legal(problem: WideProblem, choice: Ints) -> bool:
    """Return whether a choice keeps the limit and has nothing forbidden."""
    return fits(problem, choice) and num_broken(problem, choice) == 0
