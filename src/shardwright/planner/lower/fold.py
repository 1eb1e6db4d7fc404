"""A graph and a strategy without most of their equal blocks, so that lowering has less to look at.

Of every run of blocks that are alike and treated alike by a strategy ``KEPT`` remain. What lowering
makes of the others follows from those in the middle (``expand``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.core.graph import Block, Operator, OperatorGraph, TensorSpec
from shardwright.core.strategy import GradientSync, Strategy
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.outline import REACH, Ints, Outline, Stretch
from shardwright.planner.space.legal import check_pipeline

# So many blocks of a run remain, the copied one in the middle: it and all within its reach are looked at, on either
# side of those left out. Fewer than this share of all blocks must remain, or it is not worth the trouble.
KEPT, WORTHWHILE = 4 * REACH, 0.6
# So many folded graphs are remembered; they differ in how many blocks remain.
MOST_GRAPHS = 32


@dataclass(frozen=True, slots=True)
class Run:
    """``KEPT`` blocks of a folded graph from ``position`` on, for so many more."""

    position: int
    dropped: int

    @property
    def template(self) -> int:
        """The block behind which ``dropped`` copies of it are missing."""
        return self.position + KEPT // 2 - 1


@dataclass(frozen=True, eq=False, slots=True)
class Short:
    """A folded graph. ``blocks``: which of the whole graph's it shows. ``home``, ``place``,
    ``family``: as in ``Outline``, by its own tensors and blocks; ``outer``: the whole graph's index of
    a tensor of no block, else -1.
    """

    graph: OperatorGraph
    samples: Samples
    ground: Ground
    blocks: tuple[int, ...]
    home: Ints
    place: Ints
    family: Ints
    outer: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Folded:
    """A strategy for a short graph, and the runs where blocks are missing."""

    short: Short
    strategy: Strategy
    runs: tuple[Run, ...]


class Folder:
    """Abridges strategies of one graph."""

    def __init__(self, graph: OperatorGraph, samples: Samples) -> None:
        self.graph = graph
        self.outline = Outline(graph, samples)
        self.number = {tensor: position for position, tensor in enumerate(graph.parameters)}
        self._shorts: dict[tuple[int, ...], Short] = {}

    @property
    def is_long(self) -> bool:
        """Whether any strategy could be folded enough to matter."""
        stretches = self.outline.stretches
        dropped = sum(max(0, one.stop - one.first - KEPT) for one in stretches)
        count = len(self.graph.blocks)
        return count - dropped < WORTHWHILE * count

    def fold(self, strategy: Strategy) -> Folded | None:
        """Return a strategy without the repeats; None where too few blocks would go.

        Raises ValueError where ``lower`` does for the whole graph's sake.
        """
        check_pipeline(strategy, self.outline.samples)
        shown: list[int] = []
        counts: list[int] = []
        runs: list[Run] = []
        traits = _Traits(self, strategy)
        before = 0
        for stretch in self.outline.stretches:
            shown += range(before, stretch.first)
            before, ahead = stretch.stop, len(shown)
            for first, stop in traits.runs(stretch):
                dropped = stop - first - KEPT
                if dropped > 0:
                    runs.append(Run(len(shown), dropped))
                    shown += range(first, first + KEPT // 2)
                    shown += range(stop - (KEPT - KEPT // 2), stop)
                else:
                    shown += range(first, stop)
            counts.append(len(shown) - ahead)
        shown += range(before, len(self.graph.blocks))
        if not runs or len(shown) >= WORTHWHILE * len(self.graph.blocks):
            return None
        short = self.short(tuple(counts))
        return Folded(short, self._strategy(strategy, short, shown), tuple(runs))

    def runs(self, strategy: Strategy, stretch: Stretch) -> list[tuple[int, int]]:
        """Return the lists of neighbouring blocks of a stretch that a strategy treats alike."""
        return _Traits(self, strategy).runs(stretch)

    def weights(self, strategy: Strategy) -> list[tuple[int, int]]:
        """Return operators that stand for all, with how many each stands for: of blocks that a
        strategy treats alike the third stands for those behind it."""
        if not self.is_long:
            return [(index, 1) for index in range(len(self.graph.operators))]
        traits, blocks = _Traits(self, strategy), self.graph.blocks
        times = [1] * len(blocks)
        for stretch in self.outline.stretches:
            for first, stop in traits.runs(stretch):
                alone = min(REACH, stop - first)
                times[first + alone : stop] = [0] * (stop - first - alone)
                if first + alone < stop:
                    times[first + alone] = stop - first - alone
        shown = [(blocks[number], count) for number, count in enumerate(times) if count]
        return [(i, count) for block, count in shown for i in range(block.start, block.stop)]

    def short(self, counts: tuple[int, ...]) -> Short:
        """Return the graph with so many blocks of every stretch."""
        if counts not in self._shorts:
            if len(self._shorts) == MOST_GRAPHS:
                self._shorts.clear()
            self._shorts[counts] = _shorten(self.outline, counts)
        return self._shorts[counts]

    def _strategy(self, strategy: Strategy, short: Short, shown: Sequence[int]) -> Strategy:
        """Return what a strategy says of the ``shown`` blocks, for the short graph."""
        members = self.outline.members
        operators = self.graph.operators_of(shown)
        tensors: list[int] = [
            outer if home < 0 else members[shown[home]][place]
            for outer, home, place in zip(
                short.outer.tolist(), short.home.tolist(), short.place.tolist(), strict=True
            )
        ]
        return replace(
            strategy,
            configs=tuple([strategy.configs[index] for index in operators]),
            parameters=tuple(
                [strategy.parameters[self.number[tensors[t]]] for t in short.graph.parameters]
            ),
            gradient_sync=_sync(strategy.gradient_sync, tensors),
            recompute=_places(shown, strategy.recompute),
            recompute_operators=_places(operators, strategy.recompute_operators),
            reshard_again=_places(tensors, strategy.reshard_again),
            segment_starts=_places(operators, strategy.segment_starts),
        )


def _places(listed: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Return where in a list chosen ones stand."""
    found = set(chosen)
    return tuple([place for place, one in enumerate(listed) if one in found])


