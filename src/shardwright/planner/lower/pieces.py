"""What a lowered block becomes, kept as columns: its pieces of the phases, and how pieces are joined.

A phase is the pieces of its blocks one behind the other, but for three things that cross from one
to the next. Parameters that a piece needs are gathered while the piece before runs; a gradient that
several blocks add to is synchronised where the last of them is done; and further messages of a
synchronisation come behind all pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from shardwright.planner.lower.backward import (
    SEGMENTS,
    Group,
    Links,
    Prefetched,
    Synced,
    Transfers,
    add_syncs,
    backward_pairs,
    forward_pairs,
    issued_before,
    prefetch,
    synchronised,
    weight_steps,
)
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.remake import Remake
from shardwright.planner.lower.stage import Entry, Stage
from shardwright.planner.lower.template import Rows

Pair = tuple[int, int]
# In how many surroundings what became of a block (on each stage) is remembered.
MOST_KNOWN = 8


class Piece:
    """Steps of one block, what is gathered for them while those before run, and what comes at last.

    See ``backward.Synced`` for what is carried on to the next piece, and where what comes from the
    one before ``meets`` these steps.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        ahead: Sequence[tuple[int, list[Step]]],
        steps: list[Step],
        late: Sequence[Step] = (),
        carried: Sequence[Step] = (),
        meets: int = -1,
    ) -> None:
        self.whole = Rows.of(builder, steps)
        self.late = Rows.of(builder, late) if late else None
        self.carried = Rows.of(builder, carried) if carried else None
        self.meets = meets
        self.ahead = [(turn, Rows.of(builder, gathers)) for turn, gathers in ahead]
        self.segments = [place for place, step in enumerate(steps) if step.kind in SEGMENTS]

    def woven(self, issued: Sequence[tuple[int, Rows]], brought: Rows | None) -> list[Rows]:
        """Return the steps with rows issued before some of the segments, which ascend, and with what
        is brought from the piece before."""
        parts: list[Rows] = []
        rest, done = self.whole, 0
        between = [] if brought is None else [(self.meets, brought)]
        between += [(self.segments[segment], rows) for segment, rows in issued]
        between.sort(key=lambda one: one[0])
        for place, rows in between:
            if place > done:
                first, rest = rest.split(place - done)
                parts.append(first)
                done = place
            parts.append(rows)
        return [*parts, rest]


def joined(pieces: Sequence[Piece]) -> list[list[Rows]]:
    """Return what pieces make one behind the other: the steps of each with what is woven in from those
    beside it, in parts, and then what comes behind all."""
    issued, parts, carried = _issued(pieces), list[list[Rows]](), None
    for number, piece in enumerate(pieces):
        if number not in issued and piece.meets < 0:
            parts.append([piece.whole])
            continue
        meets = piece.meets >= 0
        parts.append(piece.woven(issued.get(number, ()), carried if meets else None))
        carried = piece.carried if meets else carried
    return [*parts, [] if carried is None else [carried]]


def _issued(pieces: Sequence[Piece]) -> dict[int, list[tuple[int, Rows]]]:
    """Return by piece what is gathered while it runs, each before which of its segments: what the next
    piece with segments needs, and the first one its own."""
    issued: dict[int, list[tuple[int, Rows]]] = {}
    before = -1  # the last piece with segments
    for number, piece in enumerate(pieces):
        if not piece.segments:
            continue
        own = len(piece.segments)
        for turn, rows in piece.ahead:
            where = number if before < 0 else before
            segment = 0 if before < 0 else issued_before(turn, own, len(pieces[before].segments))
            issued.setdefault(where, []).append((segment, rows))
        before = number
    return issued


@dataclass(frozen=True, slots=True)
class Share:
    """What one block adds to the templates of one stage."""

    prologue: Piece
    forward: Piece
    inputs: Piece
    middle: Piece
    last: Piece


