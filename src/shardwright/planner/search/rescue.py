"""The last resort where nothing fits: the plans that use as little memory as the additive model can.

``rescue`` solves every shape. ``descend`` answers many questions of the kind "and with twice the
devices?": it walks from the corners of the shapes to less memory, and simulates only what may fit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence

from shardwright.errors import InputError
from shardwright.planner.model.arrangements import Arrangement, shapes
from shardwright.planner.search.candidates import Candidate, explore, to_strategy
from shardwright.planner.search.exploration import Exploration

# So many of the smallest plans of the additive model are simulated.
SMALLEST, FEW = 6, 3
# The simulator may find that a plan needs less than the additive model says, but hardly less than
# this share of it (0.91 in 18 plans of three transformers; mostly it finds more). Far above the
# limit is so many times as much.
LIKELY, FAR = 0.85, 1.5

Place = tuple[int, int]  # stages and width of the tensor axis


def rescue(exploration: Exploration) -> None:
    """Simulate the smallest plans on all devices until one fits.

    Of every shape the one with the most microbatches, and of its hull the ends only.
    """
    context = exploration.context
    found: list[Candidate] = []
    for shape in shapes(context, context.num_devices):
        if exploration.stopped():
            return
        found += _ends(exploration, shape.arrangements[-1])
    _judge(sorted(found, key=lambda c: (c.bytes, c.seconds))[:SMALLEST], exploration)


def descend(exploration: Exploration) -> bool:
    """Look for a plan that fits where the additive model finds the least memory; return whether it
    found any plan at all, fitting or not.

    From the shape of one stage and of the widest tensor axis to ever smaller neighbours, then from
    other corners, unless the first descent ended far above the limit, or below it. A minimum that no
    descent reaches is missed.
    """
    known = {
        (s.stages, s.tensor): s
        for s in shapes(exploration.context, exploration.context.num_devices)
    }
    found: dict[Place, tuple[Candidate, ...]] = {}

    def least(place: Place) -> float:
        if place not in found:
            found[place] = _ends(exploration, known[place].arrangements[-1])
        return min((c.bytes for c in found[place]), default=math.inf)

    for start in dict.fromkeys(_corners(known)):
        size = min(map(least, found), default=math.inf)
        if (
            exploration.stopped()
            or size <= exploration.room
            or FAR * exploration.room < size < math.inf
        ):
            break
        place, size = start, least(start)
        while size > exploration.room and not exploration.stopped():
            smaller = min(_neighbours(place, known), key=least, default=place)
            if least(smaller) >= size:
                break
            place, size = smaller, least(smaller)
    every = [candidate for candidates in found.values() for candidate in candidates]
    likely = [c for c in every if LIKELY * c.bytes <= exploration.room]
    _judge(sorted(likely, key=lambda c: (c.bytes, c.seconds))[:FEW], exploration)
    return bool(every)


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


def _judge(candidates: Sequence[Candidate], exploration: Exploration) -> None:
    """Simulate one after the other until one fits."""
    for candidate in candidates:
        if exploration.fitting or exploration.stopped():
            return
        with contextlib.suppress(ValueError):  # illegal after all
            exploration.evaluations.append(
                exploration.evaluate(to_strategy(exploration.context, candidate))
            )


def _ends(exploration: Exploration, arrangement: Arrangement) -> tuple[Candidate, ...]:
    """Return both ends of a hull: nothing is fast enough to be worth more."""
    try:
        return explore(exploration.context, arrangement, exploration.room, 0.0, 0.0).candidates
    except (InputError, ValueError):  # too wide for the exact search, or illegal
        return ()
