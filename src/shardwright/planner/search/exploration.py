"""The exploration: which strategies are proposed and simulated, and what is known so far.

The additive model proposes (``candidates``), the simulator disposes (``judge.evaluate``). What is exact and
what is not: per arrangement the additive optimum and all supported time/memory points are exact and
proved; which of them are simulated is a selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation, by_blocks, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.model.arrangements import (
    FEW,
    Arrangement,
    Shape,
    free_axes,
    shapes,
)
from shardwright.planner.model.context import Context
from shardwright.planner.model.problem import Problem
from shardwright.planner.search.answer import Findings, fitting
from shardwright.planner.search.candidates import (
    HOPELESS,
    Candidate,
    explore,
    is_outdone,
    least_rounds,
    solve,
    to_strategy,
)
from shardwright.planner.search.local.refinement import PATIENCE, improve
from shardwright.planner.search.named import (
    Named,
    as_strategy,
    asked_for,
    grid_strategies,
    least_seconds,
)
from shardwright.planner.search.progress import Progress
from shardwright.planner.search.selection import (
    cheaper,
    least_flat,
    log_bucket,
    pareto_front,
    shortlist,
)
from shardwright.planner.space import Placement, Seed

# Twice the memory limit with one microbatch means that one microbatch is hopeless for the others
# too.
FAR = 2.0
# So many of the fastest plans are refined (twice as many where moves are cheap, so that there are more
# than so many; of larger graphs the fastest alone), each by moves that simulate about so many
# operators; not at all where those would be too few to find anything.
REFINED, CHEAP_MOVES = 2, 100
MOVED, LEAST_MOVES, MOST_MOVES = 20_000, 20, 400
# Where the bound is so far below the fastest plan, there may be more to gain: twice as many plans, so
# many times as many moves, and more patience.
OPEN, OPENED, OPEN_PATIENCE = 0.75, 3, 100
# A plan of the additive model is simulated at once if it promises so much less than any before.
MATTERS = 0.998
# Plans that need little memory are looked for up to so many operators times microbatches.
BEARABLE = 100_000
# Graphs of so few operators are solved and simulated so fast that the whole frontier is looked at.
SMALL = 1000
# Where two free axes make many alike, so many times as many candidates are simulated.
MORE = 3
# Where more of the fastest step is no work of operators, each may split what it likes over all
# devices.
WASTED = 1.1
# A plan that takes so much longer than promised is tried with the gradients of a block merged, if
# starting messages is felt.
SLOW, FELT = 1.1, 0.02
# So many arrangements are solved again with corrected memory, where it was too little or so much.
CORRECTED, PRECISE = 2, 0.05
# More microbatches are tried while each doubling saves more than a tenth of the smallest plan's
# memory.
WORTHWHILE = 0.9


class Exploration:
    """The state of one search: candidates, evaluations and the bound."""

    def __init__(
        self,
        context: Context,
        limit: float,
        max_candidates: int,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.context, self.limit, self.max_candidates = context, limit, max_candidates
        self.evaluator = Incremental(context)
        self._progress, self._stop = progress, stop
        fixed = context.table.overhead_map.get("process_bytes", 0.0)
        self.room = max(limit - fixed, 0.0)
        self.candidates: list[Candidate] = []
        self.evaluations: list[Evaluation] = []
        self.refused: list[str] = []
        self.tried: dict[object, tuple[Candidate, Evaluation | None]] = {}
        self.bound = math.inf
        self._promised = math.inf
        self._done = 0.0
        self._far = False
        self.serial = context.serial_seconds
        self.complete = True
        self.is_small = len(context.graph.operators) <= SMALL

    @property
    def fitting(self) -> list[Evaluation]:
        """Verdicts within the memory limit, fastest first."""
        return fitting(self.evaluations, self.limit)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest simulated plan that fits."""
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
            bound=self.bound,
            is_complete=self.complete,
        )

    def evaluate_named(self, every: Iterable[Named]) -> None:
        """Simulate the strategies people know, so that none of them beats the answer: all but those
        that must be slower than what fits already.

        One that does not fit is tried again with the most microbatches, at once where plain data
        parallelism was already far too large.
        """
        for named in every:
            for strategy in (named.many,) if self._far else named:
                if self.stopped() and self.evaluations:
                    return
                if self.fitting and self._least(strategy) >= self.fitting[0].seconds:
                    break  # more microbatches are no less work
                evaluation = self.try_out(strategy, math.nan)
                self.tell(0.0, strategy.label)
                if evaluation is not None and evaluation.bytes <= self.limit:
                    break
                self._far |= evaluation is not None and evaluation.bytes > FAR * self.limit

    def _least(self, strategy: Strategy) -> float:
        """Bound a named strategy's seconds from below."""
        if len(strategy.meshes) > 1:
            return self._even_split(len(strategy.devices))
        return least_seconds(self.context, strategy)

    def evaluate_grids(self) -> None:
        """Simulate tensor parallelism in two and three dimensions, unless that is hopeless."""
        for grid in grid_strategies(self.context):
            fastest = self.fitting[0].seconds if self.fitting else math.inf
            if self.stopped() or self._least(grid.few) >= fastest:
                continue
            self._first_that_fits(grid)
            self.tell(0.0, grid.few.label)

    def evaluate_asked_for(self, wanted: str | Placement) -> None:
        """Simulate the one strategy that was asked for."""
        self._first_that_fits(asked_for(self.context, wanted))

    def _first_that_fits(self, named: Named) -> None:
        evaluation = self.try_out(named.few, math.nan)
        if (evaluation is None or evaluation.bytes > self.limit) and named.many != named.few:
            self.try_out(named.many, math.nan)

    def explore(self, counts: tuple[int, ...]) -> None:
        """Solve the arrangements of all devices, then those of fewer that could still win."""
        for order, count in enumerate(counts):
            part = (order, len(counts))
            plans = list(shapes(self.context, count))
            if count < counts[0] and self._even_split(count) >= self.fastest:
                plans = cheaper(plans, self.candidates, self.context.cluster, self.room)
            flat = [plan for plan in plans if plan.stages == 1]
            is_done = self._best_first(flat, part)
            least = least_flat(self.candidates, count, self._even_split(count))
            if is_done and self.fastest > WASTED * least:
                is_done = self._best_first(list(free_axes(self.context, count)), part)
            pipelines = [plan for plan in plans if plan.stages > 1]
            if not is_done or not self._best_first(pipelines, part):
                self.complete = False
                return
        self._explore_lean()

    def _best_first(self, plans: list[Shape], part: tuple[int, int]) -> bool:
        """Solve shapes, the promising and simple ones first; false if asked to stop.

        What cannot be faster than the fastest simulated plan is passed over.
        """
        queue = [
            (self._rough(arrangement), arrangement)
            for plan in plans
            for arrangement in plan.arrangements
        ]
        queue.sort(key=lambda entry: (log_bucket(entry[0]), entry[1].tensor, entry[1]))
        smallest: dict[Arrangement, float] = {}
        slack = HOPELESS if self.is_small else 1.0
        for number, (rough, arrangement) in enumerate(queue):
            if self.stopped():
                return False
            shape = replace(arrangement, microbatches=1)
            if rough >= slack * self.fastest or smallest.get(shape) == math.inf:
                continue
            if is_outdone(self.context, arrangement, slack * self.fastest):
                if arrangement.stages == 1:
                    smallest[shape] = math.inf  # more microbatches are no less work
                continue
            problem = Problem.of(self.context, arrangement.mesh(0), arrangement.microbatches)
            smallest[shape] = self._solve(problem, arrangement, smallest.get(shape, 0.0))
            share = (part[0] + (number + 1) / len(queue)) / part[1]
            count = arrangement.num_devices
            self.tell(0.1 + 0.6 * share, f"{count} devices, {arrangement.stages} stages")
        return True

    def _rough(self, arrangement: Arrangement) -> float:
        """Return the seconds of an arrangement if all work divided evenly."""
        rounds, _ = least_rounds(arrangement.stages, arrangement.microbatches)
        share = rounds * arrangement.stages / arrangement.microbatches
        return self._even_split(arrangement.num_devices) * share

    def _even_split(self, devices: float) -> float:
        """Return the seconds if all work divided evenly: no plan on so many devices is faster."""
        return self.serial / devices

    def evaluate_seed(self, seed: Seed) -> Evaluation | None:
        """Simulate a named strategy; None where it is impossible."""
        try:
            strategy = as_strategy(self.context, seed)
        except ValueError as error:
            self.refused.append(f"{seed.label}: {error}")
            return None
        return self.try_out(strategy, math.nan)

    def explore_shape(self, shape: Shape) -> bool:
        """Solve one shape, whatever is known of others; false if asked to stop."""
        smallest = 0.0
        for arrangement in shape.arrangements:
            if self.stopped():
                return False
            problem = Problem.of(self.context, arrangement.mesh(0), arrangement.microbatches)
            smallest = self._solve(problem, arrangement, smallest)
            if smallest == math.inf:
                break
        return True

    def _solve(self, problem: Problem, arrangement: Arrangement, smallest: float) -> float:
        """Solve an arrangement and simulate its best plan if it promises more than any before.

        Returns the bytes of its smallest plan; infinity once more microbatches are pointless:
        without a pipeline they only cost time, and here they no longer save memory, or the fastest
        plan does not need it. ``smallest`` is what fewer microbatches needed.
        """
        try:
            found = solve(
                problem, arrangement, self.room, (self.fastest, self._promised), self.bound
            )
        except InputError as error:  # too wide for the exact search
            self.refused.append(f"{arrangement}: {error}")
            self.complete = False
            return math.inf
        self.candidates += found.candidates
        self.bound = found.bound
        fits = [c for c in found.candidates if c.bytes <= self.room]
        if fits:
            best = min(fits, key=lambda c: (c.seconds, c.bytes))
            if best.seconds < self._promised * MATTERS and best.least_seconds < self.fastest:
                self._promised = best.seconds
                self._try(best)
        if arrangement.stages > 1:
            return 0.0
        least = min((c.bytes for c in found.candidates), default=math.inf)
        is_idle = 0 < smallest * WORTHWHILE < least or found.fastest > HOPELESS * self.fastest
        return math.inf if is_idle or (found.is_free and not self.is_small) else least

    def _explore_lean(self) -> None:
        """Solve the arrangements with the most microbatches too, for plans that need little."""
        plans = [
            each for each in shapes(self.context, self.context.num_devices) if each.stages == 1
        ]
        for plan in plans[:1] + plans[1:][-1:]:
            count = len(self.context.graph.operators)
            bearable = [a for a in plan.arrangements if a.microbatches * count <= BEARABLE]
            arrangement = (bearable or plan.arrangements[:1])[-1]
            if not self.stopped() and all(c.arrangement != arrangement for c in self.candidates):
                problem = Problem.of(self.context, arrangement.mesh(0), arrangement.microbatches)
                self._solve(problem, arrangement, 0.0)

    def evaluate_candidates(self) -> None:
        """Simulate a selection; while nothing fits go on with smaller ones."""
        count = self.max_candidates if self.is_small else max(2, self.max_candidates // 3)
        count *= MORE if len(self.context.graph.operators) <= FEW else 1
        promising = shortlist(self.candidates, count, self.room)
        fits = [c for c in self.candidates if c.bytes <= self.room]
        lean = pareto_front(
            fits or self.candidates, max(2, count if self.is_small else count // 2)
        )[1:]
        for number, candidate in enumerate([*promising, *lean]):
            if self.stopped() and self.evaluations:
                return
            if number >= len(promising) or candidate.least_seconds < self.fastest:
                self._try(candidate)
            part = (number + 1) / (len(promising) + len(lean))
            self.tell(0.7 + 0.2 * part, "simulating")
        self._correct()
        self._try_gpipe()
        rest = sorted(self.candidates, key=lambda c: c.bytes)
        for candidate in rest[: self.max_candidates]:
            if self.fitting or self.stopped():
                return
            self._try(candidate)

    def _correct(self) -> None:
        """Solve the most promising arrangements again, with the memory the simulator found missing
        or left over.

        The additive model does not know when tensors are alive, so plans made to just fit may not.
        """
        missing: dict[Arrangement, float] = {}
        for candidate, evaluation in self.tried.values():
            if evaluation is not None:
                error = evaluation.bytes - (self.limit - self.room) - candidate.bytes
                known = missing.get(candidate.arrangement, -math.inf)
                missing[candidate.arrangement] = max(known, error)
        fastest: dict[Arrangement, float] = {}
        for candidate in self.candidates:
            if candidate.arrangement in missing and candidate.bytes <= self.room:
                known = fastest.get(candidate.arrangement, math.inf)
                fastest[candidate.arrangement] = min(known, candidate.seconds)
        for arrangement in sorted(fastest, key=lambda a: (fastest[a], a))[:CORRECTED]:
            if self.stopped() or -PRECISE * self.room < missing[arrangement] <= 0:
                continue
            room = self.room - missing[arrangement]
            again = explore(self.context, arrangement, room, math.inf, 0.0).candidates
            fits = sorted((c for c in again if c.bytes <= room), key=lambda c: (c.seconds, c.bytes))
            if fits and fits[0].least_seconds < self.fastest:
                self._try(fits[0])
            self.tell(0.95, "correcting memory")

    def _try_gpipe(self) -> None:
        """Simulate the fastest pipeline in GPipe order too, which hides slow transfers better."""
        pipelines = [
            (evaluation.seconds, candidate.bytes, number)
            for number, (candidate, evaluation) in enumerate(self.tried.values())
            if evaluation is not None and candidate.arrangement.stages > 1
        ]
        if pipelines and not self.stopped():
            candidate = list(self.tried.values())[min(pipelines)[2]][0]
            if candidate.least_seconds >= self.fastest:
                return
            self._try(
                replace(candidate, arrangement=replace(candidate.arrangement, schedule="gpipe"))
            )

    def _try(self, candidate: Candidate) -> None:
        """Simulate a candidate unless that was done."""
        if candidate.identity not in self.tried:
            strategy = to_strategy(self.context, candidate)
            evaluation = self.try_out(strategy, candidate.least_seconds)
            starts = self.context.starting * len(self.context.graph.parameters)
            late = 0.0 if evaluation is None else evaluation.seconds - SLOW * candidate.seconds
            if evaluation is not None and late > 0 and starts > FELT * evaluation.seconds:
                # Starting so many messages may be what it did not promise.
                merged = by_blocks(self.context, strategy)
                again = self.try_out(merged, candidate.least_seconds)
                if again is not None and again.seconds < evaluation.seconds:
                    evaluation = again
            self.tried[candidate.identity] = candidate, evaluation

    def refine(self) -> None:
        """Let the simulator have the last word: small changes of the fastest plans, where they
        help."""
        is_open = self.bound < OPEN * self.fastest
        moved = MOVED * (OPENED if is_open else 1)
        moves = min(moved // len(self.context.graph.operators), MOST_MOVES)
        if moves < LEAST_MOVES:
            return
        # Those equally fast are mostly the same on another mesh.
        unlike = {f"{one.seconds:.4g}": one for one in reversed(self.fitting)}
        is_cheap = len(self.context.graph.operators) < MOVED / CHEAP_MOVES
        count = 2 * REFINED if is_cheap or is_open else REFINED
        fastest = sorted(unlike.values(), key=lambda one: one.seconds)[:count]
        for evaluation in fastest if self.is_small else fastest[:1]:
            better = improve(
                self.context, evaluation, self.limit, moves,
                patience=OPEN_PATIENCE if is_open else PATIENCE,
                evaluator=self.evaluator.run, stop=self.stopped,
            )  # fmt: skip
            self.tell(1.0, "refining")
            if better is not evaluation:
                self.evaluations.append(better)

    def stopped(self) -> bool:
        """Whether the caller wants an answer now."""
        return self._stop is not None and self._stop()

    def evaluate(self, strategy: Strategy, least_seconds: float = math.nan) -> Evaluation:
        """Simulate a strategy. Raises ValueError where it is illegal."""
        return evaluate(self.context, strategy, least_seconds, self.evaluator.run)

    def try_out(self, strategy: Strategy, least_seconds: float) -> Evaluation | None:
        """Simulate a strategy and keep the evaluation; None where it is illegal."""
        try:
            evaluation = self.evaluate(strategy, least_seconds)
        except ValueError as error:
            self.refused.append(f"{strategy.label}: {error}")
            return None
        self.evaluations.append(evaluation)
        return evaluation

    def tell(self, fraction: float, text: str) -> None:
        """Tell the caller how far the exploration is, and what it does."""
        if self._progress is not None:
            fits = self.fitting
            best = fits[0].seconds if fits else math.inf
            bound = 0.0 if math.isinf(self.bound) else self.bound
            self._done = max(self._done, fraction)
            self._progress(
                Progress(fraction=self._done, best_seconds=best, bound_seconds=bound, text=text)
            )
