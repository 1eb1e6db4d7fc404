"""Strategies people know, so that none of them beats the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from shardwright.planner.search.asked import asked_for
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.named import (
    Named,
    as_strategy,
    grid_strategies,
    least_seconds,
    named_strategies,
)
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import HOPELESS
from shardwright.planner.space import Placement, Seed


def known(pool: Pool) -> Proposals:
    """Propose the named strategies, plain data parallelism first, whatever it promises."""
    return _first_that_fit(pool, named_strategies(pool.context), is_first=True)


def grids(pool: Pool) -> Proposals:
    """Propose tensor parallelism in two and three dimensions."""
    return _first_that_fit(pool, grid_strategies(pool.context), is_first=False)


def plain(pool: Pool, count: int) -> Proposals:
    """Propose plain data parallelism on so many devices: where starting operators and messages is most of a step, what
    adds up does not tell few devices from fewer."""
    if pool.even_split(count) < pool.fastest:
        with suppress(ValueError):
            strategy = as_strategy(pool.context, Seed(data=count))
            yield Proposal(least_seconds(pool.context, strategy), partial(pool.try_out, strategy))


def asked(wanted: str | Placement, pool: Pool) -> Proposals:
    """Propose the one strategy that was asked for."""
    return _first_that_fit(pool, iter([asked_for(pool.context, wanted)]), is_first=True)


def _first_that_fit(pool: Pool, every: Iterator[Named], *, is_first: bool) -> Proposals:
    """Propose each with few microbatches, and where that does not fit with many; at once where one
    with few was already far too large. ``is_first``: before all else."""
    is_far = False
    for named in every:
        for strategy in (named.many,) if is_far else named:
            bound = 0.0 if is_first else least_seconds(pool.context, strategy)
            is_first = False
            found = yield Proposal(bound, partial(pool.weigh, strategy))
            pool.tell(0.0, strategy.label)
            if found is None or found.bytes <= pool.limit:
                break  # more microbatches are no less work
            is_far |= found.bytes > HOPELESS * pool.limit
