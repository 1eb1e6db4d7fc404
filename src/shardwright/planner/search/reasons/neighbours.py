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
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation, evaluate, merge
from shardwright.planner.model.arrangements import Arrangement, microbatch_counts
from shardwright.planner.model.context import Context
from shardwright.planner.search.candidates import Candidate, explore, to_strategy

GIB = 2**30
# So many candidates of a neighbour, and of those beyond the memory, are simulated.
TRIED, BEYOND = 2, 3
# One stage a device, as the additive model knows them.
ORDERS: tuple[NamedSchedule, ...] = ("1f1b", "gpipe", "zb-h1")
# A plan is faster if it saves more than this share of the step.
WORTH = 0.002


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

    def __init__(self, context: Context, home: Arrangement, limit: float, is_merged: bool) -> None:
        self.context, self.home, self.limit, self.is_merged = context, home, limit, is_merged
        fixed = context.table.overhead_map.get("process_bytes", 0.0)
        self.room = max(limit - fixed, 0.0)
        self._candidates: dict[Arrangement, tuple[Candidate, ...]] = {}
        self._verdicts: dict[tuple[object, ...], Evaluation | None] = {}

    def decisions(self, tell: Callable[[str, float], None]) -> tuple[Decision, ...]:
        """Return, per outer choice, the best neighbour that fits (else the smallest)."""
        found: dict[str, tuple[Neighbour, Evaluation]] = {}
        options = list(neighbours(self.context, self.home))
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
        chosen = [*edge[: BEYOND - 1], *edge[-1:]] if len(edge) > BEYOND else edge
        evaluations = filter(None, map(self._judged, chosen))
        best, prices = step_seconds, list[ShadowPrice]()
        for evaluation in sorted(evaluations, key=lambda j: (j.bytes, j.seconds)):
            if evaluation.bytes > self.limit and evaluation.seconds < best * (1 - WORTH):
                best = evaluation.seconds
                more = (evaluation.bytes - max(self.limit, peak_bytes)) / GIB
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
        beyond = (c for found in self._candidates.values() for c in found if c.bytes > self.room)
        for candidate in sorted(beyond, key=lambda c: (c.bytes, c.seconds)):
            if not front or candidate.seconds < front[-1].seconds * (1 - WORTH):
                front.append(candidate)
        return front

    def _order(self, evaluation: Evaluation) -> tuple[bool, float]:
        fits = evaluation.bytes <= self.limit
        return not fits, evaluation.seconds if fits else evaluation.bytes

    def _explore(self, arrangement: Arrangement) -> tuple[Candidate, ...]:
        if arrangement not in self._candidates:
            try:
                found = explore(self.context, arrangement, self.room, math.inf, 0.0).candidates
            except (InputError, ValueError):  # too wide for the exact search, or illegal
                found = ()
            self._candidates[arrangement] = found
        return self._candidates[arrangement]

    def _best(self, arrangement: Arrangement) -> Evaluation | None:
        """Simulate the fastest candidates that should fit, else the smallest."""
        found = self._explore(arrangement)
        fits = sorted((c for c in found if c.bytes <= self.room), key=lambda c: c.seconds)
        small = sorted(found, key=lambda c: c.bytes)
        known = list(filter(None, map(self._judged, (fits or small)[:TRIED])))
        if fits and all(evaluation.bytes > self.limit for evaluation in known):
            known += filter(None, [self._judged(small[0])])
        return min(known, key=self._order, default=None)

    def _judged(self, candidate: Candidate) -> Evaluation | None:
        key = candidate.identity
        if key not in self._verdicts:
            try:
                evaluation = evaluate(self.context, to_strategy(self.context, candidate))
                evaluation = merge(self.context, evaluation) if self.is_merged else evaluation
            except ValueError:
                evaluation = None
            self._verdicts[key] = evaluation
        return self._verdicts[key]
