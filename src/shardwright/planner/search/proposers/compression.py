"""Plans that compress gradients, where that is allowed and where it pays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardwright.planner.judge.compress import free_seconds, packings, unburdened
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.search.labels import packing_words
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import SAME


def compressed(least_sent: float, pool: Pool) -> Proposals:
    """Propose to compress the gradients of the plans that would be fastest if summing took nothing. Where
    even those are no faster than what is there, none is compressed."""
    bare = unburdened(pool.context)
    found = [(free_seconds(bare, one), number, one) for number, one in enumerate(pool.fitting)]
    for free, _, evaluation in sorted(found, key=lambda one: one[:2])[: pool.count]:
        if free >= _worth_losing(pool, pool.fastest):
            return
        yield Proposal(free, partial(_compressed, pool, evaluation, least_sent))
        pool.tell(1.0, "compressing gradients")


def _worth_losing(pool: Pool, seconds: float) -> float:
    """Return below how many seconds a plan that loses more is worth it beside one that takes so many."""
    return seconds * (1 - max(SAME, pool.same))


def _compressed(pool: Pool, evaluation: Evaluation, least_sent: float) -> Evaluation | None:
    """Try a plan at every least share of what is sent, the densest first; keep what is faster by more
    than what is alike: what is lost is lost for certain."""
    best, strategy = evaluation, evaluation.strategy
    seen = {strategy.gradient_sync}
    for sync in packings(pool.context, evaluation, least_sent, pool.evaluator.run):
        if sync in seen or not sync.compressors:
            continue
        seen.add(sync)
        label = f"{strategy.label}, {packing_words(sync)}"
        made = replace(strategy, gradient_sync=sync, label=label)
        found = pool.judged(made, evaluation.least_seconds)
        if found is not None and found.seconds < _worth_losing(pool, best.seconds):
            pool.evaluations.append(found)
            best = found
    return best
