"""The search where messages cost computation: bounds stay bounds, and the choice is the best."""

from __future__ import annotations

from shardwright.core.costs import CostTable, beneath_key, collective_key, link_label, meeting_name
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.search import Limits, Training, search
from shardwright.planner.search.named import named_strategies
from shardwright.planner.simulate import simulate
from tests.planner.search.models import cluster, mlp

WHERE = cluster(1, 2, flops=1e10, near=1e9, far=1e8)
PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")


def table(held: float) -> CostTable:
    """Collectives of 10 us and 1 ns/byte, which hold the computing thread so long, steal a third of
    what they take, and take twice as long where they are waited for."""
    label, found = link_label(WHERE, (0, 1)), []
    for name in PRIMITIVES:
        ends = (name, 1, 2, label)
        found.append((collective_key(*ends), _line(1e-5, 1e-9)))
        found.append((beneath_key("held", *ends), _line(held, 0.0)))
        found.append((beneath_key("stolen", *ends), _line(1e-5 / 3, 1e-9 / 3)))
        found.append((beneath_key("waited", *ends), _line(2e-5, 2e-9)))
    scalars = [
        (meeting_name("skew", 1, 2, label), 0.05),
        (meeting_name("hiding", 1, 2, label), 2e-4),
    ]
    return CostTable(collectives=tuple(sorted(found)), overheads=tuple(scalars))


def _line(constant: float, slope: float) -> tuple[tuple[float, float, float], ...]:
    return tuple((float(size), constant + slope * size, 0.0) for size in (1, 10**9))


def test_bounds_lie_below_and_no_named_strategy_beats_the_chosen_plan() -> None:
    graph, costs = mlp(), table(5e-4)
    frontier = search(graph, WHERE, costs, limits=Limits(max_candidates=2))
    for plan in frontier.plans:
        assert plan.bound is not None
        assert 0 < plan.bound.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)
    best = frontier.best.predicted.step_seconds
    for named in named_strategies(Context.of(graph, WHERE, costs, Training())):
        for strategy in named:
            program = lower(graph, strategy)
            seconds = price(program, graph, WHERE, costs).seconds
            assert best <= simulate(program, seconds).step_seconds * (1 + 1e-9)
