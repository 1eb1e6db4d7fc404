"""Exact optimum of two costs, seconds and bytes, under any weighting of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.buckets import Floats
from shardwright.planner.solve.exchange import Exchange
from shardwright.planner.solve.factors import FactorGraph
from shardwright.planner.solve.network import Minima, Network


@dataclass(frozen=True, eq=False)
class Solutions:
    """Per weighting: the least weighted cost, its choices, and their seconds and bytes."""

    values: Floats
    assignments: NDArray[np.int32]
    seconds: Floats
    bytes: Floats


class Elimination:
    """A network seen as two costs, each a sum of its kinds with weights of their own.

    Many such views share one network, which was prepared once for all of them.
    """

    def __init__(self, network: Network, seconds: Floats, memory: Floats) -> None:
        self._network = network
        self._views = np.stack([seconds, memory])

    @classmethod
    def of(cls, graph: FactorGraph) -> Elimination:
        """Prepare a graph of two costs."""
        return cls(Network(graph.sizes, graph.tables), np.array([1.0, 0.0]), np.array([0.0, 1.0]))

    def exchange(self, assignment: tuple[int, ...], limit: float) -> Solutions | None:
        """Return a choice within a limit of bytes, reached from another by changing one variable at a
        time; ``values`` are its seconds. None if none is.
        """
        found = self._network.exchange(self._exchanges, assignment, limit)
        return None if found is None else self._seen(found)

    @cached_property
    def _exchanges(self) -> Exchange:
        return self._network.exchanges(self._views)

    def solve(self, weights: Floats, stopped: Callable[[], bool] = lambda: False) -> Solutions:
        """Minimise ``weights[i, 0] * seconds + weights[i, 1] * bytes`` for every i; see ``Network.solve``."""
        return self._seen(self._network.solve(weights @ self._views, stopped))

    def _seen(self, found: Minima) -> Solutions:
        infinite = np.isinf(found.totals[:, 0])
        totals = np.where(infinite[:, None], 0.0, found.totals) @ self._views.T
        seconds = np.where(infinite, np.inf, totals[:, 0])
        return Solutions(found.values, found.assignments, seconds, totals[:, 1])
