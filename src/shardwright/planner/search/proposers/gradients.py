"""When gradients travel, and which together, in the plans that promise most."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation, merge, waits_little
from shardwright.planner.search.local.refinement import is_gain
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool, least


def merged(pool: Pool) -> Proposals:
    """Propose gradient buckets for the plans that promise most; their order may change."""
    close = sorted(pool.close(), key=lambda one: (least(one, one.seconds), one.seconds))
    for evaluation in close[: pool.count]:
        yield Proposal(least(evaluation), partial(_merged, pool, evaluation))
        pool.tell(1.0, "merging gradients")


def sent_earlier(pool: Pool) -> Proposals:
    """Propose segments that begin wherever trained parameters are read: backward is cut there, and gradients leave
    earlier. The bound holds for either way to cut."""
    graph = pool.context.graph
    starts = tuple(sorted(_readers_of_trained(graph) - {block.start for block in graph.blocks}))
    if not starts:
        return
    most = pool.count // 2 if pool.is_small else pool.further
    for evaluation in pool.close()[:most]:
        if waits_little(pool.context, evaluation):
            continue
        label = f"{evaluation.strategy.label}, gradients sent earlier"
        shorter = replace(evaluation.strategy, segment_starts=starts, label=label)
        yield Proposal(0.0, partial(_shortened, pool, evaluation, shorter))
        pool.tell(1.0, "sending gradients earlier")


def _merged(pool: Pool, evaluation: Evaluation) -> Evaluation:
    better = merge(pool.context, evaluation, pool.evaluator.run)
    pool.evaluations = [better if known is evaluation else known for known in pool.evaluations]
    return better


def _shortened(pool: Pool, longer: Evaluation, strategy: Strategy) -> Evaluation | None:
    found = pool.judged(strategy, longer.least_seconds)
    if found is not None and found.seconds <= longer.seconds:
        found = merge(pool.context, found, pool.evaluator.run)
    if found is not None and is_gain(found, longer, pool.same):
        pool.evaluations.append(found)
    return found


def _readers_of_trained(graph: OperatorGraph) -> set[int]:
    return {
        reader
        for tensor in graph.parameters
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
    }
