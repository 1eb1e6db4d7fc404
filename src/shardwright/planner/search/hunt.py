"""The hunt: which strategies are proposed and simulated, and what is known so far.

The additive model proposes (``candidates``), the simulator disposes (``judge``). What is exact and
what is not: per arrangement the additive optimum and all supported time/memory points are exact and
proved; which of them are simulated is a selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.search.answer import Findings, fitting
from shardwright.planner.search.arrangements import (
    Arrangement,
    Shape,
    device_counts,
    shapes,
)
from shardwright.planner.search.candidates import (
    HOPELESS,
    Candidate,
    explore,
    spread,
    to_strategy,
)
from shardwright.planner.search.context import Context
from shardwright.planner.search.judge import Judged, judge, merge
from shardwright.planner.search.named import (
    as_strategy,
    asked_for,
    grid_strategies,
    least_seconds,
    named_strategies,
)
from shardwright.planner.search.refinement import improve
from shardwright.planner.space import Placement, Seed

# Twice the memory limit with one microbatch means that one microbatch is hopeless for the others
# too.
FAR = 2.0
# Grids (2-D, 3-D) are simulated unless they must be so many times slower than what fits already.
WORTH = 2.0
# So many of the fastest plans get gradient buckets of their own, if this close to the fastest.
MERGED, CLOSE = 3, 1.1
# So many of the fastest plans are refined, each by moves that simulate about so many operators;
# fewer where many hunts make one answer.
REFINED, MOVED, LEAST_MOVES = 2, 4_000, 2
MOST_MOVES, FEW_MOVES = 48, 8
# So many arrangements are solved again with corrected memory.
CORRECTED = 3
# More microbatches are tried while each doubling saves more than a tenth of the smallest plan's
# memory.
WORTHWHILE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: ``fraction`` of its work, the best step that fits so far (inf before the
    first), and the bound (0 until it is known).
    """

    fraction: float
    best_seconds: float
    bound_seconds: float
    text: str


