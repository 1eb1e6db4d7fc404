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

from shardwright.core.graph import DTYPE_BYTES, tensor_bytes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One primitive. ``bytes`` follows ``Message.bytes``, but on a ``_Routes``, whatever the tensor's size, it is
    how many shards these count; ``layout`` is the layout afterwards."""

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
    found = _route(core, source, target, axis_sizes, scale)
    if found is None:
        raise ValueError(
            f"no way from {layout_text(source)} to {layout_text(target)} for shape {shape}"
        )
    steps, size = list[Step](), tensor_bytes(shape, dtype)
    for one in found:
        ends, here = (one.axes, one.from_dim, one.to_dim), size // _pieces(source, axis_sizes)
        steps.append(_step(one.primitive, *ends, here * one.bytes, one.layout))
        source = one.layout
    return tuple(steps)


_normal = lru_cache(maxsize=1 << 13)(normal)


@lru_cache(maxsize=1 << 13)
def _pieces(layout: Layout, axis_sizes: tuple[int, ...]) -> int:
    """Return into how many pieces a layout without flat shards cuts."""
    pairs = zip(layout, axis_sizes, strict=True)
    return math.prod([size for placement, size in pairs if shard_dim(placement) >= 0])


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
        steps.append(_flat_step("all_gather", axis, size, layout))
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
        steps.append(_step("all_reduce", left, -1, -1, size, layout))
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
        return _flat_step("reduce_scatter", axis, padded, after)
    return _flat_step("slice", axis, local_bytes(shape, dtype, layout, sizes), after)


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


def _flat_step(primitive: Primitive, axis: int, size: int, layout: Layout) -> Step:
    ends = (FLAT, -1) if primitive == "all_gather" else (-1, FLAT)
    return _step(primitive, (axis,), *ends, size, layout)


_Route = tuple[Step, ...]
# What is known of the routes between two layouts: the scales at which one was the cheapest.
_Known = list[tuple[float, _Route | None]]


@lru_cache(maxsize=1 << 16)
def _known_routes(
    core: tuple[int, ...], source: Layout, target: Layout, axis_sizes: tuple[int, ...]
) -> _Known:
    """Return a list to remember routes in, one per question but for the scale.

    A single move that is the cheapest where only bytes matter is so at every scale: only slices cost less to start,
    and as they send nothing they would have been cheaper there.
    """
    ends = zip(source, target, strict=True)
    if any(wanted == PARTIAL != held for held, wanted in ends):
        return [(HUGE, None)]  # terms cannot be made of a sum
    found = _cheapest(core, source, target, axis_sizes, HUGE)
    known: _Known = [(HUGE, found)]
    return [(0.0, found), *known] if found is not None and len(found) == 1 else known


def _route(
    core: tuple[int, ...], source: Layout, target: Layout, axis_sizes: tuple[int, ...], scale: float
) -> _Route | None:
    """Return the cheapest moves, None where there are none.

    A route's price is linear in the scale. So one that is the cheapest at two scales is so at all
    scales between.
    """
    known = _known_routes(core, source, target, axis_sizes)
    below: _Route | None = None
    for at, route in known:
        if at >= scale:
            if route is None or route == below or at == scale:
                return route
            break
        below = route
    found = _cheapest(core, source, target, axis_sizes, scale)
    known.append((scale, found))
    known.sort(key=lambda entry: entry[0])
    return found


def _cheapest(
    core: tuple[int, ...], source: Layout, target: Layout, axis_sizes: tuple[int, ...], scale: float
) -> _Route | None:
    # Else the moves do not depend on the target, so that routes to many share them.
    wanted = tuple([min(placement, PARTIAL) for placement in target])
    return _routes(core, source, wanted, axis_sizes, scale).to(target)


@lru_cache(maxsize=1 << 9)
def _routes(
    core: tuple[int, ...], source: Layout, wanted: Layout, axis_sizes: tuple[int, ...], scale: float
) -> _Routes:
    return _Routes(core, source, wanted, axis_sizes, scale)


class _Routes:
    """The cheapest routes from a layout, by Dijkstra's algorithm, which goes on where it was left
    when another target is asked for."""

    def __init__(
        self, core: tuple[int, ...], source: Layout, wanted: Layout, sizes: tuple[int, ...],
        scale: float,
    ) -> None:  # fmt: skip
        self._core, self._wanted, self._sizes, self._scale = core, wanted, sizes, scale
        self._queue: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
        self._best: dict[Layout, float] = {source: 0.0}
        self._cause: dict[Layout, tuple[Layout, Step]] = {}
        self._settled: set[Layout] = set()
        self._ticket = itertools.count(1)

    def to(self, target: Layout) -> _Route | None:
        """Return the cheapest moves to a layout, None where there are none."""
        while target not in self._settled:
            if not self._queue:
                return None
            price, _, layout = heapq.heappop(self._queue)
            if layout not in self._settled:
                self._settled.add(layout)
                self._look_around(layout, price)
        return _trace(self._cause, target)

    def _look_around(self, layout: Layout, price: float) -> None:
        best = self._best
        elements, edges = _edges(self._core, layout, self._wanted, self._sizes)
        here = elements * self._scale
        for move, per_byte, fixed in edges:
            total = price + (per_byte * here + fixed)
            if total < best.get(move.layout, math.inf):
                best[move.layout] = total
                self._cause[move.layout] = (layout, move)
                heapq.heappush(self._queue, (total, next(self._ticket), move.layout))


def _trace(cause: dict[Layout, tuple[Layout, Step]], layout: Layout) -> _Route:
    moves: list[Step] = []
    while layout in cause:
        layout, move = cause[layout]
        moves.append(move)
    return tuple(reversed(moves))


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
            move = _step("all_reduce", axes, -1, -1, 1, _replaced(layout, axes, REPLICATE))
            yield move, 2 * (group - 1) / group, LATENCY_BYTES


def _turns(
    core: tuple[int, ...], layout: Layout, wanted: Layout, sizes: tuple[int, ...], axis: int
) -> Iterator[_Edge]:
    """Yield the moves that let one axis split another dim, or none."""
    placement, size, dim = layout[axis], sizes[axis], shard_dim(layout[axis])
    if dim >= 0:
        whole = _replaced(layout, (axis,), REPLICATE)
        yield _step("all_gather", (axis,), dim, -1, size, whole), size - 1, LATENCY_BYTES
    for goal in _goals(len(core), wanted[axis]):
        after, split = _replaced(layout, (axis,), goal), shard_dim(goal)
        if split == dim or not can_lie(core, after, sizes, axis):
            continue
        if placement == REPLICATE:
            yield _step("slice", (axis,), -1, split, 1, after), 0.0, 1.0
        else:
            primitive = "reduce_scatter" if placement == PARTIAL else "all_to_all"
            move = _step(primitive, (axis,), dim, split, 1, after)
            yield move, (size - 1) / size, LATENCY_BYTES


def _goals(rank: int, wanted: int) -> Iterator[int]:
    """Yield the shards that an axis may turn to: any dim, and the inner one that is wanted."""
    yield from range(rank)
    if wanted < PARTIAL:
        yield wanted


def _replaced(layout: Layout, axes: tuple[int, ...], placement: int) -> Layout:
    return tuple(placement if axis in axes else old for axis, old in enumerate(layout))
