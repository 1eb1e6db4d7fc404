"""Put back what was left out of a folded graph: the Program of the whole graph, as columns.

Lowering goes block by block, and in a run of equal blocks that are treated alike it does with each
what it did with the one before, only with the next one's values. So the steps of the missing blocks
are those of the block in the middle of what remains, with every value moved on; that those around
it repeat it in this way is checked, and where they do not nothing is put back.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import local_bytes
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import gradients
from shardwright.planner.lower.assemble import assemble
from shardwright.planner.lower.builder import ProgramBuilder, Step
from shardwright.planner.lower.chains import Chains, Irregular
from shardwright.planner.lower.compile import Steps, Templates
from shardwright.planner.lower.fold import KEPT, Folded, Run, Short
from shardwright.planner.lower.lower import Lowering
from shardwright.planner.lower.template import (
    MOVES,
    RUNS_SEGMENT,
    TAKES_ALL,
    Facts,
    Flags,
    Ints,
    Rows,
)
from shardwright.planner.space.legal import check_pipeline

# Columns of ``Rows`` that name an item, and that count values held, written and read.
ITEM, HELD, WRITTEN, READ = 1, 8, 9, 10


@dataclass(frozen=True, eq=False, slots=True)
class Expanded:
    """A Program whose instructions are those of the whole strategy, while values, segments and
    messages are those of the ``graph`` without repeats. ``masters``: per mesh one device's bytes of
    what the optimizer keeps.
    """

    program: Program
    graph: OperatorGraph
    masters: dict[int, int]


def expand(folded: Folded, whole: Strategy) -> Expanded:
    """Return the Program of the strategy that was folded. Raises Irregular, or ValueError where
    lowering does."""
    if whole.updates != "step":
        raise Irregular  # an update between blocks is of neither
    short = folded.short
    check_pipeline(folded.strategy, short.samples)
    placed = gradients.place(short.graph, folded.strategy, short.samples, short.iterations)
    builder = ProgramBuilder(short.graph, folded.strategy, short.samples, short.iterations)
    lowering = Lowering(builder, placed)
    loss = lowering.lower_blocks()
    steps = lowering.steps()
    chains = Chains(builder, short, folded.runs)
    facts = chains.facts(Facts.of(builder))
    roll = _Roll(builder, short, chains)
    templates = [roll.templates(one) for one in steps]
    shown = copy.copy(builder)
    shown.strategy = whole
    shown.lasting = chains.repeated(builder.lasting)
    program = assemble(shown, templates, loss, facts)
    return Expanded(program, short.graph, _masters(builder, lowering, chains))


def _masters(builder: ProgramBuilder, lowering: Lowering, chains: Chains) -> dict[int, int]:
    """Return the bytes of the optimizer's shards by mesh, those of missing blocks included."""
    graph, strategy = builder.graph, builder.strategy
    total = dict.fromkeys(range(len(strategy.meshes)), 0)
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        kept = lowering.parameters.kept.get(tensor)
        if kept is not None and kept.reduced >= 0:
            spec, sizes = graph.tensors[tensor], strategy.meshes[kept.mesh].sizes
            own = local_bytes(spec.shape, spec.dtype, config.optimizer, sizes)
            total[kept.mesh] += own * int(chains.times[kept.rest])
    return total


@dataclass(frozen=True, slots=True)
class _Slice:
    """The steps from ``begin`` to ``end`` - 1, which are a block's."""

    block: int
    begin: int
    end: int


@dataclass(slots=True)
class _Plan:
    """Which steps follow each other: their indices, how far what they touch moves, and whether it
    does at all."""

    index: Ints
    shift: Ints
    moves: Flags


