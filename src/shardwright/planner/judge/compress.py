"""What compresses which gradients, given when each is ready and what it costs to select, send and add."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwright.core.compression import (
    MENU,
    MERGED,
    WHOLE,
    allowed_in_rounds,
    allowed_ways,
    is_worth_packing,
    merge_rounds,
    packed_bytes,
    sent_share,
    wide_dtype,
)
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import SEGMENT_KINDS, Kind, Message, Program, Value
from shardwright.core.strategy import REAL, Compressor, GradientSync
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.burden import BENEATH, is_measured
from shardwright.planner.judge.evaluate import (
    Evaluation,
    Run,
    burden_of,
    merge,
    message_cost,
    priced,
    sent_alone,
)
from shardwright.planner.model.context import Context
from shardwright.planner.schedule.merge import Cost, Sizes
from shardwright.planner.schedule.packing import MOST_UNITS, Way, choose_ways
from shardwright.planner.simulate import simulate_on

How = tuple[Compressor, float]


def unburdened(context: Context) -> Context:
    """Return a context in which messages take nothing from computation."""
    table = context.table
    points = [one for one in table.collectives if not one[0].startswith(BENEATH)]
    return context.at(table=replace(table, collectives=tuple(points)))


def free_seconds(context: Context, evaluation: Evaluation) -> float:
    """Return what a step would take if summing gradients over devices took nothing, nor any message
    anything from computation (``unburdened``): where that is no less, there is nothing to compress for."""
    program, prices = priced(context, evaluation.strategy)
    is_sum = (program.kind == Kind.MESSAGE) & np.isin(program.item, _sums(program))
    if not is_sum.any():
        return math.inf
    seconds = np.where(is_sum, 0.0, prices.seconds)
    return simulate_on(context.cluster, context.table, program, seconds).step_seconds


def packings(
    context: Context, evaluation: Evaluation, least_sent: float, evaluator: Run
) -> Iterator[GradientSync]:
    """Yield how a plan's gradients could travel faster, for each least share of bits, densest first.

    In deep graphs all in one way, so that equal blocks stay alike; else every bucket in its own
    (``choose_ways``), and all in the way that loses most, too: the simulator has the last word. What takes
    several messages that follow each other is for all alike: it comes behind backward.
    """
    own = evaluation.strategy.gradient_sync
    if context.facts.folder.is_long:
        program, _ = priced(context, evaluation.strategy)
        for _, sync in _offers(own, least_sent, _summed(program)):
            yield sync
        return
    alone = replace(own, method="wfbp", buckets=())
    strategy = replace(evaluation.strategy, gradient_sync=alone)
    program, timeline, _ = evaluator(strategy, evaluation.least_seconds)
    lanes = [lane for lane in _lanes(program, timeline) if any(unit.dtype for unit in lane.units)]
    menu = list[How]()
    for how, sync in _offers(alone, least_sent, _summed(program)) if lanes else ():
        if how in MENU:
            menu.append(how)
            yield _chosen(context, alone, lanes, (WHOLE, *menu))
            alike = _chosen(context, alone, lanes, (how,))
            yield replace(alike, apart=alone.apart, compressor=how[0], density=how[1])
        else:
            asked = evaluator(replace(strategy, gradient_sync=sync), evaluation.least_seconds)[2]
            yield merge(context, asked, evaluator).strategy.gradient_sync


def _offers(
    own: GradientSync, least_sent: float, found: Collection[tuple[Value, int]]
) -> list[tuple[How, GradientSync]]:
    """Return how all gradients may travel that are summed over so many devices, densest first."""
    ways = [
        (sent_share(*how, "float32"), replace(own, compressor=how[0], density=how[1]))
        for how in allowed_ways(least_sent, "float32")
    ]
    shapes = {one.shape for one, _ in found if one.dtype in REAL}
    # Merging pays where it takes fewer messages than there are packs of others to gather.
    merges = any(len(merge_rounds("gtop-k", ranks)) < ranks - 1 for _, ranks in found)
    ways += [
        (share, sync)
        for share, sync in allowed_in_rounds(own, least_sent, "float32", shapes)
        if merges or sync.compressor not in MERGED
    ]
    ways.sort(key=lambda way: -way[0])  # of equal shares what takes one message first
    return [((sync.compressor, sync.density), sync) for _, sync in ways]


def _summed(program: Program) -> list[tuple[Value, int]]:
    """Return the gradients that are summed over devices, and over how many."""
    return [
        (program.values[source], math.prod(program.meshes[one.mesh].sizes[at] for at in one.axes))
        for one in map(program.messages.__getitem__, _sums(program))
        for source in one.sources
    ]


def _sums(program: Program) -> list[int]:
    """Return the messages that sum gradients over devices."""
    return [
        place
        for place, one in enumerate(program.messages)
        if one.purpose == "synchronise" and one.primitive == "all_reduce"
    ]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Gradients of neighbours: their parameters, when the last is ready, bytes, and the elements of each;
    ``dtype`` is what they are compressed in, "" where they are too small."""

    parameters: tuple[int, ...]
    ready: float
    bytes: float
    elements: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Lane:
    """Units that follow each other on one link; those that are not compressed come last, as one."""

    program: Program
    message: Message
    ranks: int
    units: tuple[_Unit, ...]
    end: float


