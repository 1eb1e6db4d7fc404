"""Facts about a graph that every part of one search shares, whatever the cluster."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from shardwright.core.graph import OperatorGraph
from shardwright.core.halo import extended_shape
from shardwright.core.layout import local_shape
from shardwright.operators.splitting import find_samples
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.operators.splitting.samples import State
from shardwright.planner.cost.recomputation import needed_again, recomputed_operators
from shardwright.planner.lower.fold import Folder
from shardwright.planner.lower.gradients import hands_on
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.spread import Spreader
from shardwright.planner.model.saves import find_saves
from shardwright.planner.model.ties import Flow, Ties, find_flows, tie_blocks
from shardwright.planner.remember import remembered
from shardwright.planner.space import placements
from shardwright.planner.space.configs import Placements
from shardwright.planner.space.seeds import data_dims

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


class Facts:
    """What a graph says whatever the cluster, asked for once. Equal questions get equal answers."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.samples = find_samples(graph)
        self.ties = tie_blocks(graph, self.samples)
        self.saves = find_saves(graph, self.ties.block)
        self.read_last = read_last(graph, self.ties)

    def iteration(self, index: int) -> Iteration:
        """Return the iteration space of an operator."""
        return self.samples.iterations[index]

    def placements(self, index: int, dims: tuple[str, ...]) -> Placements:
        """Return the layouts of an operator's tensors under one config."""
        return self._placements(self.ties.root[index], dims)

    @remembered
    def _placements(self, root: int, dims: tuple[str, ...]) -> Placements:
        return placements(self.iteration(root), dims)

    @remembered
    def recomputed(self, name: Literal["selective", "attention"]) -> frozenset[int]:
        """Return the operators that run again in blocks that are recomputed in part."""
        again = recomputed_operators(self.graph, name)
        return frozenset(i for i, root in enumerate(self.ties.root) if root in again)

    @remembered
    def idle(self, asked: frozenset[int]) -> frozenset[int]:
        """Return those of the operators asked to run again that no backward needs to."""
        return asked - needed_again(self.graph, asked)

    @remembered
    def is_once(self, index: int) -> bool:
        """Whether an operator runs once per step: before the microbatches, or free of the batch."""
        operator, tensors = self.graph.operators[index], self.graph.tensors
        is_free = all(self.samples.state[tensor] is State.FREE for tensor in operator.outputs)
        trained = any(tensors[t].needs_gradient for t in operator.outputs) or any(
            tensors[t].role == "parameter" for t in operator.inputs
        )
        return index in self.samples.prologue or (is_free and not trained)

    @cached_property
    def sample_names(self) -> tuple[str, ...]:
        """Per operator the dim which the data axis splits, "" where it has none."""
        graph, samples = self.graph, self.samples
        names = data_dims(graph, samples, samples.iterations)
        return tuple("" if names[i] == PLUS else names[i] for i in range(len(names)))

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The activations, equal blocks taken together."""
        return find_flows(self.graph, self.ties)

    @cached_property
    def ground(self) -> Ground:
        """What lowering asks about the graph."""
        return Ground(self.graph, self.samples)

    @cached_property
    def folder(self) -> Folder:
        """Leaves out equal blocks where strategies of deep graphs are judged."""
        return Folder(self.graph, self.samples)

    @cached_property
    def spreader(self) -> Spreader:
        """Makes strategies of deep graphs, quickly."""
        return Spreader(self.folder)

    @cached_property
    def widest(self) -> dict[int, int]:
        """Per block, the operator with the largest result."""
        found: dict[int, int] = {}
        sizes = [
            max((self.graph.tensors[tensor].bytes for tensor in operator.outputs), default=0)
            for operator in self.graph.operators
        ]
        for index, block in enumerate(self.ties.block):
            if block not in found or sizes[index] > sizes[found[block]]:
                found[block] = index
        return found

    @cached_property
    def hands_on(self) -> tuple[bool, ...]:
        """Whether an operator sees no samples but its readers do (a position embedding).

        Along the data axis it runs in full while its gradient comes as partial sums; lowering hands
        those on to the parameter instead of adding them up on the way.
        """
        graph, dims = self.graph, self.sample_names
        found = [False] * len(graph.operators)
        for index in reversed(range(len(found))):
            readers = [
                reader
                for tensor in graph.operators[index].outputs
                if graph.tensors[tensor].needs_gradient
                for reader in graph.consumers[tensor]
            ]
            below = all(dims[reader] != "" or found[reader] for reader in readers)
            may = hands_on(graph, self.samples, index)
            found[index] = may and dims[index] == "" and bool(readers) and below
        return tuple(found)

    def shape(self, tensor: int, num_microbatches: int) -> Shape:
        """Return a tensor's shape in one of so many microbatches, before sharding."""
        spec = self.graph.tensors[tensor]
        dim = self.samples.tensor_dim[tensor]
        if dim < 0 or num_microbatches == 1 or spec.role in ("parameter", "buffer", "constant"):
            return spec.shape
        shape = list(spec.shape)
        shape[dim] //= num_microbatches
        return tuple(shape)

    def local(
        self, index: int, dims: tuple[str, ...], sizes: tuple[int, ...], num_microbatches: int
    ) -> tuple[Shapes, Shapes]:
        """Return the local input and output shapes of an operator, in one of so many microbatches if it runs in
        each of them."""
        operator, placed = self.graph.operators[index], self.placements(index, dims)
        count = 1 if self.is_once(index) else num_microbatches
        inputs = tuple(
            extended_shape(local_shape(self.shape(tensor, count), pair.value, sizes), pair.halos)
            for tensor, pair in zip(operator.inputs, placed.inputs, strict=True)
        )
        outputs = tuple(
            local_shape(self.shape(tensor, count), pair.value, sizes)
            for tensor, pair in zip(operator.outputs, placed.outputs, strict=True)
        )
        return inputs, outputs


def read_last(graph: OperatorGraph, ties: Ties) -> frozenset[int]:
    """Return the parameters that only the last block with any reads, if no other block is alike:
    backward begins with them.
    """
    last = max((ties.block[r] for t in graph.parameters for r in graph.consumers[t]), default=-1)
    if len(ties.classes.get(last, ())) != 1:
        return frozenset()
    return frozenset(
        tensor
        for tensor in graph.parameters
        if {ties.block[reader] for reader in graph.consumers[tensor]} == {last}
    )
