"""Pipelines that are never flushed, where somebody allows them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwright.core.staleness import Staleness
from shardwright.core.strategy import ParameterConfig, Pipeline, Strategy
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.named import as_strategy, tensor_width
from shardwright.planner.search.pool import Pool
from shardwright.planner.space import Seed

# Of those that are equally late the ones that come nearest to synchronous training; where the optimizer has no
# state there is nothing to predict from.
PREDICTED: tuple[Staleness, ...] = ("spectrain-v2", "spectrain-v1")
STASHED: tuple[Staleness, ...] = ("stash",)
# What a label says of a pipeline, and what is no longer so.
_STAGES = re.compile(r"pipeline x \d+|\d+ stages ")
_DROPPED = re.compile(r"\d+ microbatches|ZeRO-|no reshard after forward")


def late(pool: Pool) -> Proposals:
    """Propose pipelines whose gradients are at most ``pool.staleness`` updates late.

    Last of all: what is faster at the price of other losses must keep nobody from looking for what is not.
    """
    has_state = pool.context.training.optimizer_states > 0
    most = min(pool.staleness + 1, pool.context.num_devices)
    for stages in range(2, most + 1):
        for mode in PREDICTED if has_state else STASHED:
            for strategy in _cut(pool, stages, mode):
                # Whatever it promises: it may need less memory than any other.
                yield Proposal(0.0, partial(pool.try_out, strategy))


def _cut(pool: Pool, stages: int, mode: Staleness) -> Iterator[Strategy]:
    """Yield pipelines of so many stages: of one device each, of all devices, cut by flops, and the fastest
    synchronous ones of either sort made asynchronous."""
    count = pool.context.num_devices
    near = tensor_width(pool.context)
    sizes = [(1, 1)]
    if (width := count // stages) > 1 and count % stages == 0:
        sizes += [(width // t, t) for t in (1, math.gcd(width, near)) if t == 1 or near > 1]
    for copies, within in dict.fromkeys(sizes):
        seed = Seed(stages=stages, data=copies, tensor=within, staleness=mode)
        try:
            yield as_strategy(pool.context, seed)
        except ValueError as error:
            pool.refused.append(f"{seed.label}: {error}")
    alike = [
        one.strategy
        for one in pool.fitting
        if one.strategy.pipeline.is_flushed
        and len(one.strategy.meshes) == stages
        and sum(len(mesh.devices) for mesh in one.strategy.meshes) == len(one.strategy.devices)
    ]
    for is_wide in (False, True):
        like = [one for one in alike if (len(one.devices) > stages) == is_wide]
        yield from [_never_flushed(one, mode) for one in like[:1]]


def _never_flushed(strategy: Strategy, mode: Staleness) -> Strategy:
    """Return a pipeline that is never flushed, whose stages hold whole what they update."""
    words = [
        f"{len(strategy.meshes)} stages asynchronous, {mode}" if _STAGES.match(word) else word
        for word in strategy.label.split(", ")
        if not _DROPPED.match(word)
    ]
    return replace(
        strategy,
        pipeline=Pipeline(staleness=mode),
        parameters=tuple(
            [ParameterConfig(rest=p.rest, optimizer=p.rest) for p in strategy.parameters]
        ),
        label=", ".join(words),
    )
