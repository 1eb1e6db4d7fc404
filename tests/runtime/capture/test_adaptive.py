"""The adaptive softmax stays in the graph, every cluster for every row, and trains as PyTorch trains it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.operators.splitting import find_samples
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.adaptive import WHOLE
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch


class Words(nn.Module):
    """Says of each row which word follows."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(5, 32)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(32, 12, [4, 8])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.below(x).tanh(), y).loss


def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Words().double(), {"x": torch.randn(8, 5).double(), "y": torch.arange(8) * 5 % 12}


def test_an_adaptive_softmax_trains_as_in_pytorch() -> None:
    graph = capture(*made()).graph
    assert not [one.kind for one in graph.operators if one.kind.startswith("opaque.")]
    assert WHOLE in graph.notes
    assert find_samples(graph).blocker == ""
    ways = {
        "microbatches": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2)),
        "ZeRO-3": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
    }
    assert_equivalent(2, made, ways)
