"""What a lowered block becomes, kept as columns: its share of the forward and backward templates.

A template is the pieces of its blocks one behind the other, but for three things that cross from one
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
    Links,
    Prefetched,
    add_syncs,
    backward_pairs,
    forward_pairs,
    issued_before,
    prefetch,
)
from shardwright.planner.lower.builder import Finished, ProgramBuilder, Step
from shardwright.planner.lower.remake import Remake
from shardwright.planner.lower.stage import Entry
from shardwright.planner.lower.template import Rows

Pair = tuple[int, int]
Group = tuple[Pair, ...]  # gradients that are synchronised together, and where they go
# In how many surroundings what became of a block is remembered.
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


def joined(pieces: Sequence[Piece]) -> list[Rows]:
    """Return the template that pieces make, one behind the other, in parts."""
    late = [piece.late for piece in pieces if piece.late is not None]
    if not any(piece.ahead or piece.carried for piece in pieces):
        return [*[piece.whole for piece in pieces], *late]
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
    parts, carried = list[Rows](), None
    for number, piece in enumerate(pieces):
        meets = piece.meets >= 0
        parts += piece.woven(issued.get(number, ()), carried if meets else None)
        carried = piece.carried if meets else carried
    return [*parts, *([] if carried is None else [carried]), *late]


@dataclass(frozen=True, slots=True)
class Share:
    """What one block adds to the templates of one stage."""

    prologue: Piece
    forward: Piece
    middle: Piece
    last: Piece


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """That something of a block is made again before its backward, messages too if ``is_whole``; what
    is ``handed`` to other blocks is not."""

    is_whole: bool
    handed: frozenset[int]


Again = MadeAgain | None


@dataclass(frozen=True, slots=True)
class Closed:
    """A block with its segments finished: those, what they save and view, and its backward on every
    stage, not yet synchronised. ``written``: where that writes each value last. ``links``: those it uses. ``shares`` are
    remembered by the gradients of several blocks which this one sees synchronised."""

    segments: tuple[tuple[int, Finished], ...]
    views: dict[int, int]
    backward: tuple[Prefetched, ...]
    written: tuple[dict[int, int], ...]
    links: tuple[Links, ...]
    shares: dict[object, tuple[Share, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class Lowered:
    """What lowering a block made: per stage entries of prologue and forward, and its segments, not
    finished. ``pending`` are gradients to be synchronised and where they go."""

    entries: tuple[tuple[list[Entry], list[Entry]], ...]
    segments: tuple[int, ...]
    made: frozenset[int]
    pending: tuple[Pair, ...]
    known: dict[object, Closed]

    def close(
        self, builder: ProgramBuilder, finish: Callable[[int], Finished], again: Again
    ) -> Closed:
        """Return the block finished, as far as others read what it makes."""
        key = (self.made & builder.external, builder.kept_for_backward, again)
        if key in self.known:
            closed = self.known[key]
            for number, finished in closed.segments:
                builder.segments[number] = finished.segment
            builder.views.update(closed.views)
            return closed
        backward: list[Prefetched] = []
        for stage, (_, forward) in enumerate(self.entries):
            remake = None if again is None else Remake(builder, forward, again.handed)
            backward.append(prefetch(backward_pairs(builder, forward, stage, {}, remake)))
        segments = tuple([(number, finish(number)) for number in self.segments])
        for number, finished in segments:
            builder.take(number, finished)
        if len(self.known) == MOST_KNOWN:
            self.known.clear()
        self.known[key] = closed = Closed(
            segments=segments,
            views={one: other for _, done in segments for one, other in done.views.items()},
            backward=tuple(backward),
            written=tuple([_written(one.steps) for one in backward]),
            links=tuple(
                [
                    _links(builder, forward, one)
                    for (_, forward), one in zip(self.entries, backward, strict=True)
                ]
            ),
            shares={},
        )
        return closed


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


def _links(builder: ProgramBuilder, forward: Sequence[Entry], backward: Prefetched) -> Links:
    ahead = [step for _, gathers in backward.ahead for step in gathers]
    return Links.of(builder, forward, [*ahead, *backward.steps])


def _written(steps: Sequence[Step]) -> dict[int, int]:
    return {value: place for place, step in enumerate(steps) for value in step.writes}


def stages_of(
    builder: ProgramBuilder,
    blocks: Sequence[Lowered],
    shared: frozenset[int],
    finish: Callable[[int], Finished],
) -> list[tuple[Share, ...]]:
    """Return what every block adds to every stage. ``shared`` are parameters that several read."""
    again = _again(builder, blocks)
    closed = [block.close(builder, finish, how) for block, how in zip(blocks, again, strict=True)]
    buckets = builder.strategy.gradient_sync.buckets
    wide = shared.union(*buckets) if buckets else shared
    groups = _wide_groups(builder, blocks, closed, wide)
    links = tuple(
        [reduce(Links.and_those, own) for own in zip(*[one.links for one in closed], strict=True)]
    )
    found: list[tuple[Share, ...]] = []
    for block, one, own in zip(blocks, closed, groups, strict=True):
        key = (tuple(own), buckets, links)
        if key not in one.shares:
            if len(one.shares) == MOST_KNOWN:
                one.shares.clear()
            one.shares[key] = _shares(builder, block, one, (own, wide, links))
        found.append(one.shares[key])
    return found


def _wide_groups(
    builder: ProgramBuilder,
    blocks: Sequence[Lowered],
    closed: Sequence[Closed],
    wide: frozenset[int],
) -> list[list[Group]]:
    """Return, per block, the gradients of several blocks whose last term backward makes there.

    Backward ends with the first block, so that is the first to write one of them.
    """
    bucket_of = {
        tensor: number
        for number, bucket in enumerate(builder.strategy.gradient_sync.buckets)
        for tensor in bucket
    }
    values = builder.values
    groups: dict[tuple[object, ...], tuple[int, list[Pair]]] = {}
    for number, block in enumerate(blocks):
        for source, target in block.pending:
            entry = values[source]
            if entry.tensor in wide and source in closed[number].written[entry.mesh]:
                bucket = bucket_of.get(entry.tensor, -1 - entry.tensor)
                like = builder.signature(source, values[target].layout)
                key = (bucket, entry.scope, *like)
                groups.setdefault(key, (number, []))[1].append((source, target))
    found: list[list[Group]] = [[] for _ in blocks]
    for number, pairs in groups.values():
        found[number].append(tuple(pairs))
    return found


def _shares(
    builder: ProgramBuilder,
    block: Lowered,
    closed: Closed,
    others: tuple[Sequence[Group], frozenset[int], tuple[Links, ...]],
) -> tuple[Share, ...]:
    """Return what a block adds to every stage; ``others``: the gradients of several blocks that it
    sees synchronised, all such parameters, and the links of every stage."""
    own, wide, links = others
    values, first = builder.values, {group[0]: group for group in own}
    for number, finished in closed.segments:
        builder.take(number, finished)
    groups: list[dict[object, list[Pair]]] = [{} for _ in block.entries]
    for source, target in block.pending:
        entry = values[source]
        if source not in closed.written[entry.mesh]:
            continue
        if entry.tensor not in wide:
            like = builder.signature(source, values[target].layout)
            key = (entry.tensor, entry.scope, *like)
            groups[entry.mesh].setdefault(key, []).append((source, target))
        elif (source, target) in first:
            groups[entry.mesh][source, target] = list(first[source, target])
    found: list[Share] = []
    for stage, (prologue, forward) in enumerate(block.entries):
        ahead = closed.backward[stage]
        written = closed.written[stage]
        synced = add_syncs(builder, ahead.steps, written, groups[stage].values(), links[stage])
        lists = (synced.steps, synced.late, synced.carried)
        last = middle = Piece(builder, ahead.ahead, *lists, synced.meets)
        if any(step.last_only for listed in lists for step in listed):
            often = [[step for step in listed if not step.last_only] for listed in lists]
            before = synced.steps[: max(synced.meets, 0)]
            meets = synced.meets - sum(step.last_only for step in before)
            middle = Piece(builder, ahead.ahead, often[0], often[1], often[2], meets)
        found.append(
            Share(
                prologue=forward_piece(builder, prologue),
                forward=forward_piece(builder, forward),
                middle=middle,
                last=last,
            )
        )
    return tuple(found)


def forward_piece(builder: ProgramBuilder, entries: Sequence[Entry]) -> Piece:
    """Return forward entries, whose segments are finished, as a piece."""
    ahead = prefetch(forward_pairs(builder, entries))
    return Piece(builder, ahead.ahead, ahead.steps)
