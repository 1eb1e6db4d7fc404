"""Elimination, hull and dual bound against brute force on random factor graphs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.solve.buckets import elimination_order, neighbours, plan
from shardwright.planner.solve.frontier import Point, falling, hull
from shardwright.planner.solve.network import undominated
from shardwright.reasons.factors import Factor, FactorGraph
from tests.planner.solve import exhaustive


def random_graph(seed: int, integers: bool = False) -> FactorGraph:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sizes = tuple(int(size) for size in rng.integers(1, 5, size=count))
    factors = [_random_factor(rng, (variable,), sizes, integers) for variable in range(count)]
    for _ in range(int(rng.integers(0, 10))):
        width = int(rng.integers(1, min(count, 3) + 1))
        scope = tuple(sorted(int(v) for v in rng.choice(count, size=width, replace=False)))
        factors.append(_random_factor(rng, scope, sizes, integers))
    return FactorGraph(sizes, tuple(factors))


def _random_factor(
    rng: np.random.Generator, scope: tuple[int, ...], sizes: tuple[int, ...], integers: bool
) -> Factor:
    shape = tuple(sizes[v] for v in scope)
    if integers:
        return Factor(scope, rng.integers(0, 4, shape) * 1.0, rng.integers(0, 4, shape) * 1e9)
    seconds = np.where(rng.random(shape) < 0.1, np.inf, rng.random(shape))
    return Factor(scope, seconds, rng.random(shape) * 1e9)


@given(st.integers(0, 10**6), st.booleans())
def test_elimination_finds_the_brute_force_optimum_of_every_weighting(
    seed: int, integers: bool
) -> None:
    graph = random_graph(seed, integers)
    everything = list(exhaustive.assignments(graph))
    weights = np.array([(1.0, 0.0), (0.0, 1.0), (1.0, 1e-9), (1.0, 3e-10)])
    solved = graph.elimination().solve(weights)
    for row, (first, second) in enumerate(weights):
        costs = [first * s + second * b for s, b, _ in everything if math.isfinite(s)]
        if not costs:
            assert math.isinf(solved.values[row])
            continue
        assert solved.values[row] == pytest.approx(min(costs), rel=1e-12)
        seconds, memory = graph.evaluate(solved.assignments[row].tolist())
        assert (seconds, memory) == pytest.approx(
            (solved.seconds[row], solved.bytes[row]), rel=1e-12
        )
        assert first * seconds + second * memory == pytest.approx(min(costs), rel=1e-12)


@given(st.integers(0, 10**6))
def test_bisection_finds_exactly_the_corners_of_the_hull(seed: int) -> None:
    graph = random_graph(seed)
    expected = exhaustive.hull(exhaustive.frontier(graph))
    found = hull(graph.elimination())
    assert len(found.points) == len(expected)
    for point, (seconds, memory) in zip(found.points, expected, strict=True):
        assert (point.seconds, point.bytes) == pytest.approx((seconds, memory), rel=1e-9)


@given(st.integers(0, 10**6))
def test_a_bisection_that_is_stopped_still_bounds_from_below(seed: int) -> None:
    graph = random_graph(seed)
    whole = hull(graph.elimination())
    ends = hull(graph.elimination(), stopped=lambda: True)
    assert ends.points == tuple(dict.fromkeys((*whole.points[:1], *whole.points[-1:])))
    for point in whole.points:
        bound = ends.bound(point.bytes)
        assert bound <= whole.bound(point.bytes) * (1 + 1e-9) <= point.seconds * (1 + 2e-9)


@given(st.integers(0, 10**6), st.floats(0.0, 1.2), st.booleans())
def test_dual_bound_never_exceeds_the_true_optimum_within_a_limit(
    seed: int, share: float, integers: bool
) -> None:
    graph = random_graph(seed, integers)
    points = exhaustive.frontier(graph)
    if not points:
        assert hull(graph.elimination()).bound(1e18) == math.inf
        return
    limit = share * points[0][1]
    within = [seconds for seconds, memory in points if memory <= limit]
    optimum = min(within, default=math.inf)
    for cap in (2, 64):
        bound = hull(graph.elimination(), max_points=cap).bound(limit)
        assert bound <= optimum * (1 + 1e-9) or optimum == math.inf
    if optimum == math.inf and limit < points[-1][1] * 0.999:
        assert hull(graph.elimination()).bound(limit) == math.inf


@given(st.integers(0, 10**6), st.booleans())
def test_pruning_keeps_the_whole_frontier(seed: int, integers: bool) -> None:
    graph = random_graph(seed, integers)
    smaller = graph.restrict(undominated(graph.sizes, graph.tables))
    assert exhaustive.frontier(smaller) == exhaustive.frontier(graph)


def test_a_chain_is_eliminated_with_tables_of_two_variables() -> None:
    pair = np.zeros((3, 3))
    chain = FactorGraph((3,) * 6, tuple(Factor((i, i + 1), pair, pair) for i in range(5)))
    order = elimination_order(chain.sizes, [factor.scope for factor in chain.factors])
    near = neighbours(len(chain.sizes), (factor.scope for factor in chain.factors))
    for variable in order:
        assert len(near[variable]) <= 1
        for other in near[variable]:
            near[other] -= {variable}


def test_what_many_equal_readers_leave_is_one_table_for_their_neighbours() -> None:
    """Twelve variables beside two: each leaves a table over both, which are added up."""
    rng, readers = np.random.default_rng(3), range(2, 14)
    sizes = (5, 4, *[3] * len(readers))
    tables = {(end, v): rng.random((sizes[end], 3)) for v in readers for end in (0, 1)}
    graph = FactorGraph(
        sizes, tuple(Factor(scope, cells, 0 * cells) for scope, cells in tables.items())
    )
    sums = sum(
        (tables[0, v][:, None] + tables[1, v][None]).min(-1) for v in readers
    )  # over the choices of the two
    solved = graph.elimination().solve(np.array([(1.0, 0.0)]))
    assert solved.values[0] == pytest.approx(sums.min(), rel=1e-12)
    assert graph.evaluate(solved.assignments[0].tolist())[0] == pytest.approx(sums.min(), rel=1e-12)
    found = plan(sizes, tuple(tables))
    assert found is not None
    assert len(found.tables[0]) <= len(tables) + 3  # it would be one more for each reader


def test_what_choices_of_others_share_is_added_up_once() -> None:
    """Six variables of two choices, a table for each pair: the first stands in five, never more than three are added."""
    rng, sizes = np.random.default_rng(5), (2,) * 6
    tables = {pair: rng.random((2, 2)) for pair in itertools.combinations(range(6), 2)}
    graph = FactorGraph(
        sizes, tuple(Factor(scope, cells, 0 * cells) for scope, cells in tables.items())
    )
    solved = graph.elimination().solve(np.array([(1.0, 0.0)]))
    assert solved.values[0] == pytest.approx(exhaustive.frontier(graph)[0][0], rel=1e-12)
    found = plan(sizes, tuple(tables))
    assert found is not None
    assert np.diff(found.steps[4]).max() == 3


def test_room_of_tables_that_nothing_reads_any_more_is_taken_again() -> None:
    """A long ladder: each step reads what the one before left, so that few tables are there at a time."""
    rng, length = np.random.default_rng(7), 40
    sizes = (3,) * (2 * length)
    rungs = [(2 * i, 2 * i + 1) for i in range(length)]
    rails = [(v, v + 2) for v in range(2 * length - 2)]
    tables = {scope: rng.random((3, 3)) for scope in (*rungs, *rails)}
    found = plan(sizes, tuple(tables))
    assert found is not None
    assert found.num_messages <= 5 * 3**2 < found.num_choices
    graph = FactorGraph(
        sizes, tuple(Factor(scope, cells, 0 * cells) for scope, cells in tables.items())
    )
    least = np.zeros((3, 3))  # over the choices of a rung, of all that lies before it
    for i, rung in enumerate(rungs):
        least = least + tables[rung]
        if i + 1 < length:
            left, right = (tables[v, v + 2] for v in rung)
            moved = least[:, :, None, None] + left[:, None, :, None] + right[None, :, None, :]
            least = moved.min((0, 1))
    solved = graph.elimination().solve(np.array([(1.0, 0.0)]))
    assert solved.values[0] == pytest.approx(least.min(), rel=1e-12)
    assert graph.evaluate(solved.assignments[0].tolist())[0] == pytest.approx(
        least.min(), rel=1e-12
    )


def test_solving_twice_gives_the_same_assignment() -> None:
    weights = np.array([(1.0, 0.0), (1.0, 1e-10)])
    first = random_graph(5).elimination().solve(weights)
    again = random_graph(5).elimination().solve(weights)
    assert (first.assignments == again.assignments).all()


def test_a_graph_in_which_everything_is_forbidden_has_an_empty_hull() -> None:
    nothing = FactorGraph((2,), (Factor((0,), np.full(2, np.inf), np.zeros(2)),))
    assert hull(nothing.elimination()).points == ()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_falls_keeps_what_the_definition_keeps(pairs: list[tuple[int, int]]) -> None:
    kept = falling(sorted(Point(seconds=s, bytes=b, assignment=()) for s, b in pairs))
    expected = {
        (s, b)
        for s, b in pairs
        if not any((u <= s and v <= b) and (u, v) != (s, b) for u, v in pairs)
    }
    assert {(p.seconds, p.bytes) for p in kept} == expected
    assert len(kept) == len(expected)
    assert all(a.seconds < b.seconds for a, b in itertools.pairwise(kept))


def test_a_graph_too_wide_for_exact_elimination_is_bracketed() -> None:
    pair = np.zeros((8, 8))
    clique = FactorGraph(
        (8,) * 10, tuple(Factor((i, j), pair, pair) for i in range(10) for j in range(i + 1, 10))
    )
    distinct = tuple(
        Factor((i,), np.arange(8.0) * (-1) ** i, -np.arange(8.0) * (-1) ** i) for i in range(10)
    )
    graph = FactorGraph(clique.sizes, clique.factors + distinct)
    solved = graph.elimination().solve(np.array([(1.0, 0.0), (1.0, 0.1)]))
    for row, (first, second) in enumerate(((1.0, 0.0), (1.0, 0.1))):
        cost = first * solved.seconds[row] + second * solved.bytes[row]
        choice = solved.assignments[row]
        again = sum(
            first * f.seconds[tuple(choice[list(f.scope)])]
            + second * f.bytes[tuple(choice[list(f.scope)])]
            for f in graph.factors
        )
        assert cost == pytest.approx(again, rel=1e-9)
        assert cost == pytest.approx(-35.0 if row == 0 else -31.5, rel=1e-9)
        assert solved.values[row] <= cost + 1e-9 * abs(cost)
