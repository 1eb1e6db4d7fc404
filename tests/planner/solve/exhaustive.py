"""Brute force: the oracle for small problems. It shares no code with the solvers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from shardwright.core.schedules import ScheduleName
from shardwright.errors import InputError
from shardwright.planner.model.partition import Chain, Partition, measure
from shardwright.reasons.factors import FactorGraph

MAX_ASSIGNMENTS = 10**6


def assignments(graph: FactorGraph) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """Yield (seconds, bytes, choices) of every joint choice. Raises InputError beyond a million."""
    count = math.prod(graph.sizes)
    if count > MAX_ASSIGNMENTS:
        raise InputError(f"brute force tries at most {MAX_ASSIGNMENTS} assignments, not {count}")
    for choice in itertools.product(*(range(size) for size in graph.sizes)):
        seconds, memory = graph.evaluate(choice)
        yield seconds, memory, choice


def frontier(graph: FactorGraph) -> list[tuple[float, float]]:
    """Return every non-dominated (seconds, bytes), fastest first."""
    kept: list[tuple[float, float]] = []
    for seconds, memory in sorted({(a, b) for a, b, _ in assignments(graph)}):
        if math.isfinite(seconds) and (not kept or memory < kept[-1][1]):
            kept.append((seconds, memory))
    return kept


def hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the lower-left convex hull of a frontier, by testing every segment."""
    corners: list[tuple[float, float]] = []
    for seconds, memory in points:
        left = [p for p in points if p[0] < seconds]
        right = [p for p in points if p[0] > seconds]
        above = False
        for a, b in itertools.product(left, right):
            share = (seconds - a[0]) / (b[0] - a[0])
            chord = a[1] + share * (b[1] - a[1])
            above |= memory >= chord - 1e-12 * abs(chord)
        if not above:
            corners.append((seconds, memory))
    return corners


def best_partition(
    chain: Chain, num_stages: int, num_microbatches: int, schedule: ScheduleName, limit: float
) -> Partition | None:
    """Return a partition of least bottleneck by trying all cuts, or None when none fits."""
    best: Partition | None = None
    for inner in itertools.combinations(range(1, chain.num_blocks), num_stages - 1):
        tried = measure(chain, (0, *inner), num_microbatches, schedule)
        fits = max(tried.stage_bytes) <= limit
        if fits and (best is None or tried.bottleneck < best.bottleneck):
            best = tried
    return best
