"""Covariances and correlations in a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch

WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of features": lambda h, w: h.T.cov(),
    "of samples": lambda h, w: torch.cov(h),
    "of one row": lambda h, w: torch.cov(h[:, 0], correction=0),
    "counted": lambda h, w: torch.cov(h.T, fweights=w),
    "weighed": lambda h, w: torch.cov(h.T, aweights=w.double()),
    "both": lambda h, w: h.T.cov(fweights=w, aweights=w.double() + 1, correction=2),
    "correlation": lambda h, w: torch.corrcoef(h.T),
    "of itself": lambda h, w: h[:, 0].corrcoef(),
    "complex": lambda h, w: torch.view_as_real(torch.complex(h, h.square()).T.cov()),
    "of complex": lambda h, w: torch.view_as_real(torch.complex(h, h.square()).T.corrcoef()),
}


class Whitened(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(6, 4), way

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return self.way(h, w).square().sum() + h.square().mean()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_covariances_are_captured_whole_and_train_as_plain_pytorch(
    way: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def made() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        batch = {"x": torch.randn(8, 6, dtype=torch.float64), "w": torch.arange(8) % 3 + 1}
        return Whitened(way).double(), batch

    kinds = [operator.kind for operator in capture(*made()).graph.operators]
    assert not any(kind.startswith("opaque.") for kind in kinds)
    split = {
        "samples": partial(seed_strategy, seed=Seed(data=2)),
        "tensors": partial(seed_strategy, seed=Seed(tensor=2)),
    }
    assert_equivalent(2, made, split)


def test_torch_has_its_own_covariance_back() -> None:
    before = torch.cov
    capture(Whitened(WAYS["of features"]), {"x": torch.randn(8, 6), "w": torch.ones(8)})
    assert torch.cov is before
    assert "cov" not in vars(torch.Tensor)
