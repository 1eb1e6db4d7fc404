"""The arrangements, solved by the additive model: best first, those that could still win."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.model.arrangements import (
    Arrangement,
    Shape,
    device_counts,
    free_axes,
    shapes,
)
from shardwright.planner.search.bounds import Least, least_rounds
from shardwright.planner.search.candidates import (
    Candidate,
    explore,
    least_even,
    least_of,
    least_work,
)
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.known import plain
from shardwright.planner.search.proposers.shortlist import shortlist
from shardwright.planner.search.steering import BUDGET, CLOSE, FEW


def on_all(pool: Pool) -> Proposals:
    """Propose what is best in the arrangements of all devices."""
    return _arrangements(pool, (pool.context.num_devices,))


def on_fewer(pool: Pool) -> Proposals:
    """Propose what is best in the arrangements of all devices, then in those of fewer that could still
    win."""
    return _arrangements(pool, device_counts(pool.context))


def _arrangements(pool: Pool, counts: tuple[int, ...]) -> Proposals:
    context, solver = pool.context, Solver(pool)
    pool.complete = False
    for order, count in enumerate(counts):
        part = (order, len(counts))
        plans = list(shapes(context, count))
        if count < counts[0] and pool.even_split(count) >= pool.fastest:
            plans = _cheaper(pool, plans)
        yield from solver.best_first((one for one in plans if one[0].stages == 1), part)
        # Where the rest of the fastest step is no work of operators, each may split what it likes over
        # all devices.
        if pool.fastest > CLOSE * _least_flat(pool, count):
            yield from solver.best_first(free_axes(context, count), part)
        yield from solver.best_first((one for one in plans if one[0].stages > 1), part)
        if count < counts[0]:
            yield from plain(pool, count)
    pool.complete = not solver.is_beaten
    yield from solver.lean()
    yield from shortlist(pool)


def of_shape(shape: Shape, pool: Pool) -> Proposals:
    """Solve one shape, whatever is known of others."""
    solver = Solver(pool)
    for arrangement in shape:
        yield Proposal(0.0, partial(solver.solve, arrangement))
    pool.complete = not solver.is_beaten


class Solver:
    """Solves arrangements, and remembers of which shapes more microbatches are pointless."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        # Whether an arrangement was too wide for the exact search.
        self.is_beaten = False
        self._promised = math.inf
        self._smallest: dict[Arrangement, float] = {}

    def best_first(self, plans: Iterable[Shape], part: tuple[int, int]) -> Proposals:
        """Propose to solve shapes, the promising and simple ones first."""
        pool = self.pool
        every = [(self._rough(one), one) for plan in plans for one in plan]
        every.sort(key=lambda entry: (_log_bucket(entry[0]), entry[1].tensor, entry[1]))
        # In small graphs the whole frontier is looked at.
        slack = CLOSE if pool.is_small else 1.0
        for number, (rough, arrangement) in enumerate(every):
            if self._smallest.get(replace(arrangement, microbatches=1)) == math.inf:
                continue
            yield Proposal(rough / slack, partial(self._solve_unless, arrangement, slack))
            if arrangement not in pool.bounds:  # whole stages are too slow; chunks may not be
                pool.bounds.note(self._least(arrangement, slack))
            share = (part[0] + (number + 1) / len(every)) / part[1]
            text = f"{arrangement.num_devices} devices, {arrangement.stages} stages"
            pool.tell(0.1 + 0.6 * share, text)

    def lean(self) -> Proposals:
        """Propose to solve the arrangements with the most microbatches too, for plans that need
        little."""
        context = self.pool.context
        self._smallest.clear()
        plans = [each for each in shapes(context, context.num_devices) if each[0].stages == 1]
        for plan in plans[:1] + plans[1:][-1:]:
            count = len(context.graph.operators)
            bearable = [a for a in plan if a.microbatches * count <= FEW * BUDGET]
            arrangement = (bearable or plan[:1])[-1]
            if all(c.arrangement != arrangement for c in self.pool.candidates):
                yield Proposal(0.0, partial(self.solve, arrangement))

    def _rough(self, arrangement: Arrangement) -> float:
        """Return the seconds of an arrangement if all work divided evenly."""
        rounds, _ = least_rounds(arrangement.stages, arrangement.microbatches)
        share = rounds * arrangement.stages / arrangement.microbatches
        return self.pool.even_split(arrangement.num_devices) * share

    def _solve_unless(self, arrangement: Arrangement, slack: float) -> Evaluation | None:
        """Solve an arrangement unless the operators' seconds alone make it too slow."""
        least = self._least(arrangement, slack)
        if least.whole >= slack * self.pool.fastest:
            self.pool.bounds.note(least)
            if arrangement.stages == 1:  # more microbatches are no less work
                self._smallest[replace(arrangement, microbatches=1)] = math.inf
            return None
        return self.solve(arrangement)

    def _least(self, arrangement: Arrangement, slack: float) -> Least:
        """Return what the operators' seconds alone make of an arrangement, as far as that is asked for: to
        tell what is too slow, and sets no bound in chunks either."""
        pool = self.pool
        if pool.fastest == math.inf:
            return least_of(pool.context, arrangement, 0.0)
        enough = max(slack * pool.fastest, self._enough(arrangement)[0])
        return least_of(pool.context, arrangement, least_even(pool.context, arrangement, enough))

    def _enough(self, arrangement: Arrangement) -> tuple[float, float]:
        """Return what sets no new bound: see ``Bounds.enough``."""
        return self.pool.bounds.enough(least_of(self.pool.context, arrangement, 0.0))

    def _try_best(self, candidates: Sequence[Candidate]) -> Evaluation | None:
        """Simulate the fastest candidate that fits if it promises more than any before."""
        pool = self.pool
        fits = [one for one in candidates if one.bytes <= pool.room]
        best = min(fits, key=lambda one: (one.seconds, one.bytes), default=None)
        if best is None or best.least_seconds >= pool.fastest:
            return None
        if best.seconds >= self._promised * (1 - pool.same):
            return None
        self._promised = best.seconds
        return pool.try_candidate(best)

    def solve(self, arrangement: Arrangement) -> Evaluation | None:
        """Solve an arrangement and simulate its best plan if it promises more than any before.

        Once more microbatches are pointless, this notes that: without a pipeline they only cost time,
        and here they no longer save memory, or the fastest plan does not need it.
        """
        pool, shape = self.pool, replace(arrangement, microbatches=1)
        before = self._smallest.get(shape, 0.0)
        if before == math.inf:
            return None
        known, enough = (pool.fastest, self._promised), self._enough(arrangement)
        try:
            found = explore(pool.context, arrangement, pool.room, known, enough, pool.stopped)
        except InputError as error:
            pool.refused.append(f"{arrangement}: {error}")
            self.is_beaten = True
            self._smallest[shape] = math.inf
            return None
        pool.candidates += found.candidates
        pool.bounds.note(found.bound)
        evaluation = self._try_best(found.candidates)
        if arrangement.stages == 1:
            least = min((c.bytes for c in found.candidates), default=math.inf)
            is_idle = 0 < before < CLOSE * least or found.fastest > CLOSE * pool.fastest
            is_done = is_idle or (found.is_free and not pool.is_small)
            self._smallest[shape] = math.inf if is_done else least
        return evaluation


