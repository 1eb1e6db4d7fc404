"""Equal blocks share one decision: which operator stands for which, and which activations lead from which to which.

Blocks are tied when capture gave them the same signature and samples and gradients flow alike. An
operator's *root* is the operator at the same place of the first tied block.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph import Block, OperatorGraph
from shardwright.operators.splitting.samples import Samples

_Reader = tuple[int, int]  # an operator, and the position at which it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """``block``: each operator's block. ``root``: each operator's root operator. ``classes``: the
    tied blocks by their first block, which are the keys of all decisions per block. ``ranges``:
    first and last + 1 operator of every block. ``number``: its index among the graph's blocks,
    empty ones counted.
    """

    block: tuple[int, ...]
    root: tuple[int, ...]
    classes: dict[int, tuple[int, ...]]
    ranges: tuple[tuple[int, int], ...]
    number: tuple[int, ...]

    def class_of(self, block: int) -> int:
        """Return the first block tied to this one."""
        return self.block[self.root[self.ranges[block][0]]]

    def times(self, operator: int) -> int:
        """Return how many blocks are tied to that of an operator, its own among them."""
        return len(self.classes[self.class_of(self.block[operator])])


def tie_blocks(graph: OperatorGraph, samples: Samples) -> Ties:
    """Tie equal blocks. Without blocks the whole graph is one; empty blocks are left out."""
    count = len(graph.operators)
    filled = [(n, block) for n, block in enumerate(graph.blocks) if block.stop > block.start]
    filled = filled or [(0, Block(name="", start=0, stop=count, signature=""))]
    block, root = [0] * count, [0] * count
    first: dict[object, int] = {}
    classes: dict[int, tuple[int, ...]] = {}
    for index, (_, one) in enumerate(filled):
        span = range(one.start, one.stop)
        seen = tuple(_character(graph, samples, operator) for operator in span)
        lead = first.setdefault((one.signature, seen) if one.signature else index, index)
        classes[lead] = (*classes.get(lead, ()), index)
        block[one.start : one.stop] = [index] * len(span)
        begin = filled[lead][1].start
        root[one.start : one.stop] = range(begin, begin + len(span))
    return Ties(
        block=tuple(block),
        root=tuple(root),
        classes=classes,
        ranges=tuple([(one.start, one.stop) for _, one in filled]),
        number=tuple([number for number, _ in filled]),
    )


def _character(graph: OperatorGraph, samples: Samples, index: int) -> tuple[object, ...]:
    """Return what the signature does not say: samples, and where gradients flow."""
    operator = graph.operators[index]
    gradients = tuple(
        graph.tensors[t].needs_gradient for t in (*operator.inputs, *operator.outputs)
    )
    return (samples.operator_dim[index], index in samples.prologue, gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An activation of the tied graph: its root maker and output position, its root readers with input positions,
    and the blocks in which it occurs. ``tensor`` is one occurrence, and ``homes`` the blocks of its readers.
    """

    tensor: int
    maker: int
    position: int
    readers: tuple[_Reader, ...]
    homes: tuple[int, ...]
    blocks: tuple[int, ...]


def find_flows(graph: OperatorGraph, ties: Ties) -> tuple[Flow, ...]:
    """List every activation that somebody reads; linear in the size of the graph."""
    found: dict[tuple[int, int, tuple[_Reader, ...]], list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for position, tensor in enumerate(operator.outputs):
            if graph.consumers[tensor]:
                readers = tuple(sorted(_homes(graph, ties, tensor)))
                found.setdefault((ties.root[index], position, readers), []).append(tensor)
    flows: list[Flow] = []
    for (maker, position, readers), tensors in found.items():
        homes = _homes(graph, ties, tensors[0])
        flow = Flow(
            tensor=tensors[0],
            maker=maker,
            position=position,
            readers=readers,
            homes=tuple([homes[reader] for reader in readers]),
            blocks=tuple([ties.block[graph.consumers[tensor][0]] for tensor in tensors]),
        )
        flows.append(flow)
    return tuple(flows)


def _homes(graph: OperatorGraph, ties: Ties, tensor: int) -> dict[_Reader, int]:
    """Return the root readers of a tensor, with the block of one that stands there."""
    return {
        (ties.root[reader], place): ties.block[reader]
        for reader in graph.consumers[tensor]
        for place, read in enumerate(graph.operators[reader].inputs)
        if read == tensor
    }
