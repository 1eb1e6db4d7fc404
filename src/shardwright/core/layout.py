"""How a tensor lies on a mesh, in torch's words written as small integers.

A layout is one placement per mesh axis: ``dim >= 0`` means *Shard(dim)*, ``REPLICATE`` a full copy,
``PARTIAL`` a term of a sum over the axis. Where two axes shard one dim the earlier axis splits first
(outermost), as in DTensor, except that ``inner(dim)`` means *Shard(dim)* too but splits after all
later axes that shard the dim (torch's strided shard). All shards are equal: a sharded size must be
divisible.

``FLAT`` divides anything, and is for parameters between their uses only: what the other axes leave is
laid out as one row (row-major), padded at its end and cut into equal pieces, by the flat axes one
after another. Such a shard has one dim. Its padding holds zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.graph import tensor_bytes

REPLICATE = -1
PARTIAL = -2
FLAT = -(1 << 20)

Layout = tuple[int, ...]


def inner(dim: int) -> int:
    """Return the placement that splits ``dim`` within the pieces of all later axes."""
    return -3 - dim


def shard_dim(placement: int) -> int:
    """Return the dim which a placement shards, -1 where it shards none, or no single one."""
    if placement >= 0:
        return placement
    return -3 - placement if FLAT < placement < PARTIAL else -1


def is_split(placement: int) -> bool:
    """Whether devices along the axis hold different pieces."""
    return placement == FLAT or shard_dim(placement) >= 0


def unflattened(layout: Layout) -> Layout:
    """Return a layout with full copies where it has flat shards."""
    return tuple([REPLICATE if placement == FLAT else placement for placement in layout])


def split_order(layout: Layout) -> tuple[int, ...]:
    """Return the sharding axes, of any one dim the axis that splits it first before the others."""
    plain = [axis for axis, placement in enumerate(layout) if placement >= 0]
    last = [axis for axis, placement in enumerate(layout) if FLAT < placement < PARTIAL]
    return (*plain, *reversed(last))


def is_innermost(layout: Layout, axis: int) -> bool:
    """Whether a sharding axis splits its dim last: only such an axis can be gathered alone."""
    dim = shard_dim(layout[axis])
    return [other for other in split_order(layout) if shard_dim(layout[other]) == dim][-1] == axis


def normal(layout: Layout, axis_sizes: tuple[int, ...]) -> Layout:
    """Return the one way of writing a layout: an axis of one device holds a full copy, and
    ``inner`` stands only where a later axis shards the same dim.
    """
    result = [
        REPLICATE if size == 1 else placement
        for placement, size in zip(layout, axis_sizes, strict=True)
    ]
    for axis in reversed(range(len(result))):
        dim = shard_dim(result[axis])
        if dim >= 0 and all(shard_dim(later) != dim for later in result[axis + 1 :]):
            result[axis] = dim
    return tuple(result)


@lru_cache(maxsize=1 << 16)
def local_shape(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of one device's shard. Raises ValueError when a size does not divide."""
    local = list(shape)
    for placement, pieces in zip(layout, axis_sizes, strict=True):
        dim = shard_dim(placement)
        if dim >= 0:
            if local[dim] % pieces:
                raise ValueError(f"dim {dim} of {shape} does not divide into {pieces}")
            local[dim] //= pieces
    flat = _num_flat(layout, axis_sizes)
    return tuple(local) if flat == 1 else (-(-math.prod(local) // flat),)


def _num_flat(layout: Layout, axis_sizes: tuple[int, ...]) -> int:
    """Return into how many flat pieces a layout cuts."""
    if FLAT not in layout:
        return 1
    pairs = zip(layout, axis_sizes, strict=True)
    return math.prod([size for placement, size in pairs if placement == FLAT])


def can_lie(shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], axis: int) -> bool:
    """Whether ``axis`` may have come to split the dim that it does: evenly, and inside all others."""
    dim = shard_dim(layout[axis])
    pieces = math.prod(
        size for size, placed in zip(axis_sizes, layout, strict=True) if shard_dim(placed) == dim
    )
    is_written_so = layout[axis] >= 0 or normal(layout, axis_sizes) == layout
    return shape[dim] % pieces == 0 and is_innermost(layout, axis) and is_written_so


def whole_shape(
    local: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of the tensor whose shards have shape ``local``."""
    whole = list(local)
    for placement, pieces in zip(layout, axis_sizes, strict=True):
        if shard_dim(placement) >= 0:
            whole[shard_dim(placement)] *= pieces
    return tuple(whole)


def local_bytes(
    shape: tuple[int, ...], dtype: str, layout: Layout, axis_sizes: tuple[int, ...]
) -> int:
    """Return the bytes one device holds of a tensor."""
    return tensor_bytes(local_shape(shape, layout, axis_sizes), dtype)


def shard_offsets(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Return where, in the whole tensor, the shard of the device at ``coordinate`` begins; of a flat
    shard, where that begins which is cut into flat pieces."""
    extent = list(shape)
    offset = [0] * len(shape)
    for axis in split_order(layout):
        dim = shard_dim(layout[axis])
        extent[dim] //= axis_sizes[axis]
        offset[dim] += coordinate[axis] * extent[dim]
    return tuple(offset)


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box of a whole tensor which a shard holds: its elements stand in the shard one after another,
    from ``first`` on, where the shard is seen as one row."""

    first: int
    start: tuple[int, ...]
    size: tuple[int, ...]


def shard_boxes(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[ShardBox, ...]:
    """Return the boxes of the whole tensor that the device at ``coordinate`` holds.

    There is one, except of a flat shard: none where that is all padding, and up to two per dim.
    """
    offsets = shard_offsets(shape, layout, axis_sizes, coordinate)
    extent = local_shape(shape, unflattened(layout), axis_sizes)
    if _num_flat(layout, axis_sizes) == 1:
        return (ShardBox(0, offsets, extent),)
    begin, width = 0, math.prod(extent)
    end = width
    for axis, placement in enumerate(layout):
        if placement == FLAT:
            width = -(-width // axis_sizes[axis])
            begin += coordinate[axis] * width
            end = min(end, begin + width)
    boxes: list[ShardBox] = []
    first = 0
    for start, size in _row_boxes(extent, begin, end):
        moved = tuple([a + b for a, b in zip(offsets, start, strict=True)])
        boxes.append(ShardBox(first, moved, size))
        first += math.prod(size)
    return tuple(boxes)


def _row_boxes(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (start, size) of boxes that are the elements ``begin`` to ``end`` of a tensor in a row:
    what is left of a first slice, whole slices, what there is of a last one."""
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    width = math.prod(shape[1:])
    while begin < end:
        number, skipped = divmod(begin, width)
        whole = 0 if skipped else (end - begin) // width
        if whole:
            stop = begin + whole * width
            yield (number, *[0] * (len(shape) - 1)), (whole, *shape[1:])
        else:
            stop = min(end, (number + 1) * width)
            for start, size in _row_boxes(shape[1:], skipped, stop - number * width):
                yield (number, *start), (1, *size)
        begin = stop


def layout_text(layout: Layout) -> str:
    """Write a layout as people read it: ``S0·R·P``, an inner shard as ``S0'``, a flat one as ``F``."""
    names = {REPLICATE: "R", PARTIAL: "P", FLAT: "F"}
    texts = [
        names.get(placement, f"S{shard_dim(placement)}" + "'" * (placement < PARTIAL))
        for placement in layout
    ]
    return "·".join(texts) or "R"
