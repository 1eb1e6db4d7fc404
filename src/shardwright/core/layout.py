"""How a tensor lies on a mesh, in torch's words written as small integers.

A layout is one placement per mesh axis: ``dim >= 0`` means *Shard(dim)*, ``REPLICATE`` a full copy,
``PARTIAL`` a term of a sum over the axis. Where two axes shard one dim the earlier axis splits first
(outermost), as in DTensor, except that ``inner(dim)`` means *Shard(dim)* too but splits after all
later axes that shard the dim (torch's strided shard). All shards are equal: a sharded size must be
divisible.
"""

from __future__ import annotations

import math
from functools import lru_cache

from shardwright.core.graph import DTYPE_BYTES

REPLICATE = -1
PARTIAL = -2

Layout = tuple[int, ...]


def inner(dim: int) -> int:
    """Return the placement that splits ``dim`` within the pieces of all later axes."""
    return -3 - dim


def shard_dim(placement: int) -> int:
    """Return the dim which a placement shards, -1 where it shards none."""
    if placement >= 0:
        return placement
    return -3 - placement if placement < PARTIAL else -1


def split_order(layout: Layout) -> tuple[int, ...]:
    """Return the sharding axes, of any one dim the axis that splits it first before the others."""
    plain = [axis for axis, placement in enumerate(layout) if placement >= 0]
    last = [axis for axis, placement in enumerate(layout) if placement < PARTIAL]
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
    return tuple(local)


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
    return math.prod(local_shape(shape, layout, axis_sizes)) * DTYPE_BYTES[dtype]


def shard_offsets(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Return where, in the whole tensor, the shard of the device at ``coordinate`` begins."""
    extent = list(shape)
    offset = [0] * len(shape)
    for axis in split_order(layout):
        dim = shard_dim(layout[axis])
        extent[dim] //= axis_sizes[axis]
        offset[dim] += coordinate[axis] * extent[dim]
    return tuple(offset)


def layout_text(layout: Layout) -> str:
    """Write a layout as people read it: ``S0·R·P``, an inner shard as ``S0'``."""
    names = {REPLICATE: "R", PARTIAL: "P"}
    texts = [
        names.get(placement, f"S{shard_dim(placement)}" + "'" * (placement < PARTIAL))
        for placement in layout
    ]
    return "·".join(texts) or "R"
