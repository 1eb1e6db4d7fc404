"""Pipelines that are never flushed, asked for by name."""

from __future__ import annotations

import math
from typing import cast

from shardwright.core.legality import divisors
from shardwright.core.staleness import ACCUMULATES, Staleness
from shardwright.errors import InputError
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.search.seedplans import SEED_PLANS, read_sizes
from shardwright.planner.space.seeds import Seed


def asynchronous(context: Context, name: str, text: str) -> Seed:
    """Return a pipeline that is never flushed: every device a stage, or as many stages as are asked for, of
    data-parallel devices, or groups of tensor-parallel ones; and where it has microbatches, the fewest that it may have."""
    count, samples = context.num_devices, global_batch(context)
    stages, *sizes = read_sizes(name, text) if text else (count,)
    asked = sizes[:1] if name in ACCUMULATES else [1]
    within = math.prod(sizes[name in ACCUMULATES :])
    copies = count // (stages * within)
    if stages < 2 or stages * within * copies != count or samples % max(copies, 1):
        raise InputError(
            "an asynchronous pipeline has at least 2 stages of equally many devices, each with as many "
            f"samples, but {name} asks for {stages} stages with {within} devices for each of their samples, of "
            f"the cluster's {count}, and {samples} samples; name others: {name}:{SEED_PLANS[name]}"
        )
    pieces = asked[0] if asked else _fewest(samples // copies, stages)
    if samples // copies % pieces:
        raise InputError(
            f"each of {pieces} microbatches has as many samples for each of {copies} data-parallel devices, but "
            f"{samples} samples do not divide so; name others: {name}:{SEED_PLANS[name]}"
        )
    mode = cast(Staleness, name)
    return Seed(data=copies, tensor=within, stages=stages, num_microbatches=pieces, staleness=mode)


def _fewest(samples: int, stages: int) -> int:
    """Return the fewest microbatches into which samples divide that are as many as stages; so many where there are none."""
    return next((count for count in divisors(samples) if count >= stages), stages)
