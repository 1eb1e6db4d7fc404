"""Embeddings that ask for sparse gradients train as plain PyTorch does, with dense ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch


class Words(nn.Module):
    """Looks words up, averages them, and picks by index, all with sparse gradients."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, sparse=True)
        self.table = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 4)
        self.hides = hides

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.hides and x.sum() < 0:  # stops export: the whole model is opaque
            x = x + 1
        found = self.words(x).mean(1)
        picked = torch.gather(self.table, 0, x[:, :1].expand(-1, 8) % 8, sparse_grad=True)
        return F.cross_entropy(self.head(found + picked), y)


def build(hides: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Words(hides).double()
    return module, {"x": torch.randint(0, 16, (8, 5)), "y": torch.arange(8) % 4}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


@pytest.mark.parametrize("hides", [False, True], ids=["captured", "opaque"])
@pytest.mark.parametrize("seed", [Seed(data=2), Seed(data=2, zero=3)], ids=lambda seed: seed.label)
def test_sparse_gradients_are_dense_and_equal(hides: bool, seed: Seed) -> None:
    factory = partial(build, hides)
    module, batch = factory()
    captured = capture(module, batch)
    assert hides or any("sparse" in note for note in captured.graph.notes)
    runs, _ = train_rehearsed(captured, seed_strategy(captured.graph, seed), module, batch, sgd)
    expected = train_plain(factory, sgd)
    assert runs[0].losses == pytest.approx(expected.losses, rel=1e-12)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(runs[0].parameters[name], value, rtol=1e-11, atol=1e-12)
