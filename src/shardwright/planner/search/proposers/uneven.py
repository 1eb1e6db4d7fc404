"""Pipelines whose stages have unequal numbers of devices, for clusters of several kinds: BaPipe's exploration
(Zhao et al., 2020) of schedule, partition and microbatches together.

Elsewhere all stages have equal meshes, cut as if all devices were of the slowest kind. Here a dynamic program cuts the
chain of blocks and that of devices at once, so that the slowest stage is as fast as it can be; the simulator judges
the best cuts in every order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.legality import divisors
from shardwright.core.schedules import NamedSchedule, in_flight
from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import global_batch, microbatch_counts
from shardwright.planner.model.context import Context
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import BUDGET
from shardwright.planner.space.placement import Part, place_parts
from shardwright.planner.space.seeds import Seed, seed_strategy

ORDERS: tuple[NamedSchedule, ...] = ("1f1b", "gpipe", "1f1b-so")

PHASES = ("forward", "backward")

Floats = NDArray[np.float64]
# By kind and width, or first device and width: what the blocks before each take of a microbatch; None where samples do
# not divide so.
Known = dict[tuple[int, int], Floats | None]


class Cut(NamedTuple):
    """Stages as cuts of blocks and of devices, in the order ``devices``: stage s begins at ``places[s]``, in both, and ends
    at the next one; devices behind the last idle. ``seconds``: one microbatch through all stages and the slowest stage for every other; ``busy``: of that stage for all."""

    devices: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    pieces: int
    seconds: float
    busy: float
    schedule: NamedSchedule = "1f1b"


def uneven(pool: Pool) -> Proposals:
    """Propose the best cuts, each in every order, most promising first; then move the boundaries of the fastest while
    that gains. Nothing where all devices are alike."""
    best: Cut | None = None
    seconds = math.inf
    for cut in of_one_kind(pool.context):
        yield Proposal(cut.busy, partial(_try, pool, cut))
    for cut in best_cuts(pool.context, pool.room)[: pool.count]:
        for schedule in ORDERS:
            ordered = cut._replace(schedule=schedule)
            found = yield Proposal(cut.busy, partial(_try, pool, ordered))
            if (taken := _seconds(pool, found)) < seconds:
                best, seconds = ordered, taken
    while best is not None:
        cut, best = best, None
        for other in _moved(cut, len(pool.context.graph.blocks)):
            found = yield Proposal(0.0, partial(_try, pool, other))
            if (taken := _seconds(pool, found)) < seconds:
                best, seconds = other, taken


def _try(pool: Pool, cut: Cut) -> Evaluation | None:
    what = f"{len(cut.places) - 1} uneven stages"
    return pool.try_made(what, partial(to_strategy, pool.context, cut))


def _seconds(pool: Pool, found: Evaluation | None) -> float:
    """Return the seconds of what fits."""
    return math.inf if found is None or found.bytes > pool.limit else found.seconds


def _moved(cut: Cut, blocks: int) -> Iterator[Cut]:
    """Yield cuts with one boundary a block or a device elsewhere; of the last stage's, where devices end."""
    for place, (block, device) in enumerate(cut.places[1:], 1):
        for more in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            moved = (block + more[0], device + more[1])
            places = (*cut.places[:place], moved, *cut.places[place + 1 :])
            rises = all(a < c and b < d for (a, b), (c, d) in pairwise(places))
            if rises and places[-1][0] == blocks and places[-1][1] <= len(cut.devices):
                yield cut._replace(places=places)


def of_one_kind(context: Context) -> list[Cut]:
    """Return single stages on devices of one kind, the others idle, fastest first: with much slower ones beside them
    some devices are faster alone."""
    blocks, kinds, found = len(context.graph.blocks), _by_kind(context), list[Cut]()
    for own in kinds.values() if len(kinds) > 1 else ():
        for width in divisors(global_batch(context), len(own)):
            before = _seconds_before(context, own[0], width, 1)
            if before is not None:
                places = ((0, 0), (blocks, width))
                found.append(Cut(tuple(own), places, 1, float(before[-1]), float(before[-1])))
    return sorted(found, key=lambda one: one.seconds)


