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

import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Unpack

from shardwright.chains.places import refine
from shardwright.chains.proposals import Drawing
from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Frontier
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.judge.evaluate import Evaluation, merge
from shardwright.planner.lower import lower
from shardwright.planner.model.arrangements import global_batch
from shardwright.planner.model.context import Context
from shardwright.planner.search.answer import GIB, answer
from shardwright.planner.search.local.moves import Space
from shardwright.planner.search.loop import Proposal, Proposals, run
from shardwright.planner.search.named import named_strategies
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.search import How, begun
from shardwright.proofs import check

# What became of one proposal.
Trying = Generator[Proposal, Evaluation | None, Evaluation | None]
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


class Chains:
    """Chains in progress: what they propose, and counts of it.

    ``spent`` says which fraction of the budget so many proposals have used, 1 at the end; it may look at a
    clock or not. ``begun`` are the evaluations of the starts. ``illegal`` proposals could not be lowered;
    those and the ``accepted`` are among the ``proposed``.
    """

    def __init__(self, pool: Pool, chain: Chain, spent: Spent) -> None:
        self.pool, self.chain, self._spent = pool, chain, spent
        self._random = Random(chain.seed)
        self._drawing = Drawing(Space(pool.context), self._random)
        self.begun: list[Evaluation] = []
        self.proposed = self.accepted = self.illegal = 0

    def propose(self) -> Proposals:
        """Walk from every start in turn; the pool keeps the best of every trade of seconds and bytes."""
        count = len(self.chain.starts)
        for number, name in enumerate(self.chain.starts):
            begin = yield from self._start(name)
            used = self._spent(self.proposed)
            if used >= 1 and self.begun:
                return
            here = yield from self._judge(begin)
            if here is not None:
                self.begun.append(here)
                yield from self._walk(here, used, used + (1 - used) / (count - number))

    def _start(self, name: str) -> Generator[Proposal, Evaluation | None, Strategy]:
        """Return a strategy to begin from, on meshes of more axes where it is legal there."""
        every = list(named_strategies(self.pool.context))
        if not every:
            raise InputError(_no_start(self.pool.context))
        begin = every[0].few
        if name == "expert":
            found: list[Evaluation] = []
            for strategy in itertools.chain.from_iterable(every):
                evaluation = yield from self._judge(strategy)
                found += [] if evaluation is None else [evaluation]
            begin = min(found, key=self.cost).strategy
        fine = refine(self.pool.context, begin)
        begin = begin if (yield from self._judge(fine)) is None else fine
        return self._drawing.anything(begin) if name == "random" else begin

    def cost(self, evaluation: Evaluation) -> float:
        """Return seconds per step, more where the memory limit is broken."""
        over = max(0.0, evaluation.bytes / self.pool.limit - 1)
        return evaluation.seconds * (1 + OVERWEIGHT * over)

    def _walk(self, here: Evaluation, first: float, last: float) -> Proposals:
        """Run one chain between two fractions of the budget."""
        best, gained = self.cost(here), first
        while (now := self._spent(self.proposed)) < last:
            if now - gained >= PATIENCE * (last - first):
                return
            self.proposed += 1
            there = yield from self._changed(here.strategy)
            if there is not None and self.takes(self.cost(here), self.cost(there)):
                here = there
                self.accepted += 1
                if self.cost(here) < best:
                    best, gained = self.cost(here), self._spent(self.proposed)
            self.pool.tell(min(1.0, now), f"{self.proposed} proposals")

    def takes(self, here: float, there: float) -> bool:
        """Decide by Metropolis and Hastings."""
        if there <= here:
            return True
        return self._random.random() < (here / there) ** (1 / self.chain.temperature)

    def _changed(self, strategy: Strategy) -> Trying:
        """Try a random change; None where it changes nothing or is illegal."""
        try:
            changed = self._drawing.draw(strategy)
        except ValueError:
            self.illegal += 1
            return None
        if changed == strategy:
            return None
        found = yield from self._judge(replace(changed, label=_from(strategy.label)))
        self.illegal += found is None
        return found

    def _judge(self, strategy: Strategy) -> Trying:
        return (yield Proposal(0.0, partial(self._judged, strategy)))

    def _judged(self, strategy: Strategy) -> Evaluation | None:
        try:
            evaluation = self.pool.evaluator.evaluate(strategy)
        except ValueError:
            return None
        self._note(evaluation)
        return evaluation

    def _note(self, evaluation: Evaluation) -> None:
        """Keep an evaluation that no other beats in seconds and in bytes, if its Program is sound."""
        pool, mine = self.pool, (evaluation.seconds, evaluation.bytes)
        if any(known.seconds <= mine[0] and known.bytes <= mine[1] for known in pool.evaluations):
            return
        try:
            check(lower(pool.context.graph, evaluation.strategy, pool.context.facts.samples))
        except ValueError:
            return
        pool.evaluations = [
            known
            for known in pool.evaluations
            if not (mine[0] <= known.seconds and mine[1] <= known.bytes)
        ]
        pool.evaluations.append(evaluation)


def _no_start(context: Context) -> str:
    count, batch = context.num_devices, global_batch(context)
    return (
        f"a chain starts from a strategy that has a name and runs on all devices, but none divides a global "
        f"batch of {batch} over {count}; choose a batch that {count} devices divide, or leave out the method mcmc"
    )


def _from(label: str) -> str:
    """Name what a chain made of a named strategy."""
    return label if label.startswith(FROM) else FROM + label


def sample(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    chain: Chain,
    spent: Spent,
    **how: Unpack[How],
) -> Frontier:
    """Return the plans that Markov chains come by instead of ``search``; see ``walk``."""
    return walk(begun(graph, cluster, table, **how), chain, spent)


def walk(pool: Pool, chain: Chain, spent: Spent) -> Frontier:
    """Return the non-dominated plans that chains within a budget came by; the fastest is chosen.

    ``spent`` as for ``Chains``: a share of a number of proposals makes the answer deterministic. Raises
    NoPlan where nothing fits.
    """
    chains = Chains(pool, chain, spent)
    run(pool, lambda _: chains.propose())
    pool.complete = not pool.stopped()
    if pool.complete and pool.fitting:
        pool.evaluations.append(merge(pool.context, pool.fitting[0], pool.evaluator.run))
    frontier = answer(pool.findings(), chain.seed)
    plans = [replace(plan, method="MCMC over SOAP, simulation") for plan in frontier.plans]
    plans[0] = replace(plans[0], reason=_reason(frontier, chains))
    return replace(frontier, plans=tuple(plans))


def _reason(frontier: Frontier, chains: Chains) -> str:
    best, text = frontier.best, ""
    for start in sorted(chains.begun, key=lambda one: one.seconds)[:1]:
        gain = 1 - best.predicted.step_seconds / start.seconds
        faster = f"{gain:.1%} faster than" if gain > 0 else "no faster than"
        text = f", {faster} the best start, {start.strategy.label}"
    return (
        f"{best.strategy.label} is the fastest of {chains.proposed:,} proposals ({chains.accepted:,} "
        f"accepted, {chains.illegal:,} illegal) within {chains.pool.limit / GIB:.1f} GiB per device "
        f"({best.predicted.step_seconds:.4g} s){text}; nothing is proved."
    )