def _often(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of every microbatch, the last or not."""
    return [step for step in steps if not step.last_only]


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """That something of a block is made again before its backward, messages too if ``is_whole``; what
    is ``handed`` to other blocks is not."""

    is_whole: bool
    handed: frozenset[int]


Again = MadeAgain | None


class Closed:
    """A block with its segments finished: those, what they view, and per stage its steps, not yet
    synchronised: prologue, forward, backward (its first half where it is split, ``weights`` is the other),
    where that writes each value last, the links it uses.
    ``shares`` are remembered by stage and the gradients of several blocks which it sees synchronised."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, Finished]] = []
        self.views: dict[int, int] = {}
        self.prologue: dict[int, Prefetched] = {}
        self.forward: dict[int, Prefetched] = {}
        self.backward: dict[int, Prefetched] = {}
        self.weights: dict[int, list[Step]] = {}
        self.written: dict[int, dict[int, int]] = {}
        self.links: dict[int, Links] = {}
        self.shares: dict[object, Share] = {}


@dataclass(frozen=True, eq=False, slots=True)
class Lowered:
    """What lowering a block made: per stage entries of prologue and forward, and its segments, not
    finished. ``pending`` are gradients to be synchronised and where they go. ``known``: see ``Blocks``."""

    entries: tuple[tuple[list[Entry], list[Entry]], ...]
    segments: tuple[int, ...]
    made: frozenset[int]
    pending: tuple[Pair, ...]
    known: dict[object, Closed]


class Blocks:
    """The blocks of one lowering on their way to pieces: ``backward`` of every stage, the last first;
    then ``forward`` of each; ``finish``; then their ``shares``.

    What a block becomes is remembered by what others read of it, and by what is made again.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        blocks: Sequence[Lowered],
        stages: Sequence[Stage],
        pending: dict[int, int],
        shared: frozenset[int],
    ) -> None:
        self.builder, self.blocks, self.stages, self.pending = builder, blocks, stages, pending
        strategy = builder.strategy
        self.buckets = strategy.gradient_sync.buckets
        self.wide = shared.union(*self.buckets) if self.buckets else shared
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
                builder.segments[segment] = finished.segment
            builder.views.update(closed.views)
            self.closed.append(closed)

    def on(self, stage: int) -> list[int]:
        """Return the blocks that do something on a stage."""
        return [n for n, block in enumerate(self.blocks) if any(block.entries[stage])]

    def backward(self, stage: int) -> None:
        """Derive a stage's backward and synchronise its gradients."""
        builder, every = self.builder, self.stages[stage].forward
        whole = Remake(builder, every) if self.reaches else None
        stop, present = len(every), self.on(stage)
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
        steps = [step for _, gathers in made.ahead for step in gathers] + made.steps
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
        order: dict[int, int] = {}
        keys: dict[int, object] = {}
        for number in present:
            own = tuple(wide.get(number, ()))
            key, closed = (stage, own, self.buckets, links), self.closed[number]
            if key in closed.shares:
                self.found[number, stage] = closed.shares[key]
                continue
            order = order or {source: turn for turn, source in enumerate(self.pending)}
            keys[number] = key
            mine = [*own, *self._narrow_groups(stage, number)]
            groups += [(order[group[0][0]], number, group) for group in mine]
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
        if not self.wide:
            return {}
        bucket_of = {t: number for number, bucket in enumerate(self.buckets) for t in bucket}
        builder, values = self.builder, self.builder.values
        groups: dict[tuple[object, ...], tuple[int, list[Pair]]] = {}
        for source, target in self.pending.items():
            entry = values[source]
            if entry.mesh != stage or entry.tensor not in self.wide:
                continue
            writes = (n for n in present if source in self.closed[n].written[stage])
            number = next(writes, None)
            if number is not None:
                bucket = bucket_of.get(entry.tensor, -1 - entry.tensor)
                like = builder.signature(source, values[target].layout)
                groups.setdefault((bucket, entry.scope, *like), (number, []))[1].append(
                    (source, target)
                )
        found: dict[int, list[Group]] = {}
        for number, pairs in groups.values():
            found.setdefault(number, []).append(tuple(pairs))
        return found

    def _narrow_groups(self, stage: int, number: int) -> list[Group]:
        """Return the gradients of parameters that only one block reads."""
        builder, values = self.builder, self.builder.values
        groups: dict[tuple[object, ...], list[Pair]] = {}
        for source, target in self.blocks[number].pending:
            entry = values[source]
            if entry.tensor in self.wide or source not in self.closed[number].written[stage]:
                continue
            like = builder.signature(source, values[target].layout)
            groups.setdefault((entry.tensor, entry.scope, *like), []).append((source, target))
        return [tuple(pairs) for pairs in groups.values()]

    def forward(self, stage: int) -> Prefetched:
        """Gather what a stage's forward needs; return the steps of no block."""
        present = [number for number in self.on(stage) if number in self.new]
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
            closed.segments = [(segment, finish(segment)) for segment in block.segments]
            for segment, finished in closed.segments:
                builder.take(segment, finished)
                closed.views.update(finished.views)
            if not self.reaches:
                if len(block.known) == MOST_KNOWN:
                    block.known.clear()
                block.known[key] = closed

    def shares(self, stage: int) -> dict[int, Share]:
        """Return what blocks add to a stage, by block."""
        result: dict[int, Share] = {}
        for number in self.on(stage):
            if (number, stage) in self.drawn:
                key, synced = self.drawn[number, stage]
                closed = self.closed[number]
                if len(closed.shares) == MOST_KNOWN * len(self.stages):
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
        lists = (synced.steps, synced.late, synced.carried)
        last = middle = Piece(builder, ahead, *lists, synced.meets)
        if any(step.last_only for listed in lists for step in listed):
            before = synced.steps[: max(synced.meets, 0)]
            meets = synced.meets - sum(step.last_only for step in before)
            steps, late, carried = map(_often, lists)
            middle = Piece(builder, ahead, steps, late, carried, meets)
        prologue, forward = (
            Piece(builder, one.ahead, one.steps)
            for one in (closed.prologue[stage], closed.forward[stage])
        )
        return Share(prologue=prologue, forward=forward, inputs=inputs, middle=middle, last=last)


def _again(builder: ProgramBuilder, blocks: Sequence[Lowered]) -> list[Again]:
    """Say of every block how much of it is made again before backward."""
    if not builder.makes_again:
        return [None] * len(blocks)
    reads, makes = list[set[int]](), list[set[int]]()
    for block in blocks:
        steps = [step for _, forward in block.entries for one in forward for step in one.steps]
        reads.append({builder.root(value) for step in steps for value in step.reads})
        makes.append({value for step in steps for value in step.writes} | block.made)
    readers = Counter(value for found in reads for value in found)
    whole = set(builder.strategy.recompute)
    found: list[Again] = []
    for number, block in enumerate(blocks):
        some = any(builder.segments[segment].recomputed for segment in block.segments)
        if not some and number not in whole:
            found.append(None)
            continue
        own = reads[number]
        handed = [value for value in makes[number] if readers[value] > (value in own)]
        found.append(MadeAgain(is_whole=number in whole, handed=frozenset(handed)))
    return found
