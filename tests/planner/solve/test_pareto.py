"""Frontier algebra: its laws, on integer costs so that sums are exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.solve.pareto import Front, empty, front, product, union, zero


def fronts(num_costs: int = 0) -> st.SearchStrategy[Front]:
    widths = st.just(num_costs) if num_costs else st.sampled_from([2, 3])
    return widths.flatmap(
        lambda k: st.lists(
            st.tuples(*[st.integers(0, 9)] * k), max_size=8
        ).map(lambda rows: front(np.array(rows, dtype=np.float64).reshape(-1, k)))
    )  # fmt: skip


def triples() -> st.SearchStrategy[tuple[Front, Front, Front]]:
    return st.sampled_from([2, 3]).flatmap(lambda k: st.tuples(*[fronts(k)] * 3))


def same(one: Front, other: Front) -> bool:
    return one.costs.shape == other.costs.shape and bool((one.costs == other.costs).all())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_a_front_is_what_the_definition_keeps(rows: list[tuple[int, int, int]]) -> None:
    kept = {tuple(map(int, row)) for row in front(np.array(rows, dtype=float).reshape(-1, 3)).costs}
    assert kept == {
        row
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row)) for other in rows)
    }


@given(triples())
def test_unions_and_products_commute_associate_and_distribute(
    some: tuple[Front, Front, Front],
) -> None:
    a, b, c = some
    assert same(union([a, b]), union([b, a]))
    assert same(product(a, b), product(b, a))
    assert same(union([union([a, b]), c]), union([a, union([b, c])]))
    assert same(product(product(a, b), c), product(a, product(b, c)))
    assert same(product(a, union([b, c])), union([product(a, b), product(a, c)]))


@given(fronts())
def test_neutral_elements_and_pruning_again_change_nothing(one: Front) -> None:
    k = one.costs.shape[1]
    assert same(union([one, empty(k)]), one)
    assert same(product(one, zero(k)), one)
    assert len(product(one, empty(k))) == 0
    assert same(front(one.costs), one)
    assert same(union([one, one]), one)


@given(triples())
def test_links_lead_to_what_a_point_was_made_of(some: tuple[Front, Front, Front]) -> None:
    a, b, _ = some
    both = product(a, b)
    for costs, (i, j) in zip(both.costs, both.links, strict=True):
        assert (a.costs[i] + b.costs[j] == costs).all()
    either = union([a, b])
    for costs, (which, row) in zip(either.costs, either.links, strict=True):
        assert ((a, b)[which].costs[row] == costs).all()


def test_forbidden_points_are_on_no_front() -> None:
    assert len(front(np.array([[np.inf, 1.0], [2.0, 2.0]]))) == 1
