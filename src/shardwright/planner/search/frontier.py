"""Filling the holes of the simulated frontier.

The exploration simulates a selection, so between two neighbouring plans of the frontier others may lie that
nobody looked at. Where neighbours are far apart in time and in memory, candidates of the additive model
between them are simulated: those that the exploration left aside, and on demand points of the
arrangements' whole frontiers between the corners of their hulls.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.problem import Problem
from shardwright.planner.search.candidates import (
    MAX_POINTS,
    Candidate,
    from_points,
    likely_weights,
    to_strategy,
)
from shardwright.planner.search.exploration import Exploration
from shardwright.planner.solve.elimination import Elimination
from shardwright.planner.solve.frontier import Point, hull
from shardwright.planner.solve.nonsupported import NonSupported

# Neighbours are far apart if time and memory both differ by more than this share, if nobody says so.
SPACING = 0.15
# So many plans are simulated at most, or if a spacing was asked for; so many in vain for one hole;
# and so many rows of partial assignments are kept per gap.
MOST, MOST_ASKED, MISSES, MAX_ROWS = 6, 60, 2, 2**14
# An arrangement's whole frontier is found within this factor, less 1, or what was asked for.
EPSILON = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Between two neighbours of the frontier, the faster and the smaller."""

    fast: Evaluation
    small: Evaluation

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

    def holds(self, evaluation: Evaluation) -> bool:
        """Whether a plan narrows the hole."""
        return evaluation.seconds < self.small.seconds and evaluation.bytes < self.fast.bytes


def refine_frontier(exploration: Exploration, spacing: float | None = None) -> None:
    """Simulate candidates in the widest holes of the frontier, one after another.

    A hole is where time and memory of neighbours both differ by more than ``spacing`` (a share; None:
    by ``SPACING``, from known candidates only, and in large graphs nothing). One that candidates miss
    ``MISSES`` times is left as it is.
    """
    if spacing is None and not exploration.is_small:
        return
    most = MOST if spacing is None else MOST_ASKED
    wide = math.log1p(SPACING if spacing is None else spacing)
    shift = _shifts(exploration)
    misses: Counter[tuple[float, float]] = Counter()
    filled: set[Arrangement] = set()
    for turn in range(most):
        exploration.tell(turn / most, "filling the frontier")
        holes = [hole for hole in _holes(exploration, wide) if misses[hole.ends] < MISSES]
        if not holes or exploration.stopped():
            return
        widest = max(holes, key=lambda hole: hole.width)
        candidate = _between(exploration, widest, shift, wide)
        if candidate is None and spacing is not None:
            for arrangement in sorted(_arrangements(exploration, widest) - filled):
                filled.add(arrangement)
                exploration.candidates += _more(
                    exploration, arrangement, min(EPSILON, math.expm1(wide))
                )
            candidate = _between(exploration, widest, shift, wide)
        if candidate is None:
            misses[widest.ends] = MISSES
        elif not _simulate(exploration, widest, candidate):
            misses[widest.ends] += 1


def _simulate(exploration: Exploration, hole: _Gap, candidate: Candidate) -> bool:
    """Simulate a candidate; tell whether it narrows the hole."""
    evaluation = None
    try:
        evaluation = exploration.evaluate(to_strategy(exploration.context, candidate))
        exploration.evaluations.append(evaluation)
    except ValueError as error:
        exploration.refused.append(str(error))
    exploration.tried[candidate.identity] = candidate, evaluation
    return evaluation is not None and hole.holds(evaluation)


def _holes(exploration: Exploration, wide: float) -> list[_Gap]:
    edge: list[Evaluation] = []
    for evaluation in exploration.fitting:
        if not edge or evaluation.bytes < edge[-1].bytes:
            edge.append(evaluation)
    holes = [_Gap(fast=a, small=b) for a, b in itertools.pairwise(edge)]
    return [hole for hole in holes if hole.width > wide]


def _shifts(exploration: Exploration) -> dict[Arrangement, tuple[float, float]]:
    """Return, per arrangement, simulated over modelled seconds and bytes of what was tried."""
    ratios: dict[Arrangement, list[tuple[float, float]]] = {}
    for candidate, evaluation in exploration.tried.values():
        if evaluation is not None:
            ratio = evaluation.seconds / candidate.seconds, evaluation.bytes / candidate.bytes
            ratios.setdefault(candidate.arrangement, []).append(ratio)
    return {
        arrangement: (
            float(np.median([a for a, _ in rows])),
            float(np.median([b for _, b in rows])),
        )
        for arrangement, rows in ratios.items()
    }


def _between(
    exploration: Exploration, hole: _Gap, shift: dict[Arrangement, tuple[float, float]], wide: float
) -> Candidate | None:
    """Return the untried candidate that should lie deepest in a hole."""
    best: tuple[float, Candidate] | None = None
    for candidate in exploration.candidates:
        if candidate.identity in exploration.tried:
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


def _arrangements(exploration: Exploration, hole: _Gap) -> set[Arrangement]:
    """Return the arrangements of the candidates whose plans are a hole's ends."""
    return {
        candidate.arrangement
        for candidate, evaluation in exploration.tried.values()
        if evaluation is hole.fast or evaluation is hole.small
    }


def _more(exploration: Exploration, arrangement: Arrangement, epsilon: float) -> list[Candidate]:
    """Return candidates from the whole frontier of an arrangement."""
    problem = Problem.of(exploration.context, arrangement.mesh(0), arrangement.microbatches)
    graph = problem.factor_graph(likely_weights(problem, arrangement))
    points: list[Point] = []
    try:
        corners = hull(Elimination.of(graph), 4 * MAX_POINTS).points
        gaps = NonSupported(graph, MAX_ROWS)
        for fast, small in itertools.pairwise(corners):
            points += gaps.fill(fast, small, epsilon) or []
    except InputError:  # too wide for the exact search
        return []
    found = list(from_points(problem, arrangement, [*corners, *points], exploration.room))
    problem.forget_terms()
    return found
