"""Pipelines that are never flushed, where somebody allows them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardwright.core.staleness import ACCUMULATES, Staleness
from shardwright.core.strategy import ParameterConfig, Pipeline, Strategy
from shardwright.planner.model.context import Context
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.named import as_strategy, tensor_width
from shardwright.planner.search.pool import Pool
from shardwright.planner.space import Seed, check_strategy
from shardwright.planner.space.configs import wanted_as

# Of those that are equally late the ones that come nearest to synchronous training; where the optimizer has no
# state there is nothing to predict from.
PREDICTED: tuple[Staleness, ...] = ("spectrain-v2", "spectrain-v1")
STASHED: tuple[Staleness, ...] = ("stash",)
# What a label says of a pipeline, and what is no longer so.
_STAGES = re.compile(r"pipeline x \d+|\d+ stages ")
_UPDATED_WHOLE = re.compile("ZeRO-|no reshard after forward")
_DROPPED = re.compile(rf"\d+ microbatches|{_UPDATED_WHOLE.pattern}")


def late(pool: Pool) -> Proposals:
    """Propose pipelines whose gradients are at most ``pool.staleness`` updates late.

    Last of all: what is faster at the price of other losses must keep nobody from looking for what is not.
    """
    has_state = pool.context.training.optimizer_states > 0
    most = min(pool.staleness + 1, pool.context.num_devices)
    for stages in range(2, most + 1):
        for mode in PREDICTED if has_state else STASHED:
            # Whatever they promise: they may need less memory than any other.
            for seed in _cut_by_flops(pool, stages, mode):
                yield _proposal(pool, seed.label, partial(as_strategy, pool.context, seed))
            for flushed in _like_synchronous(pool, stages):
                yield _proposal(
                    pool, flushed.label, partial(_never_flushed, pool.context, flushed, mode)
                )
    if pool.staleness:
        for flushed in _double_buffered(pool, most):
            yield _proposal(
                pool, flushed.label, partial(_never_flushed, pool.context, flushed, "2bw")
            )


def _proposal(pool: Pool, what: str, make: Callable[[], Strategy]) -> Proposal:
    """Return the proposal of a pipeline if it is legal, which judging does not ask, and what has a flush does not tell:
    a parameter that two stages read has no version that a stage updates by itself."""

    def made() -> Strategy:
        strategy = make()
        check_strategy(pool.context.graph, strategy, pool.context.facts.samples)
        return strategy

    return Proposal(0.0, partial(pool.try_made, what, made))


def _double_buffered(pool: Pool, most: int) -> list[Strategy]:
    """Return what pipelines of more stages than the others may have, whose gradients are one update late all the same,
    are made of: of every number of stages the fastest synchronous ones, of one device a stage and of more."""
    found: dict[tuple[int, bool], Strategy] = {}
    for one in pool.fitting:
        strategy, stages = one.strategy, len(one.strategy.meshes)
        has_pieces = strategy.pipeline.num_microbatches >= stages
        if stages > most and has_pieces and _has_stages(strategy, stages):
            found.setdefault((stages, len(strategy.devices) > stages), strategy)
    return [*found.values()]


def _cut_by_flops(pool: Pool, stages: int, mode: Staleness) -> list[Seed]:
    """Return pipelines of so many stages: of one device each, and of an equal share of all, data parallel or as
    tensor parallel as one host allows."""
    width, rest = divmod(pool.context.num_devices, stages)
    near = math.gcd(width, tensor_width(pool.context))
    sizes = dict.fromkeys([(1, 1)] if rest else [(1, 1), (width, 1), (width // near, near)])
    return [
        Seed(stages=stages, data=copies, tensor=within, staleness=mode) for copies, within in sizes
    ]


def _like_synchronous(pool: Pool, stages: int) -> list[Strategy]:
    """Return the fastest synchronous pipelines of so many stages, of one device each and of more."""
    alike = [one.strategy for one in pool.fitting if _has_stages(one.strategy, stages)]
    found = {len(one.devices) > stages: one for one in reversed(alike)}
    return [found[is_wide] for is_wide in sorted(found)]


def _has_stages(strategy: Strategy, stages: int) -> bool:
    """Whether a synchronous pipeline has so many stages, which share no devices."""
    meshes = strategy.meshes
    apart = sum(len(mesh.devices) for mesh in meshes) == len(strategy.devices)
    return strategy.pipeline.is_flushed and len(meshes) == stages and apart


def _never_flushed(context: Context, strategy: Strategy, mode: Staleness) -> Strategy:
    """Return a pipeline that is never flushed, whose stages hold what they update as operators read it."""
    graph, samples = context.graph, context.facts.samples
    pieces, dropped = 1, _DROPPED
    if mode in ACCUMULATES:
        pieces, dropped = strategy.pipeline.num_microbatches, _UPDATED_WHOLE
    words = [
        f"{len(strategy.meshes)} stages asynchronous, {mode}" if _STAGES.match(word) else word
        for word in strategy.label.split(", ")
        if not dropped.match(word)
    ]
    read = [wanted_as(graph, samples, tensor, strategy.configs) for tensor in graph.parameters]
    return replace(
        strategy,
        pipeline=Pipeline(staleness=mode, num_microbatches=pieces),
        parameters=tuple([ParameterConfig(rest=rest, optimizer=rest) for rest in read]),
        label=", ".join(words),
    )
