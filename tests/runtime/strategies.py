"""Strategies for the runtime's tests, as importable functions of a graph."""

from __future__ import annotations

from functools import partial

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from tests.runtime.equivalence import StrategyBuilder


def _build(seed: Seed, graph: OperatorGraph) -> Strategy:
    return seed_strategy(graph, seed)


def strategy_of(seed: Seed) -> StrategyBuilder:
    """Return a builder which can be sent to another process."""
    return partial(_build, seed)


def named(*seeds: Seed) -> dict[str, StrategyBuilder]:
    """Return builders by the names of their seeds."""
    return {seed.label: strategy_of(seed) for seed in seeds}