def _cheaper(pool: Pool, plans: list[Shape]) -> list[Shape]:
    """Keep of too few devices only what may save money: the best shape, on fewer hosts."""
    fits = [c for c in pool.candidates if c.bytes <= pool.room]
    if not fits or not plans:
        return []
    best = min(fits, key=lambda c: (c.seconds, c.bytes)).arrangement
    count = plans[0][0].num_devices
    rate = pool.context.cluster.dollars_per_second
    if rate(tuple(range(2 * count))) <= rate(tuple(range(count))):
        return []
    return [
        plan[-2:]
        for plan in plans
        if (plan[0].stages, plan[0].tensor) == (best.stages, best.tensor)
    ]


def _least_flat(pool: Pool, count: int) -> float:
    """Return the seconds of the operators alone in the best arrangement of so many devices without
    stages, those of an even split where there is none."""
    works = (
        least_work(one.problem, least_rounds(1, one.arrangement.microbatches))
        for one in pool.candidates
        if one.arrangement.stages == 1 and one.arrangement.num_devices == count
    )
    return min(works, default=pool.even_split(count))


def _log_bucket(seconds: float) -> int:
    """Take seconds within a tenth of each other as alike."""
    return round(math.log(seconds) / math.log(CLOSE)) if seconds > 0 else 0