class Hunt:
    """The state of one search: candidates, verdicts and the bound."""

    def __init__(
        self,
        context: Context,
        limit: float,
        max_candidates: int,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.context, self.limit, self.max_candidates = context, limit, max_candidates
        self._progress, self._stop = progress, stop
        fixed = context.table.overhead_map.get("process_bytes", 0.0)
        self.room = max(limit - fixed, 0.0)
        self.candidates: list[Candidate] = []
        self.judged: list[Judged] = []
        self.refused: list[str] = []
        self.tried: dict[object, tuple[Candidate, Judged | None]] = {}
        self.bound = math.inf
        self.fastest = math.inf
        self.serial = context.serial_seconds
        self.complete = True

    @property
    def fitting(self) -> list[Judged]:
        """Verdicts within the memory limit, fastest first."""
        return fitting(self.judged, self.limit)

    def findings(self) -> Findings:
        """Return what was found so far."""
        return Findings(
            context=self.context,
            limit=self.limit,
            judged=tuple(self.judged),
            refused=tuple(self.refused),
            bound=self.bound,
            is_complete=self.complete,
        )

    def run(self, *, only: bool = False) -> Findings:
        """Hunt to the end, or until stopped. ``only``: not on fewer devices than all."""
        self.judge_named()
        self.judge_grids()
        self.explore((self.context.num_devices,) if only else device_counts(self.context))
        self.judge_candidates()
        self.merge_gradients()
        self.refine(FEW_MOVES if only else MOST_MOVES)
        return self.findings()

    def judge_named(self) -> None:
        """Simulate the strategies people know, so that none of them beats the answer.

        One that does not fit is tried again with the most microbatches, at once where plain data
        parallelism was already far too large.
        """
        far = False
        for few, many in named_strategies(self.context):
            for strategy in dict.fromkeys((many,) if far else (few, many)):
                if self.stopped() and self.judged:
                    return
                verdict = self._verdict(strategy, math.nan)
                self._tell(0.0, strategy.label)
                if verdict is not None and verdict.bytes <= self.limit:
                    break
                far = far or (verdict is not None and verdict.bytes > FAR * self.limit)

    def judge_grids(self) -> None:
        """Simulate tensor parallelism in two and three dimensions, unless that is hopeless."""
        for few, many in grid_strategies(self.context):
            fastest = self.fitting[0].seconds if self.fitting else math.inf
            share = self._even_split(len(few.devices))
            if self.stopped() or share + least_seconds(self.context, few) > WORTH * fastest:
                continue
            self._first_that_fits(few, many)
            self._tell(0.0, few.label)

    def judge_asked_for(self, wanted: str | Placement) -> None:
        """Simulate the one strategy that was asked for."""
        self._first_that_fits(*asked_for(self.context, wanted))

    def _first_that_fits(self, few: Strategy, many: Strategy) -> None:
        verdict = self._verdict(few, math.nan)
        if (verdict is None or verdict.bytes > self.limit) and many != few:
            self._verdict(many, math.nan)

    def explore(self, counts: tuple[int, ...]) -> None:
        """Solve the arrangements of all devices, then those of fewer that could still win."""
        for order, count in enumerate(counts):
            plans = list(shapes(self.context, count))
            if count < counts[0] and self._even_split(count) >= self.fastest:
                plans = self._cheaper(plans)
            for number, shape in enumerate(plans):
                if not self.explore_shape(shape):
                    self.complete = False
                    return
                share = (order + (number + 1) / len(plans)) / len(counts)
                self._tell(0.1 + 0.6 * share, f"{count} devices, {shape.stages} stages")

    def _even_split(self, devices: float) -> float:
        """Return the seconds if all work divided evenly: no plan on so many devices is faster."""
        return self.serial / devices

    def _cheaper(self, plans: list[Shape]) -> list[Shape]:
        """Keep of too few devices only what may save money: the best shape, on fewer hosts."""
        fits = [c for c in self.candidates if c.bytes <= self.room]
        if not fits or not plans:
            return []
        best = min(fits, key=lambda c: (c.seconds, c.bytes)).arrangement
        cluster = self.context.cluster
        count = plans[0].stages * plans[0].data * plans[0].tensor
        rate = cluster.dollars_per_second
        if rate(tuple(range(2 * count))) <= rate(tuple(range(count))):
            return []
        return [
            replace(plan, microbatches=plan.microbatches[-2:])
            for plan in plans
            if (plan.stages, plan.tensor) == (best.stages, best.tensor)
        ]

    def judge_seed(self, seed: Seed) -> Judged | None:
        """Simulate a named strategy; None where it is impossible."""
        try:
            strategy = as_strategy(self.context, seed)
        except ValueError as error:
            self.refused.append(f"{seed.label}: {error}")
            return None
        return self._verdict(strategy, math.nan)

    def explore_shape(self, shape: Shape) -> bool:
        """Try ever more microbatches, until they no longer save memory; false if asked to stop."""
        smallest = math.inf
        for arrangement in shape.arrangements:
            if self.stopped():
                return False
            bubble = (shape.stages - 1) / arrangement.microbatches
            if self._even_split(arrangement.num_devices) * (1 + bubble) > HOPELESS * self.fastest:
                continue
            try:
                found = explore(self.context, arrangement, self.room, self.fastest, self.bound)
            except InputError as error:  # too wide for the exact search
                self.refused.append(f"{arrangement}: {error}")
                self.complete = False
                break
            self.candidates += found.candidates
            self.bound = found.bound
            fast = [c.seconds for c in found.candidates if c.bytes <= self.room]
            self.fastest = min([self.fastest, *fast])
            least = min((c.bytes for c in found.candidates), default=math.inf)
            # Without a pipeline more microbatches only cost time; they are for memory.
            is_idle = least > smallest * WORTHWHILE or found.fastest > HOPELESS * self.fastest
            if is_idle and shape.stages == 1:
                break
            smallest = least
        return True

    def judge_candidates(self) -> None:
        """Simulate a selection; while nothing fits go on with smaller ones."""
        wanted = spread(self.candidates, self.max_candidates, self.room)
        for number, candidate in enumerate(wanted):
            if self.stopped() and self.judged:
                return
            self._try(candidate)
            self._tell(0.7 + 0.2 * (number + 1) / len(wanted), "simulating")
        self._correct()
        self._try_gpipe()
        rest = sorted(self.candidates, key=lambda c: c.bytes)
        for candidate in rest[: self.max_candidates]:
            if self.fitting or self.stopped():
                return
            self._try(candidate)

    def _correct(self) -> None:
        """Solve the most promising arrangements again, with the memory the simulator found missing.

        The additive model does not know when tensors are alive, so plans made to just fit may not.
        """
        missing: dict[Arrangement, float] = {}
        for candidate, verdict in self.tried.values():
            if verdict is not None:
                error = verdict.bytes - (self.limit - self.room) - candidate.bytes
                known = missing.get(candidate.arrangement, 0.0)
                missing[candidate.arrangement] = max(known, error)
        fastest: dict[Arrangement, float] = {}
        for candidate in self.candidates:
            if candidate.arrangement in missing and candidate.bytes <= self.room:
                known = fastest.get(candidate.arrangement, math.inf)
                fastest[candidate.arrangement] = min(known, candidate.seconds)
        for arrangement in sorted(fastest, key=lambda a: (fastest[a], a))[:CORRECTED]:
            if self.stopped() or missing[arrangement] <= 0:
                continue
            room = self.room - missing[arrangement]
            again = explore(self.context, arrangement, room, math.inf, 0.0).candidates
            fits = sorted((c for c in again if c.bytes <= room), key=lambda c: (c.seconds, c.bytes))
            best = self.fitting[0].seconds if self.fitting else math.inf
            if fits and fits[0].least_seconds < best:
                self._try(fits[0])
            self._tell(0.95, "correcting memory")

    def _try_gpipe(self) -> None:
        """Simulate the fastest pipeline in GPipe order too, which hides slow transfers better."""
        pipelines = [
            (verdict.seconds, candidate.bytes, number)
            for number, (candidate, verdict) in enumerate(self.tried.values())
            if verdict is not None and candidate.arrangement.stages > 1
        ]
        if pipelines and not self.stopped():
            candidate = list(self.tried.values())[min(pipelines)[2]][0]
            self._try(
                replace(candidate, arrangement=replace(candidate.arrangement, schedule="gpipe"))
            )

    def _try(self, candidate: Candidate) -> None:
        """Simulate a candidate unless that was done."""
        if candidate.identity not in self.tried:
            strategy = to_strategy(self.context, candidate)
            verdict = self._verdict(strategy, candidate.least_seconds)
            self.tried[candidate.identity] = candidate, verdict

    def merge_gradients(self) -> None:
        """Choose gradient buckets for the fastest fitting plans; the order may change."""
        for verdict in self.fitting[:MERGED]:
            if self.stopped() or verdict.seconds > CLOSE * self.fitting[0].seconds:
                return
            merged = merge(self.context, verdict)
            self.judged = [merged if known is verdict else known for known in self.judged]
            self._tell(1.0, "merging gradients")

    def refine(self, most: int) -> None:
        """Let the simulator have the last word: small changes of the fastest plans, where they
        help."""
        operators = len(self.context.graph.operators)
        moves = min(max(LEAST_MOVES, MOVED // operators), most)
        for verdict in self.fitting[:REFINED]:
            if self.stopped() or verdict.seconds > CLOSE * self.fitting[0].seconds:
                return
            better = improve(self.context, verdict, self.limit, moves, stop=self.stopped)
            if better is not verdict:
                self.judged.append(better)
            self._tell(1.0, "refining")

    def stopped(self) -> bool:
        """Whether the caller wants an answer now."""
        return self._stop is not None and self._stop()

    def _verdict(self, strategy: Strategy, least_seconds: float) -> Judged | None:
        try:
            verdict = judge(self.context, strategy, least_seconds)
        except ValueError as error:
            self.refused.append(f"{strategy.label}: {error}")
            return None
        self.judged.append(verdict)
        return verdict

    def _tell(self, fraction: float, text: str) -> None:
        if self._progress is not None:
            fits = self.fitting
            best = fits[0].seconds if fits else math.inf
            bound = 0.0 if math.isinf(self.bound) else self.bound
            self._progress(
                Progress(fraction=fraction, best_seconds=best, bound_seconds=bound, text=text)
            )
