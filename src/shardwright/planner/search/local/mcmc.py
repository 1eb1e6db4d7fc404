"""Markov chain Monte Carlo over strategies: FlexFlow's search (MLSys 2019, section 6), judged by our
simulator.

A chain walks from strategy to strategy: a proposal that is faster is taken, one that is slower with a
probability that falls with how much slower. From each start a chain runs until its share of the
budget is spent or nothing better was found for half of that share; the best strategy seen by any is
the answer. It needs no structure of the problem and proves nothing: it is the baseline that the exact
search is held against, and a way to strategies that no arrangement contains.

Where this differs from the paper: the temperature is relative (FlexFlow's own program compares
milliseconds, so its chain freezes on large models and never settles on small ones), memory over the
limit counts as time, and proposals cover what ``proposals`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from shardwright.core.plan import Frontier
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation, merge
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.lower import lower
from shardwright.planner.lower.check import check
from shardwright.planner.model.context import Context
from shardwright.planner.search.answer import GIB, Findings, answer, fitting
from shardwright.planner.search.local.moves import Space, refine
from shardwright.planner.search.local.proposals import Proposals
from shardwright.planner.search.named import named_strategies
from shardwright.planner.search.progress import Progress

Evaluate = Callable[[Strategy], Evaluation]
Spent = Callable[[int], float]
STARTS = ("data", "expert", "random")
# The share of the budget without anything better that ends a chain (the paper's second rule).
PATIENCE = 0.5
# Each tenth of memory over the limit counts like the whole step once more.
OVERWEIGHT = 10.0
FROM = "moves from "


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """How a chain walks.

    A strategy slower by a factor f is accepted with probability f ** (-1 / temperature): at 0.01,
    one per cent slower is accepted 37 times of 100, whatever a step takes. So strategies are visited
    in proportion to seconds ** (-1 / temperature). ``starts``: ``data`` parallelism, the fastest
    ``expert`` plan that people know, and ``random`` splits of every operator; each has an equal share
    of the budget, and what it leaves goes to those behind it.
    """

    seed: int = 0
    temperature: float = 0.002
    starts: tuple[str, ...] = STARTS

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"a temperature must be positive, not {self.temperature:g}")
        unknown = [start for start in self.starts if start not in STARTS]
        if unknown or not self.starts:
            raise InputError(f"chains start from some of {', '.join(STARTS)}, not {unknown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What the chains came by: the best of every trade of seconds and bytes, and counts.

    ``begun`` are the evaluations on the starts. ``illegal`` proposals could not be lowered; those and
    the ``accepted`` are among the ``proposed``.
    """

    best: tuple[Evaluation, ...]
    begun: tuple[Evaluation, ...]
    proposed: int
    accepted: int
    illegal: int


