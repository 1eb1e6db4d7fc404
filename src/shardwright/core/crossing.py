"""Which pieces travel when a tensor moves from one mesh to another.

The meshes may differ in size and axes and may share devices. Every element that a device needs comes
from exactly one holder: the device itself where it holds the element, else one of the replicas, in
turn, so that replicas share the work. A term of a sum that lies on ``PARTIAL`` axes is delivered
to the first device of those axes only, since the others may hold nothing.
"""

from __future__ import annotations

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
    must not hold partial sums: ValueError. So are more than ``MOST_PIECES``.
    """
    if here.sizes == there.sizes and lying == wanted:
        whole = tuple((0, size) for size in local_shape(shape, lying, here.sizes))
        ends = zip(here.devices, there.devices, strict=True)
        return tuple(Piece(source, target, whole, whole) for source, target in ends)
    if PARTIAL in lying:
        raise ValueError("partial sums cannot travel to a mesh that is cut otherwise; sum them up")
    held = dict(_boxes(shape, here, lying))
    holders: dict[Box, list[int]] = {}  # equal shards are looked at once
    for device, box in held.items():
        holders.setdefault(box, []).append(device)
    targets = list(_boxes(shape, there, wanted))
    _check_number(holders, targets)
    served: dict[int, int] = dict.fromkeys(here.devices, 0)
    pieces: list[Piece] = []
    for target, box in targets:
        for common, group in _cover(holders, box):
            source = target if target in group else min(group, key=served.__getitem__)
            piece = Piece(source, target, _within(common, held[source]), _within(common, box))
            served[source] += piece.num_elements if source != target else 0
            pieces.append(piece)
    return tuple(pieces)


def _check_number(holders: dict[Box, list[int]], targets: list[tuple[int, Box]]) -> None:
    """Refuse what would take more messages than any network bears, before all are listed."""
    if len(holders) * len(targets) <= MOST_PIECES:
        return
    wanted = Counter(box for _, box in targets)
    count = sum(
        times * sum(_intersection(shard, box) is not None for shard in holders)
        for box, times in wanted.items()
    )
    if count > MOST_PIECES:
        raise ValueError(
            f"moving one tensor from {len(holders):,} shards to {len(targets):,} devices that are cut "
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


def _cover(holders: dict[Box, list[int]], box: Box) -> Iterator[tuple[Box, list[int]]]:
    """Return the parts of a box that different shards hold, each with all its holders."""
    for shard, devices in holders.items():
        common = _intersection(shard, box)
        if common is not None:
            yield common, devices


def _intersection(one: Box, other: Box) -> Box | None:
    common: list[tuple[int, int]] = []
    for (start, size), (begin, length) in zip(one, other, strict=True):
        first, stop = max(start, begin), min(start + size, begin + length)
        if first >= stop:
            return None
        common.append((first, stop - first))
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
