"""Which pieces travel when a tensor moves from one mesh to another.

The meshes may differ in size and axes and may share devices. Every element that a device needs comes
from exactly one holder: the device itself where it holds the element, else one of the replicas, in
turn, so that replicas share the work. A term of a sum that lies on ``PARTIAL`` axes is delivered
to the first device of those axes only, since the others may hold nothing. Where terms of a sum become
the sum, every term travels, and the receiver adds them up in the order of the pieces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.core.layout import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Layout,
    can_lie,
    local_shape,
    shard_offsets,
    whole_shape,
)
from shardwright.core.strategy import Mesh

Box = tuple[tuple[int, int], ...]  # (first, size) per dim
Shards = tuple[tuple[int, ...], Layout, Mesh]  # the shape on a device

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
    its whole shard to the one at the same coordinate, partial sums included. Partial sums become others
    in no other way: ValueError. So are more than ``MOST_PIECES``. Time grows with their number. Where one
    side is flat (``crosses_flat``) boxes are of tensors as one row.
    """
    if here.sizes == there.sizes and lying == wanted:
        return whole_shards(local_shape(shape, lying, here.sizes), here, there)
    if PARTIAL in lying and PARTIAL in wanted:
        raise ValueError("partial sums cannot travel to a mesh that is cut otherwise; sum them up")
    if PARTIAL in lying:
        return _terms(shape, here, lying, there, wanted)
    if FLAT in lying or FLAT in wanted:
        return _in_a_row(math.prod(shape), here, lying, there, wanted)
    return _cut_otherwise(shape, here, lying, there, wanted)


def crossing_shape(source: Shards, result: Shards) -> tuple[int, ...]:
    """Return the shape of a whole tensor from its shards on two meshes: padding of flat ones is no part of it."""
    shape, layout, mesh = result if FLAT in source[1] else source
    return whole_shape(shape, layout, mesh.sizes)


def elements_between(source: Shards, result: Shards) -> list[tuple[int, int, int]]:
    """Return sender, receiver and number of elements of all pieces between two meshes, see ``pieces_between``.

    Pipelines ask for the same between many pairs of meshes, and searches for many strategies: with devices
    numbered from the first mesh on it is found once.
    """
    (_, lying, here), (_, wanted, there) = source, result
    place = {device: number for number, device in enumerate(here.devices)}
    receivers = tuple([place.setdefault(device, len(place)) for device in there.devices])
    ends = (here.sizes, lying), (there.sizes, wanted)
    rows = _elements_numbered(crossing_shape(source, result), ends, receivers)
    devices = list(place)
    return [
        (devices[sender], devices[receiver], count) for sender, receiver, count in rows.tolist()
    ]


Cut = tuple[tuple[int, ...], Layout]  # sizes of a mesh, and what is cut along its axes


@lru_cache(maxsize=64)
def _elements_numbered(
    shape: tuple[int, ...], ends: tuple[Cut, Cut], receivers: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return the same where the first mesh's devices are numbered from 0 on, a row each."""
    (sizes, lying), (others, wanted) = ends
    here, there = (
        Mesh(axes=tuple(map(str, range(len(own)))), sizes=own, devices=devices)
        for own, devices in ((sizes, tuple(range(math.prod(sizes)))), (others, receivers))
    )
    pieces = pieces_between(shape, here, lying, there, wanted)
    rows = [(one.source, one.destination, one.num_elements) for one in pieces]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _cut_otherwise(
    shape: tuple[int, ...], here: Mesh, lying: Layout, there: Mesh, wanted: Layout
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor of which no side holds terms of a sum or flat shards."""
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


def adds_up(lying: Layout, wanted: Layout) -> bool:
    """Whether what travels from one layout to another are terms, which arrive as their sum."""
    return PARTIAL in lying and PARTIAL not in wanted


def crosses_flat(flat: Layout, other: Layout) -> bool:
    """Whether flat shards may be sent to, or come from, a mesh that holds the tensor as ``other``: whole,
    or in terms of a sum, while one axis alone cuts the row."""
    rest = [placement for placement in flat if placement != FLAT]
    return len(flat) - len(rest) == 1 and {*rest, *other} <= {REPLICATE, PARTIAL}


def _terms(
    shape: tuple[int, ...], here: Mesh, lying: Layout, there: Mesh, wanted: Layout
) -> tuple[Piece, ...]:
    """Return the pieces of every term of a sum, by destination and then by the term's place."""
    kept = [axis for axis, placement in enumerate(lying) if placement != PARTIAL]
    own = tuple([lying[axis] for axis in kept])
    parts = _parts(here, kept)
    if len(parts) * len(there.devices) > MOST_PIECES:
        raise ValueError(
            f"adding up {len(parts):,} terms of one tensor on {len(there.devices):,} devices takes more "
            f"than {MOST_PIECES:,} messages; sum them up before, or on fewer devices"
        )
    pieces = [piece for part in parts for piece in pieces_between(shape, part, own, there, wanted)]
    at = {device: number for number, device in enumerate(there.devices)}
    return tuple(sorted(pieces, key=lambda piece: at[piece.destination]))


def _parts(mesh: Mesh, kept: list[int]) -> list[Mesh]:
    """Return the parts of a mesh that hold one term of a sum each, on the axes that are ``kept``."""
    terms: dict[tuple[int, ...], list[int]] = {}
    for device, place in zip(mesh.devices, _places(mesh), strict=True):
        term = tuple([at for axis, at in enumerate(place) if axis not in kept])
        terms.setdefault(term, []).append(device)
    axes, sizes = (
        tuple([mesh.axes[axis] for axis in kept]),
        tuple([mesh.sizes[axis] for axis in kept]),
    )
    return [Mesh(axes=axes, sizes=sizes, devices=tuple(devices)) for devices in terms.values()]


def _in_a_row(
    count: int, here: Mesh, lying: Layout, there: Mesh, wanted: Layout
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor of so many elements of which one side holds flat shards, whose padding
    stays where it is."""
    is_source = FLAT in lying
    flat, mesh = (lying, here) if is_source else (wanted, there)
    if not crosses_flat(flat, wanted if is_source else lying):
        raise ValueError(
            f"flat shards travel to and from whole tensors, cut along one axis, not between {lying} and "
            f"{wanted}; gather them first"
        )
    padded = math.prod(local_shape((count,), flat, mesh.sizes)) * mesh.sizes[flat.index(FLAT)]
    pieces = _cut_otherwise((padded,), here, _as_shards(lying), there, _as_shards(wanted))
    short = [_cut_short(one, count, one.put if is_source else one.taken) for one in pieces]
    return tuple([one for one in short if one.num_elements > 0])


def _as_shards(layout: Layout) -> Layout:
    """Return a layout of a row whose flat pieces are shards of its dim."""
    return tuple([0 if placement == FLAT else placement for placement in layout])


def _cut_short(piece: Piece, count: int, whole: Box) -> Piece:
    """Return a piece without what lies behind the first ``count`` elements of the row that is ``whole``."""
    ((first, size),) = whole
    size = max(0, min(size, count - first))
    ((taken, _),), ((put, _),) = piece.taken, piece.put
    return Piece(piece.source, piece.destination, ((taken, size),), ((put, size),))


def _places(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Return the coordinates of a mesh's devices."""
    return itertools.product(*(range(size) for size in mesh.sizes))


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
    for device, place in zip(mesh.devices, _places(mesh), strict=True):
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