class _Roll:
    """Puts the missing blocks' steps into lists of steps."""

    def __init__(self, builder: ProgramBuilder, short: Short, chains: Chains) -> None:
        self.builder, self.chains = builder, chains
        self.segments = np.array([segment.block for segment in builder.segments], dtype=np.int64)
        self.messages = self._homes([(*m.sources[:1], *m.results[:1]) for m in builder.messages])
        self.transforms = self._homes([(*t.reads[:1], *t.writes[:1]) for t in builder.transforms])

    def _homes(self, touched: list[tuple[int, ...]]) -> Ints:
        """Return the blocks of what touches values."""
        blocks = self.chains.block
        homes = [max((int(blocks[value]) for value in values), default=-1) for values in touched]
        return np.array(homes, dtype=np.int64)

    def templates(self, steps: Steps) -> Templates:
        """Return the templates of one stage of the whole graph."""
        builder = self.builder
        backward = self.expanded(steps.backward)
        last, often = [backward], backward.rows[:, 3] == 0
        several = builder.strategy.pipeline.num_microbatches > 1
        return Templates(
            prologue=[self.expanded(steps.prologue)],
            forward=[self.expanded(steps.forward)],
            middle=[backward.chosen(often)] if several else (),
            last=last,
            sends=[Rows.of(builder, [s for s in steps.exchange if s.kind is Kind.SEND])],
            receives=[Rows.of(builder, [s for s in steps.exchange if s.kind is not Kind.SEND])],
            epilogue=[self.expanded(steps.epilogue)],
        )

    def expanded(self, steps: Sequence[Step]) -> Rows:
        """Return the rows of some steps with those of the missing blocks."""
        rows = Rows.of(self.builder, steps)
        runs = RUNS_SEGMENT[rows.rows[:, 0]]
        last = int(np.flatnonzero(runs)[-1]) + 1 if runs.any() else 0
        before, behind = rows.split(last)
        return self._sweep(before).followed_by(self._sweep(behind))

    def _labels(self, rows: Rows) -> Ints:
        """Return the block that each step belongs to, -1 for none."""
        kind, item = rows.rows[:, 0], rows.rows[:, ITEM]
        label = np.full(len(kind), -1)
        runs, moves, works = RUNS_SEGMENT[kind], MOVES[kind], kind == Kind.TRANSFORM
        label[runs] = self.segments[item[runs]]
        label[moves] = self.messages[item[moves]]
        label[works] = self.transforms[item[works]]
        return label

    def _sweep(self, rows: Rows) -> Rows:
        """Unroll steps that go once through the blocks, up or down."""
        label = self._labels(rows)
        view = _View(rows, self.chains)
        plan = _Plan(np.arange(len(label)), 0 * label, label < -1)
        pieces: list[tuple[int, Ints, Ints]] = []
        for run in self.chains.runs:
            slices = _slices(label, run)
            if slices is None:
                continue
            pieces.append(self._check(view, plan, run, slices))
            self._check_sides(view, label, run, slices)
        return view.laid_out(_woven(plan, pieces))

    def _check(
        self, view: _View, plan: _Plan, run: Run, slices: list[_Slice]
    ) -> tuple[int, Ints, Ints]:
        """Return where the copies of a run go, and the steps and shifts of all of them."""
        missing = self.chains.shift
        own = next(one for one in slices if one.block == run.template)
        kinds = view.rows.rows[own.begin : own.end, 0]
        if np.isin(kinds, (Kind.SEND, Kind.RECEIVE)).any():
            raise Irregular
        for one in slices:
            if not view.is_alike(own, one):
                raise Irregular
            plan.shift[one.begin : one.end] = missing[one.block]
            plan.moves[one.begin : one.end] = True
        is_up = _is_up(slices)
        turns = np.arange(1, run.dropped + 1)[:: 1 if is_up else -1]
        index = np.tile(np.arange(own.begin, own.end), run.dropped)
        shift = np.repeat(turns + missing[run.template], own.end - own.begin)
        return (own.end if is_up else own.begin), index, shift

    def _check_sides(self, view: _View, label: Ints, run: Run, slices: list[_Slice]) -> None:
        """Raise Irregular where steps that were not checked touch what lies beyond the missing
        blocks, as seen from their own block, or else from where they stand: how that would be meant
        is not known."""
        low, high = min(one.begin for one in slices), max(one.end for one in slices)
        places = np.arange(len(label))
        is_below = (places < low) == _is_up(slices)
        inside = (label >= run.position) & (label < run.position + KEPT)
        is_below[inside] = label[inside] <= run.template
        for step, block in view.blocks():
            others = (step < low) | (step >= high)
            near = others & (block >= run.position) & (block < run.position + KEPT)
            if ((block <= run.template) != is_below[step])[near].any():
                raise Irregular


def _slices(label: Ints, run: Run) -> list[_Slice] | None:
    """Return the steps of the inner blocks of a run, given the block of every step; None if it has
    none here.

    A block's steps begin with the first that belongs to it, and end where the next block's do.
    """
    inner = range(run.position + 1, run.position + KEPT - 1)
    places = [np.flatnonzero(label == block) for block in inner]
    if not any(len(found) for found in places):
        return None
    if not all(len(found) for found in places):
        raise Irregular
    starts = [int(found[0]) for found in places]
    is_up = starts[0] < starts[-1]
    # The outermost block may have had steps of another kind before.
    beyond = np.flatnonzero(label == (run.position + KEPT - 1 if is_up else run.position))
    beyond = beyond[beyond > max(starts)]
    ordered = starts if is_up else starts[::-1]
    if not len(beyond) or any(one >= other for one, other in itertools.pairwise(ordered)):
        raise Irregular
    ends = [*starts[1:], int(beyond[0])] if is_up else [int(beyond[0]), *starts[:-1]]
    return [_Slice(*one) for one in zip(inner, starts, ends, strict=True)]


def _is_up(slices: list[_Slice]) -> bool:
    return slices[0].begin < slices[-1].begin


