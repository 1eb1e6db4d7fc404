"""Which pieces travel when a tensor moves from one mesh to another.

The meshes may differ in size and axes and may share devices. Every element that a device needs comes
from exactly one holder: the device itself where it holds the element, else one of the replicas, in
turn, so that replicas share the work. A term of a sum that lies on ``PARTIAL`` axes is delivered
to the first device of those axes only, since the others may hold nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    can_lie,
    local_shape,
    shard_offsets,
)
from shardwright.core.strategy import Mesh

Box = tuple[tuple[int, int], ...]  # (first, size) per dim

# One tensor in more pieces is refused: 512 shards for 512 devices each, say.
MOST_PIECES = 2**18


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor on its way: where it begins in the sender's and the receiver's shard."""

    source: int
    destination: int
    taken: Box
    put: Box

    @property
    def num_elements(self) -> int:
        """How many elements travel."""
        return math.prod(size for _, size in self.taken)


def pieces_between(
    shape: tuple[int, ...], here: Mesh, lying: Layout, there: Mesh, wanted: Layout
) -> tuple[Piece, ...]:
    """Return all pieces, by destination in mesh order. ``shape`` is the whole tensor's.

    Where both sides cut a tensor alike on meshes of equal sizes, every device at a coordinate sends
    its whole shard to the one at the same coordinate, partial sums included. Otherwise ``lying``
    must not hold partial sums: ValueError. So are more than ``MOST_PIECES``. Time grows with their
    number.
    """
    if here.sizes == there.sizes and lying == wanted:
        return whole_shards(local_shape(shape, lying, here.sizes), here, there)
    if PARTIAL in lying:
        raise ValueError("partial sums cannot travel to a mesh that is cut otherwise; sum them up")
    held = dict(_boxes(shape, here, lying))
    holders: dict[Box, list[tuple[int, int, int]]] = {}  # as heaps: served so far, place, device
    for place, (device, box) in enumerate(held.items()):
        holders.setdefault(box, []).append((0, place, device))
    order = {box: number for number, box in enumerate(holders)}
    cell = local_shape(shape, lying, here.sizes)
    targets = list(_boxes(shape, there, wanted))
    _check_number(cell, len(holders), targets)
    pieces: list[Piece] = []
    for target, box in targets:
        for shard in sorted(_overlapping(cell, box), key=order.__getitem__):
            common = _intersection(shard, box)
            source = target
            if held.get(target) != shard:
                served, place, source = holders[shard][0]
                count = math.prod(size for _, size in common)
                heapq.heapreplace(holders[shard], (served + count, place, source))
            piece = Piece(source, target, _within(common, shard), _within(common, box))
            pieces.append(piece)
    return tuple(pieces)


def whole_shards(shape: tuple[int, ...], here: Mesh, there: Mesh) -> tuple[Piece, ...]:
    """Return pieces that bring shards of one shape from every coordinate to the same one."""
    whole = tuple((0, size) for size in shape)
    ends = zip(here.devices, there.devices, strict=True)
    return tuple(Piece(source, target, whole, whole) for source, target in ends)


def _check_number(cell: tuple[int, ...], num_shards: int, targets: list[tuple[int, Box]]) -> None:
    """Refuse what would take more messages than any network bears, before all are listed."""
    if num_shards * len(targets) <= MOST_PIECES:
        return
    wanted = Counter(box for _, box in targets)
    count = sum(
        times * math.prod(len(starts) for starts in _starts(cell, box))
        for box, times in wanted.items()
    )
    if count > MOST_PIECES:
        raise ValueError(
            f"moving one tensor from {num_shards:,} shards to {len(targets):,} devices that are cut "
            f"otherwise takes {count:,} messages, more than {MOST_PIECES:,}; shard it over fewer "
            "devices, or keep its readers on one mesh"
        )


def _boxes(shape: tuple[int, ...], mesh: Mesh, layout: Layout) -> Iterator[tuple[int, Box]]:
    """Return every device with the box it holds; of partial sums only the first device's."""
    sizes = local_shape(shape, layout, mesh.sizes)
    for device, place in zip(
        mesh.devices, itertools.product(*(range(size) for size in mesh.sizes)), strict=True
    ):
        if any(at and placement == PARTIAL for at, placement in zip(place, layout, strict=True)):
            continue
        offsets = shard_offsets(shape, layout, mesh.sizes, place)
        yield device, tuple(zip(offsets, sizes, strict=True))


def _starts(cell: tuple[int, ...], box: Box) -> list[range]:
    """Return, per dim, where the shards begin that a box overlaps; shards are equal cells."""
    return [
        range(first // max(1, size) * size, first + length, max(1, size))
        for size, (first, length) in zip(cell, box, strict=True)
    ]


def _overlapping(cell: tuple[int, ...], box: Box) -> Iterator[Box]:
    """Return the shards that a box overlaps."""
    for starts in itertools.product(*_starts(cell, box)):
        yield tuple(zip(starts, cell, strict=True))


def _intersection(one: Box, other: Box) -> Box:
    """Return what two boxes that overlap have in common."""
    common: list[tuple[int, int]] = []
    for (start, size), (begin, length) in zip(one, other, strict=True):
        first = max(start, begin)
        common.append((first, min(start + size, begin + length) - first))
    return tuple(common)


def _within(box: Box, frame: Box) -> Box:
    return tuple(
        (first - start, size) for (first, size), (start, _) in zip(box, frame, strict=True)
    )


def arrival(shape: tuple[int, ...], wanted: Layout, sizes: tuple[int, ...]) -> Layout:
    """Return the layout in which a tensor should arrive so that each element travels once.

    Axes along which ``wanted`` has copies or partial sums shard a dim instead, the first that
    divides; what is to be replicated is gathered after arrival, inside the mesh.
    """
    chosen = [REPLICATE if placement == PARTIAL else placement for placement in wanted]
    for axis, placement in enumerate(chosen):
        if placement != REPLICATE or sizes[axis] == 1:
            continue
        for dim in range(len(shape)):
            finer = (*chosen[:axis], dim, *chosen[axis + 1 :])
            if not can_lie(shape, finer, sizes, axis):
                continue
            chosen[axis] = dim
            break
    return tuple(chosen)
