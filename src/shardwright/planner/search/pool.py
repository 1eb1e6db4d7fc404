"""What a search knows: the plans simulated, candidates of the additive model, and the bound.

The additive model proposes (``candidates``), the simulator disposes (``judge.evaluate``). What is exact and
what is not: per arrangement the additive optimum and all supported time/memory points are exact and
proved; which of them are simulated is a selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from shardwright.core.strategy import Strategy
from shardwright.planner.judge.evaluate import Evaluation, by_blocks, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.judge.ties import half_width_between
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.search.answer import Findings, fitting
from shardwright.planner.search.bounds import Bounds
from shardwright.planner.search.candidates import Candidate, to_strategy
from shardwright.planner.search.steering import (
    BUDGET,
    CANDIDATES,
    CLOSE,
    LEAST_MOVES,
    SAME,
)


def least(evaluation: Evaluation, unknown: float = 0.0) -> float:
    """Return what a plan could take at best, in seconds, where that is known."""
    seconds = evaluation.least_seconds
    return unknown if math.isnan(seconds) else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: ``fraction`` of its work, the best step that fits so far (inf before the
    first), and the bound (0 until it is known).
    """

    fraction: float
    best_seconds: float
    bound_seconds: float
    text: str


class Pool:
    """What proposers share and learn from."""

    def __init__(
        self,
        context: Context,
        limit: float,
        max_candidates: int = CANDIDATES,
        progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
        staleness: int = 0,
    ) -> None:
        self.staleness = staleness
        self.context, self.limit = context, limit
        self.evaluator = Incremental(context)
        self._progress, self._stop = progress, stop
        fixed = context.table.overhead_map.get("process_bytes", 0.0)
        self.room = max(limit - fixed, 0.0)
        self.candidates: list[Candidate] = []
        self.evaluations: list[Evaluation] = []
        self.refused: list[str] = []
        self.tried: dict[object, tuple[Candidate, Evaluation | None]] = {}
        self.bounds = Bounds()
        self.complete = True
        # Graphs so small that their whole frontier is looked at.
        self.is_small = LEAST_MOVES * len(context.graph.operators) <= BUDGET
        # So many candidates are simulated.
        self.count = max_candidates if self.is_small else max(2, max_candidates // 3)
        # So many plans are worked on further.
        self.further = max(1, 2 * self.count // CANDIDATES)
        # The share of a step below which two plans are the same, known from the first that is weighed.
        self.same = 0.0
        self._done = 0.0

    @property
    def fitting(self) -> list[Evaluation]:
        """Evaluations within the memory limit, fastest first."""
        return fitting(self.evaluations, self.limit)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest simulated plan that fits; infinity before the first."""
        return min(
            (one.seconds for one in self.evaluations if one.bytes <= self.limit), default=math.inf
        )

    def findings(self) -> Findings:
        """Return what was found so far."""
        return Findings(
            context=self.context,
            limit=self.limit,
            evaluations=tuple(self.evaluations),
            refused=tuple(self.refused),
            bounds=Bounds(self.bounds),
            is_complete=self.complete,
            same=self.same,
        )

    def even_split(self, devices: float) -> float:
        """Return the seconds if all work divided evenly: no plan on so many devices is faster."""
        return self.context.prices.least_serial_seconds / devices

    def judged(self, strategy: Strategy, least_seconds: float = math.nan) -> Evaluation | None:
        """Simulate a strategy; None where it is illegal."""
        try:
            return evaluate(self.context, strategy, least_seconds, self.evaluator.priced)
        except ValueError as error:
            self.refused.append(f"{strategy.label}: {error}")
            return None

    def try_out(self, strategy: Strategy, least_seconds: float = math.nan) -> Evaluation | None:
        """Simulate a strategy and keep the evaluation; None where it is illegal."""
        evaluation = self.judged(strategy, least_seconds)
        if evaluation is not None:
            self.evaluations.append(evaluation)
        return evaluation

    def try_made(self, what: str, make: Callable[[], Strategy]) -> Evaluation | None:
        """Simulate a strategy that is made only now and keep the evaluation; None where it cannot be."""
        try:
            return self.try_out(make())
        except ValueError as error:
            self.refused.append(f"{what}: {error}")
            return None

    def weigh(self, strategy: Strategy) -> Evaluation | None:
        """Simulate a strategy and keep the evaluation, as ``try_out``; learn what is the same from the first."""
        evaluation = self.try_out(strategy)
        if evaluation is not None and not self.same:
            doubts = evaluation.doubts
            self.same = SAME * half_width_between(doubts, doubts) / evaluation.seconds
        return evaluation

    @property
    def apart(self) -> float:
        """The share by which the step times of like plans differ where nobody could mistake them."""
        return self.same / SAME

    def are_same(self, one: float, other: float) -> bool:
        """Whether the search takes two step times for the same, in seconds."""
        return one == other or abs(one - other) <= self.same * max(one, other)

    def close(self) -> list[Evaluation]:
        """Return what fits and is close to the fastest, this first; of plans that are the same on another mesh the
        first."""
        most, found = CLOSE * self.fastest, list[Evaluation]()
        for one in takewhile(lambda one: one.seconds <= most, self.fitting):
            if not any(
                self.are_same(one.seconds, other.seconds)
                and self.are_same(least(one), least(other))
                for other in found
            ):
                found.append(one)
        return found

    def try_candidate(self, candidate: Candidate) -> Evaluation | None:
        """Simulate a candidate unless that was done."""
        if candidate.identity in self.tried:
            return self.tried[candidate.identity][1]
        strategy = to_strategy(self.context, candidate)
        evaluation = self.try_out(strategy, candidate.least_seconds)
        starts = self.context.starting * len(self.context.graph.parameters)
        late = 0.0 if evaluation is None else evaluation.seconds - CLOSE * candidate.seconds
        if evaluation is not None and late > 0 and starts > SAME * evaluation.seconds:
            # Starting so many messages may be what it did not promise.
            merged = by_blocks(self.context, strategy)
            again = self.try_out(merged, candidate.least_seconds)
            if again is not None and again.seconds < evaluation.seconds:
                evaluation = again
        self.tried[candidate.identity] = candidate, evaluation
        return evaluation

    def errors(self) -> dict[Arrangement, list[tuple[Candidate, Evaluation]]]:
        """Return what was tried of each arrangement: as the additive model and the simulator see it."""
        found: dict[Arrangement, list[tuple[Candidate, Evaluation]]] = {}
        for candidate, evaluation in self.tried.values():
            if evaluation is not None:
                found.setdefault(candidate.arrangement, []).append((candidate, evaluation))
        return found

    def stopped(self) -> bool:
        """Whether the caller wants an answer now."""
        return self._stop is not None and self._stop()

    def tell(self, fraction: float, text: str) -> None:
        """Tell the caller how far the search is, and what it does."""
        if self._progress is not None:
            least = self.bounds.least()
            bound = 0.0 if math.isinf(least) else least
            self._done = max(self._done, fraction)
            self._progress(
                Progress(
                    fraction=self._done, best_seconds=self.fastest, bound_seconds=bound, text=text
                )
            )
