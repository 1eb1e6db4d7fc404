"""The last resort where nothing fits: the plans that use as little memory as the additive model can."""

from __future__ import annotations

import contextlib

from shardwright.errors import InputError
from shardwright.planner.search.arrangements import Arrangement, shapes
from shardwright.planner.search.candidates import Candidate, explore, to_strategy
from shardwright.planner.search.hunt import Hunt
from shardwright.planner.search.judge import judge

# So many of the smallest plans of the additive model are simulated.
SMALLEST = 6


def rescue(hunt: Hunt) -> None:
    """Simulate the smallest plans on all devices until one fits.

    Of every shape the one with the most microbatches, and of its hull the ends only.
    """
    context = hunt.context
    found: list[Candidate] = []
    for shape in shapes(context, context.num_devices):
        if hunt.stopped():
            return
        found += _ends(hunt, shape.arrangements[-1])
    for candidate in sorted(found, key=lambda c: (c.bytes, c.seconds))[:SMALLEST]:
        if hunt.fitting or hunt.stopped():
            return
        with contextlib.suppress(ValueError):  # illegal after all
            hunt.judged.append(judge(context, to_strategy(context, candidate)))


def _ends(hunt: Hunt, arrangement: Arrangement) -> tuple[Candidate, ...]:
    """Return both ends of a hull: nothing is fast enough to be worth more."""
    try:
        return explore(hunt.context, arrangement, hunt.room, 0.0, 0.0).candidates
    except (InputError, ValueError):  # too wide for the exact search, or illegal
        return ()
