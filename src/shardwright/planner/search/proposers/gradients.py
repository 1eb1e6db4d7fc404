"""When gradients travel, and which together, in the plans that promise most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation, merge
from shardwright.planner.model.context import Context
from shardwright.planner.search.local.refinement import is_gain
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool

# So many of the fastest plans get buckets of their own, of small graphs more, if this close to the
# fastest.
MERGED, MERGED_SMALL, CLOSE = 3, 12, 1.1
# So many are tried with shorter segments, of small graphs more; where memory is short, in the first
# blocks alone.
EARLIER, EARLIER_SMALL, FIRST = 1, 6, 3


def merged(pool: Pool) -> Proposals:
    """Propose gradient buckets for the plans that promise most; their order may change."""
    most = MERGED_SMALL if pool.is_small else MERGED
    for evaluation in sorted(_close(pool), key=lambda one: (least(one, one.seconds), one.seconds))[
        :most
    ]:
        yield Proposal(least(evaluation), partial(_merged, pool, evaluation))
        pool.tell(1.0, "merging gradients")


def sent_earlier(pool: Pool) -> Proposals:
    """Propose segments that begin wherever parameters are read, in all blocks or in the first few:
    backward is cut there, and gradients leave earlier. The bound holds for either way to cut.
    """
    places = tuple(_segment_starts(pool.context))
    for evaluation in _close(pool)[: EARLIER_SMALL if pool.is_small else EARLIER]:
        for starts in places:
            label = f"{evaluation.strategy.label}, gradients sent earlier"
            shorter = replace(evaluation.strategy, segment_starts=starts, label=label)
            found = yield Proposal(0.0, partial(_shortened, pool, evaluation, shorter))
            pool.tell(1.0, "sending gradients earlier")
            if found is None or found.bytes <= pool.limit:
                break


def least(evaluation: Evaluation, unknown: float = 0.0) -> float:
    """Return what a plan could take at best, where that is known."""
    seconds = evaluation.least_seconds
    return unknown if math.isnan(seconds) else seconds


def _close(pool: Pool) -> list[Evaluation]:
    """Return the plans near the fastest; of those that are the same on another mesh, the first."""
    found: dict[tuple[str, str], Evaluation] = {}
    for one in pool.fitting:
        if one.seconds <= CLOSE * pool.fastest:
            found.setdefault((f"{one.seconds:.4g}", f"{one.least_seconds:.3g}"), one)
    return list(found.values())


def _merged(pool: Pool, evaluation: Evaluation) -> Evaluation:
    better = merge(pool.context, evaluation, pool.evaluator.run)
    pool.evaluations = [better if known is evaluation else known for known in pool.evaluations]
    return better


def _shortened(pool: Pool, longer: Evaluation, strategy: Strategy) -> Evaluation | None:
    found = pool.judged(strategy, longer.least_seconds)
    if found is not None and found.seconds <= longer.seconds:
        found = merge(pool.context, found, pool.evaluator.run)
    if found is not None and is_gain(found, longer):
        pool.evaluations.append(found)
    return found


def _segment_starts(context: Context) -> Iterator[tuple[int, ...]]:
    """Yield where segments could begin: at readers of trained parameters that do not begin a block,
    in all blocks, then only in the first few, whose gradients come last."""
    graph = context.graph
    readers = {
        reader
        for tensor in graph.parameters
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
    }
    inside = sorted(readers - {block.start for block in graph.blocks})
    trained = [
        block for block in graph.blocks if not readers.isdisjoint(range(block.start, block.stop))
    ]
    if inside:
        yield tuple(inside)
    stop = trained[min(FIRST, len(trained)) - 1].stop if trained else 0
    few = [reader for reader in inside if reader < stop]
    if few and len(few) < len(inside):
        yield tuple(few)
