"""Pipelines that are never flushed, where somebody allows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwright.core.staleness import Staleness
from shardwright.core.strategy import Pipeline, Strategy
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.space import Seed

# Of those that are equally late the ones that come nearest to synchronous training; where the optimizer has no
# state there is nothing to predict from.
PREDICTED: tuple[Staleness, ...] = ("spectrain-v2", "spectrain-v1")
STASHED: tuple[Staleness, ...] = ("stash",)


def late(pool: Pool) -> Proposals:
    """Propose pipelines whose gradients are at most ``pool.staleness`` updates late, one device a stage.

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
    """Yield pipelines of so many stages, cut by flops and as the fastest synchronous one is cut."""
    seed = Seed(stages=stages, staleness=mode)
    try:
        even = as_strategy(pool.context, seed)
    except ValueError as error:
        pool.refused.append(f"{seed.label}: {error}")
        return
    yield even
    alike = [
        one.strategy
        for one in pool.fitting
        if one.strategy.pipeline.is_flushed
        and [len(mesh.devices) for mesh in one.strategy.meshes] == [1] * stages
        and len(one.strategy.devices) == stages
    ]
    for found in alike[:1]:
        yield replace(found, pipeline=Pipeline(staleness=mode), label=even.label)
