"""Every rule, checked by running its operator in pieces against running it whole."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.example import Call, Drawn
from shardwright.errors import InputError
from shardwright.operators.splitting.rules import KIND, has_rule
from shardwright.operators.splitting.rules.notation import equation
from shardwright.verbs.examples import EXAMPLES
from shardwright.verbs.examples.notation import F, I, call
from shardwright.verbs.rules import check_kind, verify_rules

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# Sizes drawn for each kind, besides its examples.
DRAWN = 8 if "SHARDWRIGHT_LAWS" in os.environ else 1
LINEAR = (call(F(4, 6, 8), F(12, 8), F(12)),)


def test_every_kind_with_a_rule_has_an_example() -> None:
    assert set(EXAMPLES) == set(KIND)
    assert all(EXAMPLES.values())


@pytest.mark.parametrize("kind", sorted(KIND))
def test_an_operator_in_pieces_equals_the_operator_whole(kind: str) -> None:
    check(kind, *EXAMPLES[kind], cases=DRAWN)


def check(kind: str, *examples: Call, cases: int = 0) -> None:
    found = check_kind(kind, examples, cases=cases)
    assert not found.problem, found.problem
    assert found.num_cases >= len(examples)


@pytest.mark.parametrize(
    ("kind", "text", "examples"),
    [
        ("aten.linear.default", "input b.. k, weight n k, bias n -> b.. n", LINEAR),  # bias twice
        ("aten.linear.default", "input b.. k, weight n k, +bias _ -> b.. n", LINEAR),
        ("aten.softmax.int", "self n m -> n m", (call(F(4, 6), -1),)),
        ("aten.mean.default", "self n m ->", (call(F(4, 6)),)),  # not scaled
        ("aten.matmul.default", "self n k, other k m -> m n", (call(F(4, 4), F(4, 4)),)),
        ("aten.relu.default", "self n m -> _ m", (call(F(4, 6)),)),  # no sum
        # Right forward, wrong backward: what is not split has a partial gradient, and both are.
        ("aten.embedding.default", "weight v d, indices b.. -> b.. d", (call(F(12, 6), I(8)),)),
    ],
)
def test_a_wrong_rule_is_found_and_told_with_shapes_and_split(
    kind: str, text: str, examples: tuple[Call, ...]
) -> None:
    found = check_kind(kind, examples, rule=equation(text))
    assert found.difference > 1
    assert found.problem.startswith(f"{kind}(float[")
    assert " split " in found.problem


def test_a_rule_without_an_example_says_what_to_add() -> None:
    found = check_kind("aten.relu.default", ())
    assert "add one to verbs/examples" in found.problem


def test_a_kind_without_a_rule_is_refused_with_the_way_to_one() -> None:
    with pytest.raises(InputError, match=r"verify-rules --find aten\.nonzero"):
        verify_rules(["aten.nonzero.default"])


def test_the_same_seed_makes_the_same_checks_and_another_one_others() -> None:
    first, again, other = (
        verify_rules(["aten.linear.default"], cases=2, seed=s).rows for s in (3, 3, 4)
    )
    assert first == again
    assert first != other


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


@given(factorings())
def test_any_reshape_in_pieces_equals_the_reshape_whole(
    shapes: tuple[list[int], list[int]],
) -> None:
    before, after = shapes
    check("aten.reshape.default", Call((Drawn("float", tuple(before)), after), {}))


@given(st.lists(sizes, max_size=3), st.data())
def test_any_broadcast_in_pieces_equals_the_broadcast_whole(
    full: list[int], data: st.DataObject
) -> None:
    def part() -> Drawn:
        shape = [data.draw(st.sampled_from([1, size])) for size in full]
        return Drawn("float", tuple(shape[data.draw(st.integers(0, len(shape))) :]))

    check("aten.mul.Tensor", Call((part(), part()), {}))
    check("aten.add.Tensor", Call((part(), part()), {}))


@given(st.lists(sizes, max_size=2), sizes, sizes, sizes, st.data())
def test_any_matrix_product_in_pieces_equals_the_product_whole(
    batch: list[int], rows: int, inner: int, columns: int, data: st.DataObject
) -> None:
    def lead() -> list[int]:
        shape = [data.draw(st.sampled_from([1, size])) for size in batch]
        return shape[data.draw(st.integers(0, len(shape))) :]

    left, right = (*lead(), rows, inner), (*lead(), inner, columns)
    check("aten.matmul.default", Call((Drawn("float", left), Drawn("float", right)), {}))


def test_an_in_place_variant_has_the_rule_of_its_operator() -> None:
    assert has_rule("aten.add_.Tensor")
    assert has_rule("aten.__and__.Tensor")
    assert not has_rule("aten.nonzero.default")
