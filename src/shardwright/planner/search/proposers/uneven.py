"""Pipelines whose stages have unequal numbers of devices, for clusters of several kinds: BaPipe's exploration
(Zhao et al., 2020) of schedule, partition and microbatches together.

Elsewhere all stages have equal meshes, cut as if all devices were of the slowest kind. Here a dynamic program cuts the
chain of blocks and that of devices at once, so that the slowest stage is as fast as it can be; the simulator judges
the best cuts in every order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
# By kind and width, what the blocks before each take of a microbatch; None where samples do not divide so.
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
    try:
        return pool.try_out(to_strategy(pool.context, cut))
    except ValueError as error:
        pool.refused.append(f"{len(cut.places) - 1} uneven stages: {error}")
        return None


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
    blocks, cluster, found = len(context.graph.blocks), context.cluster, list[Cut]()
    kinds: dict[int, list[int]] = {}
    for device in range(context.num_devices):
        kinds.setdefault(cluster.devices[device].kind, []).append(device)
    for own in kinds.values() if len(kinds) > 1 else ():
        for width in divisors(global_batch(context), len(own)):
            with suppress(ValueError):
                seconds = float(_seconds_before(context, own[0], width, 1)[-1])
                places = ((0, 0), (blocks, width))
                found.append(Cut(tuple(own), places, 1, seconds, seconds))
    return sorted(found, key=lambda one: one.seconds)


def best_cuts(context: Context, room: float) -> list[Cut]:
    """Return cuts for every number of stages and microbatches, fastest first: those that are best if memory did not
    matter, and those that fit. A second's work at ``BUDGET``; beyond, stages stay equal."""
    devices, blocks = tuple(range(context.num_devices)), len(context.graph.blocks)
    kinds = {context.cluster.devices[device].kind for device in devices}
    if len(kinds) < 2 or blocks * len(devices) ** 2 > BUDGET:
        return []
    found, kept = dict[Cut, None](), _bytes_before(context)
    for pieces in microbatch_counts(context, 1, 2):
        known: Known = {}
        for order in (devices, devices[::-1]):
            table = _Table(context, order, pieces, kept, known)
            for limit in (np.inf, room):
                found |= dict.fromkeys(table.cuts(limit))
    return sorted(found, key=lambda one: one.seconds)


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


class _Table:
    """The dynamic program for devices in one order and so many microbatches."""

    def __init__(
        self,
        context: Context,
        order: tuple[int, ...],
        pieces: int,
        kept: tuple[Floats, Floats],
        known: Known,
    ) -> None:
        self.context, self.order, self.pieces = context, order, pieces
        self.blocks, self.count = len(context.graph.blocks), len(order)
        kinds = [context.cluster.devices[device].kind for device in order]
        self._before = known
        self._seconds = {
            (first, width): self._slowest(set(kinds[first : first + width]), width)
            for first in range(self.count)
            for width in range(1, self.count - first + 1)
        }
        self._kept, self._flight = kept

    def cuts(self, limit: float) -> Iterator[Cut]:
        """Yield the best cut into every number of stages, two and more, that fits a limit."""
        # best[b, d]: of the slowest of so many last stages, which begin at block b and device d.
        best = np.full((self.blocks + 1, self.count + 1), np.inf)
        best[self.blocks] = 0.0
        steps: list[NDArray[np.int64]] = []
        for behind in range(min(self.blocks, self.count)):
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
        for (first, width), before in self._seconds.items():
            if before is None:
                continue
            each = before[None, :] - before[:, None]  # by first block and end
            size = self._kept + held * self._flight / (self.pieces * width)
            is_wrong = (each <= 0) | (size[None, :] - size[:, None] > limit)
            slowest = np.where(is_wrong, np.inf, np.maximum(each, best[None, :, first + width]))
            end = slowest.argmin(axis=1)
            value = slowest[np.arange(len(end)), end]
            is_better = value < found[:, first]
            found[is_better, first] = value[is_better]
            step[is_better, first] = end[is_better] * (self.count + 1) + first + width
        return found, step

    def _followed(self, steps: Sequence[NDArray[np.int64]]) -> Cut:
        seconds, place = list[float](), (0, 0)
        places = [place]
        for step in reversed(steps):
            end = divmod(int(step[place]), self.count + 1)
            before = self._seconds[place[1], end[1] - place[1]]
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

    def _slowest(self, kinds: set[int], width: int) -> Floats | None:
        """Return what a stage of so many devices takes up to each block, all waiting for the slowest; None where samples
        do not divide so."""
        found = [self._seconds_of(kind, width) for kind in kinds]
        there = [one for one in found if one is not None]
        return max(there, key=lambda one: one[-1]) if len(there) == len(found) else None

    def _seconds_of(self, kind: int, width: int) -> Floats | None:
        if (kind, width) not in self._before:
            device = next(d for d in self.order if self.context.cluster.devices[d].kind == kind)
            self._before[kind, width] = None
            with suppress(ValueError):
                before = _seconds_before(self.context, device, width, self.pieces)
                self._before[kind, width] = before
        return self._before[kind, width]


def _seconds_before(context: Context, device: int, width: int, pieces: int) -> Floats:
    """Return what the blocks before each take of a microbatch on so many devices like one, forward and backward. Raises
    ValueError where samples do not divide so."""
    graph, facts, prices = context.graph, context.facts, context.prices
    seed = Seed(data=width, num_microbatches=pieces)
    strategy = seed_strategy(graph, seed, facts.samples)
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
