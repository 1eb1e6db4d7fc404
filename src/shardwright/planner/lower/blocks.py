"""The blocks of one lowering on their way to pieces of phases: backward, forward, finished, drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from shardwright.planner.lower.backward import (
    Group,
    Links,
    Prefetched,
    Synced,
    Transfers,
    add_syncs,
    backward_pairs,
    forward_pairs,
    prefetch,
    synchronised,
    weight_steps,
)
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.pieces import Piece, Share
from shardwright.planner.lower.records import Closed, Pair, Record
from shardwright.planner.lower.remake import Remake
from shardwright.planner.lower.stage import Stage
from shardwright.planner.remember import KEPT


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """That something of a block is made again before its backward, messages too if ``is_whole``; what
    is ``handed`` to other blocks is not."""

    is_whole: bool
    handed: frozenset[int]


Again = MadeAgain | None


class _HashedOnce:
    """A value that is part of the keys of many blocks, and as large as the model."""

    def __init__(self, value: object) -> None:
        self.value, self.number = value, hash(value)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashedOnce) and self.value == other.value


class Blocks:
    """The blocks of one lowering on their way to pieces: ``backward`` of every stage, the last first;
    then ``forward`` of each; ``finish``; then their ``shares``.

    What a block becomes is remembered by what others read of it, and by what is made again: ``KEPT`` of each.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        blocks: Sequence[Record],
        stages: Sequence[Stage],
        pending: dict[int, int],
        shared: frozenset[int],
    ) -> None:
        self.builder, self.blocks, self.stages = builder, blocks, stages
        strategy = builder.strategy
        self.buckets = strategy.gradient_sync.buckets
        self.wide = shared.union(*self.buckets) if self.buckets else shared
        self.order = dict(zip(pending, range(len(pending)), strict=True))
        # By stage: blocks that do something there, and pending gradients of several blocks.
        self.on, self.spread = _by_stage(blocks, len(stages)), self._spread(pending)
        # What is made again may reach into other blocks; then nothing of one is remembered.
        self.reaches = builder.makes_again and (bool(strategy.reshard_again) or len(stages) > 1)
        self.again = [None] * len(blocks) if self.reaches else _again(builder, blocks)
        self.closed: list[Closed] = []
        self.new: dict[int, object] = {}
        self.transfers: list[Transfers] = [{} for _ in blocks]
        self.drawn: dict[tuple[int, int], tuple[object, Synced]] = {}
        self.found: dict[tuple[int, int], Share] = {}
        for number, (block, how) in enumerate(zip(blocks, self.again, strict=True)):
            key = (block.made & builder.external, builder.kept_for_backward, how)
            closed = None if self.reaches else block.known.get(key)
            if closed is None:
                closed, self.new[number] = Closed(), key
            for segment, finished in closed.segments:
                builder.take(segment, finished)
            self.closed.append(closed)

    def _spread(self, pending: dict[int, int]) -> list[list[Pair]]:
        found = [list[Pair]() for _ in self.stages]
        for source, target in pending.items() if self.wide else ():
            entry = self.builder.values[source]
            if entry.tensor in self.wide:
                found[entry.mesh].append((source, target))
        return found

    def backward(self, stage: int) -> None:
        """Derive a stage's backward and synchronise its gradients."""
        builder, every = self.builder, self.stages[stage].forward
        whole = Remake(builder, every) if self.reaches else None
        stop, present = len(every), self.on[stage]
        for number in reversed(present):
            own, again = self.blocks[number].entries[stage][1], self.again[number]
            entries, places, remake = own, range(len(own)), whole
            if self.reaches:
                entries, places = every, range(stop - len(own), stop)
                stop -= len(own)
            elif number in self.new and again is not None:
                remake = Remake(builder, own, again.handed)
            if number in self.new:
                pairs = backward_pairs(
                    builder, entries, places, stage, self.transfers[number], remake
                )
                self._close(number, stage, prefetch(pairs))
        self._synchronise(stage, present)

    def _close(self, number: int, stage: int, made: Prefetched) -> None:
        """Note what a block's backward on a stage is."""
        builder, closed = self.builder, self.closed[number]
        steps = [step for _, gathers in made.ahead for step in gathers.steps] + made.steps
        closed.backward[stage], adds = made, made.steps
        if builder.splits_backward:
            adds = closed.weights[stage] = weight_steps(builder, made.steps)
        closed.written[stage] = {
            value: place for place, step in enumerate(adds) for value in step.writes
        }
        closed.links[stage] = Links.of(builder, self.blocks[number].entries[stage][1], steps)

    def _synchronise(self, stage: int, present: Sequence[int]) -> None:
        builder = self.builder
        links = reduce(Links.and_those, [self.closed[n].links[stage] for n in present], Links())
        wide = self._wide_groups(stage, present)
        groups: list[tuple[int, int, Group]] = []  # by the order in which their gradients were met
        keys: dict[int, object] = {}
        around = _HashedOnce((self.buckets, links))
        for number in present:
            own = tuple(wide.get(number, ()))
            key, closed = (stage, own, around), self.closed[number]
            if key in closed.shares:
                self.found[number, stage] = closed.shares[key]
                continue
            keys[number] = key
            mine = [*own, *self._narrow_groups(stage, number)]
            groups += [(self.order[group[0][0]], number, group) for group in mine]
        made: dict[int, list[tuple[Group, list[Step]]]] = {number: [] for number in keys}
        for _, number, group in sorted(groups):
            made[number].append((group, synchronised(builder, group)))
        for number, own in made.items():
            closed = self.closed[number]
            steps = closed.weights.get(stage, closed.backward[stage].steps)
            written = closed.written[stage]
            self.drawn[number, stage] = keys[number], add_syncs(steps, written, own, links)

    def _wide_groups(self, stage: int, present: Sequence[int]) -> dict[int, list[Group]]:
        """Return, per block, the gradients of several blocks whose last term backward makes there.

        Backward ends with the first block, so that is the first to write one of them.
        """
        if not self.spread[stage]:
            return {}
        bucket_of = {t: number for number, bucket in enumerate(self.buckets) for t in bucket}
        groups: dict[object, list[tuple[int, Pair]]] = {}
        sources = {source for source, _ in self.spread[stage]}
        first: dict[int, int] = {}
        for number in present:
            first |= dict.fromkeys(self.closed[number].written[stage].keys() & sources, number)
            sources -= first.keys()
        for source, target in self.spread[stage]:
            if (number := first.get(source, -1)) >= 0:
                tensor = self.builder.values[source].tensor
                key = self._alike(source, target, bucket_of.get(tensor, -1 - tensor))
                groups.setdefault(key, []).append((number, (source, target)))
        found: dict[int, list[Group]] = {}
        for members in groups.values():
            numbers, pairs = zip(*members, strict=True)
            found.setdefault(min(numbers), []).append(pairs)
        return found

    def _alike(self, source: int, target: int, bucket: int) -> object:
        """Return what gradients of a bucket have in common that travel together."""
        builder = self.builder
        like = builder.signature(source, builder.values[target].layout)
        return bucket, builder.values[source].scope, like

    def _narrow_groups(self, stage: int, number: int) -> list[Group]:
        """Return the gradients of parameters that only one block reads."""
        written, groups = self.closed[number].written[stage], dict[object, list[Pair]]()
        for source, target in self.blocks[number].pending:
            tensor = self.builder.values[source].tensor
            if tensor not in self.wide and source in written:
                groups.setdefault(self._alike(source, target, tensor), []).append((source, target))
        return [tuple(pairs) for pairs in groups.values()]

    def forward(self, stage: int) -> Prefetched:
        """Gather what a stage's forward needs; return the steps of no block."""
        present = [number for number in self.on[stage] if number in self.new]
        done = sum(len(block.entries[stage][0]) for block in self.blocks)
        more = self.stages[stage].prologue[done:]
        for number in present:
            prologue = self.blocks[number].entries[stage][0]
            self.closed[number].prologue[stage] = prefetch(forward_pairs(self.builder, prologue))
        last = prefetch(forward_pairs(self.builder, more))
        for number in present:
            forward = self.blocks[number].entries[stage][1]
            self.closed[number].forward[stage] = prefetch(forward_pairs(self.builder, forward))
        return last

    def finish(self, finish: Callable[[int], Finished]) -> None:
        """Finish all segments."""
        builder = self.builder
        for number, key in self.new.items():
            block, closed = self.blocks[number], self.closed[number]
            closed.segments = [(segment, finish(segment)) for segment in block.numbers]
            for segment, finished in closed.segments:
                builder.take(segment, finished)
            if not self.reaches:
                if len(block.known) == KEPT:
                    block.known.clear()
                block.known[key] = closed

    def shares(self, stage: int) -> dict[int, Share]:
        """Return what blocks add to a stage, by block."""
        result: dict[int, Share] = {}
        for number in self.on[stage]:
            if (number, stage) in self.drawn:
                key, synced = self.drawn[number, stage]
                closed = self.closed[number]
                if len(closed.shares) == KEPT * len(self.stages):
                    closed.shares.clear()
                closed.shares[key] = self._share(closed, stage, synced)
                self.found[number, stage] = closed.shares[key]
            result[number] = self.found[number, stage]
        return result

    def _share(self, closed: Closed, stage: int, synced: Synced) -> Share:
        builder, backward = self.builder, closed.backward[stage]
        for segment, finished in closed.segments:
            builder.take(segment, finished)
        ahead, inputs = backward.ahead, Piece(builder, (), [])
        if builder.splits_backward:
            ahead, inputs = [], Piece(builder, ahead, backward.steps)
        last = Piece(builder, ahead, synced.steps, synced.late, synced.carried, synced.meets)
        prologue, forward = (
            Piece(builder, one.ahead, one.steps)
            for one in (closed.prologue[stage], closed.forward[stage])
        )
        return Share(prologue=prologue, forward=forward, inputs=inputs, last=last)


