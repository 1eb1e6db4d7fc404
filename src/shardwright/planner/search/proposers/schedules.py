"""Other orders of the pipeline that promises most."""

from __future__ import annotations

from functools import partial

from shardwright.core.schedules import NamedSchedule
from shardwright.planner.search.candidates import rescheduled
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool

# GPipe hides slow transfers better than the additive model knows, and is simulated whatever it promises.
ORDERS: tuple[NamedSchedule, ...] = ("gpipe", "1f1b-so", "interleaved")


def schedules(pool: Pool) -> Proposals:
    """Propose the fastest pipeline in GPipe order, with a doubled warm-up, and interleaved, each where the
    additive model promises a gain that is more than "the same".
    """
    tried = [one for found in pool.errors().values() for one in found]
    pipelines = [one for one in tried if one[0].arrangement.stages > 1]
    if not pipelines:
        return
    candidate, _ = min(pipelines, key=lambda one: (one[1].seconds, one[0].bytes))
    for order in ORDERS:
        other = rescheduled(candidate, order)
        if other is None:
            continue
        is_gain = other.seconds < candidate.seconds * (1 - pool.same)
        if order == "gpipe" or is_gain:
            yield Proposal(other.least_seconds, partial(pool.try_candidate, other))
