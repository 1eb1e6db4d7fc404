"""What moves reach: memory is exchanged across the graph, and strategies may stand in any order."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.contest.compaction import compacted
from shardwright.contest.order import by_slack, relaid
from shardwright.planner.solve.wide.descent import Descent
from shardwright.planner.solve.wide.dual import Dual
from shardwright.planner.solve.wide.net import net_of
from shardwright.planner.solve.wide.region import room_of
from shardwright.verbs.iopddl import wide_problem
from tests.planner.solve.wide.certified import SHAPES, ZEROS, certified
from tests.planner.solve.wide.problems import cost, highs_optimum, peak, random_problem


def descent(problem, choice, seed=0):
    return Descent(problem, net_of(problem), room_of(100, 200_000), choice, seed)


def test_nodes_that_share_nothing_but_memory_exchange_it():
    shell = random_problem(0, num_nodes=3, num_edges=1, most=2, num_times=2)
    problem = replace(
        shell,
        first=np.array([0, 2, 4, 6]),
        cost=np.array([100.0, 0.0, 100.0, 90.0, 100.0, 95.0]),
        usage=np.array([0.0, 8.0, 0.0, 8.0, 0.0, 8.0]),
        begin=np.array([0, 1, 0]),
        end=np.array([2, 2, 2]),
        ends=np.zeros((0, 2), dtype=np.int64),
        table=np.zeros(0, dtype=np.int64),
        cells=np.zeros(0),
        limit=8.0,
    )
    found = descent(problem, np.array([0, 1, 0]))
    for _ in range(10):
        found.round(0.0, 3)
    assert found.choice.tolist() == [1, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_another_order_of_strategies_is_the_same_problem(seed):
    problem = compacted(random_problem(seed, num_nodes=8, num_edges=12, most=5)).problem
    rng = np.random.default_rng(seed)
    order = np.lexsort(
        (rng.random(len(problem.cost)), np.repeat(range(len(problem.sizes)), problem.sizes))
    )
    other, first = relaid(problem, order), problem.first[:-1]
    for _ in range(20):
        choice = rng.integers(0, problem.sizes)
        given = order[first + choice] - first
        assert cost(other, choice) == cost(problem, given)
        assert peak(other, choice) == peak(problem, given)


def test_a_bound_orders_each_nodes_strategies_and_ranks_all_by_what_they_cost_at_least():
    problem = compacted(wide_problem(certified("grid", "sharp", 0, 0.05).problem)).problem
    dual = Dual(problem, net_of(problem))
    for _ in range(20):
        dual.advance(np.inf)
    order, rank = by_slack(dual)
    assert sorted(rank.tolist()) == list(range(len(problem.cost)))
    for a, b in zip(problem.first[:-1], problem.first[1:], strict=True):
        assert sorted(order[a:b].tolist()) == list(range(a, b))
        assert (np.diff(rank[a:b]) > 0).all()


@pytest.mark.parametrize("kind", ZEROS)
@pytest.mark.parametrize("shape", SHAPES)
def test_planted_answers_with_a_certificate_are_optima(shape, kind):
    made = certified(shape, kind, 1, 0.003)
    least = highs_optimum(wide_problem(made.problem))
    assert made.known is not None
    assert made.known <= round(least)