def best_cuts(context: Context, room: float) -> list[Cut]:
    """Return cuts for every number of stages and microbatches, fastest first: those that are best if memory did not
    matter, and those that fit. A second's work at ``BUDGET``; beyond, stages stay equal."""
    devices, kinds = tuple(range(context.num_devices)), _by_kind(context)
    if len(kinds) < 2 or len(context.graph.blocks) * len(devices) ** 2 > BUDGET:
        return []
    found, kept = dict[Cut, None](), _bytes_before(context)
    for pieces in microbatch_counts(context, 1, 2):
        known = {
            (kind, width): _seconds_before(context, own[0], width, pieces)
            for kind, own in kinds.items()
            for width in range(1, len(devices) + 1)
        }
        for order in (devices, devices[::-1]):
            along = [context.cluster.devices[device].kind for device in order]
            table = _Table(order, pieces, _of_stages(along, known), *kept)
            for limit in (np.inf, room):
                found |= dict.fromkeys(table.cuts(limit))
    return sorted(found, key=lambda one: one.seconds)


def _by_kind(context: Context) -> dict[int, list[int]]:
    """Return the devices of every kind."""
    kinds: dict[int, list[int]] = {}
    for device in range(context.num_devices):
        kinds.setdefault(context.cluster.devices[device].kind, []).append(device)
    return kinds


def to_strategy(context: Context, cut: Cut) -> Strategy:
    """Return a cut as a strategy: every stage is data parallel over its devices. Raises ValueError where it cannot be."""
    graph, parts, words = context.graph, list[Part](), list[str]()
    for (block, device), (next_block, next_device) in pairwise(cut.places):
        operators = range(graph.blocks[block].start, graph.blocks[next_block - 1].stop)
        own = tuple(sorted(cut.devices[device:next_device]))
        parts.append(Part(devices=own, operators=tuple(operators), seed=Seed(data=len(own))))
        words.append(str(len(own)))
    precision = context.training.precision
    whole = Seed(num_microbatches=cut.pieces, schedule=cut.schedule, precision=precision)
    strategy = place_parts(graph, parts, whole, context.facts.samples)
    label = f"{len(parts)} stages of {', '.join(words)} devices {cut.schedule}, {cut.pieces} microbatches"
    if len(parts) == 1:
        kind = context.cluster.kind_of(cut.devices[0]).name
        label = f"{Seed(data=len(parts[0].devices)).label}, on {kind}"
    return replace(context.training.applied(strategy), label=label)


