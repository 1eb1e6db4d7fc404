"""A finished search with all that it looked at: what is recommended, and what could be instead.

``search`` proposes a frontier of the plans that it simulated. Here plans that the prediction cannot
tell apart become one line, the simplest of them, and any other strategy can be laid beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier, Plan
from shardwright.core.strategy import Strategy
from shardwright.planner.cost.burden import is_measured
from shardwright.planner.cost.collective import MODEL_SPREAD
from shardwright.planner.judge.evaluate import Evaluation, evaluate, starts_are_felt
from shardwright.planner.judge.ties import NEAR, complexity, half_width_between
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.answer import Findings, is_no_less, make_plan
from shardwright.planner.search.goals import FASTEST, Goal
from shardwright.planner.search.labels import told_apart
from shardwright.planner.search.limits import room
from shardwright.planner.search.local.refinement import REFINED
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.steering import CANDIDATES
from shardwright.planner.space import Seed
from shardwright.planner.space.seeds import capped_sync

# Plain data parallelism with so many microbatches is what users already have.
PLAIN_MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True, eq=False)
class Survey:
    """A search's frontier and findings. ``goal`` and ``seed`` are what it was asked for."""

    frontier: Frontier
    findings: Findings
    goal: Goal = FASTEST
    seed: int = 0
    _known: dict[Strategy, Evaluation] = field(
        default_factory=dict[Strategy, Evaluation], repr=False
    )

    @property
    def context(self) -> Context:
        """What was searched: graph, cluster and costs."""
        return self.findings.context

    @property
    def room(self) -> float:
        """The bytes of a device that plans may use."""
        return self.findings.limit

    def weighed(self, strategy: Strategy) -> Evaluation:
        """Return a strategy's evaluation, as the search found it if it did. Raises ValueError where it is
        illegal."""
        known = self._known
        if not known:
            known |= {one.strategy: one for one in self.findings.evaluations}
        if strategy not in known:
            known[strategy] = evaluate(self.context, strategy)
        return known[strategy]

    def plan(self, strategy: Strategy) -> Plan:
        """Return a strategy as a plan, with what is predicted of it."""
        return make_plan(self.findings, self.weighed(strategy), self.seed)

    def half_width(self, one: Strategy, other: Strategy) -> float:
        """Return the half-width of the difference of two strategies' step times, in seconds."""
        return half_width_between(self.weighed(one).doubts, self.weighed(other).doubts)

    @cached_property
    def plain(self) -> tuple[Plan, ...]:
        """Plain data parallelism on all devices, with 1, 2 and 4 microbatches where that is legal
        and fits. Gradients travel as with torch's DistributedDataParallel, which is what users have;
        in deep graphs block by block, unless starting so many messages was measured, and is felt."""
        found: list[Plan] = []
        context = self.context
        for count in PLAIN_MICROBATCHES:
            try:
                seed = Seed(data=context.num_devices, num_microbatches=count)
                strategy = as_strategy(context, seed)
                if not context.facts.folder.is_long or (
                    is_measured(context.table) and starts_are_felt(context, self.weighed(strategy))
                ):
                    sync = strategy.gradient_sync.carrying(capped_sync(context.graph))
                    strategy = replace(strategy, gradient_sync=sync)
                plan = self.plan(strategy)
            except ValueError:
                continue
            if plan.predicted.peak_bytes <= self.room:
                found.append(plan)
        return tuple(found)

    @cached_property
    def alone(self) -> tuple[Strategy, ...]:
        """The first device alone, with no messages at all; nothing where that is illegal, does not fit or is
        slower than what is chosen by twice what models of operators are off by."""
        most = (1 + 2 * MODEL_SPREAD) * self.frontier.best.predicted.step_seconds
        first = self.context.on(1)
        if self.context.num_devices == 1 or first.prices.serial_seconds > most:
            return ()
        try:
            strategy = as_strategy(first, Seed())
            fits = self.weighed(strategy).bytes <= self.room
        except ValueError:
            return ()
        return (strategy,) if fits else ()

    def fastest(self, count: int) -> tuple[Plan, ...]:
        """Return the plans predicted fastest, one for each name; refinement is no other name."""
        found: dict[str, Evaluation] = {}
        for evaluation in self.findings.fitting:
            found.setdefault(evaluation.strategy.label.removesuffix(REFINED), evaluation)
            if len(found) == count:
                break
        return tuple(
            make_plan(self.findings, evaluation, self.seed) for evaluation in found.values()
        )

    def settled(self) -> Survey:
        """Return the survey with a frontier of plans that can be told apart, the simplest of each
        kind, for the goal that asks for speed."""
        if self.goal.mode != "min-time" or len(self.findings.fitting) < 2:
            return self
        pool = self._with_plain()
        # The simplest, and the fastest that it stands for.
        lines: list[tuple[Evaluation, Evaluation]] = []
        for evaluation in pool:
            kept = [simple for simple, _ in lines]
            if evaluation.seconds > self.goal.deadline or self._is_covered(evaluation, kept):
                continue
            simple = self._simplest(evaluation, pool)
            lines.append((evaluation if self._is_covered(simple, kept) else simple, evaluation))
        return replace(self, frontier=self._frontier(lines))

    def _with_plain(self) -> list[Evaluation]:
        """Return what fits, plain data parallelism and a device alone, the best objective first."""
        pool = [*self.findings.fitting]
        known = {evaluation.strategy for evaluation in pool}
        wanted = [*(one.strategy for one in self.plain), *self.alone]
        pool += [self.weighed(one) for one in wanted if one not in known]
        return sorted(pool, key=lambda one: one.objective)

    def _frontier(self, lines: list[tuple[Evaluation, Evaluation]]) -> Frontier:
        chosen, fastest = lines[0]
        kept = [chosen]
        for simple, _ in lines[1:]:
            beaten = any(other.objective.dominates(simple.objective) for other, _ in lines)
            if not beaten and simple not in kept:
                kept.append(simple)
        kept.sort(key=lambda one: one.objective)
        plans = told_apart([make_plan(self.findings, evaluation, self.seed) for evaluation in kept])
        place = kept.index(chosen)
        reason = self.frontier.best.reason
        if chosen is not fastest:
            width = self.half_width(chosen.strategy, fastest.strategy)
            reason = (
                f"{chosen.strategy.label} ({chosen.seconds:.4g} s) is the simplest of the plans that "
                f"the prediction cannot tell from the fastest: {fastest.strategy.label} is predicted "
                f"{1 - fastest.seconds / chosen.seconds:.1%} faster, less than the half-width of the "
                f"difference, {width / chosen.seconds:.1%}."
            )
        plans[place] = replace(plans[place], reason=reason)
        return Frontier(plans=tuple(plans), chosen=place)

    def _is_covered(self, evaluation: Evaluation, kept: list[Evaluation]) -> bool:
        return any(self._covers(one, evaluation) for one in kept)

    def _covers(self, kept: Evaluation, other: Evaluation) -> bool:
        """Whether a plan offers nothing beside one that is kept: of one that takes longer more is asked,
        as much again for every time that its step is twice as long."""
        doublings = math.log2(max(other.seconds / kept.seconds, 1.0))
        if not is_no_less(other, kept, min(NEAR * (1 + doublings), 1.0)):
            return False
        return kept.seconds <= other.seconds or self._are_same(kept, other)

    def _are_same(self, one: Evaluation, other: Evaluation) -> bool:
        """Whether the prediction cannot tell two step times apart."""
        apart = abs(one.seconds - other.seconds)
        if apart > self._farthest * min(one.seconds, other.seconds):
            return False
        return apart <= self.half_width(one.strategy, other.strategy)

    @cached_property
    def _farthest(self) -> float:
        """What half-widths of differences come to at most, as a share: twice the fastest's own."""
        fastest = self.findings.fitting[0]
        return max(2 * sum(fastest.doubts.values()) / fastest.seconds, 1e-3)

    def _simplest(self, evaluation: Evaluation, pool: list[Evaluation]) -> Evaluation:
        """Return the simplest plan that is the same in time, and no worse in memory and money where
        the plan stands on the frontier for these."""
        own = complexity(evaluation.strategy)
        is_fastest = evaluation is pool[0]
        reach = (1 + self._farthest) * evaluation.seconds
        rivals = [
            (complexity(one.strategy), one.seconds, place)
            for place, one in enumerate(pool)
            if one.seconds <= reach
            and one.objective.staleness <= evaluation.objective.staleness
            and (is_fastest or is_no_less(evaluation, one, NEAR))
        ]
        for how, _, place in sorted(rivals)[:CANDIDATES]:
            if how < own and self._are_same(pool[place], evaluation):
                return pool[place]
        return evaluation


def surveyed(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    frontier: Frontier,
    training: Training,
) -> Survey:
    """Return a survey of a frontier that was found before, so that other strategies can be laid
    beside its plans; nothing is searched, and nothing proved."""
    context = Context.of(graph, cluster, table, training)
    found = Findings(
        context=context,
        limit=room(cluster),
        evaluations=(),
        refused=(),
        is_complete=True,
    )
    return Survey(frontier, found)
