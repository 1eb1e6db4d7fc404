"""Min-marginals against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.reasons.factors import Factor, FactorGraph
from shardwright.reasons.marginals import min_marginals
from tests.planner.solve import exhaustive
from tests.planner.solve.test_elimination import random_graph


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-9, 3e-10]))
def test_every_choice_costs_what_the_best_assignment_with_it_costs(seed: int, price: float) -> None:
    graph = random_graph(seed)
    expected = [np.full(size, math.inf) for size in graph.sizes]
    for seconds, memory, choice in exhaustive.assignments(graph):
        for variable, value in enumerate(choice):
            best = expected[variable]
            best[value] = min(best[value], seconds + price * memory)
    found = min_marginals(graph, price)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_components_that_share_nothing_still_pay_for_each_other() -> None:
    first = Factor((0,), np.array([1.0, 3.0]), np.zeros(2))
    second = Factor((1,), np.array([10.0, 20.0]), np.zeros(2))
    constant = Factor((), np.array(100.0), np.array(0.0))
    found = min_marginals(FactorGraph((2, 2), (first, second, constant)), 0.0)
    assert [list(one) for one in found] == [[111.0, 113.0], [111.0, 121.0]]


def test_a_graph_too_wide_to_price_is_refused() -> None:
    pair = np.zeros((8, 8))
    scopes = [(i, j) for i in range(10) for j in range(i + 1, 10)]
    with pytest.raises(InputError, match="cells"):
        min_marginals(FactorGraph((8,) * 10, tuple(Factor(s, pair, pair) for s in scopes)), 0.0)
