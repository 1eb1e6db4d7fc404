"""The last resort where nothing fits: the plans that use as little memory as the additive model can."""

from __future__ import annotations

from functools import partial

from shardwright.errors import InputError
from shardwright.planner.model.arrangements import Arrangement, shapes
from shardwright.planner.search.candidates import Candidate, explore
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool


def smallest(pool: Pool) -> Proposals:
    """Where nothing fits, propose the smallest plans on all devices until one does.

    Of every shape the one with the most microbatches, and of its hull the ends only.
    """
    found: list[Candidate] = []
    for shape in shapes(pool.context, pool.context.num_devices):
        if pool.fitting or pool.stopped():
            return
        found += ends(pool, shape[-1])
    yield from until_one_fits(pool, found)


def until_one_fits(pool: Pool, found: list[Candidate]) -> Proposals:
    """Propose candidates, the smallest first, until one fits."""
    for candidate in sorted(found, key=lambda c: (c.bytes, c.seconds))[: pool.count]:
        if pool.fitting:
            return
        yield Proposal(0.0, partial(pool.try_candidate, candidate))


def ends(pool: Pool, arrangement: Arrangement) -> tuple[Candidate, ...]:
    """Return both ends of a hull: nothing is fast enough to be worth more."""
    try:
        return explore(pool.context, arrangement, pool.room, (0.0, 0.0), (0.0, 0.0)).candidates
    except (InputError, ValueError):  # too wide for the exact search, or illegal
        return ()
