"""Flops that captured operators are noted with, against torch's own counter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from shardwright.operators.counting.products import PRODUCTS  # noqa: E402
from shardwright.operators.derivatives import base_kind  # noqa: E402
from shardwright.runtime.capture import capture  # noqa: E402

pytestmark = pytest.mark.torch


class Products(nn.Module):
    """Products that go by other names than ``linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))
        self.turned = nn.ConvTranspose1d(4, 4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in three ways, and add everything up."""
        x = torch.einsum("bse,hef->bshf", x, self.weight).flatten(1, 2)
        x = torch.inner(x, self.weight[0])
        return self.turned(x[:, :4]).mean()


def test_products_are_noted_with_the_flops_that_torch_counts():
    model, x = Products(), torch.randn(2, 5, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    graph = capture(model, (x,)).graph
    products = [one for one in graph.operators if base_kind(one.kind) in PRODUCTS]
    assert len(products) == 3
    assert sum(one.flops for one in products) == pytest.approx(counter.get_total_flops())
