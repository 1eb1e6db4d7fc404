"""Judging one strategy after another: only what changed is lowered and priced again.

``evaluate`` is the definition, this is its equal to the last bit. Local search asks it for strategies
that differ little from those it asked for before (``lower.incremental``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.core.program import Program
from shardwright.core.strategy import Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.price import InstructionCosts, Prices
from shardwright.planner.judge.evaluate import Evaluation, evaluate_program
from shardwright.planner.lower.incremental import IncrementalLowering
from shardwright.planner.model.context import Context
from shardwright.planner.remember import KEPT


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is remembered of strategies on the same meshes."""

    lowering: IncrementalLowering
    costs: InstructionCosts


class Incremental:
    """Judges strategies of one context, each quickly where it resembles one of the last.

    It compares by itself, operator by operator, what a strategy has in common with those before.
    Strategies on other meshes, with other microbatches or in another precision than the last few
    begin anew. It is quickest where unchanged configs are the same objects.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._frames: dict[object, _Frame] = {}  # the last used comes last
        # Asked for again, mostly at once.
        self._last: tuple[Strategy, Program, Prices] | None = None

    @cached_property
    def _lowering(self) -> IncrementalLowering:
        facts = self.context.facts
        return IncrementalLowering(facts.graph, facts.samples, facts.ground)

    def evaluate(self, strategy: Strategy, least_seconds: float = float("nan")) -> Evaluation:
        """Return what ``evaluate`` returns: every field is equal."""
        return self.run(strategy, least_seconds)[2]

    def run(self, strategy: Strategy, least_seconds: float) -> tuple[Program, Timeline, Evaluation]:
        """Return what ``evaluate.run`` returns, the Program with other numbers of values, segments and
        messages (``IncrementalLowering``)."""
        program, prices = self.priced(strategy)
        timeline, evaluation = evaluate_program(self.context, program, prices, least_seconds)
        return program, timeline, evaluation

    def priced(self, strategy: Strategy) -> tuple[Program, Prices]:
        """Return the Program of ``run``, and what its instructions cost."""
        if self._last is None or self._last[0] != strategy:
            frame = self._frame(strategy)
            program = frame.lowering.lower(strategy)
            self._last = strategy, program, frame.costs.price(program)
        return self._last[1:]

    def _frame(self, strategy: Strategy) -> _Frame:
        context, frames = self.context, self._frames
        key = (strategy.meshes, strategy.pipeline, strategy.precision, strategy.batch_norm)
        frame = frames.pop(key, None) or _Frame(
            self._lowering.anew(),
            InstructionCosts(context.graph, context.prices.shards),
        )
        frames[key] = frame
        if len(frames) > KEPT:  # a search that tries another and comes back goes on where it was
            del frames[next(iter(frames))]
        return frame
