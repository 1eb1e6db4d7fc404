"""Put back what was left out of a folded graph: the Program of the whole graph, as columns.

Lowering goes block by block, and in a run of equal blocks that are treated alike it does with each
what it did with the one before, only with the next one's values. So the steps of the missing blocks
are those of the block in the middle of what remains, with every value moved on; that those around
it repeat it in this way is checked, and where they do not nothing is put back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import local_bytes
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import gradients
from shardwright.planner.lower.assemble import assemble
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.chains import Chains, Irregular
from shardwright.planner.lower.fold import KEPT, Folded, Run
from shardwright.planner.lower.lower import Lowering
from shardwright.planner.lower.template import HELD, ITEM, KIND, READ, WRITTEN, Facts, Ints, Rows
from shardwright.planner.space.configs import Placements
from shardwright.planner.space.legal import check_pipeline
from shardwright.planner.space.servers import is_served


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
    if whole.updates != "step" or not whole.pipeline.is_flushed or is_served(whole):
        raise Irregular  # an update between blocks, a version of all, a push of some: of none of them
    short = folded.short
    check_pipeline(folded.strategy, short.samples)
    placed = gradients.place(short.graph, folded.strategy, short.samples, short.ground.iterations)
    builder = ProgramBuilder(short.ground, folded.strategy)
    lowering = _Linking(builder, placed, folded)
    loss = lowering.lower_blocks()
    phases = lowering.phases()
    chains = lowering.chains
    shown = copy.copy(builder)
    shown.strategy = whole
    shown.lasting = chains.repeated(builder.lasting)
    program = assemble(shown, phases, loss, chains.facts(Facts.of(builder)))
    return Expanded(program, short.graph, _masters(builder, lowering, chains))


def _masters(builder: ProgramBuilder, lowering: Lowering, chains: Chains) -> dict[int, int]:
    """Return the bytes of the optimizer's shards by mesh, those of missing blocks included."""
    graph, strategy = builder.graph, builder.strategy
    total = dict.fromkeys(range(len(strategy.meshes)), 0)
    for tensor, config in zip(graph.parameters, strategy.parameters, strict=True):
        kept = lowering.parameters.kept.get(tensor)
        if kept is not None and kept.reduced >= 0:
            shape, sizes = graph.tensors[tensor].shape, strategy.meshes[kept.mesh].sizes
            own = local_bytes(shape, builder.master_dtype(tensor), config.optimizer, sizes)
            total[kept.mesh] += own * int(chains.times[kept.rest])
    return total


class _Linking(Lowering):
    """Lowers a short graph and puts the missing blocks' steps in."""

    def __init__(self, builder: ProgramBuilder, placed: list[Placements], folded: Folded) -> None:
        super().__init__(builder, placed)
        self.folded = folded

    @cached_property
    def chains(self) -> Chains:
        """The values by chain, when all are there."""
        return Chains(self.builder, self.folded.short, self.folded.runs)

    def inserted(self, numbers: Sequence[int], parts: Sequence[Sequence[Rows]]) -> list[Rows]:
        """Return the steps of blocks, each moved to where it is in the whole graph, and those of the
        missing ones."""
        chains, missing = self.chains, self.chains.shift
        own = dict(zip(numbers, map(Rows.joined, parts), strict=True))
        is_up = len(numbers) < 2 or numbers[0] < numbers[1]
        inner, copies = set[int](), dict[int, Rows]()
        for run in chains.runs:
            blocks = self._alike_in(run, own)
            if blocks:
                inner.update(blocks)
                turns = np.arange(1, run.dropped + 1)[:: 1 if is_up else -1]
                template = own[run.template]
                copies[run.template] = self._copied(template, turns + missing[run.template])
        found: list[Rows] = []
        for number, rows in own.items():
            if number in inner:
                found.append(self._copied(rows, missing[number : number + 1]))
            else:
                self._check_side(number, rows)
                found.append(rows)
            if number in copies:
                found.insert(len(found) - (not is_up), copies[number])
        return found

    def _alike_in(self, run: Run, own: Mapping[int, Rows]) -> Sequence[int]:
        """Return the blocks of a run but for its ends, none where they have no steps. Raises Irregular where
        only some have, or others than the template, or what is sent elsewhere."""
        blocks = range(run.position + 1, run.position + KEPT - 1)
        present = [block for block in blocks if block in own and len(own[block].rows)]
        if not present:
            return ()
        template = own.get(run.template)
        if len(present) < len(blocks) or template is None:
            raise Irregular
        if np.isin(template.rows[:, KIND], (Kind.SEND, Kind.RECEIVE)).any():
            raise Irregular
        if not all(self._is_alike((template, run.template), (own[one], one)) for one in blocks):
            raise Irregular
        return blocks

    def _copied(self, rows: Rows, shifts: Ints) -> Rows:
        """Return steps once for each of ``shifts``, on values so many blocks further."""
        count = len(shifts)
        value, read = (
            self.chains.moved(np.tile(values, count), np.repeat(shifts, len(values)))
            for values in (rows.value, rows.read)
        )
        return Rows(np.tile(rows.rows, (count, 1)), value, read)

    def _check_side(self, number: int, rows: Rows) -> None:
        """Raise Irregular where steps that are not moved touch what lies beyond the missing blocks, as
        seen from their own block: how that would be meant is not known."""
        blocks = self.chains.block[np.concatenate([rows.value, rows.read])]
        for run in self.chains.runs:
            near = (blocks >= run.position) & (blocks < run.position + KEPT)
            if ((blocks <= run.template) != (number <= run.template))[near].any():
                raise Irregular

    def _is_alike(self, one: tuple[Rows, int], other: tuple[Rows, int]) -> bool:
        """Whether steps do with one block what others do with another."""
        mine, theirs = (np.delete(rows.rows, ITEM, axis=1) for rows, _ in (one, other))
        return np.array_equal(mine, theirs) and all(
            np.array_equal(here, there)
            for here, there in zip(self._relative(*one), self._relative(*other), strict=True)
        )

    def _relative(self, rows: Rows, block: int) -> tuple[Ints, Ints]:
        """Return the chain of all that steps touch, and how many blocks ahead it is, or which it is."""
        values = np.concatenate([rows.value, rows.read])
        chain = self.chains.chain[values]
        return chain, np.where(chain < 0, values, self.chains.block[values] - block)

    def widened(self, rows: Rows) -> Rows:
        """Let a step that touches all blocks (the update) touch the missing ones' values."""
        held = rows.rows[0, HELD]
        ends = rows.value[:held], rows.value[held:], rows.read
        held, written, read = [self._with_copies(values) for values in ends]
        row = rows.rows.copy()
        row[0, [HELD, WRITTEN, READ]] = len(held), len(written), len(read)
        return Rows(row, np.concatenate([held, written]), read)

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
