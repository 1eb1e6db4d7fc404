"""Repeat a layer of a captured graph: deep models are captured as three layers.

Exporting takes half a second a layer, repeating one a millisecond.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardwright.core.graph import Block, Operator, OperatorGraph, TensorSpec
from shardwright.errors import CaptureError


def deepened(graph: OperatorGraph, times: int) -> OperatorGraph:
    """Return the graph with ``times`` more copies of its middle repeated block.

    A copy reads of its predecessor what the block reads of the block before it, and has parameters
    and buffers of its own where the block has. Only for planning: there are no calls for it.
    """
    if times == 0:
        return graph
    middle = _middle(graph)
    block, previous = graph.blocks[middle], graph.blocks[middle - 1]
    tensors = list(graph.tensors)
    operators = list(graph.operators[: block.stop])
    blocks = list(graph.blocks[: middle + 1])
    own = _own_entries(graph, block)
    last = {tensor: tensor for tensor in _made(graph, block)}
    before = dict(zip(_made(graph, previous), _made(graph, block), strict=True))
    for number in range(times):
        mark = f"+{number + 1}"
        names = {tensor: len(tensors) + place for place, tensor in enumerate(own)}
        tensors += [_renamed(graph.tensors[tensor], mark) for tensor in own]
        names |= {old: last[new] for old, new in before.items()}
        start = len(operators)
        for operator in graph.operators[block.start : block.stop]:
            position = len(operators)
            for tensor in operator.outputs:
                names[tensor] = len(tensors)
                tensors.append(replace(_renamed(graph.tensors[tensor], mark), producer=position))
            operators.append(_moved(operator, names, mark, len(blocks)))
        blocks.append(replace(block, name=block.name + mark, start=start, stop=len(operators)))
        last = {tensor: names[tensor] for tensor in last}
    shift = len(operators) - block.stop
    for operator in graph.operators[block.stop :]:
        position = len(operators)
        for tensor in operator.outputs:
            tensors[tensor] = replace(tensors[tensor], producer=position)
        later = operator.block + times if operator.block >= 0 else operator.block
        inputs = tuple([last.get(tensor, tensor) for tensor in operator.inputs])
        operators.append(replace(operator, inputs=inputs, block=later))
    blocks += [
        replace(one, start=one.start + shift, stop=one.stop + shift)
        for one in graph.blocks[middle + 1 :]
    ]
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators), blocks=tuple(blocks))


def _middle(graph: OperatorGraph) -> int:
    """Return the second of the blocks that repeat."""
    count = Counter(block.signature for block in graph.blocks)
    repeated = [i for i, block in enumerate(graph.blocks) if count[block.signature] > 1]
    if len(repeated) < 3 or repeated != list(range(repeated[0], repeated[0] + len(repeated))):
        raise CaptureError(
            f"only three equal layers in a row can be repeated, but {graph.name} has "
            f"{len(repeated)} equal blocks; capture it whole"
        )
    return repeated[1]


def _made(graph: OperatorGraph, block: Block) -> list[int]:
    return [t for one in graph.operators[block.start : block.stop] for t in one.outputs]


def _own_entries(graph: OperatorGraph, block: Block) -> list[int]:
    """Return what enters from outside and is read by this block alone."""
    inside = range(block.start, block.stop)
    found = {tensor for index in inside for tensor in graph.operators[index].inputs}
    return [
        tensor
        for tensor in sorted(found)
        if graph.tensors[tensor].producer < 0
        and all(reader in inside for reader in graph.consumers[tensor])
    ]


def _renamed(tensor: TensorSpec, mark: str) -> TensorSpec:
    return replace(tensor, name=tensor.name + mark)


def _moved(operator: Operator, names: dict[int, int], mark: str, block: int) -> Operator:
    return replace(
        operator,
        name=operator.name + mark,
        inputs=tuple([names.get(tensor, tensor) for tensor in operator.inputs]),
        outputs=tuple([names[tensor] for tensor in operator.outputs]),
        module=operator.module + mark,
        block=block,
    )
