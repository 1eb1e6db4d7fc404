"""Equal blocks share one decision: which operator stands for which.

Blocks are tied when capture gave them the same signature and the sample analysis saw the same in
them. An operator's *root* is the operator at the same place of the first tied block.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.planner.space.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """``block``: each operator's block. ``root``: each operator's root operator. ``classes``: the tied
    blocks by their first block, which are the keys of all decisions per block. ``ranges``: first and
    last + 1 operator of every block.
    """

    block: tuple[int, ...]
    root: tuple[int, ...]
    classes: dict[int, tuple[int, ...]]
    ranges: tuple[tuple[int, int], ...]

    def class_of(self, block: int) -> int:
        """Return the first block tied to this one."""
        return self.block[self.root[self.ranges[block][0]]]


def tie_blocks(graph: OperatorGraph, samples: Samples) -> Ties:
    """Tie equal blocks. Without blocks the whole graph is one; empty blocks are left out."""
    count = len(graph.operators)
    ranges = [(block.start, block.stop) for block in graph.blocks if block.stop > block.start]
    names = [block.signature for block in graph.blocks if block.stop > block.start]
    if not ranges:
        ranges, names = [(0, count)], [""]
    block, root = [0] * count, [0] * count
    first: dict[object, int] = {}
    classes: dict[int, list[int]] = {}
    for index, ((start, stop), name) in enumerate(zip(ranges, names, strict=True)):
        seen = tuple(
            (samples.operator_dim[op], op in samples.prologue) for op in range(start, stop)
        )
        lead = first.setdefault((name, seen) if name else index, index)
        classes.setdefault(lead, []).append(index)
        for offset in range(stop - start):
            block[start + offset] = index
            root[start + offset] = ranges[lead][0] + offset
    tied = {lead: tuple(members) for lead, members in classes.items()}
    return Ties(block=tuple(block), root=tuple(root), classes=tied, ranges=tuple(ranges))
