"""Equal blocks share one decision: which operator stands for which.

Blocks are tied when capture gave them the same signature and samples and gradients flow alike. An
operator's *root* is the operator at the same place of the first tied block.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.planner.space.samples import Samples


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


def tie_blocks(graph: OperatorGraph, samples: Samples) -> Ties:
    """Tie equal blocks. Without blocks the whole graph is one; empty blocks are left out."""
    count = len(graph.operators)
    filled = [number for number, block in enumerate(graph.blocks) if block.stop > block.start]
    ranges = [(graph.blocks[number].start, graph.blocks[number].stop) for number in filled]
    names = [graph.blocks[number].signature for number in filled]
    if not ranges:
        filled, ranges, names = [0], [(0, count)], [""]
    block, root = [0] * count, [0] * count
    first: dict[object, int] = {}
    classes: dict[int, list[int]] = {}
    for index, ((start, stop), name) in enumerate(zip(ranges, names, strict=True)):
        seen = tuple(_character(graph, samples, op) for op in range(start, stop))
        lead = first.setdefault((name, seen) if name else index, index)
        classes.setdefault(lead, []).append(index)
        for offset in range(stop - start):
            block[start + offset] = index
            root[start + offset] = ranges[lead][0] + offset
    tied = {lead: tuple(members) for lead, members in classes.items()}
    return Ties(
        block=tuple(block),
        root=tuple(root),
        classes=tied,
        ranges=tuple(ranges),
        number=tuple(filled),
    )


def _character(graph: OperatorGraph, samples: Samples, index: int) -> tuple[object, ...]:
    """Return what the signature does not say: samples, and where gradients flow."""
    operator = graph.operators[index]
    gradients = tuple(
        graph.tensors[t].needs_gradient for t in (*operator.inputs, *operator.outputs)
    )
    return (samples.operator_dim[index], index in samples.prologue, gradients)
