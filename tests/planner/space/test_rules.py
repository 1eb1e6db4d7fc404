"""Every rule, checked by running its operator in pieces against running it whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.rules import KIND, has_rule
from shardwright.planner.space.rules.examples import EXAMPLES
from shardwright.planner.space.rules.examples.notation import Call, Drawn
from tests.planner.space.pieces import (
    Case,
    draw,
    from_partial_sums,
    in_pieces,
    rule_of,
    shapes_of_piece,
    whole,
)

pytestmark = pytest.mark.torch

# Splitting samples gives each piece its own statistics: that is the meaning, not an accident.
LOCAL_STATISTICS = {("aten.batch_norm.default", "n")}
DRAWN = ("rand", "empty", "new_empty", "bernoulli", "multinomial", "normal_functional")
RANDOM = frozenset(kind for kind in KIND if kind.split(".")[1].startswith(DRAWN))


def test_every_kind_with_a_rule_has_an_example() -> None:
    assert set(EXAMPLES) == set(KIND)
    assert all(EXAMPLES.values())


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_an_operator_in_pieces_equals_the_operator_whole(kind: str) -> None:
    for example in EXAMPLES[kind]:
        check(draw(kind, example))


def check(case: Case) -> Iteration:
    results, _, gradients = whole(case)
    iteration = rule_of(case, results)
    check_that_splits_combine(case, iteration, results)
    for dim in iteration.dims:
        if case.kind in RANDOM:
            assert dim.name in iteration.outputs[0]
            continue
        if (case.kind, dim.name) in LOCAL_STATISTICS and case.arguments.get("training") is True:
            continue
        for pieces in (2, 3, 4):
            if dim.size % pieces == 0:
                label = f"{case.kind} {case.arguments} split {dim.name} by {pieces}"
                compare(in_pieces(case, iteration, dim.name, pieces), (results, gradients), label)
    if iteration.linear and all(case.tensors[at].is_floating_point() for at in iteration.linear):
        label = f"{case.kind} {case.arguments} on partial sums"
        compare(from_partial_sums(case, iteration), (results, gradients), label)
    return iteration


def check_that_splits_combine(case: Case, iteration: Iteration, results: list[Tensor]) -> None:
    """A piece must have the remaining dims in the same places, so that it can be split again."""
    for dim in iteration.dims:
        pieces = next(count for count in range(2, dim.size + 1) if dim.size % count == 0)
        local = rule_of(*shapes_of_piece(case, iteration, results, dim.name, pieces))
        left = {other.name for other in iteration.dims} - {dim.name}
        if dim.size > pieces:
            left.add(dim.name)
        for names, again in zip(
            iteration.inputs + iteration.outputs, local.inputs + local.outputs, strict=True
        ):
            kept = zip(names, again, strict=True)
            assert all(new == old for old, new in kept if old in left), (case.kind, dim.name)
        assert local.once == iteration.once


Outcome = tuple[list[Tensor], list[Tensor | None]]


def compare(found: Outcome, wanted: Outcome, label: str) -> None:
    for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        if one is None or other is None:
            assert one is other or not torch.any(one if other is None else other), label
            continue
        assert one.dtype == other.dtype, label
        assert one.shape == other.shape, label
        tolerance = 1e-5 if one.dtype == torch.float32 else 1e-12
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True), label


sizes = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def factorings(draw_: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equal volume."""
    factors = draw_(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=0, max_size=5))

    def merge() -> list[int]:
        shape = [1]
        for factor in factors:
            if draw_(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return shape

    return merge(), merge()


@settings(max_examples=150, deadline=None)
@given(factorings())
def test_any_reshape_in_pieces_equals_the_reshape_whole(
    shapes: tuple[list[int], list[int]],
) -> None:
    before, after = shapes
    check(draw("aten.reshape.default", Call((Drawn("float", tuple(before)), after), {})))


@settings(max_examples=100, deadline=None)
@given(st.lists(sizes, max_size=3), st.data())
def test_any_broadcast_in_pieces_equals_the_broadcast_whole(
    full: list[int], data: st.DataObject
) -> None:
    def part() -> Drawn:
        shape = [data.draw(st.sampled_from([1, size])) for size in full]
        return Drawn("float", tuple(shape[data.draw(st.integers(0, len(shape))) :]))

    check(draw("aten.mul.Tensor", Call((part(), part()), {})))
    check(draw("aten.add.Tensor", Call((part(), part()), {})))


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, max_size=2), sizes, sizes, sizes, st.data())
def test_any_matrix_product_in_pieces_equals_the_product_whole(
    batch: list[int], rows: int, inner: int, columns: int, data: st.DataObject
) -> None:
    def lead() -> list[int]:
        shape = [data.draw(st.sampled_from([1, size])) for size in batch]
        return shape[data.draw(st.integers(0, len(shape))) :]

    left, right = (*lead(), rows, inner), (*lead(), inner, columns)
    check(draw("aten.matmul.default", Call((Drawn("float", left), Drawn("float", right)), {})))


def test_an_in_place_variant_has_the_rule_of_its_operator() -> None:
    assert has_rule("aten.add_.Tensor")
    assert has_rule("aten.__and__.Tensor")
    assert not has_rule("aten.nonzero.default")
