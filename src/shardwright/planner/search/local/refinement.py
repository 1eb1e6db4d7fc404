"""Refinement: small changes of the best plans, kept where the simulator says that they help.

The additive model proposes plans without knowing what waits for what. So look at the chain of
instructions that makes the step as long as it is, and change what is on it: Aceso's rule (EuroSys
2024) that only relieving the bottleneck can help, with FlexFlow's moves on single operators: what moves or
updates tensors changes; work is split as well as it can be already. Nothing is taken that is slower or
does not fit, so refinement never makes an answer worse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardwright.core.layout import Layout, local_bytes
from shardwright.core.program import SEGMENT_KINDS, Kind, Program
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import microbatch_counts
from shardwright.planner.model.context import Context
from shardwright.planner.search.labels import relabelled
from shardwright.planner.search.local.moves import Dims, Space, lay, mend, resplit
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import CANDIDATES, FEW, PATIENCE
from shardwright.planner.solve.frontier import TOLERANCE

REFINED = ", refined"


class Bottleneck(NamedTuple):
    """A tensor whose messages, or updates, a critical chain spends seconds on; it stands for those at the same place of
    equal blocks."""

    tensor: int
    purpose: str
    seconds: float


class Effort(NamedTuple):
    """How long a climb goes on: at most so many simulated moves, so many of them in vain."""

    moves: int
    patience: int = PATIENCE


def improve(pool: Pool, evaluation: Evaluation, effort: Effort) -> Evaluation:
    """Return the fastest strategy within the memory limit that an effort reaches.

    What may relieve the bottlenecks is tried, one after the other. Deterministic.
    """
    return _Climb(pool, effort).to_the_top(evaluation)


def is_gain(evaluation: Evaluation, best: Evaluation, same: float = TOLERANCE) -> bool:
    """Whether an evaluation is faster by more than a share that counts as the same."""
    return evaluation.seconds < best.seconds * (1 - same)


class _Climb:
    """Steps from strategy to better strategy, so many simulated in all; none is tried twice."""

    def __init__(self, pool: Pool, effort: Effort) -> None:
        self._pool = pool
        self._left, self._patience = effort
        self._space = Space(pool.context)
        self._tried: set[Strategy] = set()

    def to_the_top(self, best: Evaluation) -> Evaluation:
        """Take every better step, until none is found with patience or no moves are left."""
        self._last = self._pool.evaluator.run(best.strategy, best.least_seconds)
        while self._left > 0 and not self._pool.stopped():
            better = self._step(best, max(0, self._left - self._patience))
            if better is None:
                return best
            best = better
        return best

    def evaluated(self, strategy: Strategy) -> Evaluation | None:
        """Simulate a strategy that was not yet; None if illegal."""
        known = len(self._tried)
        self._tried.add(strategy)
        if len(self._tried) == known:
            return None
        self._left -= 1
        try:
            self._last = self._pool.evaluator.run(strategy, math.nan)
        except ValueError:
            return None
        return self._last[2]

    def _step(self, best: Evaluation, last: int) -> Evaluation | None:
        program, timeline, _ = self._last  # of ``best``
        found = bottlenecks(self._pool.context, program, timeline)
        self._tried.add(best.strategy)
        for changed in _moves(self._space, best.strategy, found):
            if self._left <= last or self._pool.stopped():
                return None
            evaluation = self.evaluated(changed)
            if evaluation is None or evaluation.bytes > self._pool.limit:
                continue
            if is_gain(evaluation, best):
                before = best.strategy.label.removesuffix(REFINED)
                label = relabelled(self._pool.context, replace(changed, label=before)) + REFINED
                return replace(evaluation, strategy=replace(changed, label=label))
        return None


def bottlenecks(context: Context, program: Program, timeline: Timeline) -> list[Bottleneck]:
    """Return what the critical chain spends its time on besides the work of operators, most first."""
    found: dict[tuple[int, int, str], Bottleneck] = {}
    for tensor, purpose, seconds in _spent(context, program, timeline):
        operator = _owner(context, tensor)
        place = context.graph.operators[operator].outputs
        output = place.index(tensor) if tensor in place else tensor
        key = (context.facts.ties.root[operator], output, purpose)
        first, _, before = found.get(key, (tensor, purpose, 0.0))
        found[key] = Bottleneck(first, purpose, before + seconds)
    return sorted(
        (one for one in found.values() if one.seconds > 0),
        key=lambda one: (-one.seconds, _owner(context, one.tensor), one.tensor),
    )


def _spent(
    context: Context, program: Program, timeline: Timeline
) -> Iterator[tuple[int, str, float]]:
    """Yield the seconds of the critical chain that are no work of operators: on which tensor, and its purpose."""
    for index in timeline.critical:
        seconds = float(timeline.end[index] - timeline.start[index])
        kind, item = Kind(program.kind[index]), int(program.item[index])
        if kind == Kind.UPDATE:
            for tensor, share in _updates(context, program, int(program.group[index])):
                yield tensor, "parameter", seconds * share
        elif kind not in SEGMENT_KINDS and item >= 0:
            purpose, read = _moved(program, kind, item)
            for source in read:
                tensor = program.values[source].tensor
                if _owner(context, tensor) >= 0:
                    yield tensor, purpose, seconds / len(read)


def _moved(program: Program, kind: Kind, item: int) -> tuple[str, tuple[int, ...]]:
    """Return what a transform or a message is for, and the values it takes."""
    if kind == Kind.TRANSFORM:
        return program.transforms[item].purpose, program.transforms[item].reads
    return program.messages[item].purpose, program.messages[item].sources


def _updates(context: Context, program: Program, mesh: int) -> list[tuple[int, float]]:
    """Return the parameters that one mesh updates, each with its share of the bytes."""
    graph, strategy = context.graph, program.strategy
    sizes: dict[int, int] = {}
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        spec, readers = graph.tensors[tensor], graph.consumers[tensor]
        home = min((strategy.configs[reader].mesh for reader in readers), default=-1)
        if home == mesh and spec.needs_gradient:
            axes = strategy.meshes[mesh].sizes
            sizes[tensor] = local_bytes(spec.shape, spec.dtype, config.optimizer, axes)
    total = sum(sizes.values()) or 1
    return [(tensor, size / total) for tensor, size in sizes.items()]


def _owner(context: Context, tensor: int) -> int:
    """Return who makes a tensor, else who reads it first; -1 for nobody."""
    spec = context.graph.tensors[tensor]
    readers = context.graph.consumers[tensor]
    return spec.producer if spec.producer >= 0 else next(iter(readers), -1)


def _moves(space: Space, strategy: Strategy, found: list[Bottleneck]) -> Iterator[Strategy]:
    """Yield changes that may relieve the bottlenecks, and changes of the whole."""
    by_place = [_relieved(space, strategy, one) for one in found[:CANDIDATES]]
    # In turns, so that no one sort of move uses up the budget.
    for round_ in itertools.zip_longest(_whole(space, strategy), *by_place):
        yield from (changed for changed in round_ if changed is not None)


def _relieved(space: Space, strategy: Strategy, one: Bottleneck) -> Iterator[Strategy]:
    if one.purpose in ("synchronise", "parameter"):
        readers = space.equals(space.context.graph.consumers[one.tensor][0])
        starts = {*strategy.segment_starts, *readers}
        yield replace(strategy, segment_starts=tuple(sorted(starts)))
        yield from _parameter_moves(space, strategy, one.tensor)
    else:
        yield from _message_moves(space, strategy, one.tensor)


def _message_moves(space: Space, strategy: Strategy, tensor: int) -> Iterator[Strategy]:
    """Split the readers as the tensor is made, or make it as one of them reads it."""
    maker, configs = space.context.graph.tensors[tensor].producer, strategy.configs
    if maker < 0:
        return
    made, mesh = space.layout(maker, configs[maker].dims, tensor), configs[maker].mesh
    read = {
        reader: space.layout(reader, configs[reader].dims, tensor)
        for reader in space.context.graph.consumers[tensor]
        if configs[reader].mesh == mesh
    }
    others = {reader: layout for reader, layout in read.items() if layout != made}
    changes = [(reader, made) for reader in others]
    changes += [(maker, layout) for layout in sorted(set(others.values()))]
    for index, layout in changes:
        yield from _split_so(space, strategy, index, tensor, layout)


def _split_so(
    space: Space, strategy: Strategy, index: int, tensor: int, layout: Layout
) -> Iterator[Strategy]:
    """Split an operator so that a tensor lies as wanted, in few ways."""
    options = space.legal(strategy, index, strategy.configs[index].mesh)
    fitting = [dims for dims in options if space.layout(index, dims, tensor) == layout]
    return itertools.islice(_splits(space, strategy, index, fitting), FEW)


def _splits(
    space: Space, strategy: Strategy, index: int, options: list[Dims]
) -> Iterator[Strategy]:
    """Yield the strategy with an operator, and its equals, split otherwise; cheapest work first.

    Each comes with its neighbours split to fit, too, where that is another strategy.
    """
    own = strategy.configs[index]
    others = [dims for dims in options if dims != own.dims]
    for dims in sorted(others, key=lambda dims: (space.seconds(strategy, index, dims), dims)):
        yield _split_equals(space, strategy, {index: dims})
        around = {index: dims} | _fitting(space, strategy, index, dims)
        if len(around) > 1:
            yield _split_equals(space, strategy, around)


def _fitting(space: Space, strategy: Strategy, index: int, dims: Dims) -> dict[int, Dims]:
    """Return splits of the neighbours for which nothing moves between them and the operator."""
    mesh, found = strategy.configs[index].mesh, dict[int, Dims]()
    sizes, pieces = strategy.meshes[mesh].sizes, strategy.pipeline.num_microbatches
    for tensor, other in space.edges(index):
        if strategy.configs[other].mesh != mesh or other in found:
            continue
        wanted = space.layout(index, dims, tensor)
        if space.layout(other, strategy.configs[other].dims, tensor) == wanted:
            continue
        options = space.fitting(other, sizes, pieces, tensor, wanted)
        if options:
            found[other] = min(options, key=lambda one: (space.seconds(strategy, other, one), one))
    return found


def _split_equals(space: Space, strategy: Strategy, changes: dict[int, Dims]) -> Strategy:
    every: dict[int, Dims] = {}
    for index, dims in changes.items():
        sizes = strategy.meshes[strategy.configs[index].mesh].sizes
        every |= dict.fromkeys(space.alike(strategy, index, sizes), dims)
    return mend(space, resplit(space, strategy, every), every)


def _parameter_moves(space: Space, strategy: Strategy, tensor: int) -> Iterator[Strategy]:
    """Keep a parameter, and its equals or not, sharded further or less, summed rarely or often."""
    reader = space.context.graph.consumers[tensor][0]
    position = space.context.graph.operators[reader].inputs.index(tensor)
    tensors = {space.context.graph.operators[one].inputs[position] for one in space.equals(reader)}
    every = [one for one in sorted(tensors) if one in space.number]
    # One microbatch is the step.
    syncs = ("step", "microbatch")[: strategy.pipeline.num_microbatches]
    ways = itertools.product(((False, False), (False, True), (True, True)), syncs, (False, True))
    for (finer, sync, keeps), known in itertools.product(ways, (every, [tensor])):
        parameters = list(strategy.parameters)
        for one in known:
            how = replace(parameters[space.number[one]], sync=sync, keeps=keeps)
            parameters[space.number[one]] = lay(space, strategy, one, how, finer)
        if tuple(parameters) != strategy.parameters:
            yield replace(strategy, parameters=tuple(parameters))


def _whole(space: Space, strategy: Strategy) -> Iterator[Strategy]:
    """Yield changes of the whole: less recomputation, other stages, microbatches, order."""
    if space.context.training.recompute == "auto":
        yield from _remembered(strategy)
    yield from _other_cuts(space, strategy)
    if strategy.pipeline.order:
        return  # which is for so many microbatches, and no other schedule has one
    count = strategy.pipeline.num_microbatches
    pieces = strategy.meshes[0].sizes[0]
    for other in microbatch_counts(space.context, pieces, len(strategy.meshes)):
        if other in (2 * count, count // 2):
            yield replace(strategy, pipeline=replace(strategy.pipeline, num_microbatches=other))
    if len(strategy.meshes) > 1:
        schedule = "gpipe" if strategy.pipeline.schedule == "1f1b" else "1f1b"
        yield replace(strategy, pipeline=replace(strategy.pipeline, schedule=schedule))


def _remembered(strategy: Strategy) -> Iterator[Strategy]:
    """Make less again in backward."""
    if strategy.recompute:
        yield replace(strategy, recompute=strategy.recompute[:-1])
        yield replace(strategy, recompute=strategy.recompute[1:])
    if strategy.recompute_operators:
        half = strategy.recompute_operators[: len(strategy.recompute_operators) // 2]
        yield replace(strategy, recompute_operators=half)
        # The same segments, of which none runs again.
        again = set(strategy.recompute_operators)
        edges = again ^ {index + 1 for index in again}
        edges.discard(len(strategy.configs))
        starts = tuple(sorted(edges.union(strategy.segment_starts)))
        yield replace(strategy, recompute_operators=(), segment_starts=starts)
        yield replace(strategy, recompute_operators=())


def _other_cuts(space: Space, strategy: Strategy) -> Iterator[Strategy]:
    """Give a block at the edge of a stage to the stage beside it."""
    ranges, configs = space.context.facts.ties.ranges, strategy.configs
    for left, right in itertools.pairwise(ranges):
        here, there = configs[left[1] - 1].mesh, configs[right[0]].mesh
        if there != here + 1 or strategy.meshes[here].sizes != strategy.meshes[there].sizes:
            continue
        for block, mesh in ((left, there), (right, here)):
            moved = list(configs)
            for index in range(*block):
                moved[index] = OperatorConfig(mesh=mesh, dims=configs[index].dims)
            if len({config.mesh for config in moved}) == len(strategy.meshes):
                yield replace(strategy, configs=tuple(moved))
