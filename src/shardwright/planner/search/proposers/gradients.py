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


def summed_sooner(pool: Pool) -> Proposals:
    """Propose that the fastest pipeline sums gradients of what is sharded after every microbatch (ZeRO-2): more is sent, but
    beneath what is still to be computed, and not on links where activations wait behind it."""
    best = next(iter(pool.fitting), None)
    if best is not None and (sooner := _summed_sooner(best.strategy)) != best.strategy:
        yield Proposal(0.0, partial(_shortened, pool, best, sooner))


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


def _summed_sooner(strategy: Strategy) -> Strategy:
    """Return a pipeline whose sharded gradients are summed after every microbatch; another strategy as it is."""
    if len(strategy.meshes) == 1 or strategy.pipeline.num_microbatches == 1:
        return strategy
    parameters = tuple(
        replace(one, sync="microbatch") if one.optimizer != one.rest else one
        for one in strategy.parameters
    )
    return replace(strategy, parameters=parameters)


def _readers_of_trained(graph: OperatorGraph) -> set[int]:
    return {
        reader
        for tensor in graph.parameters
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
    }
