"""Time against memory: all supported points of a factor graph, with the proof that they are all.

Recursive weight bisection (phase 1 of the two-phase method for two objectives): between two
neighbouring points minimise the weighting under which they tie; either a new point lies below their
segment, or the segment is proved to be an edge of the convex hull. The hull is also the Lagrangian
dual of "fastest within a memory limit", so reading it at the limit gives a lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from shardwright.planner.solve.network import Elimination, Minima

TOLERANCE = 1e-9  # of sums in another order


class HasBytes(Protocol):
    """What takes memory."""

    @property
    def bytes(self) -> float:
        """How much."""
        ...


T = TypeVar("T", bound=HasBytes)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """One assignment with its costs."""

    seconds: float
    bytes: float
    assignment: tuple[int, ...]


Pair = tuple[Point, Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """Supported points, fastest first, so bytes descend.

    ``edge_values`` holds, per neighbouring pair, the proved least value of
    seconds + slope * bytes with the slope at which the pair ties; it equals the pair's own value
    where the edge is final and is minus infinity where ``max_points`` stopped the bisection.
    ``floor`` are the least seconds and the least bytes, as far as they are proved.
    """

    points: tuple[Point, ...]
    edge_values: tuple[float, ...]
    floor: tuple[float, float]

    def bound(self, limit: float) -> float:
        """Return seconds that every assignment within ``limit`` bytes needs; inf if none fits."""
        best, least_bytes = self.floor
        if not self.points or limit < least_bytes * (1 - TOLERANCE):
            return math.inf
        for fast, small, value in zip(self.points, self.points[1:], self.edge_values, strict=False):
            best = max(best, value - slope(fast, small) * limit)
        return best

    def price(self, limit: float) -> float:
        """Return the seconds that one byte is worth at a limit; 0 where memory is no matter."""
        for fast, small in itertools.pairwise(self.points):
            if small.bytes <= limit < fast.bytes:
                return slope(fast, small)
        return 0.0


def slope(fast: Point, small: Point) -> float:
    """Return the seconds that one byte is worth where the two points tie."""
    return (small.seconds - fast.seconds) / (fast.bytes - small.bytes)


def _around(pairs: list[Pair], near: float) -> list[Pair]:
    """Return the pair of points between which so many bytes lie, if any."""
    return [(first, second) for first, second in pairs if second.bytes <= near < first.bytes]


def hull(
    elimination: Elimination,
    max_points: int = 64,
    focus: float | None = None,
    give_up: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> Hull:
    """Find every supported (seconds, bytes) point, at most about ``max_points`` of them.

    Beyond that number only the pair of points around ``focus`` bytes is bisected to the end. Where
    even the fastest point takes more than ``give_up`` seconds, the two ends are enough, and so are those found
    where the caller has ``stopped``.
    """
    ends, floor = _extremes(elimination, stopped)
    if not ends:
        return Hull(points=(), edge_values=(), floor=floor)
    points = ends
    if ends[0].seconds > give_up:
        max_points, focus = 0, None
    near = math.nan if focus is None else focus
    values: dict[Pair, float] = {}
    while not stopped():
        pairs = [pair for pair in itertools.pairwise(points) if pair not in values]
        if len(points) > max_points:
            pairs = _around(pairs, near)
        if not pairs:
            break
        points = _lower_hull([*points, *_bisected(elimination, pairs, values, stopped)])
    edges = tuple(values.get(pair, -math.inf) for pair in itertools.pairwise(points))
    return Hull(points=tuple(points), edge_values=edges, floor=floor)


def _bisected(
    elimination: Elimination,
    pairs: list[Pair],
    values: dict[Pair, float],
    stopped: Callable[[], bool],
) -> Iterator[Point]:
    """Minimise the weightings under which pairs tie; note the values and yield the points below."""
    weights = np.array([(1.0, slope(*pair)) for pair in pairs])
    solved = elimination.solve(weights, stopped)
    for row, pair in enumerate(pairs):
        tied = pair[0].seconds + weights[row, 1] * pair[0].bytes
        values[pair] = min(float(solved.values[row]), tied)
        point = _point(solved, row)
        below = solved.values[row] < tied - TOLERANCE * abs(tied)
        if below and pair[0].bytes > point.bytes > pair[1].bytes:
            yield point


def nearest_within(elimination: Elimination, curve: Hull, limit: float) -> Point | None:
    """Return the fastest point within a limit that exchanges reach from the hull's on both sides.

    It need not be the fastest of all; ``curve.bound(limit)`` says how far it may be from that.
    """
    found: list[Point] = []
    for fast, small in itertools.pairwise(curve.points):
        if small.bytes <= limit < fast.bytes:
            for end in (fast, small):
                near = elimination.exchange(end.assignment, limit)
                found += [] if near is None else [_point(near, 0)]
    return min(found, default=None)


def between(elimination: Elimination, fast: Point, small: Point, epsilon: float) -> Iterator[Point]:
    """Yield points between two neighbours of a hull, each with less memory than the one before by a
    factor of 1 + ``epsilon`` at least, as exchanges reach them one from another."""
    near: Point | None = fast
    while near is not None and near.bytes > (1 + epsilon) * small.bytes:
        found = elimination.exchange(near.assignment, near.bytes / (1 + epsilon))
        near = None if found is None else _point(found, 0)
        if near is not None:
            yield near


def _extremes(
    elimination: Elimination, stopped: Callable[[], bool]
) -> tuple[list[Point], tuple[float, float]]:
    """Return the fastest point and the smallest point (ties broken by the other cost), and bounds
    of their seconds and bytes.
    """
    first = elimination.solve(np.array([(1.0, 0.0), (0.0, 1.0)]), stopped)
    floor = float(first.values[0]), float(first.values[1])
    if not math.isfinite(floor[0]):
        return [], floor
    rough = [_point(first, 0), _point(first, 1)]
    spread = (
        max(rough[0].bytes, rough[1].bytes, 1.0),
        max(rough[0].seconds, rough[1].seconds, 1e-12),
    )
    ratio = spread[1] / spread[0]
    weights = np.array([(1.0, 1e-9 * ratio), (1e-9 / ratio, 1.0)])
    solved = elimination.solve(weights, stopped)
    fast, small = _point(solved, 0), _point(solved, 1)
    if fast.bytes <= small.bytes or fast.seconds >= small.seconds:
        return [fast], floor
    return [fast, small], floor


def _point(solved: Minima, row: int) -> Point:
    choice = tuple(int(value) for value in solved.assignments[row])
    return Point(
        seconds=float(solved.seconds[row]), bytes=float(solved.bytes[row]), assignment=choice
    )


def _lower_hull(points: list[Point]) -> list[Point]:
    """Keep the points on the lower-left convex hull, fastest first."""
    kept: list[Point] = []
    for point in sorted(points):
        if kept and point.bytes >= kept[-1].bytes:
            continue
        while len(kept) > 1 and slope(kept[-2], kept[-1]) >= slope(kept[-2], point):
            kept.pop()
        kept.append(point)
    return kept


def falling(ordered: Iterable[T]) -> list[T]:
    """Of what comes in the order of seconds, keep what needs fewer bytes than all before it."""
    kept: list[T] = []
    for one in ordered:
        if not kept or one.bytes < kept[-1].bytes:
            kept.append(one)
    return kept
