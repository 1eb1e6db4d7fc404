"""The plan's neighbours in the outer choices, and faster plans beyond its memory.

One step from the plan's arrangement in every direction: devices, pipeline stages, tensor degree,
microbatches, schedule. Each is solved as the search would, and its best plan simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwright.core.explanation import Decision, ShadowPrice
from shardwright.core.schedules import NamedSchedule
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation, merge
from shardwright.planner.model.arrangements import Arrangement, microbatch_counts
from shardwright.planner.model.context import Context
from shardwright.planner.remember import remembered
from shardwright.planner.search.answer import GIB
from shardwright.planner.search.candidates import Candidate, explore, to_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import FEW

# One stage a device, as the additive model knows them.
ORDERS: tuple[NamedSchedule, ...] = ("1f1b", "gpipe", "zb-h1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """An arrangement one step away, and the step in words."""

    what: str
    chosen: str
    other: str
    arrangement: Arrangement


def neighbours(context: Context, home: Arrangement) -> Iterator[Neighbour]:
    """Yield every legal arrangement one step from ``home``."""
    p, d, o, t = home.stages, home.data, home.outer, home.tensor
    steps = (
        ("devices", home.num_devices, (p, d / 2, o, t), (p, d, o, t / 2), (p / 2, d, o, t)),
        ("pipeline stages", p, (2 * p, d / 2, o, t), (2 * p, d, o, t / 2)),
        ("pipeline stages", p, (p / 2, 2 * d, o, t), (p / 2, d, o, 2 * t)),
        ("outer degree", o, *([(p, d, o / 2, 2 * t), (p, d, 2 * o, t / 2)] if o > 1 else [])),
        ("tensor parallel degree", t, (p, d / 2, o, 2 * t)),
        ("tensor parallel degree", t, (p, 2 * d, o, t / 2)),
    )
    for what, chosen, *options in steps:
        whole = [tuple([int(degree) for degree in option]) for option in options]
        for degrees in (one for one, option in zip(whole, options, strict=True) if one == option):
            other = {
                "devices": math.prod(degrees), "pipeline stages": degrees[0],
                "outer degree": degrees[2],
            }.get(what, degrees[3])  # fmt: skip
            for arrangement in _filled(context, home, *degrees):
                yield Neighbour(
                    what=what, chosen=str(chosen), other=str(other), arrangement=arrangement
                )
    yield from _otherwise_run(context, home)


def _otherwise_run(context: Context, home: Arrangement) -> Iterator[Neighbour]:
    """Yield the arrangement with more and fewer microbatches, and in other orders."""
    counts, m = microbatch_counts(context, home.data, home.stages), home.microbatches
    for other in (m * 2, m // 2):
        if other in counts and other != m:
            moved = replace(home, microbatches=other)
            yield Neighbour(what="microbatches", chosen=str(m), other=str(other), arrangement=moved)
    if home.stages > 1:
        for schedule in ORDERS:
            if schedule != home.schedule:
                moved = replace(home, schedule=schedule)
                yield Neighbour(
                    what="schedule", chosen=home.schedule, other=schedule, arrangement=moved
                )


def _filled(
    context: Context, home: Arrangement, stages: int, data: int, outer: int, tensor: int
) -> list[Arrangement]:
    """Return the arrangement of these degrees with as many microbatches as now, and as fill it."""
    if stages > len(context.facts.ties.ranges):
        return []
    counts = microbatch_counts(context, data, stages)
    if not counts:
        return []
    wanted = {home.microbatches} if stages == 1 else {home.microbatches, 4 * stages}
    found = dict.fromkeys(min(counts, key=lambda c: (abs(c - w), c)) for w in sorted(wanted))
    return [
        replace(home, stages=stages, data=data, outer=outer, tensor=tensor, microbatches=count)
        for count in found
    ]


class Rivalry:
    """Explored neighbours of one plan: their candidates, and what was simulated of them."""

    def __init__(self, pool: Pool, home: Arrangement, strategy: Strategy) -> None:
        self.pool, self.home, self.strategy = pool, home, strategy
        self._explored: list[Candidate] = []

    def decisions(self, tell: Callable[[str, float], None]) -> tuple[Decision, ...]:
        """Return, per outer choice, the best neighbour that fits (else the smallest)."""
        found: dict[str, tuple[Neighbour, Evaluation]] = {}
        options = list(neighbours(self.pool.context, self.home))
        for number, option in enumerate(options):
            tell(f"{option.what} {option.other}", number / len(options))
            evaluation = self._best(option.arrangement)
            if evaluation is None:
                continue
            known = found.get(option.what)
            if known is None or self._order(evaluation) < self._order(known[1]):
                found[option.what] = option, evaluation
        return tuple(
            Decision(
                what=what, chosen=option.chosen, runner_up=option.other,
                added_seconds=math.nan, added_bytes=math.nan,
                step_seconds=evaluation.seconds, peak_bytes=evaluation.bytes,
            )
            for what, (option, evaluation) in found.items()
        )  # fmt: skip

    def more_memory(self, step_seconds: float, peak_bytes: float) -> tuple[ShadowPrice, ...]:
        """Return faster plans that need more memory than there is, the least memory first."""
        self._explore(self.home)
        edge = [c for c in self._beyond() if c.least_seconds < step_seconds]
        chosen = [*edge[: FEW - 1], *edge[-1:]] if len(edge) > FEW else edge
        evaluations = filter(None, map(self._judged, chosen))
        best, limit, prices = step_seconds, self.pool.limit, list[ShadowPrice]()
        for evaluation in sorted(evaluations, key=lambda j: (j.bytes, j.seconds)):
            if evaluation.bytes > limit and evaluation.seconds < best * (1 - self.pool.same):
                best = evaluation.seconds
                more = (evaluation.bytes - max(limit, peak_bytes)) / GIB
                prices.append(
                    ShadowPrice(
                        what=f"{more:.3g} GiB more memory per device",
                        step_seconds=evaluation.seconds,
                        label=evaluation.strategy.label,
                    )
                )
        return tuple(prices)

    def _beyond(self) -> list[Candidate]:
        """Return candidates that need more memory than there is, each worth it after those before."""
        front: list[Candidate] = []
        beyond = [one for one in self._explored if one.bytes > self.pool.room]
        for candidate in sorted(beyond, key=lambda c: (c.bytes, c.seconds)):
            if not front or candidate.seconds < front[-1].seconds * (1 - self.pool.same):
                front.append(candidate)
        return front

    def _order(self, evaluation: Evaluation) -> tuple[bool, float]:
        fits = evaluation.bytes <= self.pool.limit
        return not fits, evaluation.seconds if fits else evaluation.bytes

    @remembered
    def _explore(self, arrangement: Arrangement) -> tuple[Candidate, ...]:
        context, room = self.pool.context, self.pool.room
        try:
            found = explore(context, arrangement, room, enough=(0.0, 0.0)).candidates
        except (InputError, ValueError):  # too wide for the exact search, or illegal
            return ()
        self._explored += found
        return found

    def _best(self, arrangement: Arrangement) -> Evaluation | None:
        """Simulate the fastest candidates that should fit, else the smallest."""
        found = self._explore(arrangement)
        fits = sorted((c for c in found if c.bytes <= self.pool.room), key=lambda c: c.seconds)
        small = sorted(found, key=lambda c: c.bytes)
        known = list(filter(None, map(self._judged, (fits or small)[: max(2, self.pool.further)])))
        if fits and all(evaluation.bytes > self.pool.limit for evaluation in known):
            known += filter(None, [self._judged(small[0])])
        return min(known, key=self._order, default=None)

    @remembered
    def _judged(self, candidate: Candidate) -> Evaluation | None:
        return judged_like(self.pool, self.strategy, candidate)


def judged_like(pool: Pool, model: Strategy, candidate: Candidate) -> Evaluation | None:
    """Simulate a candidate, its gradients merged if those of another strategy are."""
    strategy = to_strategy(pool.context, candidate)
    found = pool.judged(strategy, candidate.least_seconds)
    if found is None or not model.gradient_sync.is_merged:
        return found
    return merge(pool.context, found, pool.evaluator.run)
