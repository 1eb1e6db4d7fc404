"""Named strategies that every answer is held against: data parallel, ZeRO, Megatron, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.strategy import Strategy
from shardwright.planner.search.arrangements import global_batch
from shardwright.planner.search.context import Context
from shardwright.planner.space.seeds import Seed, seed_strategy


def named_strategies(context: Context) -> Iterator[tuple[Strategy, Strategy]]:
    """Yield the named strategies that are legal here, plain data parallel first.

    Each comes twice: with as few microbatches as it may have, and with as many.
    """
    for seed in _seeds(context):
        try:
            few = _strategy(context, seed)
            many = _strategy(context, replace(seed, num_microbatches=_most(context, seed)))
        except ValueError:
            continue
        yield few, many


def _strategy(context: Context, seed: Seed) -> Strategy:
    training = context.training
    return replace(
        seed_strategy(context.graph, seed, context.samples),
        precision=training.precision,
        batch_norm=training.batch_norm,
        optimizer_states=training.optimizer_states,
        clips=training.clips,
    )


def _most(context: Context, seed: Seed) -> int:
    """Return the most microbatches: a power of two that divides each device's samples."""
    samples = global_batch(context) // seed.data
    count = 1
    while not context.samples.blocker and samples % (2 * count) == 0:
        count *= 2
    return max(count, seed.num_microbatches)


def _seeds(context: Context) -> list[Seed]:
    count = context.cluster.num_devices
    if count == 1:
        return [Seed()]
    batch = global_batch(context)
    near = _tensor_width(context)
    stages = _stage_count(context)
    seeds = [Seed(data=count, zero=zero) for zero in range(4)] if batch % count == 0 else []
    if count % batch == 0 and count > batch:
        seeds.append(Seed(data=batch, context=count // batch, zero=1))
    if near > 1 and batch % (count // near) == 0:
        seeds.append(Seed(data=count // near, tensor=near))
        seeds.append(Seed(data=count // near, tensor=near, zero=1, sequence=True))
    if stages > 1 and not context.samples.blocker and batch % (count // stages * stages) == 0:
        seeds.append(Seed(data=count // stages, stages=stages, num_microbatches=stages))
    return seeds


def _tensor_width(context: Context) -> int:
    """Return how many devices of one host could share every operator: a divisor of both."""
    cluster = context.cluster
    hosts = [device.host for device in cluster.devices]
    near = min(hosts.count(host) for host in set(hosts))
    near = near if near > 1 else cluster.num_devices
    return max(w for w in range(1, min(near, 8) + 1) if cluster.num_devices % w == 0)


def _stage_count(context: Context) -> int:
    limit = min(4, len(context.ties.ranges))
    return max(s for s in range(1, limit + 1) if context.cluster.num_devices % s == 0)
