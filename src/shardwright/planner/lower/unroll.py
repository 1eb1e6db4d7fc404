"""Put back what was left out of an abridged graph: the Program of the whole graph, as columns.

Lowering goes block by block, and in a run of equal blocks that are treated alike it does with each
what it did with the one before, only with the next one's values. So the steps of the missing blocks
are those of the block in the middle of what remains, with every value moved on; that those around
it repeat it in this way is checked, and where they do not nothing is put back.

A *chain* is a list of values, one per block, that stand for the same thing in each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import local_bytes
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower.abridged import KEPT, Abridged, Run, Short
from shardwright.planner.lower.assemble import Steps, Templates, assemble
from shardwright.planner.lower.draft import Draft, Step
from shardwright.planner.lower.gradients import place
from shardwright.planner.lower.lower import Lowering, check_legal
from shardwright.planner.lower.template import (
    COMPUTES,
    MOVES,
    RUNS_SEGMENT,
    Facts,
    Flags,
    Ints,
    Rows,
    Template,
)

# Columns of ``Rows`` that name an item, and that count values held, written and read.
ITEM, HELD, WRITTEN, READ = 1, 8, 9, 10


class Irregular(Exception):
    """Blocks that are alike were not lowered alike; the whole graph must be lowered."""


@dataclass(frozen=True, eq=False, slots=True)
class Unrolled:
    """A Program whose instructions are those of the whole strategy, while values, segments and
    messages are those of the ``graph`` without repeats. ``masters``: per mesh one device's bytes of
    what the optimizer keeps.
    """

    program: Program
    graph: OperatorGraph
    masters: dict[int, int]


def unroll(abridged: Abridged, whole: Strategy) -> Unrolled:
    """Return the Program of the strategy that was abridged. Raises Irregular, or ValueError where
    lowering does."""
    short = abridged.short
    check_legal(short.graph, abridged.strategy, short.samples)
    placed = place(short.graph, abridged.strategy, short.samples, short.iterations)
    draft = Draft(short.graph, abridged.strategy, short.samples, short.iterations)
    lowering = Lowering(draft, placed)
    loss = lowering.lower_blocks()
    steps = lowering.steps()
    chains = _Chains(draft, short, abridged.runs)
    facts = chains.facts(Facts.of(draft))
    roll = _Roll(draft, short, chains)
    templates = [roll.templates(one) for one in steps]
    shown = copy.copy(draft)
    shown.strategy = whole
    shown.lasting = chains.repeated(draft.lasting)
    program = assemble(shown, templates, loss, facts)
    return Unrolled(program, short.graph, _masters(draft, lowering, chains))


def _masters(draft: Draft, lowering: Lowering, chains: _Chains) -> dict[int, int]:
    """Return the bytes of the optimizer's shards by mesh, those of missing blocks included."""
    graph, strategy, total = draft.graph, draft.strategy, dict.fromkeys(range(len(draft.strategy.meshes)), 0)
    times = chains.times
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        kept = lowering.parameters.kept.get(tensor)
        if kept is not None and kept.reduced >= 0:
            spec, sizes = graph.tensors[tensor], strategy.meshes[kept.mesh].sizes
            own = local_bytes(spec.shape, spec.dtype, config.optimizer, sizes)
            total[kept.mesh] += own * times[kept.rest]
    return total


