"""Bags of embeddings with rows of one length are captured as a lookup and a fold, and equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch


class Bags(nn.Module):
    """A recommender's first layers; ``weighted`` bags are sums with a weight per entry."""

    def __init__(self, mode: str, weighted: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 8, mode=mode, sparse=mode == "sum")
        self.weighted, self.head = weighted, nn.Linear(8, 4)

    def forward(self, x: Tensor, shares: Tensor, y: Tensor) -> Tensor:
        found = self.bags(x, per_sample_weights=shares if self.weighted else None)
        return nn.functional.cross_entropy(self.head(found), y)


def build(mode: str, weighted: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module, shares = Bags(mode, weighted).double(), torch.rand(8, 5, dtype=torch.float64)
    return module, {"x": torch.randint(0, 16, (8, 5)), "shares": shares, "y": torch.arange(8) % 4}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)]
)
def test_bags_are_split_by_samples_and_equal(mode: str, weighted: bool) -> None:
    module, batch = build(mode, weighted)
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    kinds = [operator.kind for operator in captured.graph.operators]
    place = kinds.index("aten.embedding.default")
    assert strategy.configs[place].dims == ("b",)
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(lambda: build(mode, weighted), sgd), mode)
