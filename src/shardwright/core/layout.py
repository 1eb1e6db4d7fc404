"""How a tensor lies on a mesh, in torch's words written as small integers.

A layout is one placement per mesh axis: ``dim >= 0`` means *Shard(dim)*, ``REPLICATE`` a full copy,
``PARTIAL`` a term of a sum over the axis. Where two axes shard one dim the earlier axis splits first
(outermost), as in DTensor. All shards are equal: a sharded size must be divisible.
"""

from __future__ import annotations

import math

from shardwright.core.graph import DTYPE_BYTES

REPLICATE = -1
PARTIAL = -2

Layout = tuple[int, ...]


def local_shape(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of one device's shard. Raises ValueError when a size does not divide."""
    local = list(shape)
    for placement, pieces in zip(layout, axis_sizes, strict=True):
        if placement >= 0:
            if local[placement] % pieces:
                raise ValueError(f"dim {placement} of {shape} does not divide into {pieces}")
            local[placement] //= pieces
    return tuple(local)


def whole_shape(
    local: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of the tensor whose shards have shape ``local``."""
    whole = list(local)
    for placement, pieces in zip(layout, axis_sizes, strict=True):
        if placement >= 0:
            whole[placement] *= pieces
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
    for placement, pieces, place in zip(layout, axis_sizes, coordinate, strict=True):
        if placement >= 0:
            extent[placement] //= pieces
            offset[placement] += place * extent[placement]
    return tuple(offset)


def layout_text(layout: Layout) -> str:
    """Write a layout as people read it: ``S0·R·P``."""
    names = {REPLICATE: "R", PARTIAL: "P"}
    return "·".join(names.get(placement, f"S{placement}") for placement in layout) or "R"