class _Chains:
    """The values of a short graph by chain, and the numbers of those that are missing.

    A value keeps its number; copies get numbers behind all of them, block by block. ``block`` is
    where in the short graph a value belongs (-1: nowhere), ``shift`` how many blocks are missing
    before a block, ``numbers`` the values of chains by the block of the whole graph.
    """

    def __init__(self, draft: Draft, short: Short, runs: Sequence[Run]) -> None:
        self.runs = runs
        tensor = np.array([value.tensor for value in draft.values], dtype=np.int64)
        mesh = np.array(draft.meshes)
        self.block = short.home[tensor]
        positions = np.arange(len(short.blocks))
        self.shift = np.zeros(len(positions), dtype=np.int64)
        for run in runs:
            self.shift[positions > run.template] += run.dropped
        self.chain = self._find_chains(short, tensor, mesh)
        count = len(positions) + sum(run.dropped for run in runs)
        self.numbers = np.full((int(self.chain.max(initial=-1)) + 1, count), -1)
        mine = np.flatnonzero(self.block >= 0)
        at = self.block[mine]
        self.numbers[self.chain[mine], at + self.shift[at]] = mine
        self.templates, self.size = list[Ints](), len(tensor)
        for run in runs:
            self._number_copies(run)
        self.times = np.ones(len(tensor), dtype=np.int64)
        for run, template in zip(runs, self.templates, strict=True):
            self.times[template] += run.dropped

    def _find_chains(self, short: Short, tensor: Ints, mesh: Ints) -> Ints:
        """Number chains: values of the tensors at one place of their blocks, on one mesh, in the order
        in which they were made."""
        # Meshes count apart: one may make values of a block that another does not.
        group = tensor * (int(mesh.max(initial=0)) + 1) + mesh
        order = np.argsort(group, kind="stable")
        ordered = group[order]
        first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(order) else order
        rank = np.empty(len(order), dtype=np.int64)
        lengths = np.diff(np.append(first, len(order)))
        rank[order] = np.arange(len(order)) - np.repeat(first, lengths)
        rows = np.stack([short.family[self.block], short.place[tensor], mesh, rank], axis=1)
        chain = np.full(len(tensor), -1)
        mine = self.block >= 0
        chain[mine] = np.unique(rows[mine], axis=0, return_inverse=True)[1].reshape(-1)
        return chain

    def _number_copies(self, run: Run) -> None:
        at = run.template + int(self.shift[run.template])
        chains = np.flatnonzero(self.numbers[:, at] >= 0)
        template = self.numbers[chains, at]
        # Those of a run of another mesh in the same block (work that is repeated) go with it.
        copies = self.size + np.arange(run.dropped * len(chains)).reshape(run.dropped, len(chains))
        self.numbers[chains, at + 1 : at + 1 + run.dropped] = copies.T
        self.size += copies.size
        self.templates.append(template)

    def repeated(self, values: Sequence[int]) -> list[int]:
        """List values, each as often as the whole graph has it."""
        listed = np.array(values, dtype=np.int64)
        return np.repeat(listed, self.times[listed]).tolist()

    def facts(self, facts: Facts) -> Facts:
        """Add the facts of copies, which are those of what they were made from."""
        moved = self.shift[self.block]
        flags = ("by_microbatch", "is_gradient", "is_activation", "is_gathered")
        for run in self.runs:
            self._check_alike(run, [facts.bytes, facts.mesh, *(getattr(facts, f) for f in flags)])
            for links in (facts.root, facts.storage):
                self._check_alike(run, [self.chain[links], np.where(
                    self.chain[links] < 0, links, self.block[links] - self.block)])

        def column(values: NDArray[np.generic]) -> NDArray[np.generic]:
            parts = [np.tile(values[t], run.dropped) for run, t in self._copies()]
            return np.concatenate([values, *parts])

        def links(values: Ints) -> Ints:
            parts = [self.moved(values, moved)]
            for run, template in self._copies():
                shift = self.shift[run.template]
                parts += [
                    self.moved(values[template], np.full(len(template), shift + turn + 1))
                    for turn in range(run.dropped)
                ]
            return np.concatenate(parts)

        return Facts(
            bytes=column(facts.bytes),
            root=links(facts.root),
            storage=links(facts.storage),
            mesh=column(facts.mesh),
            by_microbatch=column(facts.by_microbatch),
            is_gradient=column(facts.is_gradient),
            is_activation=column(facts.is_activation),
            is_gathered=column(facts.is_gathered),
            compiled=True,
        )

    def _copies(self) -> list[tuple[Run, Ints]]:
        return list(zip(self.runs, self.templates, strict=True))

    def _check_alike(self, run: Run, columns: Sequence[NDArray[np.generic]]) -> None:
        """Raise Irregular unless the blocks around the copied one have the same values as it."""
        at = run.template + int(self.shift[run.template])
        own = self.numbers[:, at]
        for there in (at - 2, at - 1, at + run.dropped + 1, at + run.dropped + 2):
            other = self.numbers[:, there]
            if not np.array_equal(own >= 0, other >= 0):
                raise Irregular
            mine = own >= 0
            if not all(np.array_equal(c[own[mine]], c[other[mine]]) for c in columns):
                raise Irregular

    def moved(self, values: Ints, shift: Ints) -> Ints:
        """Return the values that stand where others do, so many blocks further in the whole graph
        than these stand in the short one."""
        chain = self.chain[values]
        at = self.block[values] + shift
        mine = chain >= 0
        if not mine.any():
            return values
        inside = (at[mine] >= 0) & (at[mine] < self.numbers.shape[1])
        if not inside.all():
            raise Irregular
        result = values.copy()
        result[mine] = self.numbers[chain[mine], at[mine]]
        if (result < 0).any():
            raise Irregular
        return result


