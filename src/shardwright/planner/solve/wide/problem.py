"""The wide problem: nodes that choose a strategy each, priced alone and in pairs, under one memory
limit at every time point.

A node has a cost and a usage per strategy and is alive during a half-open interval of time; an edge
has a table of costs over the strategies of its two nodes. Everything is stored in flat columns, so
that kernels can walk it; equal tables are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class WideProblem:
    """Strategies of node ``i`` are ``first[i]:first[i + 1]`` in ``cost`` and ``usage``.

    Edge ``e`` joins ``ends[e]``; its costs are ``cells[table[e] + s * k + t]`` for strategy ``s``
    of the first end and ``t`` of the second, which has ``k``. Infinite costs are forbidden. Node
    ``i`` is alive at the times ``begin[i] <= time < end[i]``; at each time the usages of the nodes
    alive sum to at most ``limit``, of which ``base`` is taken already.
    """

    first: Ints
    cost: Floats
    usage: Floats
    begin: Ints
    end: Ints
    ends: Ints
    table: Ints
    cells: Floats
    limit: float
    base: Floats

    @classmethod
    def free(cls, costs: Sequence[Floats], edges: Sequence[tuple[int, int, Floats]]) -> WideProblem:
        """Return the problem of nodes' and edges' costs in which nothing uses memory."""
        first = np.cumsum([0, *map(len, costs)]).astype(np.int64)
        nothing = np.zeros(len(costs), np.int64)
        cells = [table.ravel() for _, _, table in edges]
        return cls(
            first=first,
            cost=np.concatenate(costs),
            usage=np.zeros(int(first[-1])),
            begin=nothing,
            end=nothing,
            ends=np.array([edge[:2] for edge in edges], np.int64).reshape(-1, 2),
            table=np.cumsum([0, *map(len, cells)])[:-1].astype(np.int64),
            cells=np.concatenate([np.zeros(0), *cells]),
            limit=1.0,
            base=np.zeros(1),
        )

    @property
    def num_nodes(self) -> int:
        """How many nodes choose."""
        return len(self.begin)

    @cached_property
    def sizes(self) -> Ints:
        """How many strategies each node has."""
        return np.diff(self.first)

    def evaluate(self, choice: Ints) -> float:
        """Return the cost of one strategy per node; infinite where it is forbidden."""
        return float(self.costs(choice).sum())

    def costs(self, choice: Ints) -> Floats:
        """Return every node's and then every edge's cost."""
        place = self.table + self.places(choice)
        return np.concatenate([self.cost[self.first[:-1] + choice], self.cells[place]])

    def places(self, choice: Ints) -> Ints:
        """Return where in its table every edge's cost is."""
        one, two = self.ends[:, 0], self.ends[:, 1]
        return choice[one] * self.sizes[two] + choice[two]

    def profile(self, choice: Ints) -> Floats:
        """Return the usage at every time point."""
        return profile(self, self.usage[self.first[:-1] + choice])


def profile(problem: WideProblem, usage: Floats) -> Floats:
    """Return the sum of the nodes' usages at every time point, ``base`` included."""
    change = np.zeros(len(problem.base) + 1)
    alive = problem.begin < problem.end
    np.add.at(change, problem.begin[alive], usage[alive])
    np.add.at(change, problem.end[alive], -usage[alive])
    return np.cumsum(change[:-1]) + problem.base
