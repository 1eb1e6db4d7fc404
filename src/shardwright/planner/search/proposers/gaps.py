"""Filling the gaps of the simulated frontier.

The pool simulates a selection, so between two neighbouring plans of the frontier others may lie that
nobody looked at. Where neighbours are far apart in time and in memory, candidates of the additive model
between them are simulated: those that the pool left aside, and on demand points between the corners of
the arrangements' hulls.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.problem import Problem
from shardwright.planner.search.candidates import (
    Candidate,
    from_points,
    likely_weights,
)
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import CANDIDATES, CLOSE
from shardwright.planner.solve.frontier import between, falling, hull


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
        """What makes it this gap."""
        return self.fast.bytes, self.small.bytes

    def holds(self, evaluation: Evaluation) -> bool:
        """Whether a plan narrows the gap."""
        return evaluation.seconds < self.small.seconds and evaluation.bytes < self.fast.bytes


def filled(pool: Pool, spacing: float | None = None) -> Proposals:
    """Propose candidates in the widest gaps of the frontier, one after another.

    A gap is where time and memory of neighbours both differ by more than ``spacing`` (a share; None:
    by ``CLOSE``, from known candidates only, and in large graphs nothing). One that a candidate misses
    is left as it is.
    """
    if spacing is None and not pool.is_small:
        return
    most = pool.count // 2 if spacing is None else CANDIDATES * pool.count // 2
    filling = _Filling(pool, CLOSE - 1 if spacing is None else spacing, spacing is not None)
    for turn in range(most):
        pool.tell(turn / most, "filling the frontier")
        gap = filling.widest()
        if gap is None:
            return
        candidate, found = filling.candidate(gap), None
        if candidate is not None:
            found = yield Proposal(0.0, partial(pool.try_candidate, candidate))
        if found is None or not gap.holds(found):
            filling.missed.add(gap.ends)


class _Filling:
    """What is known of gaps wider than a spacing: those ``missed``, and how far the simulator's seconds and
    bytes are off the additive model's. Where ``solves``, arrangements are looked into anew."""

    def __init__(self, pool: Pool, spacing: float, solves: bool) -> None:
        self._pool, self._wide, self._solves = pool, math.log1p(spacing), solves
        self._shift = _shifts(pool)
        self._solved: set[Arrangement] = set()
        self.missed: set[tuple[float, float]] = set()

    def widest(self) -> _Gap | None:
        """Return the widest gap that no candidate missed."""
        gaps = [gap for gap in _gaps(self._pool, self._wide) if gap.ends not in self.missed]
        return max(gaps, key=lambda gap: gap.width, default=None)

    def candidate(self, gap: _Gap) -> Candidate | None:
        """Return the untried candidate that should lie deepest in a gap."""
        found = _between(self._pool, gap, self._shift, self._wide)
        if found is None and self._solves:
            for arrangement in sorted(_arrangements(self._pool, gap) - self._solved):
                self._solved.add(arrangement)
                self._pool.candidates += _more(self._pool, arrangement, math.expm1(self._wide / 4))
            found = _between(self._pool, gap, self._shift, self._wide)
        return found


def _gaps(pool: Pool, wide: float) -> list[_Gap]:
    gaps = [_Gap(fast=a, small=b) for a, b in itertools.pairwise(falling(pool.fitting))]
    return [gap for gap in gaps if gap.width > wide]


def _shifts(pool: Pool) -> dict[Arrangement, tuple[float, float]]:
    """Return, per arrangement, simulated over modelled seconds and bytes of what was tried."""
    return {
        arrangement: (
            float(np.median([found.seconds / candidate.seconds for candidate, found in tried])),
            float(np.median([found.bytes / candidate.bytes for candidate, found in tried])),
        )
        for arrangement, tried in pool.errors().items()
    }


def _between(
    pool: Pool, gap: _Gap, shift: dict[Arrangement, tuple[float, float]], wide: float
) -> Candidate | None:
    """Return the untried candidate that should lie deepest in a gap."""
    best: tuple[float, Candidate] | None = None
    for candidate in pool.candidates:
        if candidate.identity in pool.tried:
            continue
        slower, larger = shift.get(candidate.arrangement, (1.0, 1.0))
        seconds, size = slower * candidate.seconds, larger * candidate.bytes
        depth = min(
            math.log(gap.small.seconds / seconds), math.log(gap.fast.bytes / size),
            math.log(size / gap.small.bytes) + wide / 2,
        )  # fmt: skip
        if depth > wide / 4 and (best is None or depth > best[0]):
            best = depth, candidate
    return best[1] if best is not None else None


def _arrangements(pool: Pool, gap: _Gap) -> set[Arrangement]:
    """Return the arrangements of the candidates whose plans are a gap's ends."""
    return {
        candidate.arrangement
        for candidate, evaluation in pool.tried.values()
        if evaluation is gap.fast or evaluation is gap.small
    }


def _more(pool: Pool, arrangement: Arrangement, epsilon: float) -> list[Candidate]:
    """Return candidates from the whole frontier of an arrangement."""
    problem = Problem.of(pool.context, arrangement.mesh(0), arrangement.microbatches)
    if problem.is_wide:  # every minimum takes seconds there
        return []
    view = problem.elimination(likely_weights(problem, arrangement))
    points = list(hull(view, 2 * CANDIDATES).points)
    for ends in itertools.pairwise(tuple(points)):
        points += between(view, *ends, epsilon)
    found = list(from_points(problem, arrangement, points, pool.room))
    problem.forget_terms()
    return found
