"""The last resort where nothing fits: the plans that use as little memory as the additive model can.

``smallest`` solves every shape. ``descended`` answers many questions of the kind "and with twice the
devices?": it walks from the corners of the shapes to less memory, and simulates only what may fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

from shardwright.errors import InputError
from shardwright.planner.model.arrangements import Arrangement, shapes
from shardwright.planner.remember import remembered
from shardwright.planner.search.candidates import Candidate, explore
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.known import known as known_ones
from shardwright.planner.search.steering import CLOSE, FAR

Place = tuple[int, int]  # stages and width of the tensor axis


def smallest(pool: Pool) -> Proposals:
    """Where nothing fits, propose the smallest plans on all devices until one does.

    Of every shape the one with the most microbatches, and of its hull the ends only.
    """
    found: list[Candidate] = []
    for shape in shapes(pool.context, pool.context.num_devices):
        if pool.fitting or pool.stopped():
            return
        found += _ends(pool, shape.arrangements[-1])
    yield from _until_one_fits(pool, found)


def descended(pool: Pool) -> Proposals:
    """Propose plans where the additive model finds the least memory, until one fits; strategies people
    know where it finds none.

    From the shape of one stage and of the widest tensor axis to ever smaller neighbours, then from
    other corners, unless the first descent ended far above the limit, or below it. A minimum that no
    descent reaches is missed.
    """
    descent = _Descent(pool)
    for start in dict.fromkeys(_corners(descent.known)):
        size = descent.least
        if pool.stopped() or size <= pool.room or FAR * pool.room < size < math.inf:
            break
        descent.run(start)
    every = descent.candidates
    likely = [c for c in every if c.bytes <= CLOSE * pool.room]
    yield from _until_one_fits(pool, likely) if every else known_ones(pool)


class _Descent:
    """Places and what was found there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        every = shapes(pool.context, pool.context.num_devices)
        self.known = {(shape.stages, shape.tensor): shape for shape in every}
        self.candidates: list[Candidate] = []

    @property
    def least(self) -> float:
        """The least bytes found so far."""
        return min((one.bytes for one in self.candidates), default=math.inf)

    @remembered
    def _least_at(self, place: Place) -> float:
        found = _ends(self._pool, self.known[place].arrangements[-1])
        self.candidates += found
        return min((one.bytes for one in found), default=math.inf)

    def run(self, place: Place) -> None:
        """Go on to ever smaller neighbours until one fits or none is smaller."""
        size = self._least_at(place)
        while size > self._pool.room and not self._pool.stopped():
            place = min(_neighbours(place, self.known), key=self._least_at, default=place)
            if self._least_at(place) >= size:
                return
            size = self._least_at(place)


def _corners(known: Collection[Place]) -> list[Place]:
    """One stage of the widest tensor axis, of the narrowest, and the most stages of the narrowest."""
    if not known:
        return []
    few, many = min(stages for stages, _ in known), max(stages for stages, _ in known)
    widths = [tensor for stages, tensor in known if stages == few]
    return [
        (few, max(widths)),
        (few, min(widths)),
        (many, min(tensor for stages, tensor in known if stages == many)),
    ]


def _neighbours(place: Place, known: Collection[Place]) -> list[Place]:
    """The nearest shapes with more or fewer stages, or a wider or narrower tensor axis."""
    found: list[Place] = []
    for axis in (0, 1):
        line = sorted(other for other in known if other[1 - axis] == place[1 - axis])
        at = line.index(place)
        found += line[max(at - 1, 0) : at] + line[at + 1 : at + 2]
    return found


def _until_one_fits(pool: Pool, found: list[Candidate]) -> Proposals:
    for candidate in sorted(found, key=lambda c: (c.bytes, c.seconds))[: pool.count]:
        if pool.fitting:
            return
        yield Proposal(0.0, partial(pool.try_candidate, candidate))


def _ends(pool: Pool, arrangement: Arrangement) -> tuple[Candidate, ...]:
    """Return both ends of a hull: nothing is fast enough to be worth more."""
    try:
        return explore(pool.context, arrangement, pool.room, 0.0, 0.0).candidates
    except (InputError, ValueError):  # too wide for the exact search, or illegal
        return ()
