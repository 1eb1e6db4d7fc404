"""Feasibility first: what is found is legal, what is called impossible is, planted answers are found."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.contest import solve
from shardwright.contest.compaction import compacted
from shardwright.contest.feasible import Feasibility
from shardwright.contest.order import order_of, reordered
from shardwright.files.iopddl import FORBIDDEN
from shardwright.verbs.iopddl import wide_problem
from tests.planner.solve.wide.families import planted, shuffled
from tests.planner.solve.wide.problems import cost, optimum, peak, random_problem, with_limit


def sought(problem, rounds=60):
    found = Feasibility(problem, 0)
    for _ in range(rounds):
        if found.is_found or found.is_impossible:
            break
        found.round()
    return found


def test_what_trying_everything_finds_is_found_and_nothing_else_is_called_impossible():
    outcomes = set()
    for seed in range(80):
        problem = random_problem(seed, forbidden=0.4)
        least = problem.limit / 1.15
        problem = with_limit(problem, float(np.floor(least * (1.0 + seed % 3 / 4))))
        is_possible = np.isfinite(optimum(problem))
        found = sought(problem)
        assert found.is_found == is_possible, seed
        assert not (found.is_impossible and is_possible), seed
        outcomes.add((found.is_found, found.is_impossible))
        if found.is_found:
            assert np.isfinite(cost(problem, found.choice))
            assert peak(problem, found.choice) <= problem.limit
    assert {(True, False), (False, True)} <= outcomes


@pytest.mark.parametrize("family", ["chain", "knapsack", "constrained", "plateau", "fan-out"])
def test_a_planted_answer_means_that_a_legal_one_is_found_in_a_few_rounds(family):
    problem = planted(family, 1).problem
    smaller = compacted(wide_problem(problem))
    found = sought(smaller.problem, rounds=20)
    assert found.is_found
    choice = smaller.expand(found.choice).tolist()
    assert problem.limit is not None
    assert problem.peak(choice) <= problem.limit
    sizes = np.diff(problem.first)
    pairs = problem.table + np.array(
        [choice[one] * sizes[two] + choice[two] for one, two in problem.ends]
    )
    assert problem.cells[pairs].max() < FORBIDDEN


def test_an_order_of_nodes_and_edges_does_not_decide_whether_anything_is_found():
    problem = wide_problem(shuffled(planted("experts", 1).problem, 3))
    assert sought(compacted(problem).problem, rounds=20).is_found


def test_pairs_that_leave_nothing_are_proved_to():
    problem = random_problem(5, forbidden=0.0)
    problem = replace(problem, cells=np.full(len(problem.cells), np.inf))
    found = solve(problem, lambda count: count / 50)
    assert found.is_impossible


def test_a_limit_that_no_fractional_choice_keeps_is_proved_too_low():
    problem = wide_problem(planted("experts", 1).problem)
    problem = with_limit(problem, problem.limit * 0.3)
    assert solve(problem, lambda count: count / 60).is_impossible


def test_something_legal_is_looked_for_though_getting_ready_took_its_share_of_the_time():
    problem = wide_problem(planted("knapsack", 1).problem)
    found = solve(problem, lambda count: 0.3 if count < 5 else 1.0)
    assert peak(problem, found.choice) <= problem.limit
    assert np.isfinite(found.cost)


def test_a_shuffled_problem_gets_an_order_back_in_which_edges_are_short():
    given = wide_problem(planted("residual", 1).problem)
    mixed = wide_problem(shuffled(planted("residual", 1).problem, 3))
    assert order_of(given) is None
    order = order_of(mixed)
    assert order is not None
    sorted_again = reordered(mixed, order)
    lengths = [np.abs(np.diff(p.ends, axis=1)).mean() for p in (given, mixed, sorted_again)]
    assert lengths[2] < 1.5 * lengths[0] < lengths[1]
    choice = np.random.default_rng(0).integers(0, mixed.sizes)
    assert cost(sorted_again, choice[order]) == cost(mixed, choice)
    assert peak(sorted_again, choice[order]) == peak(mixed, choice)
