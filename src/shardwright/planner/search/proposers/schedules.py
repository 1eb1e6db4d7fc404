"""Other orders of the pipeline that promises most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import SCHEDULES, NamedSchedule, ScheduleName
from shardwright.planner.judge.actions import timed
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.partition import Chain, measure, partition
from shardwright.planner.search.candidates import (
    Candidate,
    chains,
    to_strategy,
)
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import CLOSE, FEW, HOPELESS

# GPipe hides slow transfers better than the additive model knows, and is simulated whatever it promises.
ORDERS: tuple[NamedSchedule, ...] = ("gpipe", "1f1b-so", "interleaved")
# With the backward split: less idle time at the memory of 1F1B, or at twice that, best first. The last is the
# shortest where W takes little and microbatches are few.
SPLIT: tuple[NamedSchedule, ...] = ("zb-v", "zb-h2", "zb-h1", "zb-interleaved")
# For what 1F1B has no memory for: what W needs may be less, or a half and a third of the activations stay.
SMALL: tuple[NamedSchedule, ...] = ("zb-v", "zb-h1", "v-half", "v-min")


def schedules(pool: Pool) -> Proposals:
    """Propose the fastest pipeline in GPipe order, with a doubled warm-up, and interleaved, each where the
    additive model promises a gain that is more than "the same"; then the most promising ones in more chunks,
    the fastest with its backward split, and what is faster but does not fit on a V of less memory, each where
    that promises a gain that nobody could mistake.
    """
    tried = [one for found in pool.errors().values() for one in found]
    pipelines = [one for one in tried if one[0].arrangement.stages > 1]
    if pipelines:
        fastest, _ = min(pipelines, key=lambda one: (one[1].seconds, one[0].bytes))
        yield from _whole(pool, fastest)
        yield from _in_more_chunks(pool)
        yield from _where_faster(pool, fastest, SPLIT)
    large = [
        one
        for one in pool.candidates
        if one.arrangement.stages > 1 and pool.room < one.bytes <= HOPELESS * pool.room
    ]
    if large:
        fastest = min(large, key=lambda one: (one.seconds, one.bytes))
        yield from _where_faster(pool, fastest, SMALL)


def _whole(pool: Pool, candidate: Candidate) -> Proposals:
    for other in _in_orders(candidate, ORDERS):
        is_gain = other.seconds < candidate.seconds * (1 - pool.same)
        if other.arrangement.schedule == "gpipe" or is_gain:
            yield Proposal(other.least_seconds, partial(pool.try_candidate, other))


def _in_more_chunks(pool: Pool) -> Proposals:
    """Propose the pipelines that promise most with more than two chunks a device, of any arrangement: the
    less a pipeline has to be filled, the fewer microbatches it needs. Each where it promises a gain that nobody
    could mistake."""
    promising = [other for one in _fastest_open(pool) if (other := _many_chunks(one, pool.same))]
    for other in sorted(promising, key=lambda one: (one.seconds, one.bytes))[:FEW]:
        if other.seconds < pool.fastest * (1 - pool.apart):
            yield Proposal(other.least_seconds, partial(_if_faster, pool, other))


def _fastest_open(pool: Pool) -> list[Candidate]:
    """Return the fastest pipeline that fits of each arrangement which in chunks may take clearly less than the
    fastest plan, as far as its bound tells."""
    enough = pool.fastest * (1 - pool.apart)
    is_open = {one.arrangement for one in pool.bounds if one.seconds(one.blocks) < enough}
    fits = [one for one in pool.candidates if one.arrangement.stages > 1 and one.bytes <= pool.room]
    found: dict[Arrangement, Candidate] = {}
    for one in sorted(fits, key=lambda one: (one.seconds, one.bytes)):
        if one.arrangement in is_open:
            found.setdefault(one.arrangement, one)
    return list(found.values())


def _many_chunks(candidate: Candidate, same: float) -> Candidate | None:
    """Return a pipeline in so many chunks a device, twice two at least, as each doubling promises a gain."""
    found, chunks, blocks = None, 4, chains_of(candidate)
    best = reordered(candidate, blocks, "interleaved")
    while best is not None:
        more = reordered(candidate, blocks, "interleaved", chunks)
        if more is None or more.seconds >= best.seconds * (1 - same):
            break
        found, best, chunks = more, more, 2 * chunks
    return found


def _where_faster(pool: Pool, candidate: Candidate, orders: Iterable[NamedSchedule]) -> Proposals:
    for other in _in_orders(candidate, orders):
        if other.seconds < pool.fastest * (1 - pool.apart):
            yield Proposal(other.least_seconds, partial(_if_faster, pool, other))


def _in_orders(candidate: Candidate, orders: Iterable[NamedSchedule]) -> Iterator[Candidate]:
    """Yield a pipeline in each of some orders for which it has blocks enough."""
    blocks = chains_of(candidate)
    every = (reordered(candidate, blocks, order) for order in orders)
    yield from filter(None, every)


def _if_faster(pool: Pool, candidate: Candidate) -> Evaluation | None:
    """Try a candidate; keep it where it is faster by more than the doubt about like plans: what is simpler
    runs with less overhead, and has a bound."""
    found = pool.judged(to_strategy(pool.context, candidate), candidate.least_seconds)
    if found is None or found.bytes > pool.limit:
        return None
    if found.strategy.pipeline.splits_backward and found.seconds < CLOSE * pool.fastest:
        found = _in_time(pool, found)
    if found.seconds >= pool.fastest * (1 - pool.apart):
        return None
    pool.evaluations.append(found)
    return found


def _in_time(pool: Pool, found: Evaluation) -> Evaluation:
    """Return a plan in an order for what its actions take, where that is shorter: named orders are laid out for F,
    I and W that take equally long."""
    strategy = timed(pool.context, found.strategy)
    other = None if strategy is None else pool.judged(strategy, found.least_seconds)
    if other is None or other.bytes > pool.limit:
        return found
    return other if other.seconds < found.seconds * (1 - pool.same) else found


def chains_of(candidate: Candidate) -> tuple[Chain, Chain]:
    """Return a pipeline's blocks as cuts rank them, and with all hidden that can be."""
    found = chains(candidate.problem, candidate.arrangement, candidate.assignments)
    candidate.problem.forget_terms()
    return found


