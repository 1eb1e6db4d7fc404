"""Frontier algebra: sets of non-dominated costs as packed arrays, with what they were made of.

A front holds points of k costs to keep small (seconds, bytes, dollars), sorted, none dominating another
and no two equal. ``union`` offers a choice, ``product`` adds a choice of one front to a choice of the
other. Both are associative and commutative, product distributes over union, and pruning before or after
gives the same costs (TensorOpt, section 4; the tests hold these laws). Back pointers lead from a point to
the points it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Links = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Front:
    """Non-dominated points: ``costs`` of shape (n, k), sorted by first, second, ... cost.

    ``links`` of shape (n, 2) says what each was made of: after ``union`` (which operand, its row),
    after ``product`` (row of the first, row of the second); of fresh points (0, row given).
    """

    costs: Costs
    links: Links

    def __len__(self) -> int:
        return len(self.costs)


def front(costs: Costs) -> Front:
    """Keep the non-dominated of any points, of equal ones the first. Forbidden points (an infinite
    cost) go."""
    rows = np.arange(len(costs))
    return _kept(costs, np.stack([np.zeros_like(rows), rows], axis=1))


def empty(num_costs: int) -> Front:
    """Return the front without points, neutral in unions."""
    return Front(np.zeros((0, num_costs)), np.zeros((0, 2), dtype=np.int64))


def zero(num_costs: int) -> Front:
    """Return the front of one point that costs nothing, neutral in products."""
    return Front(np.zeros((1, num_costs)), np.zeros((1, 2), dtype=np.int64))


def union(operands: Sequence[Front]) -> Front:
    """Return the best of several fronts."""
    costs = np.concatenate([one.costs for one in operands])
    which = np.concatenate([np.full(len(one), number) for number, one in enumerate(operands)])
    row = np.concatenate([np.arange(len(one)) for one in operands])
    return _kept(costs, np.stack([which, row], axis=1).astype(np.int64))


def product(first: Front, second: Front) -> Front:
    """Return the best sums of a point of one front and a point of the other."""
    costs = (first.costs[:, None, :] + second.costs[None, :, :]).reshape(-1, first.costs.shape[1])
    one, other = np.divmod(np.arange(len(costs)), max(len(second), 1))
    return _kept(costs, np.stack([one, other], axis=1))


def _kept(costs: Costs, links: Links) -> Front:
    """Sort, and drop what is dominated, equal to another, or forbidden."""
    allowed = np.flatnonzero(np.all(np.isfinite(costs), axis=-1))
    keys = [allowed, *(costs[allowed, column] for column in reversed(range(costs.shape[1])))]
    order = allowed[np.lexsort(keys)]
    costs, links = costs[order], links[order]
    kept = staircase(costs[:, 1]) if costs.shape[1] == 2 else _survivors(costs)
    return Front(costs[kept], links[kept])


def staircase(second: Costs) -> NDArray[np.intp]:
    """Return which of points sorted by their first cost none before beats in the second."""
    best = np.minimum.accumulate(np.concatenate(([np.inf], second)))[:-1]
    return np.flatnonzero(second < best)


def _survivors(costs: Costs) -> NDArray[np.intp]:
    """Return the non-dominated of sorted points of any number of costs, in O(n * kept)."""
    kept: list[int] = []
    for row in range(len(costs)):
        if not kept or not np.any(np.all(costs[kept] <= costs[row], axis=-1)):
            kept.append(row)
    return np.array(kept, dtype=np.intp)
