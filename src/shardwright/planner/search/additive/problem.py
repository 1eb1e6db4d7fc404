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

from shardwright.core.strategy import Mesh, ParameterConfig
from shardwright.planner.search.additive.activations import activation_terms
from shardwright.planner.search.additive.context import (
    Context,
    Shape,
    Shapes,
    Wires,
    local_shapes,
    num_bytes,
)
from shardwright.planner.search.additive.crossings import Crossing, find_crossings
from shardwright.planner.search.additive.domains import Dims, domain, least_seconds
from shardwright.planner.search.additive.elimination import Elimination
from shardwright.planner.search.additive.factors import FactorGraph
from shardwright.planner.search.additive.modes import KEEP, Mode, find_modes
from shardwright.planner.search.additive.network import Network
from shardwright.planner.search.additive.parameters import parameter_config, parameter_terms
from shardwright.planner.search.additive.terms import (
    EACH,
    FLIGHT,
    NUM_COLUMNS,
    ONCE,
    TRANSIENT,
    Term,
    Weights,
    factor_graph,
    network,
    per_block,
)

WORKING_COPIES = 2


class Problem:
    """Variables, domains and terms. Built once; everything else only reads it."""

    def __init__(self, context: Context, mesh: Mesh, num_microbatches: int) -> None:
        self.context = context
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        self.sizes: list[int] = []
        ties = context.ties
        self.roots = tuple(i for i, root in enumerate(ties.root) if root == i)
        alike = {context.sort(i): i for i in reversed(self.roots)}
        domains = {s: domain(context, mesh, num_microbatches, i) for s, i in alike.items()}
        self.domains: dict[int, tuple[Dims, ...]] = {
            i: domains[context.sort(i)] for i in self.roots
        }
        self.config_of = {i: self.variable(len(self.domains[i])) for i in self.roots}
        self.modes = find_modes(context, mesh)
        self.mode_of = {
            lead: self.variable(len(self.modes))
            for lead, members in ties.classes.items()
            if len(members) > 1
        }
        self._levels: dict[int, int] | None = None

    @property
    def level_of(self) -> dict[int, int]:
        """The variables of parameters' levels, by (root) parameter."""
        if self._levels is None:
            _ = self.terms  # which add them
        assert self._levels is not None
        return self._levels

    @cached_property
    def terms(self) -> list[Term]:
        """All tables; adds the variables of copies and of parameters' levels."""
        self._levels = {}
        terms = self._segment_terms()
        for index in self.roots:
            terms += self._operator_terms(index)
        terms += activation_terms(self)
        return terms + parameter_terms(self)

    @cached_property
    def wires(self) -> Wires:
        """The prices of messages on the mesh."""
        return self.context.wires(self.mesh)

    @cached_property
    def least_work(self) -> tuple[float, float]:
        """Seconds of the operators alone, each split as well as it can be: those of a microbatch
        through all blocks, and those once per step. No plan on this mesh has less to compute.
        """
        context, each, once = self.context, 0.0, 0.0
        for index in self.roots:
            options = self.domains[index]
            least = least_seconds(context, index, options, self.mesh.sizes, self.num_microbatches)
            block = context.ties.block[index]
            total = least * len(context.ties.classes[context.ties.class_of(block)])
            if context.is_once(index):
                once += total
            else:
                each += total
        return each, once

    def forget_terms(self) -> None:
        """Drop the tables once solved: what remains can still spell out assignments."""
        for name in ("terms", "network"):
            self.__dict__.pop(name, None)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """The activations that stage cuts may have to send."""
        return find_crossings(self)

    # -- variables -----------------------------------------------------------------------------

    def variable(self, size: int) -> int:
        """Add a variable and return its index."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def shape(self, tensor: int, reader: int) -> Shape:
        """Return a tensor's shape before sharding as ``reader`` (or its maker) sees it."""
        whole = self.context.is_once(reader)
        return self.context.shape(tensor, 1 if whole else self.num_microbatches)

    def local(self, index: int, dims: Dims) -> tuple[Shapes, Shapes]:
        """Return the local input and output shapes of an operator."""
        count = 1 if self.context.is_once(index) else self.num_microbatches
        return local_shapes(self.context, index, dims, self.mesh.sizes, count)

    def modes_of(self, block: int) -> tuple[Mode, ...]:
        """Return the modes of a block; only those that have equals choose."""
        return self.modes if self.context.ties.class_of(block) in self.mode_of else (KEEP,)

    # -- terms ---------------------------------------------------------------------------------

    def _segment_terms(self) -> list[Term]:
        """Charge every block the fixed cost of one segment, forward and backward, and of those that
        run again.
        """
        fixed, ties = self.context.segment_seconds, self.context.ties
        terms: list[Term] = []
        for lead, members in ties.classes.items():
            modes = self.modes_of(lead)
            columns = np.zeros((NUM_COLUMNS, len(modes)))
            columns[EACH] = [fixed * (2 + _segments_again(ties.ranges[lead], m)) for m in modes]
            if columns.any():
                terms.append(self._switched(lead, (), columns, members))
        return terms

    def _switched(
        self,
        lead: int,
        scope: tuple[int, ...],
        columns: NDArray[np.float64],
        blocks: tuple[int, ...],
    ) -> Term:
        """Return a term whose last axis is the mode of a class of blocks."""
        switch = self.mode_of.get(lead)
        if switch is None:
            return Term(scope, columns[..., 0], blocks)
        return Term((*scope, switch), columns, blocks)

    def _operator_terms(self, index: int) -> list[Term]:
        context, saves = self.context, self.context.saves
        tensors, operator = context.graph.tensors, context.graph.operators[index]
        column = ONCE if context.is_once(index) else EACH
        block = context.ties.block[index]
        modes = self.modes_of(block)
        columns = np.zeros((NUM_COLUMNS, len(self.domains[index]), len(modes)))
        for choice, dims in enumerate(self.domains[index]):
            inputs, outputs = self.local(index, dims)
            seconds = context.seconds(index, inputs, outputs)
            kept = self._kept(index, inputs, outputs)
            across = sum(
                num_bytes(outputs[p], tensors[operator.outputs[p]].dtype)
                for p in saves.crossing[index]
            )
            working = 0
            if context.widest[block] == index:
                # While the block's widest tensor is worked on, it and its gradient exist once more.
                working = WORKING_COPIES * max(
                    num_bytes(shape, tensors[t].dtype)
                    for shape, t in zip(outputs, operator.outputs, strict=True)
                )
            for number, mode in enumerate(modes):
                times = 2 if mode.repeats(index) else 1
                dropped = sum(size for size, maker in kept if mode.repeats(maker))
                columns[column, choice, number] = times * seconds.forward + seconds.backward
                columns[FLIGHT, choice, number] = across + sum(s for s, _ in kept) - dropped
                columns[TRANSIENT, choice, number] = working + dropped
        lead = context.ties.class_of(block)
        return [self._switched(lead, (self.config_of[index],), columns, context.ties.classes[lead])]

    def _kept(self, index: int, inputs: Shapes, outputs: Shapes) -> list[tuple[int, int]]:
        """Return the bytes that an operator pays for, each with the operator that makes them."""
        saves, tensors = self.context.saves, self.context.graph.tensors
        operator = self.context.graph.operators[index]
        read = [
            (
                num_bytes(inputs[p], tensors[operator.inputs[p]].dtype),
                saves.maker[operator.inputs[p]],
            )
            for p in saves.inputs[index]
        ]
        made = [
            (num_bytes(outputs[p], tensors[operator.outputs[p]].dtype), index)
            for p in saves.outputs[index]
        ]
        return [*read, *made, (saves.extra[index](inputs, outputs), index)]

    # -- reading -------------------------------------------------------------------------------

    def factor_graph(self, weights: Weights) -> FactorGraph:
        """Return the two-cost factor graph under one way to pipeline."""
        terms = self.terms  # which add variables
        return factor_graph(tuple(self.sizes), terms, weights)

    @cached_property
    def network(self) -> Network:
        """The network of all decisions, prepared for every way to pipeline."""
        terms = self.terms  # which add variables
        return network(tuple(self.sizes), terms)

    @property
    def is_wide(self) -> bool:
        """Whether minima are bracketed instead of found by elimination; that takes seconds each."""
        return self.network.is_wide

    def elimination(self, weights: Weights) -> Elimination:
        """Return the exact solver under one way to pipeline."""
        return Elimination(self.network, *weights.views())

    def per_block(self, assignment: tuple[int, ...]) -> NDArray[np.float64]:
        """Return what an assignment costs in every block, by column."""
        return per_block(self.terms, assignment, len(self.context.ties.ranges))

    def dims(self, assignments: Sequence[tuple[int, ...]]) -> tuple[Dims, ...]:
        """Return every operator's dims, each block following its own assignment."""
        ties = self.context.ties
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
            pair = context.placements(reader, dims[reader]).inputs[position]
            root = context.ties.root[reader]
            key = context.graph.operators[root].inputs[position]
            variable = self.level_of.get(key)
            level = assignments[context.ties.block[reader]][variable] if variable is not None else 0
            shape = context.graph.tensors[tensor].shape
            config = parameter_config(shape, pair.value, self.mesh.sizes, level)
            stays = keeps and config.rest != pair.value and tensor in context.read_last
            configs.append(replace(config, keeps=True) if stays else config)
        return tuple(configs)

    def chosen_modes(self, assignments: Sequence[tuple[int, ...]]) -> tuple[Mode, ...]:
        """Return the mode of every block."""
        ties = self.context.ties
        return tuple(
            self.modes[assignments[block][self.mode_of[lead]]] if lead in self.mode_of else KEEP
            for block in range(len(ties.ranges))
            for lead in (ties.class_of(block),)
        )


def _segments_again(span: tuple[int, int], mode: Mode) -> int:
    """Return how many segments of a block run again: runs of repeated operators, at least."""
    again = [mode.repeats(index) for index in range(*span)]
    return sum(now and not before for before, now in zip([False, *again], again, strict=False))
