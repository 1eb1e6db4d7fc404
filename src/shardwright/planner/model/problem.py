"""The intra-stage problem of one mesh and one number of microbatches, as terms over decisions.

Decisions: a config per (root) operator, how far each parameter is sharded further at rest, what the
blocks of a class make again in backward, and which re-laid-out copies of a tensor with several readers
exist (one copy serves all readers that want the same layouts, as in lowering).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import tensor_bytes
from shardwright.core.strategy import ParameterConfig
from shardwright.planner.model.activations import Crossing, find_crossings, state_activations
from shardwright.planner.model.decisions import Decisions, Dims, Statement
from shardwright.planner.model.facts import Shapes
from shardwright.planner.model.modes import KEEP, Mode
from shardwright.planner.model.parameters import parameter_config, state_parameters
from shardwright.planner.model.prices import Seconds
from shardwright.planner.model.terms import (
    EACH,
    FLIGHT,
    NUM_COLUMNS,
    ONCE,
    TRANSIENT,
    ByBlock,
    Term,
    Weights,
    network,
    term,
)
from shardwright.planner.solve.network import Elimination, Network

WORKING_COPIES = 2


class Problem(Decisions):
    """Decisions with what they cost. Tables are made when they are first asked for."""

    @cached_property
    def statement(self) -> Statement:
        """All tables, with the variables of copies and of parameters' levels."""
        statement = Statement(self.choices, self._own_terms)
        state_activations(self, statement)
        state_parameters(self, statement)
        return statement

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many values every variable has."""
        return tuple(self.statement.sizes)

    @cached_property
    def level_of(self) -> dict[int, int]:
        """The variables of parameters' levels, by (root) parameter."""
        return self.statement.level_of

    @cached_property
    def least_work(self) -> tuple[float, float]:
        """Seconds of the operators alone, each split as well as it can be: those of a microbatch
        through all blocks, and those once per step. No plan on this mesh has less to compute.
        """
        found = {True: 0.0, False: 0.0}
        for index in self.roots:
            least = min(sum(seconds) for *_, seconds in self._shards(index))
            is_once = self.context.facts.is_once(index)
            found[is_once] += least * self.context.facts.ties.times(index)
        return found[False], found[True]

    def forget_terms(self) -> None:
        """Drop the tables once solved: what remains can still spell out assignments."""
        _ = self.sizes, self.level_of  # which stay
        for name in ("statement", "network", "_own_terms", "_known", "_by_block"):
            self.__dict__.pop(name, None)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """The activations that stage cuts may have to send."""
        return find_crossings(self)

    # -- terms ---------------------------------------------------------------------------------

    @cached_property
    def _own_terms(self) -> tuple[Term, ...]:
        """What blocks and operators cost themselves."""
        return (*self._segment_terms(), *map(self._operator_term, self.roots))

    def _segment_terms(self) -> list[Term]:
        """Charge every block the fixed cost of one segment, forward and backward, and of those that
        run again.
        """
        fixed, ties = self.context.prices.segment_seconds, self.context.facts.ties
        terms: list[Term] = []
        for lead, members in ties.classes.items():
            modes = self.modes_of(lead)
            columns = np.zeros((NUM_COLUMNS, len(modes)))
            columns[EACH] = [fixed * (2 + _segments_again(ties.ranges[lead], m)) for m in modes]
            if columns.any():
                terms.append(term((self.mode_of.get(lead),), columns, members))
        return terms

    def _largest(self, index: int, outputs: Sequence[tuple[int, ...]]) -> int:
        """Return the bytes of an operator's largest output, of these local shapes."""
        graph = self.context.graph
        pairs = zip(outputs, graph.operators[index].outputs, strict=True)
        return max(tensor_bytes(shape, graph.tensors[tensor].dtype) for shape, tensor in pairs)

    def _operator_term(self, index: int) -> Term:
        context, saves = self.context, self.context.facts.saves
        tensors, operator = context.graph.tensors, context.graph.operators[index]
        column = ONCE if context.facts.is_once(index) else EACH
        block = context.facts.ties.block[index]
        modes = self.modes_of(block)
        columns = np.zeros((NUM_COLUMNS, len(self.domains[index]), len(modes)))
        for choice, (inputs, outputs, seconds) in enumerate(self._shards(index)):
            kept = self._kept(index, inputs, outputs)
            across = sum(
                tensor_bytes(outputs[p], tensors[operator.outputs[p]].dtype)
                for p in saves.crossing[index]
            )
            # While the block's widest tensor is worked on, it and its gradient exist once more.
            is_widest = context.facts.widest[block] == index
            working = WORKING_COPIES * self._largest(index, outputs) if is_widest else 0
            for number, mode in enumerate(modes):
                times = 2 if mode.repeats(index) else 1
                dropped = sum(size for size, maker in kept if mode.repeats(maker))
                columns[column, choice, number] = times * seconds.forward + seconds.backward
                columns[FLIGHT, choice, number] = across + sum(s for s, _ in kept) - dropped
                columns[TRANSIENT, choice, number] = working + dropped
        lead = context.facts.ties.class_of(block)
        blocks = context.facts.ties.classes[lead]
        return term((self.config_of[index], self.mode_of.get(lead)), columns, blocks)

    def _shards(self, index: int) -> list[tuple[Shapes, Shapes, Seconds]]:
        """Return an operator's local shapes under every config, and what it takes; those of a sort share them."""
        context, sort = self.context, self.context.prices.sort(index)
        if sort not in self._known:
            ends = (self.mesh.sizes, self.num_microbatches)
            local = [context.facts.local(index, dims, *ends) for dims in self.domains[index]]
            self._known[sort] = [(*one, context.prices.seconds(index, *one)) for one in local]
        return self._known[sort]

    @cached_property
    def _known(self) -> dict[int, list[tuple[Shapes, Shapes, Seconds]]]:
        return {}

    def _kept(self, index: int, inputs: Shapes, outputs: Shapes) -> list[tuple[int, int]]:
        """Return the bytes that an operator pays for, each with the operator that makes them."""
        saves, tensors = self.context.facts.saves, self.context.graph.tensors
        operator = self.context.graph.operators[index]
        read = [
            (
                tensor_bytes(inputs[p], tensors[operator.inputs[p]].dtype),
                saves.maker[operator.inputs[p]],
            )
            for p in saves.inputs[index]
        ]
        made = [
            (tensor_bytes(outputs[p], tensors[operator.outputs[p]].dtype), index)
            for p in saves.outputs[index]
        ]
        return [*read, *made, (saves.extra[index](inputs, outputs), index)]

    # -- reading -------------------------------------------------------------------------------

    @cached_property
    def network(self) -> Network:
        """The network of all decisions, prepared for every way to pipeline."""
        return network(self.sizes, self.statement.terms)

    @property
    def is_wide(self) -> bool:
        """Whether minima are bracketed instead of found by elimination; that takes seconds each."""
        return self.network.is_wide

    def elimination(self, weights: Weights) -> Elimination:
        """Return the exact solver under one way to pipeline."""
        return Elimination(self.network, *weights.views())

    def per_block(self, assignment: tuple[int, ...]) -> NDArray[np.float64]:
        """Return what an assignment costs in every block, by column."""
        return self._by_block.of(assignment)

    @cached_property
    def _by_block(self) -> ByBlock:
        return ByBlock(self.sizes, self.statement.terms, len(self.context.facts.ties.ranges))

    def dims(self, assignments: Sequence[tuple[int, ...]]) -> tuple[Dims, ...]:
        """Return every operator's dims, each block following its own assignment."""
        ties = self.context.facts.ties
        return tuple(
            self.domains[root][assignments[ties.block[index]][self.config_of[root]]]
            for index, root in enumerate(ties.root)
        )

    def parameters(
        self, assignments: Sequence[tuple[int, ...]], *, keeps: bool = False
    ) -> tuple[ParameterConfig, ...]:
        """Return every parameter's config, each following the block of its first reader.

        ``keeps``: what the last block gathers for forward stays for its backward, which comes next.
        """
        context = self.context
        dims = self.dims(assignments)
        configs: list[ParameterConfig] = []
        for tensor in context.graph.parameters:
            readers = context.graph.consumers[tensor]
            if not readers:
                whole = (-1,) * len(self.mesh.sizes)
                configs.append(ParameterConfig(rest=whole, optimizer=whole))
                continue
            reader = readers[0]
            position = context.graph.operators[reader].inputs.index(tensor)
            pair = context.facts.placements(reader, dims[reader]).inputs[position]
            root = context.facts.ties.root[reader]
            key = context.graph.operators[root].inputs[position]
            variable = self.level_of.get(key)
            level = (
                assignments[context.facts.ties.block[reader]][variable]
                if variable is not None
                else 0
            )
            shape = context.graph.tensors[tensor].shape
            config = parameter_config(shape, pair.value, self.mesh.sizes, level)
            stays = keeps and config.rest != pair.value and tensor in context.facts.read_last
            configs.append(replace(config, keeps=True) if stays else config)
        return tuple(configs)

    def chosen_modes(self, assignments: Sequence[tuple[int, ...]]) -> tuple[Mode, ...]:
        """Return the mode of every block."""
        ties = self.context.facts.ties
        return tuple(
            self.modes[assignments[block][self.mode_of[lead]]] if lead in self.mode_of else KEEP
            for block in range(len(ties.ranges))
            for lead in (ties.class_of(block),)
        )


def _segments_again(span: tuple[int, int], mode: Mode) -> int:
    """Return how many segments of a block run again: runs of repeated operators, at least."""
    again = [mode.repeats(index) for index in range(*span)]
    return sum(now and not before for before, now in zip([False, *again], again, strict=False))