@dataclass(slots=True)
class _Plan:
    """Which steps follow each other: their indices, how far what they touch moves, and whether it
    does at all."""

    index: Ints
    shift: Ints
    moves: Flags


class _Roll:
    """Puts the missing blocks' steps into lists of steps."""

    def __init__(self, draft: Draft, short: Short, chains: _Chains) -> None:
        self.draft, self.chains = draft, chains
        self.segments = np.array([segment.block for segment in draft.segments], dtype=np.int64)
        self.messages = np.array(
            [
                max((int(chains.block[v]) for v in (*m.sources[:1], *m.results[:1])), default=-1)
                for m in draft.messages
            ],
            dtype=np.int64,
        )

    def templates(self, steps: Steps) -> Templates:
        """Return the templates of one stage of the whole graph."""
        draft = self.draft
        backward = self.unrolled(steps.backward)
        last = middle = Template([backward])
        if draft.strategy.pipeline.num_microbatches > 1 and last.last_only.any():
            middle = Template([backward.chosen(~last.last_only)])
        return Templates(
            prologue=Template([self.unrolled(steps.prologue)]),
            forward=Template([self.unrolled(steps.forward)]),
            middle=middle,
            last=last,
            sends=Template.of(draft, [s for s in steps.exchange if s.kind is Kind.SEND]),
            receives=Template.of(draft, [s for s in steps.exchange if s.kind is Kind.RECEIVE]),
            epilogue=Template([self.unrolled(steps.epilogue)]),
        )

    def unrolled(self, steps: Sequence[Step]) -> Rows:
        """Return the rows of some steps with those of the missing blocks."""
        rows = Rows.of(self.draft, steps)
        runs = RUNS_SEGMENT[rows.rows[:, 0]]
        last = int(np.flatnonzero(runs)[-1]) + 1 if runs.any() else 0
        found: list[Rows] = []
        for sweep in rows.split(last):
            found.append(self._sweep(sweep))
        return found[0].followed_by(found[1])

    def _labels(self, rows: Rows) -> Ints:
        """Return the block that each step belongs to, -1 for none."""
        kind, item = rows.rows[:, 0], rows.rows[:, ITEM]
        label = np.full(len(kind), -1)
        runs, moves = RUNS_SEGMENT[kind], MOVES[kind]
        label[runs] = self.segments[item[runs]]
        label[moves] = self.messages[item[moves]]
        return label

    def _sweep(self, rows: Rows) -> Rows:
        """Unroll steps that go once through the blocks, up or down."""
        label = self._labels(rows)
        first = np.full(len(self.chains.shift), -1)
        places = np.flatnonzero(label >= 0)
        first[label[places][::-1]] = places[::-1]
        view = _View(rows, self.chains)
        plan = _Plan(
            np.arange(len(label)), np.zeros(len(label), dtype=np.int64), np.zeros(len(label), dtype=np.bool_)
        )
        pieces: list[tuple[int, Ints, Ints]] = []
        for run in self.chains.runs:
            slices = _slices(first, run)
            if slices is None:
                continue
            pieces.append(self._check(view, plan, run, slices))
            self._check_sides(view, run, slices)
        return view.laid_out(_woven(plan, pieces))

    def _check(
        self, view: _View, plan: _Plan, run: Run, slices: list[tuple[int, int, int]]
    ) -> tuple[int, Ints, Ints]:
        """Return where the copies of a run go, and the steps and shifts of all of them."""
        chains = self.chains
        template = next((a, b) for block, a, b in slices if block == run.template)
        for block, begin, end in slices:
            if not view.is_alike(template, run.template, (begin, end), block):
                raise Irregular
            plan.shift[begin:end] = chains.shift[block]
            plan.moves[begin:end] = True
        begin, end = template
        kinds = view.rows.rows[begin:end, 0]
        if np.isin(kinds, (Kind.SEND, Kind.RECEIVE)).any():
            raise Irregular
        turns = np.arange(1, run.dropped + 1)
        is_up = slices[0][1] < slices[-1][1]
        turns = turns if is_up else turns[::-1]
        length = end - begin
        index = np.tile(np.arange(begin, end), run.dropped)
        shift = np.repeat(turns + chains.shift[run.template], length)
        return (end if is_up else begin), index, shift

    def _check_sides(self, view: _View, run: Run, slices: list[tuple[int, int, int]]) -> None:
        """Raise Irregular where steps before and after the checked ones touch what lies beyond the
        missing blocks: how that would be meant is not known."""
        low, high = min(a for _, a, _ in slices), max(b for _, _, b in slices)
        is_up = slices[0][1] < slices[-1][1]
        for begin, end, is_below in ((0, low, is_up), (high, len(view.rows.rows), not is_up)):
            block = view.blocks(begin, end)
            near = block[(block >= run.position) & (block < run.position + KEPT)]
            if ((near > run.template) if is_below else (near <= run.template)).any():
                raise Irregular


