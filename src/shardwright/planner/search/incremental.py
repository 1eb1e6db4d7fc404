"""Judging one strategy after another: only what changed is lowered and priced again.

``judge`` is the definition, this is its equal to the last bit. Local search asks it for strategies
that differ little from those it asked for before (``lower.incremental``).
"""

from __future__ import annotations

from shardwright.core.strategy import Strategy
from shardwright.planner.cost.price import Tariff
from shardwright.planner.lower.incremental import IncrementalLowering
from shardwright.planner.search.context import Context
from shardwright.planner.search.judge import Judged, judge_program


class Incremental:
    """Judges strategies of one context, each quickly where it resembles one of the last.

    It compares by itself, operator by operator, what a strategy has in common with those before.
    Strategies on other meshes, with other microbatches or in another precision begin anew. It is
    quickest where unchanged configs are the same objects.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lowering = IncrementalLowering(context.graph, context.samples)
        self._tariff = Tariff(context.graph, context.cluster, context.table)

    def judge(self, strategy: Strategy, least_seconds: float = float("nan")) -> Judged:
        """Return what ``judge`` returns: every field is equal."""
        program = self._lowering.lower(strategy)
        prices = self._tariff.price(program)
        return judge_program(self.context, program, prices, least_seconds)[1]
