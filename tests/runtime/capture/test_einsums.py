"""Einsums of several operands: what torch contracts two by two is so in the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.capture import capture
from shardwright.runtime.capture.einsums import in_pairs

SIZES = {name: 2 + place for place, name in enumerate("abcdefghijk")}
EQUATIONS = {
    "two layers and what they meet in": "abe,abf,efk->abk",
    "summed before the last": "bikc,bjkc,c->bijc",
    "a chain": "ab,bc,cd,de->ae",
    "without a result": "ab,bc,cd",
    "a number": "ab,bc,ca->",
    "one of them alone": "abc,aec,k->bke",
    "a diagonal": "aab,bc,c->ac",
    "products only": "ab,a,b -> ba",
}


def operands(equation: str) -> list[Tensor]:
    """Draw an equation's operands."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    torch.manual_seed(0)
    return [torch.randn([SIZES[one] for one in term], dtype=torch.float64) for term in terms]


@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_pairs_come_to_the_same(equation: str, is_turned: bool) -> None:
    """Along the path that torch takes, and along one from the last to the first."""
    left = operands(equation)
    wanted = torch.einsum(equation, *left)
    many = len(left)
    path = [n for last in range(many - 1, 0, -1) for n in (last, last - 1)] if is_turned else None
    pairs = in_pairs(equation, many, path)
    assert pairs is not None
    assert len(pairs) == many - 1
    for first, second, pair in pairs:
        two, one = left.pop(second), left.pop(first)
        left.insert(len(left) if path else 0, torch.einsum(pair, one, two))
    torch.testing.assert_close(left[0], wanted)


def test_dims_without_letters_stay() -> None:
    assert in_pairs("...a,ab,bc->...c", 3) is None


class Bilinear(nn.Module):
    """What two layers say of a token, multiplied by a tensor of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 4)
        self.core = nn.Parameter(torch.randn(5, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("nti,ntj,ijk->ntk", self.one(x), self.two(x), self.core)
        return made.square().mean()


def test_a_graph_has_what_lies_between_two() -> None:
    graph = capture(Bilinear(), {"x": torch.randn(2, 3, 6)}).graph
    made = [graph.tensors[one.outputs[0]].shape for one in graph.operators if "einsum" in one.kind]
    assert made == [(2, 3, 5, 4), (2, 3, 3)]
