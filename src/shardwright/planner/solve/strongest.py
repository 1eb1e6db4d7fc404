"""The strongest of all means of several bounds: seconds that every choice within a limit of bytes needs.

Any mean of bounds, with any price of memory, is a bound: the least of any choices (Lagrangian duality). The strongest
is found by cutting planes (Kelley, 1960): a linear program over the choices met so far says which mean could be the
strongest, and the network which choices that did not know of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from shardwright.planner.solve.buckets import Floats
from shardwright.planner.solve.network import Network
from shardwright.planner.solve.wide.dual import SLIGHT


def strongest(
    network: Network,
    ways: Floats,
    limit: float,
    mix: Floats,
    share: float = 0.0,
    useful: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> float:
    """Return the most seconds that a mean of bounds proves, but for a share, or as many as are useful.

    Of every way, ``ways`` has what each bound counts of every kind of the network's costs, and the bytes last: shape (ways,
    bounds + 1, kinds). What is proved holds for choices in any way. ``mix`` is tried first: weights of the bounds, which
    add up to 1, and a price of memory. Where the network is too wide, or once ``stopped``, it is all that is tried.
    """
    value, totals = _least(network, mix @ ways, stopped)
    best = value - float(mix[-1]) * limit
    if best >= useful or not math.isfinite(best) or network.is_wide or stopped():
        return best
    planes = _Planes(ways, limit)
    planes.add(totals)
    smallest, totals = _least(network, np.append(np.zeros(len(mix) - 1), 1.0) @ ways, stopped)
    if not smallest < limit:
        return math.inf
    while not stopped():
        planes.add(totals)
        promised, mix = planes.strongest()
        if promised <= best * (1 + max(share, SLIGHT)):
            break
        value, totals = _least(network, mix @ ways, stopped)
        best = max(best, value - float(mix[-1]) * limit)
        if best >= useful:
            break
    return best


def _least(network: Network, mixes: Floats, stopped: Callable[[], bool]) -> tuple[float, Floats]:
    """Return the least that choices in any way weigh, and what these cost in every kind."""
    found = network.solve(mixes, stopped)
    return float(found.values.min()), found.totals


class _Planes:
    """A linear program: the mean and the price that are strongest for the choices met so far."""

    def __init__(self, ways: Floats, limit: float) -> None:
        import highspy  # late: few searches have more to prove

        self._ways, self._limit = ways, limit
        self._program = cast("Any", highspy).Highs()
        self._program.silent()
        self._means: list[Any] = [
            self._program.addVariable(0.0, 1.0) for _ in range(ways.shape[1] - 1)
        ]
        self._price, self._seconds = self._program.addVariable(0.0), self._program.addVariable(0.0)
        self._program.addConstr(sum(self._means) == 1)
        self._unit = 0.0  # of the seconds that HiGHS is told of: it takes numbers near one

    def add(self, totals: Floats) -> None:
        """Add choices in every way, by what they cost in every kind: each bounds all means."""
        cuts = (self._ways @ totals[..., None])[..., 0]
        self._unit = self._unit or float(cuts[:, :-1].max(initial=math.ulp(0.0)))
        for cut in cuts:
            factors = [*(cut[:-1] / self._unit).tolist(), float(cut[-1] / self._limit - 1)]
            # HiGHS refuses smaller ones. Without them it may mean otherwise, and any mean is a bound.
            terms = zip(factors, [*self._means, self._price], strict=True)
            weighed = sum(by * one for by, one in terms if abs(by) > 1e-9)
            self._program.addConstr(weighed >= self._seconds)

    def strongest(self) -> tuple[float, Floats]:
        """Return the seconds that could be proved at most, and the mean and price that may prove them."""
        program = self._program
        program.maximize(self._seconds)
        price = program.val(self._price) * self._unit / self._limit
        return program.val(self._seconds) * self._unit, np.array(
            [*program.vals(self._means), price]
        )