def _sync(sync: GradientSync, tensors: Sequence[int]) -> GradientSync:
    """Return what is said of some tensors, by their places."""
    here = {tensor: place for place, tensor in enumerate(tensors)}
    aside = tuple([(here[one], how, share) for one, how, share in sync.apart if one in here])
    buckets = [tuple([here[t] for t in bucket if t in here]) for bucket in sync.buckets]
    return replace(sync, buckets=tuple(filter(None, buckets)), apart=aside)


class _Traits:
    """A strategy as numbers: equal ones for what is equal."""

    def __init__(self, folder: Folder, strategy: Strategy) -> None:
        graph = folder.graph
        self.operators = _codes(strategy.configs)
        self.tensors = np.full((4, len(graph.tensors)), -1)
        self.tensors[0, list(graph.parameters)] = _codes(strategy.parameters)
        self.blocks = np.zeros(len(graph.blocks), dtype=np.int64)
        self.operators[list(strategy.recompute_operators)] += len(self.operators)
        self.operators[list(strategy.segment_starts)] += 2 * len(self.operators)
        self.tensors[1, list(strategy.reshard_again)] = 1
        self.blocks[list(strategy.recompute)] = 1
        self._note_buckets(folder.outline, strategy.gradient_sync)
        apart = strategy.gradient_sync.apart
        self.tensors[3, [one[0] for one in apart]] = _codes([one[1:] for one in apart])

    def _note_buckets(self, outline: Outline, sync: GradientSync) -> None:
        """Number buckets by their first member's place in its block; those that several blocks share
        keep numbers of their own, so that these blocks are unlike all others."""
        count = len(outline.home)
        for number, bucket in enumerate(sync.buckets):
            homes = {outline.home[tensor] for tensor in bucket}
            code = count + number if len(homes) > 1 else min(outline.place[t] for t in bucket)
            self.tensors[2, list(bucket)] = code

    def runs(self, stretch: Stretch) -> list[tuple[int, int]]:
        """Return the lists of neighbouring blocks of a stretch that are treated alike."""
        first, stop = stretch.first, stretch.stop
        operators, blocks = self.operators[stretch.operators], self.blocks[first:stop]
        tensors = self.tensors[:, stretch.tensors]
        same = (operators[1:] == operators[:-1]).all(axis=1) & (blocks[1:] == blocks[:-1])
        same &= (tensors[:, 1:] == tensors[:, :-1]).all(axis=(0, 2))
        edges = [first, *(first + 1 + np.flatnonzero(~same)).tolist(), stop]
        return list(itertools.pairwise(edges))


