"""Rows sorted by expert, multiplied expert by expert and put back are cut by samples and into microbatches, however that is
spelled."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.grouped import grouped_product
from tests.runtime.equivalence import assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch

WAYS = named(
    Seed(data=2),
    Seed(data=2, zero=3, num_microbatches=2),
    Seed(tensor=2),
    Seed(stages=2, num_microbatches=2),
)
EXPERTS, COPIES = 4, 2
Ends = Callable[[Tensor, Tensor], Tensor]
Back = Callable[[Tensor, Tensor], Tensor]


def by_histogram(_chosen: Tensor, found: Tensor) -> Tensor:
    return torch.histc(found.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


def by_marks(chosen: Tensor, _found: Tensor) -> Tensor:
    return F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)


def by_bins(chosen: Tensor, _found: Tensor) -> Tensor:
    return chosen.bincount(minlength=EXPERTS).cumsum(0).int()


def by_inverse(made: Tensor, order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return made[inverse].view(-1, COPIES, made.shape[-1]).sum(1)


def by_sort(made: Tensor, order: Tensor) -> Tensor:
    return made[order.argsort()].view(-1, COPIES, made.shape[-1]).sum(1)


def by_write(made: Tensor, order: Tensor) -> Tensor:
    back = torch.zeros_like(made)
    back[order] = made
    return back.unflatten(0, (-1, COPIES)).sum(1)


def by_sum(made: Tensor, order: Tensor) -> Tensor:
    zeros = made.new_zeros(order.shape[0] // COPIES, made.shape[-1])
    return zeros.index_add(0, order // COPIES, made)


class Experts(nn.Module):
    """Gated experts with biases, of which every token chooses two."""

    def __init__(self, ends: Ends, back: Back, *, descending: bool = False) -> None:
        super().__init__()
        self.ends, self.back, self.descending = ends, back, descending
        self.router, self.head = nn.Linear(8, EXPERTS), nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, 8) / 4)
        self.shift = nn.Parameter(torch.randn(EXPERTS, 16) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(COPIES)
        found, order = chosen.flatten().sort(descending=self.descending)
        ends = self.ends(chosen.flatten(), found)
        rows = tokens[order // COPIES]
        gate, up = (product(rows, self.up.mT, ends) + self.shift[found]).chunk(2, -1)
        made = product(F.silu(gate) * up, self.down, ends) * share.flatten()[order][:, None]
        mixed = self.back(made, order).view(x.shape) + x
        return F.cross_entropy(self.head(mixed).flatten(0, 1), y.flatten())


def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Hugging Face's, which takes float64 as well."""
    importlib.import_module("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)  # type: ignore[no-any-return]


def experts(ends: Ends, back: Back) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 3, 8).double(), "y": torch.randint(4, (8, 3))}
    return Experts(ends, back).double(), batch


SPELLINGS = [
    (by_histogram, by_inverse),
    (by_marks, by_sort),
    (by_bins, by_write),
    (by_histogram, by_sum),
]


@pytest.mark.parametrize(("ends", "back"), SPELLINGS)
def test_sorted_rows_split_by_samples(ends: Ends, back: Back) -> None:
    factory = partial(experts, ends, back)
    kinds = [operator.kind for operator in capture(*factory()).graph.operators]
    assert kinds.count("shardwright.grouped_product") == 2
    assert not [kind for kind in kinds if "sort" in kind]
    assert_equivalent(2, factory, WAYS, partial(torch.optim.SGD, lr=0.1))


def by_neighbours(made: Tensor, order: Tensor) -> Tensor:
    return by_inverse(made + made.cumsum(0), order)


def by_shifted(made: Tensor, order: Tensor) -> Tensor:
    return by_inverse(made, order.roll(1))


@pytest.mark.parametrize("back", [by_neighbours, by_shifted])
def test_what_mixes_sorted_rows_stays_as_it_is(back: Back) -> None:
    factory = partial(experts, by_histogram, back)
    kinds = [operator.kind for operator in capture(*factory()).graph.operators]
    assert "aten.sort.default" in kinds
    assert "shardwright.grouped_product" not in kinds
    assert_equivalent(2, factory, named(Seed(data=2), Seed(tensor=2)), torch.optim.SGD)


def test_ends_of_other_groups_are_no_groups() -> None:
    """Not where the last group's rows are left out or rows are counted by weight, nor where rows lie the other way
    round."""

    def ends(_chosen: Tensor, found: Tensor) -> Tensor:
        counts = torch.histc(found.float(), EXPERTS, 0, EXPERTS - 2)
        return counts.cumsum(0, dtype=torch.int32)

    def weighted(chosen: Tensor, _found: Tensor) -> Tensor:
        return torch.zeros_like(chosen[:EXPERTS]).scatter_add(0, chosen, chosen).cumsum(0).int()

    backwards = Experts(by_histogram, by_inverse, descending=True).double()
    for module in (*(experts(one, by_inverse)[0] for one in (ends, weighted)), backwards):
        kinds = [one.kind for one in capture(module, experts(ends, by_inverse)[1]).graph.operators]
        assert "shardwright.grouped_product" not in kinds


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_every_row_meets_its_groups_matrix(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    rows, weight = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((12, 8), (3, 8, 16))
    )
    groups = torch.tensor([2, 0, 0, 2, 2, 0, 2, 0, 0, 2, 2, 0])  # nobody is of the second
    made = grouped_product(rows, weight, groups)
    each = torch.stack([row @ weight[group] for row, group in zip(rows, groups, strict=True)])
    torch.testing.assert_close(made, each, rtol=tolerance, atol=tolerance)
    loss = [torch.autograd.grad(one.square().sum(), (rows, weight)) for one in (made, each)]
    for found, expected in zip(*loss, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)
