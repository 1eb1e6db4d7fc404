"""The whole frontier against brute force, within a factor, under a limit, and along chains."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.solve.frontier import between, hull
from shardwright.reasons.factors import Factor, FactorGraph
from tests.planner.solve import exhaustive
from tests.planner.solve.ldp import chain_frontier
from tests.planner.solve.test_elimination import random_graph
from tests.planner.solve.whole import fastest_within, whole_frontier


@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.2]))
def test_exchanges_between_corners_reach_ever_smaller_points(seed: int, epsilon: float) -> None:
    graph = random_graph(seed)
    view = graph.elimination()
    curve = hull(view)
    frontier = exhaustive.frontier(graph)
    for fast, small in itertools.pairwise(curve.points):
        before = fast
        for point in between(view, fast, small, epsilon):
            assert graph.evaluate(point.assignment) == pytest.approx((point.seconds, point.bytes))
            assert point.bytes <= before.bytes / (1 + epsilon) * (1 + 1e-9)
            least = min(s for s, memory in frontier if memory <= point.bytes * (1 + 1e-9))
            assert curve.bound(point.bytes) <= least * (1 + 1e-9)
            assert least <= point.seconds * (1 + 1e-9)
            before = point


def random_chain(seed: int) -> FactorGraph:
    rng = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in rng.integers(1, 5, size=int(rng.integers(1, 9))))
    scopes = [(v,) for v in range(len(sizes))] + [(v, v + 1) for v in range(len(sizes) - 1)]
    factors = tuple(
        Factor(scope, rng.integers(0, 20, shape) * 1.0, rng.integers(0, 20, shape) * 1e6)
        for scope in scopes
        for shape in [tuple(sizes[v] for v in scope)]
    )
    return FactorGraph(sizes, factors)


@given(st.integers(0, 10**6), st.booleans())
def test_nothing_is_missing_between_the_corners(seed: int, integers: bool) -> None:
    graph = random_graph(seed, integers)
    found = whole_frontier(graph)
    expected = exhaustive.frontier(graph)
    assert [(p.seconds, p.bytes) for p in found.points] == [
        pytest.approx(point, rel=1e-9) for point in expected
    ]
    assert found.epsilon == 0.0
    for point in found.points:
        assert graph.evaluate(point.assignment) == pytest.approx((point.seconds, point.bytes))


@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 0.5]))
def test_every_true_point_is_within_the_factor_of_a_returned_one(seed: int, eps: float) -> None:
    graph = random_graph(seed)
    found = whole_frontier(graph, eps).points
    reach = (1 + eps) * (1 + 1e-9)
    for seconds, memory in exhaustive.frontier(graph):
        assert any(p.seconds <= seconds * reach and p.bytes <= memory * reach for p in found)


@given(st.integers(0, 10**6), st.floats(0.0, 1.1), st.booleans())
def test_the_fastest_within_a_limit_is_that_of_brute_force(
    seed: int, share: float, integers: bool
) -> None:
    graph = random_graph(seed, integers)
    points = exhaustive.frontier(graph)
    limit = share * points[0][1] if points else 1.0
    best = min((s for s, b in points if b <= limit * (1 - 1e-9)), default=math.inf)
    loose = min((s for s, b in points if b <= limit * (1 + 1e-9)), default=math.inf)
    found = fastest_within(graph, limit)
    seconds = math.inf if found is None else found.seconds
    assert seconds <= best * (1 + 1e-9) or best == math.inf
    assert seconds >= loose * (1 - 1e-9) or found is None


@given(st.integers(0, 10**6))
def test_the_linear_program_agrees_on_chains(seed: int) -> None:
    graph = random_chain(seed)
    chain = chain_frontier(graph)
    whole = whole_frontier(graph).points
    assert [(p.seconds, p.bytes) for p in chain] == [(p.seconds, p.bytes) for p in whole]
    for point in chain:
        assert graph.evaluate(point.assignment) == (point.seconds, point.bytes)


def test_what_is_no_chain_is_refused() -> None:
    pair = np.zeros((2, 2))
    with pytest.raises(ValueError, match="neighbours only"):
        chain_frontier(FactorGraph((2, 2, 2), (Factor((0, 2), pair, pair),)))


def test_a_gap_that_would_take_too_many_rows_stays_open_and_says_so() -> None:
    graph = random_graph(2)
    found = whole_frontier(graph, max_rows=1)
    assert found.epsilon == math.inf
    assert len(found.points) >= 2