class Walk:
    """Chains in progress; at any time ``walked`` is the answer so far.

    ``spent`` says which fraction of the budget so many proposals have used, 1 at the end; it may
    look at a clock or not. ``tell`` hears of the fraction and of the best seconds after every
    proposal.
    """

    def __init__(
        self,
        context: Context,
        limit: float,
        evaluate: Evaluate,
        spent: Spent,
        chain: Chain,
        tell: Callable[[float, float], None] = lambda fraction, seconds: None,
    ) -> None:
        self.context, self.limit, self.chain = context, limit, chain
        self._evaluate, self._spent, self._tell = evaluate, spent, tell
        self._random = Random(chain.seed)
        self._proposals = Proposals(Space(context), self._random)
        self._front: list[Evaluation] = []
        self._begun: list[Evaluation] = []
        self.num_proposed = self._accepted = self._illegal = 0

    def run(self) -> Walked:
        """Walk from every start in turn."""
        count = len(self.chain.starts)
        for number, (_, begin) in enumerate(self._starts()):
            if self._spent(self.num_proposed) >= 1 and self._begun:
                break
            used = self._spent(self.num_proposed)
            self._walk(begin, used, used + (1 - used) / (count - number))
        return self.walked()

    def walked(self) -> Walked:
        """Return what was found so far; the best come first."""
        fits = fitting(self._front, self.limit)
        others = sorted((j for j in self._front if j not in fits), key=lambda j: j.bytes)
        return Walked(
            best=(*fits, *others),
            begun=tuple(self._begun),
            proposed=self.num_proposed,
            accepted=self._accepted,
            illegal=self._illegal,
        )

    def _starts(self) -> Iterator[tuple[str, Strategy]]:
        named = [named.few for named in named_strategies(self.context)]
        if not named:
            raise InputError("no named strategy divides the batch, so that no chain can start")
        for name in self.chain.starts:
            if name == "data":
                yield name, self._refined(named[0])
            elif name == "random":
                yield name, self._proposals.anything(self._refined(named[0]))
            else:
                yield name, self._refined(self._expert())

    def _expert(self) -> Strategy:
        """Return the named strategy of the least cost."""
        evaluations = [
            evaluation
            for named in named_strategies(self.context)
            for strategy in named
            if (evaluation := self._judged(strategy)) is not None
        ]
        return min(evaluations, key=self.cost).strategy

    def _refined(self, strategy: Strategy) -> Strategy:
        fine = refine(self.context, strategy)
        return strategy if self._judged(fine) is None else fine

    def cost(self, evaluation: Evaluation) -> float:
        """Return seconds per step, more where the memory limit is broken."""
        over = max(0.0, evaluation.bytes / self.limit - 1)
        return evaluation.seconds * (1 + OVERWEIGHT * over)

    def _walk(self, begin: Strategy, first: float, last: float) -> None:
        """Run one chain between two fractions of the budget."""
        here = self._judged(begin)
        if here is None:
            return
        self._begun.append(here)
        best, gained = self.cost(here), first
        while (now := self._spent(self.num_proposed)) < last:
            if now - gained >= PATIENCE * (last - first):
                return
            there = self._propose(here.strategy)
            if there is not None and self.takes(self.cost(here), self.cost(there)):
                here = there
                self._accepted += 1
                if self.cost(here) < best:
                    best, gained = self.cost(here), self._spent(self.num_proposed)
            fits = fitting(self._front, self.limit)
            self._tell(min(1.0, now), fits[0].seconds if fits else math.inf)

    def takes(self, here: float, there: float) -> bool:
        """Decide by Metropolis and Hastings."""
        if there <= here:
            return True
        return self._random.random() < (here / there) ** (1 / self.chain.temperature)

    def _propose(self, strategy: Strategy) -> Evaluation | None:
        self.num_proposed += 1
        try:
            changed = self._proposals.draw(strategy)
            if changed == strategy:
                return None
            changed = replace(changed, label=_from(strategy.label))
            evaluation = self._evaluate(changed)
        except ValueError:
            self._illegal += 1
            return None
        self._note(evaluation)
        return evaluation

    def _judged(self, strategy: Strategy) -> Evaluation | None:
        try:
            evaluation = self._evaluate(strategy)
        except ValueError:
            return None
        self._note(evaluation)
        return evaluation

    def _note(self, evaluation: Evaluation) -> None:
        """Keep an evaluation that no other beats in seconds and in bytes, if its Program is sound."""
        mine = (evaluation.seconds, evaluation.bytes)
        if any(known.seconds <= mine[0] and known.bytes <= mine[1] for known in self._front):
            return
        try:
            check(lower(self.context.graph, evaluation.strategy, self.context.facts.samples))
        except ValueError:
            return
        self._front = [
            known
            for known in self._front
            if not (mine[0] <= known.seconds and mine[1] <= known.bytes)
        ]
        self._front.append(evaluation)


def _from(label: str) -> str:
    """Name what a chain made of a named strategy."""
    return label if label.startswith(FROM) else FROM + label


def walk(
    context: Context,
    limit: float,
    chain: Chain,
    spent: Spent,
    *,
    evaluate: Evaluate | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Frontier:
    """Return the non-dominated plans that chains within a budget came by; the fastest is chosen.

    ``spent`` as for ``Walk``: a share of a number of proposals makes the answer deterministic.
    ``evaluate`` judges strategies, by default as ``Incremental`` does. Once ``stop`` is true the best
    so far is returned. Raises NoPlan where nothing fits the limit, in bytes per device.
    """

    def tell(fraction: float, seconds: float) -> None:
        text = f"{chains.num_proposed} proposals"
        progress(Progress(fraction=fraction, best_seconds=seconds, bound_seconds=0.0, text=text))

    def used(proposals: int) -> float:
        return 1.0 if stop() else spent(proposals)

    chains = Walk(context, limit, evaluate or Incremental(context).evaluate, used, chain, tell)
    walked = chains.run()
    is_complete = not stop()
    best = [merge(context, walked.best[0])] if walked.best and is_complete else []
    findings = Findings(
        context=context,
        limit=limit,
        evaluations=(*best, *walked.best),
        refused=(),
        is_complete=is_complete,
    )
    frontier = answer(findings, chain.seed)
    plans = [replace(plan, method="MCMC over SOAP, simulation") for plan in frontier.plans]
    plans[0] = replace(plans[0], reason=_reason(frontier, walked, limit))
    return replace(frontier, plans=tuple(plans))


def _reason(frontier: Frontier, walked: Walked, limit: float) -> str:
    best = frontier.best
    begun = min(walked.begun, key=lambda one: one.seconds)
    gain = 1 - best.predicted.step_seconds / begun.seconds
    faster = f"{gain:.1%} faster than" if gain > 0 else "no faster than"
    return (
        f"{best.strategy.label} is the fastest of {walked.proposed:,} proposals ({walked.accepted:,} "
        f"accepted, {walked.illegal:,} illegal) within {limit / GIB:.1f} GiB per device "
        f"({best.predicted.step_seconds:.4g} s), {faster} the best start, {begun.strategy.label}; "
        "nothing is proved."
    )