def _woven(plan: _Plan, pieces: list[tuple[int, Ints, Ints]]) -> _Plan:
    """Put copies between the steps that are there."""
    index, shift, moves = list[Ints](), list[Ints](), list[Flags]()
    done = 0
    for place, copies, turns in sorted(pieces, key=lambda piece: piece[0]):
        index += [plan.index[done:place], copies]
        shift += [plan.shift[done:place], turns]
        moves += [plan.moves[done:place], np.ones(len(copies), dtype=np.bool_)]
        done = place
    return _Plan(
        np.concatenate([*index, plan.index[done:]]),
        np.concatenate([*shift, plan.shift[done:]]),
        np.concatenate([*moves, plan.moves[done:]]),
    )


class _View:
    """Rows with the chain and the block of all that they touch."""

    def __init__(self, rows: Rows, chains: Chains) -> None:
        self.rows, self.chains = rows, chains
        touched = rows.rows[:, HELD] + rows.rows[:, WRITTEN]
        self.touched = np.concatenate([[0], np.cumsum(touched)])
        self.read = np.concatenate([[0], np.cumsum(rows.rows[:, READ])])

    def _parts(self, begin: int, end: int) -> list[Ints]:
        return [
            self.rows.value[self.touched[begin] : self.touched[end]],
            self.rows.read[self.read[begin] : self.read[end]],
        ]

    def blocks(self) -> list[tuple[Ints, Ints]]:
        """Return columns (step, block) of all that steps touch, but for those that touch everything."""
        rows = self.rows.rows
        alone = ~TAKES_ALL[rows[:, 0]]
        found: list[tuple[Ints, Ints]] = []
        for counts, values in (
            (rows[:, HELD] + rows[:, WRITTEN], self.rows.value),
            (rows[:, READ], self.rows.read),
        ):
            steps = np.repeat(np.arange(len(rows)), counts)
            mine = alone[steps]
            found.append((steps[mine], self.chains.block[values[mine]]))
        return found

    def is_alike(self, one: _Slice, other: _Slice) -> bool:
        """Whether steps do with one block what others do with another."""
        rows = np.delete(self.rows.rows, ITEM, axis=1)
        if not np.array_equal(rows[one.begin : one.end], rows[other.begin : other.end]):
            return False
        mine, theirs = self._parts(one.begin, one.end), self._parts(other.begin, other.end)
        return all(
            np.array_equal(here, there)
            for part, like in zip(mine, theirs, strict=True)
            for here, there in zip(
                self._relative(part, one.block), self._relative(like, other.block), strict=True
            )
        )

    def _relative(self, values: Ints, block: int) -> tuple[Ints, Ints]:
        """Return the chain of values, and how many blocks ahead they are, or which they are."""
        chain = self.chains.chain[values]
        return chain, np.where(chain < 0, values, self.chains.block[values] - block)

    def laid_out(self, plan: _Plan) -> Rows:
        """Return the rows of a plan; what touches all blocks touches the missing ones too."""
        rows = self.rows.rows[plan.index].copy()
        counts = rows[:, HELD] + rows[:, WRITTEN]
        value = self._taken(self.rows.value, self.touched, counts, plan)
        read = self._taken(self.rows.read, self.read, rows[:, READ], plan)
        everything = TAKES_ALL[rows[:, 0]]
        for place in np.flatnonzero(everything).tolist():
            value, read = self._widened(rows, place, value, read)
        return Rows(rows, value, read)

    def _taken(self, values: Ints, begin: Ints, counts: Ints, plan: _Plan) -> Ints:
        start = begin[plan.index]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        taken = values[np.repeat(start, counts) + within]
        moves = np.repeat(plan.moves, counts)
        taken[moves] = self.chains.moved(taken[moves], np.repeat(plan.shift, counts)[moves])
        return taken

    def _widened(self, rows: Ints, place: int, value: Ints, read: Ints) -> tuple[Ints, Ints]:
        """Let a step that touches all blocks (the update) touch the missing ones' values."""
        begin = int(rows[:place, HELD : WRITTEN + 1].sum())
        middle, ahead = begin + int(rows[place, HELD]), int(rows[:place, READ].sum())
        end, after = middle + int(rows[place, WRITTEN]), ahead + int(rows[place, READ])
        held, written = self._with_copies(value[begin:middle]), self._with_copies(value[middle:end])
        reads = self._with_copies(read[ahead:after])
        rows[place, [HELD, WRITTEN, READ]] = len(held), len(written), len(reads)
        value = np.concatenate([value[:begin], held, written, value[end:]])
        return value, np.concatenate([read[:ahead], reads, read[after:]])

    def _with_copies(self, values: Ints) -> Ints:
        chains, found = self.chains, [values]
        for run in chains.runs:
            mine = values[chains.block[values] == run.template]
            near = [values[chains.block[values] == run.template + step] for step in (-1, 1)]
            if not all(np.array_equal(chains.chain[mine], chains.chain[one]) for one in near):
                raise Irregular
            shift = int(chains.shift[run.template])
            found += [
                chains.moved(mine, np.full(len(mine), shift + turn))
                for turn in range(1, run.dropped + 1)
            ]
        return np.concatenate(found)
