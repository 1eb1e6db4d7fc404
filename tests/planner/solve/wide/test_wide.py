"""Wide problems: exact parts against trying everything, the whole against HiGHS."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from shardwright.contest import solve
from shardwright.contest.compaction import compacted
from shardwright.planner.solve.wide.descent import Descent
from shardwright.planner.solve.wide.dual import Dual
from shardwright.planner.solve.wide.net import BIG, net_of
from shardwright.planner.solve.wide.region import room_of, solve_region
from tests.planner.solve.wide.problems import (
    cost,
    highs_optimum,
    optimum,
    peak,
    random_problem,
    with_limit,
)

ROUNDS = 400


def solved(problem, seed=0, rounds=ROUNDS):
    return solve(problem, lambda count: count / rounds, seed=seed)


def test_random_problems_are_solved_to_the_optimum_that_trying_everything_finds():
    for seed in range(60):
        problem = random_problem(seed)
        best, found = optimum(problem), solved(problem)
        if np.isinf(best):
            is_legal = peak(problem, found.choice) <= problem.limit and np.isfinite(found.cost)
            assert not is_legal, seed
            continue
        assert found.cost == cost(problem, found.choice) == best, seed
        assert peak(problem, found.choice) <= problem.limit
        assert found.bound <= best


def test_wider_problems_are_proved_and_agree_with_highs():
    for seed in range(4):
        problem = random_problem(seed, num_nodes=20, num_edges=36, most=4, forbidden=0.02)
        best, found = highs_optimum(problem), solved(problem, rounds=3000)
        assert found.bound <= best + 1e-6
        assert found.cost == pytest.approx(best)
        assert found.gap == 0


def test_compaction_keeps_the_optimum_and_its_solutions_can_be_expanded():
    for seed in range(80):
        problem = random_problem(seed, num_edges=5)
        smaller = compacted(problem)
        if np.isinf(optimum(problem)):
            continue
        assert optimum(smaller.problem) + smaller.constant == optimum(problem), seed
        rng = np.random.default_rng(seed)
        choice = np.array([rng.integers(size) for size in smaller.problem.sizes], dtype=np.int64)
        full = smaller.expand(choice)
        expected = cost(smaller.problem, choice) + smaller.constant
        assert cost(problem, full) == expected
        fits = peak(problem, full) <= problem.limit
        assert fits == (peak(smaller.problem, choice) <= smaller.problem.limit)


def test_every_bound_on_the_way_is_below_the_optimum():
    for seed in range(60):
        smaller = compacted(random_problem(seed, num_nodes=6, num_edges=11))
        problem, best = smaller.problem, optimum(smaller.problem)
        if np.isinf(best) or not problem.num_nodes:
            continue
        dual = Dual(problem, net_of(problem))
        for _ in range(60):
            dual.advance(np.inf)
            assert dual.bound <= best + 1e-6, seed


def test_strategies_of_solutions_cheaper_than_the_known_one_are_never_forbidden():
    for seed in range(60):
        smaller = compacted(random_problem(seed, num_nodes=6, num_edges=11))
        problem, best = smaller.problem, optimum(smaller.problem)
        if np.isinf(best) or not problem.num_nodes:
            continue
        dual = Dual(problem, net_of(problem))
        for _ in range(60):
            dual.advance(best + 1)  # the optimum is cheaper than that
        keep = dual.allowed
        priced = problem.cost.copy()
        priced[~keep] = np.inf
        assert optimum(replace(problem, cost=priced)) == best, seed


def test_a_region_is_solved_exactly_whatever_the_rest_is():
    for seed in range(40):
        problem = compacted(random_problem(seed, num_nodes=6, num_edges=12)).problem
        problem = with_limit(problem, np.inf)
        if problem.num_nodes < 3 or np.isinf(optimum(problem)):
            continue
        net = net_of(problem)
        room = room_of(16, 4096)
        count = problem.num_nodes
        room.node[:count] = np.arange(count)
        room.size[:count] = problem.sizes
        local = np.arange(count)
        solve_region(net, room, count, local, net.cost.copy(), np.zeros(count, np.int64), 4096)
        assert cost(problem, room.answer[:count]) == optimum(problem), seed


def test_nodes_of_a_region_without_edges_take_their_cheapest_strategies():
    net = net_of(random_problem(2, num_nodes=4, num_edges=0, most=4))
    room = room_of(16, 4096)
    room.node[:4] = np.arange(4)
    room.size[:4] = np.diff(net.first)
    solve_region(net, room, 4, np.arange(4), net.cost.copy(), np.zeros(4, np.int64), 4096)
    cheapest = [net.cost[a:b].argmin() for a, b in itertools.pairwise(net.first)]
    assert room.answer[:4].tolist() == cheapest


def test_tables_that_may_not_grow_leave_some_choices_as_they_are():
    problem = compacted(random_problem(3, num_nodes=12, num_edges=40, most=4)).problem
    net, count = net_of(problem), problem.num_nodes
    room = room_of(16, 4096)
    room.node[:count] = np.arange(count)
    room.size[:count] = problem.sizes
    before = np.zeros(count, np.int64)
    kept = solve_region(net, room, count, np.arange(count), net.cost.copy(), before, 20)
    assert 0 < kept < count
    capped = np.minimum(problem.costs(room.answer[:count]), BIG).sum()
    assert capped <= np.minimum(problem.costs(before), BIG).sum()


def test_a_descent_comes_to_fit_goes_on_fitting_and_may_be_over_the_limit_for_a_while():
    for seed in range(12):
        problem = random_problem(seed, num_nodes=30, num_edges=60, most=5, num_times=12)
        problem = compacted(replace(problem, cells=np.minimum(problem.cells, 40.0))).problem
        largest = [
            a + int(problem.usage[a:b].argmax()) for a, b in itertools.pairwise(problem.first)
        ]
        room = room_of(64, 100_000)
        descent = Descent(problem, net_of(problem), room, largest - problem.first[:-1], seed)
        assert not descent.fits
        for _ in range(60):
            descent.round(0.0, 10)
        assert descent.fits
        before = descent.cost
        for _ in range(10):
            descent.round(0.0, 10)
            assert peak(problem, descent.choice) <= problem.limit
            assert cost(problem, descent.choice) == descent.cost <= before
            before = descent.cost
        descent.loosen()
        for _ in range(60):
            descent.round(0.0, 10)
        assert descent.fits
        assert peak(problem, descent.choice) <= problem.limit


def test_equal_seeds_and_rounds_give_equal_answers():
    problem = random_problem(7, num_nodes=30, num_edges=60, most=5, num_times=12)
    one, two = solved(problem, rounds=60), solved(problem, rounds=60)
    assert (one.choice == two.choice).all()
    assert (one.cost, one.bound) == (two.cost, two.bound)


def test_a_problem_over_its_limit_whatever_is_chosen_is_said_to_be_so():
    problem = with_limit(random_problem(1), -1.0)
    assert peak(problem, solved(problem, rounds=20).choice) > problem.limit