class _Table(NamedTuple):
    """The dynamic program for devices in one ``order`` and so many microbatches. ``seconds``: by first device and width, what
    the blocks before each take; ``kept`` and ``flight`` their bytes."""

    order: tuple[int, ...]
    pieces: int
    seconds: Known
    kept: Floats
    flight: Floats

    def cuts(self, limit: float) -> Iterator[Cut]:
        """Yield the best cut into every number of stages, two and more, that fits a limit."""
        # best[b, d]: of the slowest of so many last stages, which begin at block b and device d.
        blocks, count = len(self.kept) - 1, len(self.order)
        best = np.full((blocks + 1, count + 1), np.inf)
        best[blocks] = 0.0
        steps: list[NDArray[np.int64]] = []
        for behind in range(min(blocks, count)):
            best, step = self._extended(best, behind, limit)
            steps.append(step)
            if behind and np.isfinite(best[0, 0]):
                yield self._followed(steps)

    def _extended(
        self, best: Floats, behind: int, limit: float
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Put one more stage in front of ``behind`` others; return where it ends, as a flat index."""
        found = np.full_like(best, np.inf)
        step = np.zeros(best.shape, dtype=np.int64)
        held = in_flight("1f1b", behind, self.pieces)
        for (first, width), before in self.seconds.items():
            if before is None:
                continue
            each = before[None, :] - before[:, None]  # by first block and end
            size = self.kept + held * self.flight / (self.pieces * width)
            is_wrong = (each <= 0) | (size[None, :] - size[:, None] > limit)
            slowest = np.where(is_wrong, np.inf, np.maximum(each, best[None, :, first + width]))
            end = slowest.argmin(axis=1)
            value = slowest[np.arange(len(end)), end]
            is_better = value < found[:, first]
            found[is_better, first] = value[is_better]
            step[is_better, first] = end[is_better] * (len(self.order) + 1) + first + width
        return found, step

    def _followed(self, steps: Sequence[NDArray[np.int64]]) -> Cut:
        seconds, place = list[float](), (0, 0)
        places = [place]
        for step in reversed(steps):
            end = divmod(int(step[place]), len(self.order) + 1)
            before = self.seconds[place[1], end[1] - place[1]]
            assert before is not None
            seconds.append(float(before[end[0]] - before[place[0]]))
            place = end
            places.append(place)
        slowest = max(seconds)
        return Cut(
            devices=self.order,
            places=tuple(places),
            pieces=self.pieces,
            seconds=sum(seconds) + (self.pieces - 1) * slowest,
            busy=self.pieces * slowest,
        )


def _of_stages(along: Sequence[int], known: Known) -> Known:
    """Return what stages take, by first device and width, of devices of such kinds one after another."""
    return {
        (first, width): _slowest([known[kind, width] for kind in along[first:][:width]])
        for first in range(len(along))
        for width in range(1, len(along) - first + 1)
    }


def _slowest(before: Sequence[Floats | None]) -> Floats | None:
    """Return what a stage takes up to each block, all its devices waiting for the slowest; None where samples do not
    divide so."""
    there = [one for one in before if one is not None]
    return max(there, key=lambda one: one[-1]) if len(there) == len(before) else None


def _seconds_before(context: Context, device: int, width: int, pieces: int) -> Floats | None:
    """Return what the blocks before each take of a microbatch on so many devices like one, forward and backward; None
    where samples do not divide so."""
    graph, facts, prices = context.graph, context.facts, context.prices
    try:
        strategy = seed_strategy(graph, Seed(data=width, num_microbatches=pieces), facts.samples)
    except ValueError:
        return None
    rates = prices.shards.rates(device, context.training.precision)
    seconds: list[float] = []
    for index in range(len(graph.operators)):
        dims, sizes = strategy.configs[index].dims, strategy.meshes[0].sizes
        shapes = facts.local(index, dims, sizes, pieces)
        sort = prices.shards.sort(graph, index)
        costs = [prices.shards.cost(graph, index, sort, shapes, phase, rates) for phase in PHASES]
        seconds.append(sum(cost.seconds for cost in costs))
    return _before_blocks(context, seconds)


def _bytes_before(context: Context) -> tuple[Floats, Floats]:
    """Return what the blocks before each keep on a device: for the step (parameters, gradients, the optimizer's), and of
    all samples' results from forward to backward."""
    graph, copies = context.graph, 2 + context.training.optimizer_states
    owned, kept, flight = set[int](), list[float](), list[float]()
    for operator in graph.operators:
        new = [
            t for t in operator.inputs if graph.tensors[t].role == "parameter" and t not in owned
        ]
        owned.update(new)
        kept.append(copies * sum(graph.tensors[tensor].bytes for tensor in new))
        made = [graph.tensors[tensor] for tensor in operator.outputs]
        flight.append(sum(one.bytes for one in made if one.needs_gradient))
    return _before_blocks(context, kept), _before_blocks(context, flight)


def _before_blocks(context: Context, each: Sequence[float]) -> Floats:
    ends = [0, *[block.stop for block in context.graph.blocks]]
    sums = [0.0, *accumulate(each)]
    return np.cumsum([0.0, *[sums[b] - sums[a] for a, b in pairwise(ends)]])
