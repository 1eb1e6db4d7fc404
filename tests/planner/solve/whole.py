"""Whole frontiers of factor graphs, and the fastest within a limit: both phases together.

The search fills single gaps; brute force and the benchmark of frontiers ask for all.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from shardwright.planner.solve.frontier import Point, falling, hull, nearest_within
from shardwright.reasons.factors import FactorGraph
from tests.planner.solve.nonsupported import MAX_ROWS, ROUNDING, NonSupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Points of a frontier, fastest first. Every point of the true frontier is within the factor
    1 + ``epsilon`` of one of them in both costs, infinite where a gap had to stay open."""

    points: tuple[Point, ...]
    epsilon: float


def whole_frontier(graph: FactorGraph, epsilon: float = 0.0, max_rows: int = MAX_ROWS) -> Whole:
    """Return the frontier of seconds and bytes, exactly or within the factor 1 + ``epsilon``."""
    corners = hull(graph.elimination(), max_points=10**6).points
    filler = NonSupported(graph, max_rows)
    points, is_complete = list(corners), True
    for fast, small in itertools.pairwise(corners):
        found = filler.fill(fast, small, epsilon)
        is_complete = is_complete and found is not None
        points += found or []
    points = _distinct(_evaluated(graph, points))
    return Whole(points=tuple(points), epsilon=epsilon if is_complete else math.inf)


def fastest_within(graph: FactorGraph, limit: float, max_rows: int = MAX_ROWS) -> Point | None:
    """Return the fastest assignment within ``limit`` bytes, None where none fits.

    Only the one gap around the limit is looked into. Raises ValueError where it is too large.
    """
    view = graph.elimination()
    curve = hull(view, max_points=0, focus=limit)
    corners, near = curve.points, nearest_within(view, curve, limit)
    limit *= 1 + ROUNDING
    fitting = [point for point in corners if point.bytes <= limit]
    if not fitting:
        return None
    best = fitting[0]
    above = [point for point in corners if point.bytes > limit]
    if not above:
        return best
    # Nothing above the limit is wanted, so the triangle's other corner moves down to it.
    most = (near or best).seconds, limit
    found = NonSupported(graph, max_rows).fill(above[-1], best, 0.0, most)
    if found is None:
        raise ValueError("the gap around the memory limit has too many partial assignments")
    return min(_evaluated(graph, [near or best, *found]))


def _evaluated(graph: FactorGraph, points: list[Point]) -> list[Point]:
    """Price assignments in the order of the graph's factors, so that equal ones cost the same."""
    picks = np.array([point.assignment for point in points], dtype=np.intp)
    costs = np.zeros((2, len(points)))
    for factor in graph.factors if points else ():
        place = tuple(picks[:, variable] for variable in factor.scope)
        costs[0] += factor.seconds[place]
        costs[1] += factor.bytes[place]
    return [
        Point(seconds=float(a), bytes=float(b), assignment=point.assignment)
        for a, b, point in zip(*costs, points, strict=True)
    ]


def _distinct(points: list[Point]) -> list[Point]:
    """Keep the non-dominated; of points that only rounding tells apart, the smaller."""
    kept: list[Point] = []
    for point in falling(sorted(points)):
        if kept and point.bytes >= kept[-1].bytes * (1 - ROUNDING):
            continue
        if kept and point.seconds <= kept[-1].seconds * (1 + ROUNDING):
            kept.pop()
        kept.append(point)
    return kept
