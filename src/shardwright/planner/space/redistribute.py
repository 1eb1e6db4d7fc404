"""From one layout to another on the same mesh by the cheapest sequence of collectives.

The search is Dijkstra over layouts. A step's price is the bytes one device must send (ring
algorithms), plus a constant which stands for latency and keeps sequences short. Inner shards are
entered only where the target has them, so that they cost nothing where nobody asked for them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    can_lie,
    is_innermost,
    layout_text,
    local_bytes,
    normal,
    shard_dim,
)
from shardwright.core.program import Primitive

# Bytes which cost as much as starting one more collective; only breaks ties between sequences.
LATENCY_BYTES = 16384.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One primitive. ``bytes`` follows ``Message.bytes``; ``layout`` is the layout afterwards."""

    primitive: Primitive
    axes: tuple[int, ...]
    from_dim: int
    to_dim: int
    bytes: int
    layout: Layout


@lru_cache(maxsize=1 << 16)
def reshard_steps(
    shape: tuple[int, ...],
    dtype: str,
    source: Layout,
    target: Layout,
    axis_sizes: tuple[int, ...],
) -> tuple[Step, ...]:
    """Return the cheapest steps from ``source`` to ``target``, () when they are equal.

    Raises ValueError where no sequence exists: a full copy cannot become a partial sum, and shards
    must divide evenly.
    """
    source = normal(source, axis_sizes)
    target = normal(target, axis_sizes)
    queue: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
    best: dict[Layout, float] = {source: 0.0}
    cause: dict[Layout, tuple[Layout, Step]] = {}
    ticket = itertools.count(1)
    while queue:
        price, _, layout = heapq.heappop(queue)
        if layout == target:
            return _trace(cause, layout)
        if price > best[layout]:
            continue
        for step, extra in _moves(shape, dtype, layout, target, axis_sizes):
            total = price + extra
            if total < best.get(step.layout, float("inf")):
                best[step.layout] = total
                cause[step.layout] = (layout, step)
                heapq.heappush(queue, (total, next(ticket), step.layout))
    raise ValueError(
        f"no way from {layout_text(source)} to {layout_text(target)} for shape {shape}"
    )


def _trace(cause: dict[Layout, tuple[Layout, Step]], layout: Layout) -> tuple[Step, ...]:
    steps: list[Step] = []
    while layout in cause:
        layout, step = cause[layout]
        steps.append(step)
    return tuple(reversed(steps))


def _moves(
    shape: tuple[int, ...], dtype: str, layout: Layout, target: Layout, sizes: tuple[int, ...]
) -> Iterator[tuple[Step, float]]:
    """Yield every legal single step from ``layout`` on the way to ``target`` with its price."""
    here = local_bytes(shape, dtype, layout, sizes)
    partial = [axis for axis, placement in enumerate(layout) if placement == PARTIAL]
    for count in range(1, len(partial) + 1):
        for axes in itertools.combinations(partial, count):
            group = _product(sizes, axes)
            after = _replaced(layout, axes, REPLICATE)
            step = _step("all_reduce", axes, -1, -1, here, after)
            yield step, 2 * (group - 1) / group * here + LATENCY_BYTES
    for axis, placement in enumerate(layout):
        size, dim = sizes[axis], shard_dim(placement)
        if size == 1 or (dim >= 0 and not is_innermost(layout, axis)):
            continue
        if dim >= 0:
            after = _replaced(layout, (axis,), REPLICATE)
            step = _step("all_gather", (axis,), dim, -1, here * size, after)
            yield step, (size - 1) * here + LATENCY_BYTES
        for goal in _goals(len(shape), target[axis]):
            after, split = _replaced(layout, (axis,), goal), shard_dim(goal)
            if split == dim or not can_lie(shape, after, sizes, axis):
                continue
            if placement == REPLICATE:
                yield _step("slice", (axis,), -1, split, here, after), 1.0
            else:
                primitive = "reduce_scatter" if placement == PARTIAL else "all_to_all"
                step = _step(primitive, (axis,), dim, split, here, after)
                yield step, (size - 1) / size * here + LATENCY_BYTES


def _goals(rank: int, wanted: int) -> Iterator[int]:
    """Yield the shards that an axis may turn to: any dim, and the inner one that is wanted."""
    yield from range(rank)
    if wanted < PARTIAL:
        yield wanted


def _step(
    primitive: Primitive,
    axes: tuple[int, ...],
    from_dim: int,
    to_dim: int,
    size: int,
    layout: Layout,
) -> Step:
    return Step(
        primitive=primitive, axes=axes, from_dim=from_dim, to_dim=to_dim, bytes=size, layout=layout
    )


def _product(sizes: tuple[int, ...], axes: tuple[int, ...]) -> int:
    total = 1
    for axis in axes:
        total *= sizes[axis]
    return total


def _replaced(layout: Layout, axes: tuple[int, ...], placement: int) -> Layout:
    return tuple(placement if axis in axes else old for axis, old in enumerate(layout))
