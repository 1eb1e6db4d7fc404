"""What lowering knows of a graph, whatever the strategy: asked for once."""

from __future__ import annotations

from functools import cached_property

from shardwright.core.graph import OperatorGraph
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.samples import Samples, State
from shardwright.planner.lower.alike import Alike, Surroundings, alike_blocks, surroundings
from shardwright.planner.space.legal import depend_on_parameters


class Ground:
    """A graph, and what lowering asks about it."""

    def __init__(self, graph: OperatorGraph, samples: Samples) -> None:
        self.graph, self.samples = graph, samples
        self.moved: dict[object, int] = {}  # see ``transfers``

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """The iteration space of every operator."""
        return self.samples.iterations

    @cached_property
    def writes(self) -> list[bool]:
        """Which operators write a buffer or depend on one that is written."""
        return _writes_or_reads_written(self.graph)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Operators that do the same in every microbatch, as far as the graph says: nothing of a sample, and nothing
        that learns."""
        graph, state = self.graph, self.samples.state
        return frozenset(
            index
            for index, operator in enumerate(graph.operators)
            if not self.writes[index]
            and all(
                state[tensor] is State.FREE and not graph.tensors[tensor].needs_gradient
                for tensor in operator.outputs
            )
            and all(graph.tensors[tensor].role != "parameter" for tensor in operator.inputs)
        )

    @cached_property
    def trained(self) -> list[bool]:
        """Whether what an operator makes depends on parameters."""
        return depend_on_parameters(self.graph)

    @cached_property
    def alike(self) -> list[Alike | None]:
        """Per block what makes it like others."""
        return alike_blocks(self.graph, self.samples, self.blocks, self.writes)

    @cached_property
    def blocks(self) -> list[Surroundings]:
        """What every block has to do with the others."""
        return surroundings(self.graph)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The parameters that several blocks read."""
        graph, block_of = self.graph, self.graph.block_of
        read = [(t, graph.consumers[t]) for t in graph.parameters if graph.consumers[t]]
        return frozenset([t for t, ends in read if block_of[ends[0]] < block_of[ends[-1]]])


def _writes_or_reads_written(graph: OperatorGraph) -> list[bool]:
    """Say which operators write a buffer or depend on one that is written.

    They run in every microbatch: a counter counts calls of forward, as with gradient accumulation.
    """
    written = {
        tensor
        for operator in graph.operators
        if not operator.outputs
        for tensor in operator.inputs
        if graph.tensors[tensor].role == "buffer"
    }
    result: list[bool] = []
    for operator in graph.operators:
        result.append(not operator.outputs or not written.isdisjoint(operator.inputs))
        if result[-1]:
            written.update(operator.outputs)
    return result
