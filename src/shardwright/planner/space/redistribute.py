"""From one layout to another on the same mesh by the cheapest sequence of collectives.

The search is Dijkstra over layouts. A step's price is the bytes one device must send (ring
algorithms), plus a constant which stands for latency and keeps sequences short. Inner shards are
entered only where the target has them, so that they cost nothing where nobody asked for them. Flat
shards are no part of the search: they are gathered before it and cut after it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.layout import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Layout,
    can_lie,
    is_innermost,
    layout_text,
    local_bytes,
    local_shape,
    normal,
    shard_dim,
    unflattened,
)
from shardwright.core.program import Primitive

# Bytes which cost as much as starting one more collective; only breaks ties between sequences.
LATENCY_BYTES = 16384.0
# A scale at which nothing but bytes matters.
HUGE = 2.0**60


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive. ``bytes`` follows ``Message.bytes``, but while ways are looked for, whatever the tensor's size,
    it is how many shards these count; ``layout`` is the layout afterwards."""

    primitive: Primitive
    axes: tuple[int, ...]
    from_dim: int
    to_dim: int
    bytes: int
    layout: Layout


def is_sum(steps: Sequence[Step]) -> bool:
    """Whether steps do nothing but sum over devices, so that all have the whole."""
    return [step.primitive for step in steps] == ["all_reduce"]


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
    source, target = _normal(source, axis_sizes), _normal(target, axis_sizes)
    if source == target:
        return ()
    if FLAT in source or FLAT in target:
        return tuple(_flat_steps(shape, dtype, source, target, axis_sizes))
    local_shape(shape, source, axis_sizes)  # which must exist
    # Which shards are possible depends on what each size shares with the mesh; the rest is scale.
    pieces = math.prod(axis_sizes)
    core = tuple(math.gcd(size, pieces) for size in shape)
    scale = math.prod(shape) / math.prod(core) * DTYPE_BYTES[dtype]
    found = _by_bytes(core, source, target, axis_sizes)
    if found is not None and len(found) > 1:
        found = _cheapest(core, source, target, axis_sizes, scale)
    if found is None:
        raise ValueError(
            f"no way from {layout_text(source)} to {layout_text(target)} for shape {shape}"
        )
    steps = list[Step]()
    for one in found:
        size = local_bytes(shape, dtype, source, axis_sizes) * one.bytes
        steps.append(Step(one.primitive, one.axes, one.from_dim, one.to_dim, size, one.layout))
        source = one.layout
    return tuple(steps)


_normal = lru_cache(maxsize=1 << 13)(normal)


def _flat_steps(
    shape: tuple[int, ...], dtype: str, source: Layout, target: Layout, sizes: tuple[int, ...]
) -> list[Step]:
    """Return steps between layouts of which one has flat shards at least.

    Sums over axes that are to hold full copies come last, on flat shards, which are smaller.
    """
    held, wanted = _axes_of(FLAT, source), _axes_of(FLAT, target)
    kept, layout, steps = _flat_kept(source, target, held, wanted), source, list[Step]()
    for axis in reversed(held[kept:]):
        size = local_bytes(shape, dtype, layout, sizes) * sizes[axis]
        layout = _replaced(layout, (axis,), REPLICATE)
        steps.append(Step("all_gather", (axis,), FLAT, -1, size, layout))
    if not kept:
        middle = unflattened(_before_cuts(layout, target, (FLAT, REPLICATE) if wanted else (FLAT,)))
        steps += reshard_steps(shape, dtype, layout, middle, sizes)
        layout = steps[-1].layout if steps else layout
    for axis in wanted[kept:]:
        steps.append(_flat_cut(shape, dtype, layout, sizes, axis))
        layout = steps[-1].layout
    left = tuple([axis for axis in _axes_of(PARTIAL, layout) if target[axis] != PARTIAL])
    if left:
        size, layout = local_bytes(shape, dtype, layout, sizes), _replaced(layout, left, REPLICATE)
        steps.append(Step("all_reduce", left, -1, -1, size, layout))
    return steps


def _axes_of(placement: int, layout: Layout) -> list[int]:
    return [axis for axis, one in enumerate(layout) if one == placement]


def _flat_cut(
    shape: tuple[int, ...], dtype: str, layout: Layout, sizes: tuple[int, ...], axis: int
) -> Step:
    """Return the step that cuts a layout into flat shards along an axis, terms being summed."""
    after = _replaced(layout, (axis,), FLAT)
    if layout[axis] == PARTIAL:
        padded = local_bytes(shape, dtype, after, sizes) * sizes[axis]
        return Step("reduce_scatter", (axis,), -1, FLAT, padded, after)
    return Step("slice", (axis,), -1, FLAT, local_bytes(shape, dtype, layout, sizes), after)


