"""Which plans a prediction can tell apart, and which of those that it cannot is the simplest.

A step time is known up to its half-width. What two plans have in common errs in common, and cancels
in their difference; what only one of them does, does not. Plans nearer to each other than that are
the same, and of the same plans the simplest is the best.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.core.layout import Layout, shard_dim
from shardwright.core.program import SEGMENT_KINDS, Kind, Program
from shardwright.core.strategy import ParameterConfig, Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.price import Prices

# Seconds of half-width by what they come from: ``compute``, ``update``, or a message's primitive.
Doubts = Mapping[str, float]

# Messages are known alone; beneath computation, and where ranks wait for each other, they are off by
# at least this share (0.25 is also the half-width of a modelled collective).
MEETING = 0.25
# Of the half-widths that two plans have in common this share does not cancel, since their shards
# differ in shape: a fifth of a half-width of a quarter is the 5 % within which published layouts of
# one model change their order.
UNLIKE = 0.2
# Plans that differ by less than this share of memory or money lie beside each other for nothing.
# Memory is predicted to some 3 %.
NEAR = 0.05

COMPUTES = (*SEGMENT_KINDS, Kind.TRANSFORM)


def doubts_of(program: Program, prices: Prices, timeline: Timeline) -> dict[str, float]:
    """Return where the half-width of a simulated step comes from.

    Work counts as far as it is on the critical chain. Messages count whether they are hidden or
    not, those of the devices that have most of them: a hidden one may turn out not to be.
    """
    found: dict[str, float] = {}
    critical = np.fromiter(timeline.critical, dtype=np.int64)
    for name, kinds in (("compute", COMPUTES), ("update", (Kind.CLIP, Kind.UPDATE))):
        mine = critical[np.isin(program.kind[critical], kinds)]
        found[name] = float(prices.spread[mine].sum()) / timeline.laps
    moves = (program.kind == Kind.MESSAGE) | (program.kind == Kind.SEND)
    sent = np.flatnonzero(moves & (program.item >= 0))
    spread = np.maximum(prices.spread[sent], MEETING * prices.seconds[sent])
    count = len(program.messages)
    place = program.group[sent].astype(np.int64) * count + program.item[sent]
    sums = np.bincount(place, weights=spread, minlength=len(program.meshes) * count)
    totals: dict[tuple[int, str], float] = {}
    for where in np.flatnonzero(sums).tolist():
        group, item = divmod(where, count)
        key = group, program.messages[item].primitive
        totals[key] = totals.get(key, 0.0) + float(sums[where])
    for (_, primitive), seconds in totals.items():
        found[primitive] = max(found.get(primitive, 0.0), seconds)
    return found


def half_width(prices: Prices, timeline: Timeline) -> float:
    """Return the step time's half-width: those of the critical chain, added.

    Errors of one machine are not independent, so they do not average out.
    """
    chain = np.fromiter(timeline.critical, dtype=np.int64)
    return float(prices.spread[chain].sum()) / timeline.laps


def half_width_between(one: Doubts, other: Doubts) -> float:
    """Return the half-width of the difference of two step times, in seconds."""
    total = 0.0
    for name in {**one, **other}:
        here, there = one.get(name, 0.0), other.get(name, 0.0)
        total += abs(here - there) + UNLIKE * min(here, there)
    return total


def complexity(strategy: Strategy) -> tuple[int, ...]:
    """Order strategies by the devices they occupy, and then by what a reader has to understand: how
    many ideas, ways in which parameters lie, and microbatches.

    Ideas are a pipeline, each mesh axis, each ZeRO stage, recomputation of some sort, activations
    sent again, what compresses gradients, and exceptions that only a search thinks of.
    """
    split = {
        axis
        for mesh in strategy.meshes
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
        if size > 1
    }
    kinds = {_kind(config) for config in strategy.parameters}
    axes = strategy.meshes[0].axes
    ideas = (
        len(split),
        max((_zero(config, axes) for config in strategy.parameters), default=0),
        len(strategy.meshes) > 1,
        bool(strategy.recompute),
        bool(strategy.recompute_operators),
        bool(strategy.reshard_again),
        bool(strategy.segment_starts),
        strategy.label.endswith("refined"),
        len(strategy.gradient_sync.compressors),
    )
    return len(strategy.devices), sum(ideas), len(kinds), strategy.pipeline.num_microbatches


def _kind(config: ParameterConfig) -> tuple[object, ...]:
    """Return how a parameter lies, whichever of its dims are split."""
    return _split(config.rest), _split(config.optimizer), config.sync, config.keeps


def _split(layout: Layout) -> tuple[bool, ...]:
    return tuple(shard_dim(placement) >= 0 for placement in layout)


def _zero(config: ParameterConfig, axes: tuple[str, ...]) -> int:
    """Return the ZeRO stage of a parameter; at rest only this one splits it over the data axis."""
    pairs = zip(axes, _split(config.rest), strict=False)
    if any(is_split and axis == "data" for axis, is_split in pairs):
        return 3
    if _split(config.rest) == _split(config.optimizer):
        return 0
    return 2 if config.sync == "microbatch" else 1
