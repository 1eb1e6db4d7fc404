"""Where gradients lie: the placements of every operator, with partial gradients let through.

An operator that is replicated along an axis may hand a partial gradient straight on, since its
backward is linear in the incoming gradient. That is worth doing where the operator sees no samples
(a position embedding): the sum is then taken once, at the parameter, instead of in the middle of
backward; over microbatches it is the only way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL
from shardwright.core.strategy import Strategy
from shardwright.planner.space.configs import Pair, Placements, placements
from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.samples import Samples


def place(
    graph: OperatorGraph, strategy: Strategy, samples: Samples, iterations: Sequence[Iteration]
) -> list[Placements]:
    """Return the placements of every operator's tensors, gradients included."""
    placed = [
        placements(iteration, config.dims)
        for iteration, config in zip(iterations, strategy.configs, strict=True)
    ]
    for index in reversed(range(len(placed))):
        if samples.operator_dim[index] == "" and "" in strategy.configs[index].dims:
            placed[index] = let_through(graph, strategy, placed, index)
    return placed


def let_through(
    graph: OperatorGraph, strategy: Strategy, placed: Sequence[Placements], index: int
) -> Placements:
    """Return an operator's placements with those partial gradients which all its readers give."""
    operator, config = graph.operators[index], strategy.configs[index]
    if not any(graph.tensors[tensor].needs_gradient for tensor in operator.outputs):
        return placed[index]
    uses = [
        (reader, placed[reader].inputs[position].gradient)
        for tensor in operator.outputs
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
        for position, read in enumerate(graph.operators[reader].inputs)
        if read == tensor
    ]
    local = all(strategy.configs[reader].mesh == config.mesh for reader, _ in uses)
    axes = [
        axis
        for axis, name in enumerate(config.dims)
        if name == "" and local and uses and all(layout[axis] == PARTIAL for _, layout in uses)
    ]
    if not axes:
        return placed[index]
    return Placements(
        tuple(_partial(pair, axes) for pair in placed[index].inputs),
        tuple(_partial(pair, axes) for pair in placed[index].outputs),
    )


def _partial(pair: Pair, axes: list[int]) -> Pair:
    gradient = tuple(
        PARTIAL if axis in axes else placement for axis, placement in enumerate(pair.gradient)
    )
    return replace(pair, gradient=gradient)