def _flat_kept(source: Layout, target: Layout, held: list[int], wanted: list[int]) -> int:
    """Return how many flat axes, from the first on, may stay as they are: what they cut is cut alike."""
    ends = zip(unflattened(source), unflattened(target), strict=True)
    if not all(a in (b, PARTIAL) if b == REPLICATE else a == b for a, b in ends):
        return 0
    pairs = zip(held, wanted, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _before_cuts(layout: Layout, target: Layout, sums: tuple[int, ...]) -> Layout:
    """Return a target in which terms are left where they are summed later."""
    ends = zip(layout, target, strict=True)
    return tuple([PARTIAL if one == PARTIAL and goal in sums else goal for one, goal in ends])


@lru_cache(maxsize=1 << 16)
def _by_bytes(
    core: tuple[int, ...], source: Layout, target: Layout, sizes: tuple[int, ...]
) -> tuple[Step, ...] | None:
    """Return the moves that are the cheapest where nothing but bytes matters. A single one is so at every scale: only
    slices cost less to start, and as they send nothing they would have been cheaper here."""
    return _cheapest(core, source, target, sizes, HUGE)


def _cheapest(
    core: tuple[int, ...], source: Layout, target: Layout, sizes: tuple[int, ...], scale: float
) -> tuple[Step, ...] | None:
    """Return the cheapest moves from one layout to another by Dijkstra's algorithm, None where there are none."""
    # Else the moves do not depend on the target, so that routes to many share them.
    wanted = tuple([min(placement, PARTIAL) for placement in target])
    best, ticket = {source: 0.0}, itertools.count(1)
    queue: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, 0, source, ())]
    while queue:
        price, _, layout, moves = heapq.heappop(queue)
        if layout == target:
            return moves
        if price > best[layout]:
            continue
        elements, edges = _edges(core, layout, wanted, sizes)
        here = elements * scale
        for move, per_byte, fixed in edges:
            total = price + (per_byte * here + fixed)
            if total < best.get(move.layout, math.inf):
                best[move.layout] = total
                heapq.heappush(queue, (total, next(ticket), move.layout, (*moves, move)))
    return None


# A step with what it costs for each byte here, and besides.
_Edge = tuple[Step, float, float]


@lru_cache(maxsize=1 << 13)
def _edges(
    core: tuple[int, ...], layout: Layout, wanted: Layout, sizes: tuple[int, ...]
) -> tuple[int, tuple[_Edge, ...]]:
    """Return the elements here, and every legal single move on the way to ``wanted`` with what it
    costs for each byte here, and besides. Of ``wanted`` only inner shards count."""
    found = [*_sums(layout, sizes)]
    for axis, placement in enumerate(layout):
        is_held = shard_dim(placement) >= 0 and not is_innermost(layout, axis)
        if sizes[axis] > 1 and not is_held:
            found += _turns(core, layout, wanted, sizes, axis)
    return math.prod(local_shape(core, layout, sizes)), tuple(found)


def _sums(layout: Layout, sizes: tuple[int, ...]) -> Iterator[_Edge]:
    """Yield all-reduces over some of the axes that hold terms."""
    partial = _axes_of(PARTIAL, layout)
    for count in range(1, len(partial) + 1):
        for axes in itertools.combinations(partial, count):
            group = math.prod([sizes[axis] for axis in axes])
            move = Step("all_reduce", axes, -1, -1, 1, _replaced(layout, axes, REPLICATE))
            yield move, 2 * (group - 1) / group, LATENCY_BYTES


def _turns(
    core: tuple[int, ...], layout: Layout, wanted: Layout, sizes: tuple[int, ...], axis: int
) -> Iterator[_Edge]:
    """Yield the moves that let one axis split another dim, or none."""
    placement, size, dim = layout[axis], sizes[axis], shard_dim(layout[axis])
    if dim >= 0:
        whole = _replaced(layout, (axis,), REPLICATE)
        yield Step("all_gather", (axis,), dim, -1, size, whole), size - 1, LATENCY_BYTES
    own = [wanted[axis]] if wanted[axis] < PARTIAL else []  # the inner shard that is wanted
    for goal in (*range(len(core)), *own):
        after, split = _replaced(layout, (axis,), goal), shard_dim(goal)
        if split == dim or not can_lie(core, after, sizes, axis):
            continue
        if placement == REPLICATE:
            yield Step("slice", (axis,), -1, split, 1, after), 0.0, 1.0
        else:
            primitive = "reduce_scatter" if placement == PARTIAL else "all_to_all"
            move = Step(primitive, (axis,), dim, split, 1, after)
            yield move, (size - 1) / size, LATENCY_BYTES


def _replaced(layout: Layout, axes: tuple[int, ...], placement: int) -> Layout:
    return tuple(placement if axis in axes else old for axis, old in enumerate(layout))
