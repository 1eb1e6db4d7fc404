"""Carry a strategy over to another capture of the same model.

In another precision a graph has conversions of dtype more or fewer, and nothing else differs. A
conversion that is new lies as its input does.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.graph import CASTS, OperatorGraph
from shardwright.core.layout import PARTIAL, Layout
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.planner.space.configs import placements
from shardwright.planner.space.iteration import PLUS, Iteration
from shardwright.planner.space.rules import iterate


def carry_over(strategy: Strategy, graph: OperatorGraph, other: OperatorGraph) -> Strategy:
    """Return the strategy for ``other``. Raises ValueError where more than conversions differ."""
    if len(graph.parameters) != len(other.parameters) or len(graph.blocks) != len(other.blocks):
        raise ValueError("the two graphs have other parameters or blocks")
    origin = _matched(graph, other)
    configs: list[OperatorConfig] = []
    for index, match in enumerate(origin):
        if match >= 0:
            configs.append(strategy.configs[match])
        else:
            configs.append(_followed(strategy, other, origin, index, configs))
    again, starts = set(strategy.recompute_operators), set(strategy.segment_starts)
    apart = set(strategy.reshard_again)
    tensors = {
        mine: theirs
        for index, match in enumerate(origin)
        if match >= 0
        for mine, theirs in zip(
            other.operators[index].outputs, graph.operators[match].outputs, strict=True
        )
    }
    return replace(
        strategy,
        configs=tuple(configs),
        recompute_operators=tuple(i for i, match in enumerate(origin) if match in again),
        reshard_again=tuple(mine for mine, theirs in tensors.items() if theirs in apart),
        segment_starts=tuple(i for i, match in enumerate(origin) if match in starts),
    )


def _matched(graph: OperatorGraph, other: OperatorGraph) -> list[int]:
    """Return, for every operator of ``other``, which one of ``graph`` it is, or -1 if new."""
    found: list[int] = []
    place, kinds = 0, [operator.kind for operator in graph.operators]
    for operator in other.operators:
        while place < len(kinds) and kinds[place] != operator.kind and kinds[place] in CASTS:
            place += 1
        if place < len(kinds) and kinds[place] == operator.kind:
            found.append(place)
            place += 1
        elif operator.kind in CASTS:
            found.append(-1)
        else:
            raise ValueError(f"operator {operator.name} ({operator.kind}) has no match")
    if any(kind not in CASTS for kind in kinds[place:]):
        raise ValueError(f"operator {graph.operators[place].name} is gone")
    return found


def _followed(
    strategy: Strategy,
    graph: OperatorGraph,
    origin: list[int],
    index: int,
    configs: list[OperatorConfig],
) -> OperatorConfig:
    """Return the config of a new conversion: as its input lies, where its input was made."""
    operator, width = graph.operators[index], len(strategy.meshes[0].axes)
    producer = graph.tensors[operator.inputs[0]].producer
    if producer < 0:
        readers = [r for t in operator.outputs for r in graph.consumers[t] if origin[r] >= 0]
        mesh = min((strategy.configs[origin[r]].mesh for r in readers), default=0)
        return OperatorConfig(mesh=mesh, dims=("",) * width)
    made = placements(iterate(graph, producer), configs[producer].dims)
    place = graph.operators[producer].outputs.index(operator.inputs[0])
    dims = _dims_of(made.outputs[place].value, iterate(graph, index))
    return OperatorConfig(mesh=configs[producer].mesh, dims=dims)


def _dims_of(layout: Layout, iteration: Iteration) -> tuple[str, ...]:
    """Return the dims along which a conversion takes a layout as it is; a partial sum that may not
    pass, since rounding is not linear, arrives summed."""
    names = iteration.inputs[0]
    passed = PLUS if iteration.linear else ""
    return tuple(
        passed if placement == PARTIAL else names[placement] if placement >= 0 else ""
        for placement in layout
    )
