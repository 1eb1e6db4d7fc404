"""How parameters lie at rest: as in use, or sharded further over axes that hold full copies."""

from __future__ import annotations

import math
from functools import lru_cache

from shardwright.core.layout import FLAT, REPLICATE, Layout, can_lie, inner, local_shape, shard_dim


@lru_cache(maxsize=1 << 14)
def shard_further(
    shape: tuple[int, ...],
    use: Layout,
    axis_sizes: tuple[int, ...],
    axes: tuple[int, ...] | None = None,
) -> Layout:
    """Shard a layout's full copies over ``axes`` (all by default), in turn.

    Each axis takes the first dim whose shards it can split, outside those of later axes if no dim
    is left to it otherwise (``inner``): what is gathered over the axis is then one block. Where no
    dim divides, the axis cuts flat shards, which divide anything; it is left alone where there are
    fewer elements than pieces. Vectors that are split in use do without either: they save less than
    their messages cost.
    """
    layout = use
    dims = range(len(shape))
    goals = (*dims, *map(inner, dims)) if len(shape) > 1 else tuple(dims)
    is_cut = len(shape) == 1 and any(shard_dim(placement) >= 0 for placement in use)
    chosen = range(len(use)) if axes is None else axes
    for axis in [one for one in chosen if use[one] == REPLICATE and axis_sizes[one] > 1]:
        *finer, flat = ((*layout[:axis], goal, *layout[axis + 1 :]) for goal in (*goals, FLAT))
        has_enough = math.prod(local_shape(shape, layout, axis_sizes)) >= axis_sizes[axis]
        rest = layout if is_cut or not has_enough else flat
        layout = next((one for one in finer if can_lie(shape, one, axis_sizes, axis)), rest)
    return layout