def _by_stage(blocks: Sequence[Record], count: int) -> list[list[int]]:
    """Return the blocks that do something on each stage."""
    found = [list[int]() for _ in range(count)]
    for number, block in enumerate(blocks):
        for stage, entries in enumerate(block.entries):
            if any(entries):
                found[stage].append(number)
    return found


def _again(builder: ProgramBuilder, blocks: Sequence[Record]) -> list[Again]:
    """Say of every block how much of it is made again before backward."""
    found: list[Again] = [None] * len(blocks)
    if not builder.makes_again:
        return found
    touched = [_touched(builder, block) for block in blocks]
    readers = Counter(chain.from_iterable([reads for reads, _ in touched]))
    whole = set(builder.strategy.recompute)
    for number, (block, (reads, makes)) in enumerate(zip(blocks, touched, strict=True)):
        some = any(builder.segments[segment].recomputed for segment in block.numbers)
        if some or number in whole:
            handed = frozenset([value for value in makes if readers[value] > (value in reads)])
            found[number] = MadeAgain(is_whole=number in whole, handed=handed)
    return found


def _touched(builder: ProgramBuilder, block: Record) -> tuple[set[int], set[int]]:
    """Return the values that a block's forward reads, and those that it makes."""
    steps = [step for _, forward in block.entries for one in forward for step in one.steps]
    reads = {builder.roots[value] for step in steps for value in step.reads}
    return reads, {value for step in steps for value in step.writes} | block.made