def _codes(items: Sequence[object]) -> Ints:
    """Number items so that equal ones have equal numbers."""
    ids, place = np.unique(np.fromiter(map(id, items), np.int64, len(items)), return_inverse=True)
    first = np.full(len(ids), -1)
    first[place] = np.arange(len(items))
    known: dict[object, int] = {}
    numbers = [known.setdefault(items[index], len(known)) for index in first.tolist()]
    return np.array(numbers, dtype=np.int64)[place]


def _shorten(outline: Outline, counts: tuple[int, ...]) -> Short:
    """Leave so many blocks of every stretch."""
    blocks: list[int] = []
    before = 0
    for stretch, count in zip(outline.stretches, counts, strict=True):
        blocks += range(before, stretch.first + count)
        before = stretch.stop
    blocks += range(before, len(outline.graph.blocks))
    return _Shortening(outline, blocks).short()


class _Shortening:
    """Takes blocks out of a graph; those behind read those before as they did their neighbours."""

    def __init__(self, outline: Outline, blocks: Sequence[int]) -> None:
        self.outline, self.blocks = outline, tuple(blocks)
        graph, kept = outline.graph, set(blocks)
        self.outer = [
            tensor
            for tensor, spec in enumerate(graph.tensors)
            if spec.producer < 0 and (outline.home[tensor] < 0 or outline.home[tensor] in kept)
        ]
        self.made = [
            t for b in blocks for t in outline.members[b] if graph.tensors[t].producer >= 0
        ]
        self.tensor = {old: new for new, old in enumerate((*self.outer, *self.made))}
        self.operators = graph.operators_of(blocks)
        self.operator = {old: new for new, old in enumerate(self.operators)}

    def short(self) -> Short:
        """Return the graph and what is known of it."""
        outline = self.outline
        position = dict(zip(self.blocks, range(len(self.blocks)), strict=True))
        old = (*self.outer, *self.made)
        short = self._graph()
        samples = outline.samples
        samples = replace(
            samples,
            operator_dim=tuple([samples.operator_dim[i] for i in self.operators]),
            iterations=tuple(map(samples.iterations.__getitem__, self.operators)),
            tensor_dim=tuple([samples.tensor_dim[t] for t in old]),
            state=tuple([samples.state[t] for t in old]),
            prologue=frozenset([self.operator[i] for i in samples.prologue & self.operator.keys()]),
        )
        return Short(
            graph=short,
            samples=samples,
            ground=Ground(short, samples),
            blocks=self.blocks,
            home=np.array([position.get(outline.home[t], -1) for t in old], dtype=np.int64),
            place=np.array([outline.place[t] for t in old], dtype=np.int64),
            family=np.array([outline.family[b] for b in self.blocks], dtype=np.int64),
            outer=np.array([t if outline.home[t] < 0 else -1 for t in old], dtype=np.int64),
        )

    def _graph(self) -> OperatorGraph:
        graph = self.outline.graph
        specs = [graph.tensors[t] for t in self.outer] + [self._made(t) for t in self.made]
        blocks: list[Block] = []
        start = 0
        for old in self.blocks:
            block = graph.blocks[old]
            stop = start + block.stop - block.start
            blocks.append(replace(block, start=start, stop=stop))
            start = stop
        places = {block: place for place, block in enumerate(self.blocks)}
        operators = [self._operator(i, places[graph.block_of[i]]) for i in self.operators]
        return OperatorGraph(
            name=graph.name,
            tensors=tuple(specs),
            operators=tuple(operators),
            blocks=tuple(blocks),
            loss=self.tensor[graph.loss],
            outputs=tuple([(name, self.tensor[tensor]) for name, tensor in graph.outputs]),
            backend=graph.backend,
        )

    def _made(self, tensor: int) -> TensorSpec:
        spec = self.outline.graph.tensors[tensor]
        return replace(spec, producer=self.operator[spec.producer])

    def _operator(self, index: int, place: int) -> Operator:
        operator = self.outline.graph.operators[index]
        return replace(
            operator,
            inputs=tuple([self._read(tensor, place) for tensor in operator.inputs]),
            outputs=tuple([self.tensor[tensor] for tensor in operator.outputs]),
            block=place,
        )

    def _read(self, tensor: int, place: int) -> int:
        """Return what the block at ``place`` reads in place of a tensor."""
        outline = self.outline
        home = outline.home[tensor]
        if home < 0 or outline.family[home] != outline.family[self.blocks[place]]:
            return self.tensor[tensor]
        before = self.blocks[place - (self.blocks[place] - home)]
        return self.tensor[outline.members[before][outline.place[tensor]]]
