"""Branch and bound over the dual: proves that nothing cheaper than a known cost exists, or finds it.

A node of the search tree is a set of strategies still allowed. Its bound comes from message passing
with prices, started from its parent's messages and prices; strategies whose slack exceeds the gap
go. It is split where the memory of one node of the problem matters most: low against high usage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.contest.feasible import fits
from shardwright.planner.solve.wide.descent import capped_cost
from shardwright.planner.solve.wide.dual import PATIENCE, Dual, tolerance
from shardwright.planner.solve.wide.net import FEW, net_of
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leaf:
    """A part of the space still to be searched, and where its bound starts from."""

    allowed: Mask
    messages: Floats
    multipliers: Floats
    bound: float

    @classmethod
    def of(cls, dual: Dual, least: float = -math.inf) -> Leaf:
        """Return what a dual leaves open, and whose bound is that or a known one."""
        return cls(
            allowed=dual.allowed.copy(),
            messages=dual.messages.copy(),
            multipliers=dual.best_multipliers.copy(),
            bound=max(least, dual.bound),
        )


class Branching:
    """The search; ``round`` works on one leaf. ``bound`` holds for everything not searched yet."""

    def __init__(self, problem: WideProblem, dual: Dual, cost: float) -> None:
        self.problem, self.cost = problem, cost
        self.best: Ints | None = None
        self._dual = Dual(problem, net_of(problem))
        self.leaves = [Leaf.of(dual)]

    @property
    def bound(self) -> float:
        """What every solution costs at least."""
        return min([self.cost, *(leaf.bound for leaf in self.leaves)])

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to search: ``cost`` is the optimum."""
        return not self.leaves

    def round(self, goes_on: Callable[[], bool]) -> None:
        """Bound one leaf and split it if it may hold something better."""
        leaf = self.leaves.pop()
        if self._is_hopeless(leaf.bound):
            return
        leaf = self._bounded(leaf, goes_on)
        if self._is_hopeless(leaf.bound) or not _has_choice(self.problem, leaf.allowed):
            return
        if not goes_on():
            self.leaves.append(leaf)
            return
        self.leaves += [replace(leaf, allowed=part) for part in self._parts(leaf)]

    def _is_hopeless(self, bound: float) -> bool:
        return bound > self.cost - 1 + tolerance(self.cost)

    def _bounded(self, leaf: Leaf, goes_on: Callable[[], bool]) -> Leaf:
        """Return a leaf with a better bound and fewer strategies."""
        dual = self._dual
        dual.restart(leaf.allowed, leaf.messages, leaf.multipliers)
        for _ in range(FEW * PATIENCE):  # fewer where the bound suffices
            dual.advance(self.cost)
            choice = dual.choice
            cost = capped_cost(self.problem, choice)
            if cost < self.cost and fits(self.problem, choice):
                self.best, self.cost = choice.copy(), cost
            if self._is_hopeless(dual.bound) or not goes_on():
                break
        return Leaf.of(dual, leaf.bound)

    def _parts(self, leaf: Leaf) -> tuple[Mask, Mask]:
        """Cut the allowed strategies in two at the node whose usage matters most, or where none does at
        one with many strategies."""
        problem = self.problem
        prefix = np.concatenate([[0.0], np.cumsum(leaf.multipliers)])
        price = prefix[problem.end] - prefix[problem.begin]
        starts = problem.first[:-1]
        most = np.maximum.reduceat(np.where(leaf.allowed, problem.usage, -1), starts)
        least = np.minimum.reduceat(np.where(leaf.allowed, problem.usage, np.inf), starts)
        count = np.add.reduceat(leaf.allowed, starts)
        node = int(np.where(count > 1, price * (most - least) + 1e-6 * count, -1.0).argmax())
        part = slice(int(problem.first[node]), int(problem.first[node + 1]))
        low, high = leaf.allowed.copy(), leaf.allowed.copy()
        low[part] &= _lower_half(problem.usage[part], leaf.allowed[part])
        high[part] &= ~low[part]
        return high, low


def _lower_half(usage: Floats, allowed: Mask) -> Mask:
    """Return the allowed strategies below the widest step of usage; the first where all are
    equal."""
    levels = np.unique(usage[allowed])
    if len(levels) == 1:
        mask = np.zeros(len(usage), dtype=bool)
        mask[np.flatnonzero(allowed)[0]] = True
        return mask
    widest = int(np.diff(levels).argmax())
    return usage <= levels[widest]


def _has_choice(problem: WideProblem, allowed: Mask) -> bool:
    """Whether every node still has a strategy and some node more than one."""
    count = np.add.reduceat(allowed, problem.first[:-1])
    return bool(count.min() >= 1 and count.max() > 1)
