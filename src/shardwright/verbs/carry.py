"""Carry a strategy over to another capture of the same model.

In another precision a graph has conversions of dtype more or fewer, and nothing else differs. A
conversion that is new lies as its input does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.graph import CASTS, OperatorGraph
from shardwright.core.layout import PARTIAL, Layout
from shardwright.core.strategy import OperatorConfig, Strategy
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.iteration import PLUS, Iteration
from shardwright.planner.space.configs import made_as


def carry_over(strategy: Strategy, graph: OperatorGraph, other: OperatorGraph) -> Strategy:
    """Return the strategy for ``other``. Raises ValueError where more than conversions differ."""
    if len(graph.parameters) != len(other.parameters) or len(graph.blocks) != len(other.blocks):
        raise ValueError("the two graphs have other parameters or blocks")
    origin = _matched(graph, other)
    configs: list[OperatorConfig] = []
    apart: list[int] = []
    for index, match in enumerate(origin):
        if match < 0:
            configs.append(_followed(strategy, other, origin, index, configs))
            continue
        configs.append(strategy.configs[match])
        pairs = zip(other.operators[index].outputs, graph.operators[match].outputs, strict=True)
        apart += [mine for mine, theirs in pairs if theirs in strategy.reshard_again]

    def carried(operators: Sequence[int]) -> tuple[int, ...]:
        chosen = set(operators)
        return tuple(index for index, match in enumerate(origin) if match in chosen)

    return replace(
        strategy,
        configs=tuple(configs),
        recompute_operators=carried(strategy.recompute_operators),
        reshard_again=tuple(apart),
        segment_starts=carried(strategy.segment_starts),
    )


def _matched(graph: OperatorGraph, other: OperatorGraph) -> list[int]:
    """Return, for every operator of ``other``, which one of ``graph`` it is, or -1 if new."""
    found: list[int] = []
    place, kinds = 0, [*(operator.kind for operator in graph.operators), ""]
    for operator in other.operators:
        while kinds[place] in CASTS and kinds[place] != operator.kind:
            place += 1
        if kinds[place] == operator.kind:
            found.append(place)
            place += 1
        elif operator.kind in CASTS:
            found.append(-1)
        else:
            raise ValueError(f"operator {operator.name} ({operator.kind}) has no match")
    if not CASTS.issuperset(kinds[place:-1]):
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
    operator = graph.operators[index]
    producer = graph.tensors[operator.inputs[0]].producer
    if producer < 0:
        readers = [r for t in operator.outputs for r in graph.consumers[t] if origin[r] >= 0]
        mesh = min((strategy.configs[origin[r]].mesh for r in readers), default=0)
        return OperatorConfig(mesh=mesh, dims=("",) * len(strategy.meshes[mesh].axes))
    dims = _dims_of(made_as(graph, operator.inputs[0], configs), iterate(graph, index))
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
