"""Which blocks of a graph repeat the one before in everything that lowering looks at.

Blocks of equal signature may still be read elsewhere, read other blocks, or share a parameter. A
*stretch* is a list of neighbouring blocks that also do all of that alike, each relative to its own
place; in between blocks may be left out (``folded``) and put back (``expand``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.graph import OperatorGraph
from shardwright.operators.splitting.samples import Samples

Ints = NDArray[np.int64]
# A block that reads, or is read by, blocks further away than this is not left out. Whoever leaves blocks out
# keeps at least as many at either end, and looks whether those between are alike.
REACH = 2


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """Blocks ``first`` to ``stop`` - 1. Rows of ``operators`` and ``tensors``: those of each block."""

    first: int
    stop: int
    operators: Ints
    tensors: Ints


class Outline:
    """Facts about the blocks of a graph.

    ``members``: per block the tensors that belong to it, those from outside that nobody else reads
    in the order of their first use, then those it makes. ``home`` and ``place``: where a tensor is
    listed there; -1 for those of no block. ``family``: equal numbers for neighbours of equal signature.
    """

    def __init__(self, graph: OperatorGraph, samples: Samples) -> None:
        self.graph, self.samples = graph, samples
        blocks = graph.blocks
        self.family: list[int] = []
        for number, block in enumerate(blocks):
            same = number > 0 and block.signature == blocks[number - 1].signature != ""
            self.family.append(self.family[-1] if same else number)
        self.home, self.place = [-1] * len(graph.tensors), [-1] * len(graph.tensors)
        self.members = [self._members(number) for number in range(len(blocks))]
        self.stretches = self._find_stretches()

    def _members(self, number: int) -> tuple[int, ...]:
        graph, block = self.graph, self.graph.blocks[number]
        own: dict[int, None] = {}
        made: list[int] = []
        for index in range(block.start, block.stop):
            operator = graph.operators[index]
            for tensor in operator.inputs:
                spec = graph.tensors[tensor]
                if spec.producer < 0 and spec.role != "input":
                    readers = graph.consumers[tensor]
                    if block.start <= readers[0] and readers[-1] < block.stop:
                        own[tensor] = None
            made += operator.outputs
        found = (*own, *made)
        for place, tensor in enumerate(found):
            self.home[tensor], self.place[tensor] = number, place
        return found

    def _find_stretches(self) -> tuple[Stretch, ...]:
        """Return the lists of at least two neighbours that are alike."""
        seen = [self._described(number) for number in range(len(self.graph.blocks))]
        found: list[Stretch] = []
        first = 0
        for stop in range(1, len(seen) + 1):
            if stop < len(seen) and seen[stop] is not None and seen[stop] == seen[first]:
                continue
            if stop - first > 1:
                found.append(self._stretch(first, stop))
            first = stop
        return tuple(found)

    def _stretch(self, first: int, stop: int) -> Stretch:
        blocks = self.graph.blocks[first:stop]
        return Stretch(
            first,
            stop,
            np.array([range(block.start, block.stop) for block in blocks], dtype=np.int64),
            np.array(self.members[first:stop], dtype=np.int64),
        )

    def _described(self, number: int) -> tuple[object, ...] | None:
        """Return what lowering a block depends on but for strategies; None if it must stay."""
        graph, samples, block = self.graph, self.samples, self.graph.blocks[number]
        start, stop = block.start, block.stop
        if start == stop or not block.signature:
            return None
        reads, readers = self._reads(number), self._readers(number)
        if reads is None or readers is None:
            return None
        own = self.members[number]
        return (
            self.family[number],
            reads,
            readers,
            samples.operator_dim[start:stop],
            [index - start for index in range(start, stop) if index in samples.prologue],
            [
                (samples.state[t], samples.tensor_dim[t], graph.tensors[t].needs_gradient)
                for t in own
            ],
        )

    def _reads(self, number: int) -> list[tuple[int, int]] | None:
        """Return what comes from elsewhere, as (blocks back, place there) or (-1, tensor)."""
        graph, block = self.graph, self.graph.blocks[number]
        found: list[tuple[int, int]] = []
        for operator in graph.operators[block.start : block.stop]:
            for tensor in operator.inputs:
                home = self.home[tensor]
                if home == number:
                    found.append((0, self.place[tensor]))
                elif home < 0 or self.family[home] != self.family[number]:
                    found.append((-1, tensor))
                elif number - home > REACH:
                    return None
                else:
                    found.append((number - home, self.place[tensor]))
        return found

    def _readers(self, number: int) -> list[tuple[int, int, int]] | None:
        """Return who reads what a block makes behind it: (place, blocks ahead, operator there)."""
        graph, block = self.graph, self.graph.blocks[number]
        reported = {graph.loss, *(tensor for _, tensor in graph.outputs)}
        found: list[tuple[int, int, int]] = []
        for place, tensor in enumerate(self.members[number]):
            if tensor in reported:
                return None
            for reader in graph.consumers[tensor]:
                if reader < block.stop:
                    continue
                other = graph.block_of[reader]
                if self.family[other] != self.family[number] or other - number > REACH:
                    return None
                found.append((place, other - number, reader - graph.blocks[other].start))
        return found
