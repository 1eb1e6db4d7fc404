"""Filling the holes of the simulated frontier.

The hunt simulates a selection, so between two neighbouring plans of the frontier others may lie that
nobody looked at. Where neighbours are far apart in time and in memory, candidates of the additive model
between them are simulated: those that the hunt left aside, and on demand points of the
arrangements' whole frontiers between the corners of their hulls.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Judged
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.problem import Problem
from shardwright.planner.search.candidates import (
    MAX_POINTS,
    Candidate,
    from_points,
    likely_weights,
    to_strategy,
)
from shardwright.planner.search.hunt import Hunt
from shardwright.planner.solve.elimination import Elimination
from shardwright.planner.solve.frontier import Point, hull
from shardwright.planner.solve.gaps import Gaps

# Neighbours are far apart if time and memory both differ by more than this share, if nobody says so.
SPACING = 0.15
# So many plans are simulated at most, or if a spacing was asked for; so many in vain for one hole;
# and so many rows of partial assignments are kept per gap.
MOST, MOST_ASKED, MISSES, MAX_ROWS = 6, 60, 2, 2**14
# An arrangement's whole frontier is found within this factor, less 1, or what was asked for.
EPSILON = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hole:
    """Between two neighbours of the frontier, the faster and the smaller."""

    fast: Judged
    small: Judged

    @property
    def width(self) -> float:
        """The logarithm of the smaller of the two ratios."""
        return min(
            math.log(self.small.seconds / self.fast.seconds),
            math.log(self.fast.bytes / self.small.bytes),
        )

    @property
    def ends(self) -> tuple[float, float]:
        """What makes it this hole."""
        return self.fast.bytes, self.small.bytes

    def holds(self, verdict: Judged) -> bool:
        """Whether a plan narrows the hole."""
        return verdict.seconds < self.small.seconds and verdict.bytes < self.fast.bytes


def fill_holes(hunt: Hunt, spacing: float | None = None) -> None:
    """Simulate candidates in the widest holes of the frontier, one after another.

    A hole is where time and memory of neighbours both differ by more than ``spacing`` (a share; None:
    by ``SPACING``, from known candidates only, and in large graphs nothing). One that candidates miss
    ``MISSES`` times is left as it is.
    """
    if spacing is None and not hunt.is_small:
        return
    most = MOST if spacing is None else MOST_ASKED
    wide = math.log1p(SPACING if spacing is None else spacing)
    shift = _shifts(hunt)
    misses: Counter[tuple[float, float]] = Counter()
    filled: set[Arrangement] = set()
    for turn in range(most):
        hunt.tell(turn / most, "filling the frontier")
        holes = [hole for hole in _holes(hunt, wide) if misses[hole.ends] < MISSES]
        if not holes or hunt.stopped():
            return
        widest = max(holes, key=lambda hole: hole.width)
        candidate = _between(hunt, widest, shift, wide)
        if candidate is None and spacing is not None:
            for arrangement in sorted(_arrangements(hunt, widest) - filled):
                filled.add(arrangement)
                hunt.candidates += _more(hunt, arrangement, min(EPSILON, math.expm1(wide)))
            candidate = _between(hunt, widest, shift, wide)
        if candidate is None:
            misses[widest.ends] = MISSES
        elif not _simulate(hunt, widest, candidate):
            misses[widest.ends] += 1


def _simulate(hunt: Hunt, hole: _Hole, candidate: Candidate) -> bool:
    """Simulate a candidate; tell whether it narrows the hole."""
    verdict = None
    try:
        verdict = hunt.judge(to_strategy(hunt.context, candidate))
        hunt.judged.append(verdict)
    except ValueError as error:
        hunt.refused.append(str(error))
    hunt.tried[candidate.identity] = candidate, verdict
    return verdict is not None and hole.holds(verdict)


def _holes(hunt: Hunt, wide: float) -> list[_Hole]:
    edge: list[Judged] = []
    for verdict in hunt.fitting:
        if not edge or verdict.bytes < edge[-1].bytes:
            edge.append(verdict)
    holes = [_Hole(fast=a, small=b) for a, b in itertools.pairwise(edge)]
    return [hole for hole in holes if hole.width > wide]


def _shifts(hunt: Hunt) -> dict[Arrangement, tuple[float, float]]:
    """Return, per arrangement, simulated over modelled seconds and bytes of what was tried."""
    ratios: dict[Arrangement, list[tuple[float, float]]] = {}
    for candidate, verdict in hunt.tried.values():
        if verdict is not None:
            ratio = verdict.seconds / candidate.seconds, verdict.bytes / candidate.bytes
            ratios.setdefault(candidate.arrangement, []).append(ratio)
    return {
        arrangement: (
            float(np.median([a for a, _ in rows])),
            float(np.median([b for _, b in rows])),
        )
        for arrangement, rows in ratios.items()
    }


def _between(
    hunt: Hunt, hole: _Hole, shift: dict[Arrangement, tuple[float, float]], wide: float
) -> Candidate | None:
    """Return the untried candidate that should lie deepest in a hole."""
    best: tuple[float, Candidate] | None = None
    for candidate in hunt.candidates:
        if candidate.identity in hunt.tried:
            continue
        slower, larger = shift.get(candidate.arrangement, (1.0, 1.0))
        seconds, size = slower * candidate.seconds, larger * candidate.bytes
        depth = min(
            math.log(hole.small.seconds / seconds), math.log(hole.fast.bytes / size),
            math.log(size / hole.small.bytes) + wide / 2,
        )  # fmt: skip
        if depth > wide / 4 and (best is None or depth > best[0]):
            best = depth, candidate
    return best[1] if best is not None else None


def _arrangements(hunt: Hunt, hole: _Hole) -> set[Arrangement]:
    """Return the arrangements of the candidates whose plans are a hole's ends."""
    return {
        candidate.arrangement
        for candidate, verdict in hunt.tried.values()
        if verdict is hole.fast or verdict is hole.small
    }


def _more(hunt: Hunt, arrangement: Arrangement, epsilon: float) -> list[Candidate]:
    """Return candidates from the whole frontier of an arrangement."""
    problem = Problem.of(hunt.context, arrangement.mesh(0), arrangement.microbatches)
    graph = problem.factor_graph(likely_weights(problem, arrangement))
    points: list[Point] = []
    try:
        corners = hull(Elimination.of(graph), 4 * MAX_POINTS).points
        gaps = Gaps(graph, MAX_ROWS)
        for fast, small in itertools.pairwise(corners):
            points += gaps.fill(fast, small, epsilon) or []
    except InputError:  # too wide for the exact search
        return []
    found = list(from_points(problem, arrangement, [*corners, *points], hunt.room))
    problem.forget_terms()
    return found
