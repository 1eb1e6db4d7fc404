"""In which layouts tensors are made and wanted, given the configs of operators."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import PARTIAL, REPLICATE, Layout
from shardwright.core.strategy import OperatorConfig
from shardwright.operators.splitting import iterate
from shardwright.operators.splitting.samples import Samples
from shardwright.planner.space.configs import placements


def made_as(graph: OperatorGraph, tensor: int, configs: Sequence[OperatorConfig]) -> Layout:
    """Return the layout in which the producer of a tensor leaves it."""
    producer = graph.tensors[tensor].producer
    place = graph.operators[producer].outputs.index(tensor)
    return placements(iterate(graph, producer), configs[producer].dims).outputs[place].value


def wanted_as(
    graph: OperatorGraph, samples: Samples, tensor: int, configs: Sequence[OperatorConfig]
) -> Layout:
    """Return the layout in which the first reader of a tensor wants it; whole where nobody reads it."""
    readers = graph.consumers[tensor]
    if not readers:
        return (REPLICATE,) * len(configs[0].dims)
    reader = readers[0]
    place = graph.operators[reader].inputs.index(tensor)
    return placements(samples.iterations[reader], configs[reader].dims).inputs[place].value


def summed_over(
    graph: OperatorGraph,
    configs: Sequence[OperatorConfig],
    index: int,
    tensor: int,
    axes: Sequence[int],
) -> list[int]:
    """Return over which of these axes a tensor comes to an operator as a partial sum: only one that
    is made on the same mesh does."""
    producer = graph.tensors[tensor].producer
    if producer < 0 or configs[producer].mesh != configs[index].mesh:
        return []
    layout = made_as(graph, tensor, configs)
    return [axis for axis in axes if layout[axis] == PARTIAL]
