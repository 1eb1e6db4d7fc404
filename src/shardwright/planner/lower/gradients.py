"""Where gradients lie: the placements of every operator, with partial gradients let through.

An operator that is replicated along an axis may hand a partial gradient straight on, since its
backward is linear in the incoming gradient; that of ``bent`` functions is not, and of opaque
modules, which may have hooks, nobody knows. It is worth doing where the operator sees no samples
(a position embedding): the sum is then taken once, at the parameter, instead of in the middle of
backward; over microbatches it is the only way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.graph import Operator, OperatorGraph
from shardwright.core.layout import PARTIAL
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.space.configs import Pair, Placements, placements


def place(
    graph: OperatorGraph, strategy: Strategy, samples: Samples, iterations: Sequence[Iteration]
) -> list[Placements]:
    """Return the placements of every operator's tensors, gradients included."""
    known: dict[tuple[int, tuple[str, ...]], Placements] = {}
    placed: list[Placements] = []
    for iteration, config in zip(iterations, strategy.configs, strict=True):
        key = id(iteration), config.dims
        if key not in known:
            known[key] = placements(iteration, config.dims)
        placed.append(known[key])
    for index in reversed(range(len(placed))):
        if hands_on(graph, samples, index) and "" in strategy.configs[index].dims:
            placed[index] = let_through(graph, strategy, placed, index)
    return placed


def hands_on(graph: OperatorGraph, samples: Samples, index: int) -> bool:
    """Whether an operator may hand on partial gradients."""
    bends = graph.operators[index].kind.startswith(("opaque.", "bent."))
    return samples.operator_dim[index] == "" and not bends


def _uses(graph: OperatorGraph, operator: Operator) -> list[tuple[int, int]]:
    """Return by whom, and at which positions, those of an operator's outputs are read that need a
    gradient."""
    return [
        (reader, position)
        for tensor in operator.outputs
        if graph.tensors[tensor].needs_gradient
        for reader in graph.consumers[tensor]
        for position, read in enumerate(graph.operators[reader].inputs)
        if read == tensor
    ]


def let_through(
    graph: OperatorGraph, strategy: Strategy, placed: Sequence[Placements], index: int
) -> Placements:
    """Return an operator's placements with those partial gradients which all its readers give."""
    axes = _terms_over(graph, strategy, placed, index)
    if not axes:
        return placed[index]
    return Placements(
        tuple(_partial(pair, axes) for pair in placed[index].inputs),
        tuple(_partial(pair, axes) for pair in placed[index].outputs),
    )


def _terms_over(
    graph: OperatorGraph, strategy: Strategy, placed: Sequence[Placements], index: int
) -> list[int]:
    """Return the axes along which an operator is replicated and all that read it, on its mesh, give
    partial gradients."""
    config = strategy.configs[index]
    uses = _uses(graph, graph.operators[index])
    if any(strategy.configs[reader].mesh != config.mesh for reader, _ in uses):
        return []
    given = [placed[reader].inputs[position].gradient for reader, position in uses]
    return [
        axis
        for axis, name in enumerate(config.dims)
        if given and name == "" and all(layout[axis] == PARTIAL for layout in given)
    ]


def _partial(pair: Pair, axes: list[int]) -> Pair:
    gradient = tuple(
        PARTIAL if axis in axes else placement for axis, placement in enumerate(pair.gradient)
    )
    return replace(pair, gradient=gradient)