def _lanes(program: Program, timeline: Timeline) -> Iterator[_Lane]:
    for message, entries in sent_alone(program, timeline):
        if message.primitive != "all_reduce":
            continue
        value = program.values[message.sources[0]]
        width = DTYPE_BYTES[value.dtype]
        large, small = list[_Unit](), list[_Unit]()
        for tensor, (ready, size) in sorted(entries.items(), key=lambda one: (one[1][0], one[0])):
            elements = int(size // width)
            dtype = wide_dtype(value.dtype) if is_worth_packing(value.dtype, elements) else ""
            unit = _Unit((tensor,), ready, size, (elements,), dtype)
            (large if dtype else small).append(unit)
        mesh = program.meshes[message.mesh]
        runs = (program.group == message.mesh) & np.isin(program.kind, SEGMENT_KINDS)
        end = float(timeline.end[runs].max(initial=0.0))
        units = _few(large, MOST_UNITS)
        if small:
            rest = _joined(small)
            units.append(replace(rest, ready=max(rest.ready, units[-1].ready if units else 0.0)))
        ranks = math.prod(mesh.sizes[axis] for axis in message.axes)
        yield _Lane(program, message, ranks, tuple(units), end)


def _few(units: Sequence[_Unit], most: int) -> list[_Unit]:
    """Join neighbours of least bytes until no more than so many are left."""
    found = list(units)
    while len(found) > most:
        pairs = [one.bytes + other.bytes for one, other in pairwise(found)]
        at = int(np.argmin(pairs))
        found[at : at + 2] = [_joined(found[at : at + 2])]
    return found


def _joined(units: Sequence[_Unit]) -> _Unit:
    return _Unit(
        tuple([one for unit in units for one in unit.parameters]),
        max(unit.ready for unit in units),
        sum(unit.bytes for unit in units),
        tuple([one for unit in units for one in unit.elements]),
        units[0].dtype,
    )


def _chosen(
    context: Context, alone: GradientSync, lanes: Sequence[_Lane], hows: Sequence[How]
) -> GradientSync:
    """Return how gradients travel that may do so in these ways; those that are too small travel whole."""
    chosen = [one for lane in lanes for one in _of_lane(context, lane, hows)]
    buckets = [bucket for bucket, _ in chosen]
    apart = sorted((one, *how) for bucket, how in chosen for one in bucket if how != WHOLE)
    return replace(alone, method="optimal", buckets=tuple(buckets), apart=tuple(apart))


def _of_lane(
    context: Context, lane: _Lane, hows: Sequence[How]
) -> Iterator[tuple[tuple[int, ...], How]]:
    """Yield buckets in the order in which they leave, and how each travels."""
    ways = [_way(context, lane, how) for how in hows]
    if WHOLE not in hows:  # but what is small travels so
        bar = [math.inf if unit.dtype else 0.0 for unit in lane.units]
        ways.append(replace(_way(context, lane, WHOLE), packs=bar))
        hows = (*hows, WHOLE)
    for first, stop, way in choose_ways([unit.ready for unit in lane.units], lane.end, ways):
        members = [unit.parameters for unit in lane.units[first:stop]]
        yield tuple([one for parameters in members for one in parameters]), hows[way]


def _way(context: Context, lane: _Lane, how: How) -> Way:
    units = lane.units
    if how == WHOLE:
        zeros, sizes = [0.0] * len(units), [unit.bytes for unit in units]
        cost = message_cost(context, lane.program, lane.message, with_held=False)
        load = _load(context, lane, lane.message)
        return Way(packs=zeros, sums=zeros, sizes=sizes, cost=cost, load=load)
    gather = replace(lane.message, primitive="all_gather")
    return Way(
        packs=[_work(context, unit, how[0], how[1]) or math.inf for unit in units],
        sums=[
            _work(context, unit, "zeros", 1.0)
            + lane.ranks * _work(context, unit, f"{how[0]} sum", how[1])
            for unit in units
        ],
        sizes=[float(lane.ranks * _size(unit, how)) for unit in units],
        cost=message_cost(context, lane.program, gather, with_held=False),
        load=_load(context, lane, gather),
    )


def _load(context: Context, lane: _Lane, message: Message) -> Cost | None:
    """Return what messages take from the thread that computes, where that was measured."""
    if not is_measured(context.table):
        return None

    def load(sizes: Sizes) -> Sizes:
        burdens = [burden_of(context, lane.program, message, float(size)) for size in sizes]
        return np.array([burden.held + burden.stolen for burden in burdens])

    return load


def _work(context: Context, unit: _Unit, name: str, density: float) -> float:
    """Return the seconds of a piece of compressing (``pack_cost``); 0 of what is not compressed."""
    if not unit.dtype:
        return 0.0
    seconds = context.prices.pack_seconds
    return sum(seconds(name, one, unit.dtype, density) for one in unit.elements)


def _size(unit: _Unit, how: How) -> int:
    if not unit.dtype:
        return 0
    return sum(packed_bytes(*how, one, unit.dtype) for one in unit.elements)
