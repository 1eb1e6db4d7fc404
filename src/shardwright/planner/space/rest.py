"""How parameters lie at rest: as in use, or sharded further over axes that hold full copies."""

from __future__ import annotations

from functools import lru_cache

from shardwright.core.layout import REPLICATE, Layout, can_lie, inner


@lru_cache(maxsize=1 << 14)
def shard_further(
    shape: tuple[int, ...],
    use: Layout,
    axis_sizes: tuple[int, ...],
    axes: tuple[int, ...] | None = None,
) -> Layout:
    """Shard a layout's full copies over ``axes`` (all by default), in turn.

    Each axis takes the first dim whose shards it can split, outside those of later axes if no dim
    is left to it otherwise (``inner``): what is gathered over the axis is then one block. Vectors
    do without: they save less than their messages cost. An axis is left alone where nothing
    divides.
    """
    layout = use
    dims = range(len(shape))
    goals = (*dims, *map(inner, dims)) if len(shape) > 1 else tuple(dims)
    for axis in range(len(use)) if axes is None else axes:
        if layout[axis] != REPLICATE or axis_sizes[axis] == 1:
            continue
        for goal in goals:
            finer = (*layout[:axis], goal, *layout[axis + 1 :])
            if can_lie(shape, finer, axis_sizes, axis):
                layout = finer
                break
    return layout
