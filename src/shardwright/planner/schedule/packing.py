"""Which gradients travel together, and how: whole, or compressed in one of several ways.

What compresses runs where backward runs, so it delays all that becomes ready later; what is saved on the
network may be worth that or not (OMGS, Shi et al., INFOCOM 2020). How dense, is asked of each bucket
(LAGS, Shi et al., ECAI 2020): as dense as it hides. Everything is in backward order, as in ``merge``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.schedule.merge import Cost
from shardwright.planner.schedule.play import ROUNDING

# Groups (first, stop, way): gradients first to stop - 1 travel together in a way.
Groups = tuple[tuple[int, int, int], ...]
# Who has more gradients takes neighbours together first: time grows with the square. As many partial answers of which
# none beats another are followed; more are rare, and then it is not exact.
MOST_UNITS = 16

_Rows = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Way:
    """How gradients may travel: seconds of computation before they leave (``packs``, infinite for one that
    cannot travel so) and after all have come (``sums``), and the ``sizes`` that ``cost`` prices, by gradient.
    ``load``: seconds that a message takes from the computation beneath it, by size; none where it is None.
    """

    packs: Sequence[float]
    sums: Sequence[float]
    sizes: Sequence[float]
    cost: Cost
    load: Cost | None = None


def choose_ways(ready: Sequence[float], end: float, ways: Sequence[Way]) -> Groups:
    """Return the groups and ways whose sums are done first; ``ready`` and the ``end`` of computation are
    those without compression, ``ready`` ascending.

    Exact, by dynamic programming over (delay of computation, end on the network, seconds of sums) of every
    prefix: what is nowhere larger than another is never worse. Of equals the earlier way, and of these the
    larger groups. Each group is then made as dense as it can be without ending later.
    """
    count = len(ready)
    totals = [_Totals(way) for way in ways]
    states: list[_Rows] = [np.zeros((1, 3))]
    origins: list[NDArray[np.int64]] = [np.full((1, 3), -1)]
    for stop in range(1, count + 1):
        every, origin = _extended(states, totals, ready[stop - 1])
        # At the end the seconds of the last sum count too, which are no state.
        kept = _undominated(every, end) if stop < count else np.arange(len(every))
        states.append(every[kept])
        origins.append(origin[kept])
    if not count:
        return ()
    finishes = list[float]()
    for state, origin in zip(states[count], origins[count], strict=True):
        sums = totals[int(origin[1])].sums
        finishes.append(_finish(state, end, sums[count] - sums[int(origin[0])]))
    at, stop, groups = int(np.argmin(finishes)), count, list[tuple[int, int, int]]()
    while stop:
        first, way, before = (int(one) for one in origins[stop][at])
        groups.append((first, stop, way))
        at, stop = before, first
    return _as_dense(tuple(reversed(groups)), ready, end, totals)


def _extended(
    states: Sequence[_Rows], totals: Sequence[_Totals], ready: float
) -> tuple[_Rows, NDArray[np.int64]]:
    """Return the states of one prefix more, each with the first of its last group, how that travels, and
    the place of the state before."""
    rows, origins, stop = list[_Rows](), list[NDArray[np.int64]](), len(states)
    for number, total in enumerate(totals):
        for first, before in enumerate(states):
            found = total.after(before, ready, first, stop)
            if found is not None:
                rows.append(found)
                places = [(first, number, place) for place in range(len(found))]
                origins.append(np.array(places, dtype=np.int64))
    return np.concatenate(rows), np.concatenate(origins)


class _Totals:
    """A way with sums over prefixes, so that those of a group are differences."""

    def __init__(self, way: Way) -> None:
        fits = [math.isfinite(one) for one in way.packs]
        self.packs = _prefixes(
            [one if fit else 0.0 for one, fit in zip(way.packs, fits, strict=True)]
        )
        self.sums, self.sizes = _prefixes(way.sums), _prefixes(way.sizes)
        # How many gradients before each cannot travel so.
        self.misfits = _prefixes([not fit for fit in fits])
        self.cost, self.load = way.cost, way.load

    def after(self, before: _Rows, ready: float, first: int, stop: int) -> _Rows | None:
        """Return what becomes of states once a group has travelled; None where it cannot."""
        if self.misfits[stop] > self.misfits[first]:
            return None
        delay = before[:, 0] + (self.packs[stop] - self.packs[first])
        size = np.array([self.sizes[stop] - self.sizes[first]])
        sent = np.maximum(before[:, 1], ready + delay) + self.cost(size)[0]
        if self.load is not None:
            delay = delay + self.load(size)[0]
        return np.stack([delay, sent, before[:, 2] + (self.sums[stop] - self.sums[first])], 1)


def _prefixes(terms: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(terms)]


def _finish(state: _Rows, end: float, last: float) -> float:
    """Sums run behind all other computation, the last when its packs are there."""
    return max(end + float(state[0] + state[2]), float(state[1]) + last)


def _undominated(rows: _Rows, end: float) -> NDArray[np.int64]:
    """Return the places of rows that no other is below in everything, of equals the first."""
    order = np.lexsort((np.arange(len(rows)), rows.sum(1)))
    kept = list[int]()
    left = order
    while len(left) and len(kept) < MOST_UNITS:
        best = int(left[0])
        kept.append(best)
        left = left[(rows[left] < rows[best]).any(1)]
    if len(left):  # those that promise to end first
        promise = np.maximum(end + rows[:, 0] + rows[:, 2], rows[:, 1])
        kept += left[np.argsort(promise[left], kind="stable")][:MOST_UNITS].tolist()
    return np.array(kept, dtype=np.int64)


def _ends(groups: Groups, ready: Sequence[float], end: float, totals: Sequence[_Totals]) -> float:
    state: _Rows | None = np.zeros((1, 3))
    last = 0.0
    for first, stop, way in groups:
        state = totals[way].after(state, ready[stop - 1], first, stop)
        if state is None:
            return np.inf
        last = totals[way].sums[stop] - totals[way].sums[first]
    return _finish(state[0], end, last)


def _as_dense(
    groups: Groups, ready: Sequence[float], end: float, totals: Sequence[_Totals]
) -> Groups:
    """Let each group travel in the first way with which all is summed as early."""
    chosen = list(groups)
    least = _ends(groups, ready, end, totals) * (1 + ROUNDING)
    for place, (first, stop, own) in enumerate(groups):
        for way in range(own):
            chosen[place] = (first, stop, way)
            if _ends(tuple(chosen), ready, end, totals) <= least:
                break
            chosen[place] = (first, stop, own)
    return tuple(chosen)
