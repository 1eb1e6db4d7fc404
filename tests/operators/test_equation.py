"""Dims of einsum's operands and results, against torch's own reading of the same equations."""

from __future__ import annotations

import pytest

from shardwright.operators.equation import dims, sides

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHAPES = [
    ("bnk,bkm->bnm", [(2, 4, 6), (2, 6, 8)]),
    ("bk, kn", [(2, 4), (4, 6)]),
    ("ba,ac", [(2, 4), (4, 6)]),
    ("...k,nk->...n", [(2, 4, 6), (8, 6)]),
    ("...k,...k->...", [(2, 4, 6), (4, 6)]),
    ("z...k,k...", [(3, 2, 4, 6), (6, 4)]),
    ("i...->...", [(3, 2, 4)]),
    ("ij,jk,k->i", [(2, 3), (3, 4), (4,)]),
    ("ii", [(4, 4)]),
    ("ii->i", [(4, 4)]),
]


@pytest.mark.parametrize(("equation", "shapes"), SHAPES)
def test_named_dims_have_the_sizes_that_torch_gives_the_result(equation, shapes):
    named, made = dims(equation, [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for names, shape in zip(named, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            assert sizes.setdefault(name, size) == size
    result = torch.einsum(equation, [torch.ones(shape) for shape in shapes])
    assert tuple(sizes[name] for name in made) == tuple(result.shape)


@pytest.mark.parametrize(
    ("equation", "ranks"), [("", [2, 2]), ("ij,jk->ik", [2]), ("ij,jk->ik", [2, 3]), ("ij...", [1])]
)
def test_what_an_equation_does_not_fit_has_no_names(equation, ranks):
    assert dims(equation, ranks) is None


def test_a_result_that_is_not_said_has_what_is_named_once_in_order():
    assert sides("ca, ab") == (["ca", "ab"], "bc")
    assert sides("c...a,ab->") == (["c...a", "ab"], "")