def reordered(
    candidate: Candidate, blocks: tuple[Chain, Chain], schedule: ScheduleName, chunks: int = 2
) -> Candidate | None:
    """Return a pipeline in another order, as the additive model sees it; None where it has too few blocks.

    With a doubled warm-up (1F1B-SO) transfers hide behind the rounds: at best they cost nothing.
    Interleaved or on a V, each stage has several chunks: the cut is another, a device receives more often,
    and waits for the first microbatch and the last so many times less. Where backwards are split, transfers hide at
    best too. ``least_seconds`` is what one device has to do: T >= m t + once, whatever the order.
    """
    arrangement, (ranked, hidden) = candidate.arrangement, blocks
    other = replace(arrangement, schedule=schedule)
    if schedule == "gpipe":
        return replace(candidate, arrangement=other)
    p, m = arrangement.stages, arrangement.microbatches
    starts, entry = candidate.starts, SCHEDULES[schedule]
    if entry.chunks:
        cut = partition(ranked, chunks * p, m, "1f1b", math.inf)
        if cut is None:
            return None
        starts = cut.starts
    if entry.chunks or entry.splits:
        waits = _without_transfers(ranked) if entry.splits else ranked
        each, once = _per_device(waits, starts, other)
        idle = entry.idle if entry.splits else 1 / chunks
        fill = (1 + (p - 1) * idle) * each.mean()
        seconds = float((m - 1) * each.max() + once.max() + fill)
    else:
        seconds = measure(_without_transfers(ranked), starts, m, "1f1b").step_seconds
    busy, step = _per_device(hidden, starts, other)
    return replace(
        candidate,
        arrangement=other,
        starts=starts,
        seconds=seconds,
        least_seconds=float(np.max(m * busy + step)),
    )


def _without_transfers(blocks: Chain) -> Chain:
    return replace(blocks, transfer=blocks.transfer * 0)


def _per_device(
    blocks: Chain, starts: tuple[int, ...], arrangement: Arrangement
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each stage's seconds per microbatch, with what it receives, and those per step."""
    each, once = np.zeros(arrangement.stages), np.zeros(arrangement.stages)
    for chunk, (start, stop) in enumerate(itertools.pairwise((*starts, blocks.num_blocks))):
        stage = arrangement.place(chunk)
        each[stage] += blocks.seconds[start:stop].sum() + (blocks.transfer[start] if start else 0.0)
        once[stage] += blocks.once[start:stop].sum()
    return each, once