def _slices(first: Ints, run: Run) -> list[tuple[int, int, int]] | None:
    """Return (block, begin, end) of the steps of the inner blocks of a run, None if it has none here.

    A block's steps begin with the first that belongs to it.
    """
    inner = range(run.position + 1, run.position + KEPT - 1)
    starts = first[run.position : run.position + KEPT]
    if (starts[1:-1] < 0).all():
        return None
    if (starts < 0).any():
        raise Irregular
    steps = np.diff(starts)
    if not ((steps > 0).all() or (steps < 0).all()):
        raise Irregular
    step = 1 if steps[0] > 0 else -1
    return [(block, int(first[block]), int(first[block + step])) for block in inner]


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

    def __init__(self, rows: Rows, chains: _Chains) -> None:
        self.rows, self.chains = rows, chains
        touched = rows.rows[:, HELD] + rows.rows[:, WRITTEN]
        self.touched = np.concatenate([[0], np.cumsum(touched)])
        self.read = np.concatenate([[0], np.cumsum(rows.rows[:, READ])])

    def _parts(self, begin: int, end: int) -> list[Ints]:
        return [
            self.rows.value[self.touched[begin] : self.touched[end]],
            self.rows.read[self.read[begin] : self.read[end]],
        ]

    def blocks(self, begin: int, end: int) -> Ints:
        """Return the blocks of all that some steps touch, but for what touches all of them."""
        rows = self.rows.rows[begin:end]
        alone = RUNS_SEGMENT[rows[:, 0]] | MOVES[rows[:, 0]]
        counts = ((rows[:, HELD] + rows[:, WRITTEN], rows[:, READ]))
        found = [
            self.chains.block[part[np.repeat(alone, count)]]
            for part, count in zip(self._parts(begin, end), counts, strict=True)
        ]
        return np.concatenate(found)

    def is_alike(self, one: tuple[int, int], block: int, other: tuple[int, int], there: int) -> bool:
        """Whether steps do with one block what others do with another."""
        if one[1] - one[0] != other[1] - other[0]:
            return False
        columns = [column for column in range(self.rows.rows.shape[1]) if column != ITEM]
        rows = self.rows.rows[:, columns]
        if not np.array_equal(rows[one[0] : one[1]], rows[other[0] : other[1]]):
            return False
        chains = self.chains
        for mine, theirs in zip(self._parts(*one), self._parts(*other), strict=True):
            if not np.array_equal(chains.chain[mine], chains.chain[theirs]):
                return False
            fixed = chains.chain[mine] < 0
            here = np.where(fixed, mine, chains.block[mine] - block)
            if not np.array_equal(here, np.where(fixed, theirs, chains.block[theirs] - there)):
                return False
        return True

    def laid_out(self, plan: _Plan) -> Rows:
        """Return the rows of a plan; what touches all blocks touches the missing ones too."""
        rows = self.rows.rows[plan.index].copy()
        counts = rows[:, HELD] + rows[:, WRITTEN]
        value = self._taken(self.rows.value, self.touched, counts, plan)
        read = self._taken(self.rows.read, self.read, rows[:, READ], plan)
        for place in np.flatnonzero(COMPUTES[rows[:, 0]] & ~RUNS_SEGMENT[rows[:, 0]])[::-1].tolist():
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
        held, written, reads = (int(rows[place, column]) for column in (HELD, WRITTEN, READ))
        before = int(rows[:place, HELD : WRITTEN + 1].sum())
        ahead = int(rows[:place, READ].sum())
        parts = [
            self._with_copies(value[before : before + held]),
            self._with_copies(value[before + held : before + held + written]),
        ]
        own = self._with_copies(read[ahead : ahead + reads])
        rows[place, HELD], rows[place, WRITTEN], rows[place, READ] = len(parts[0]), len(parts[1]), len(own)
        value = np.concatenate([value[:before], *parts, value[before + held + written :]])
        return value, np.concatenate([read[:ahead], own, read[ahead + reads :]])

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
