"""Bags of embeddings with rows of one length are captured as a lookup and a fold, and equal."""

from __future__ import annotations

from dataclasses import replace

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

    def __init__(self, mode: str, weighted: bool, padding: int | None) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 8, mode=mode, sparse=mode == "sum", padding_idx=padding)
        self.weighted, self.head = weighted, nn.Linear(8, 4)

    def forward(self, x: Tensor, shares: Tensor, y: Tensor) -> Tensor:
        found = self.bags(x, per_sample_weights=shares if self.weighted else None)
        return nn.functional.cross_entropy(self.head(found), y)


def build(mode: str, weighted: bool, padding: int | None) -> tuple[Bags, dict[str, Tensor]]:
    torch.manual_seed(0)
    module, shares = Bags(mode, weighted, padding).double(), torch.rand(8, 5, dtype=torch.float64)
    rows = module.bags.weight.data
    rows[8:] = rows[:8]  # of equal rows only the first is a bag's largest
    x = torch.randint(0, 16, (8, 5))
    x[0], x[1, 2:] = 3, 3  # of padding only, and of more than half
    return module, {"x": x, "shares": shares, "y": torch.arange(8) % 4}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


@pytest.mark.parametrize(
    ("mode", "weighted", "padding"),
    [
        ("sum", False, None), ("sum", True, 3), ("mean", False, None), ("mean", False, 3), ("max", False, 3),
    ],
)  # fmt: skip
def test_bags_are_split_by_samples_and_equal(
    mode: str, weighted: bool, padding: int | None
) -> None:
    module, batch = build(mode, weighted, padding)
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    kinds = [operator.kind for operator in captured.graph.operators]
    place = kinds.index("aten.embedding.default")
    assert strategy.configs[place].dims == ("b",)
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(lambda: build(mode, weighted, padding), sgd), mode)


class Loose(nn.Module):
    """Bags of any length, one of them empty, in one row of indices."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(16, 8, mode=mode, padding_idx=3), nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        starts = lengths.cumsum(0) - lengths
        return nn.functional.cross_entropy(self.head(self.bags(x, starts)), y)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_any_length_are_split_by_columns_and_equal(mode: str) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        lengths = torch.tensor([3, 0, 4, 5])
        batch = {"x": torch.randint(0, 16, (12,)), "lengths": lengths, "y": torch.arange(4)}
        return Loose(mode).double(), batch

    module, batch = build()
    captured = capture(module, batch)
    place = [one.kind for one in captured.graph.operators].index("shardwright.embedding_bags")
    strategy = seed_strategy(captured.graph, Seed(data=2))
    configs = list(strategy.configs)
    configs[place] = replace(configs[place], dims=("d",))
    runs, _ = train_rehearsed(
        captured, replace(strategy, configs=tuple(configs)), module, batch, sgd
    )
    assert_close(runs[0], train_plain(build, sgd), mode)


class Spoken(nn.Module):
    """Scores of frames under CTC loss, with lengths as tensors or as lists."""

    def __init__(self, reduction: str, lists: bool) -> None:
        super().__init__()
        self.head, self.lists = nn.Linear(6, 5), lists
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        frames = [7] * 4 if self.lists else torch.full((4,), 7)
        return self.loss(scores, y, frames, [3, 1, 2, 3] if self.lists else lengths)


@pytest.mark.parametrize(("reduction", "lists"), [("mean", False), ("mean", True), ("sum", False)])
def test_ctc_loss_is_split_by_samples_and_equal(reduction: str, lists: bool) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        y, lengths = torch.randint(1, 5, (4, 3)), torch.tensor([3, 1, 2, 3])
        batch = {"x": torch.randn(4, 7, 6).double(), "y": y, "lengths": lengths}
        return Spoken(reduction, lists).double(), batch

    module, batch = build()
    captured = capture(module, batch)
    place = [one.kind for one in captured.graph.operators].index("shardwright.ctc_losses")
    strategy = seed_strategy(captured.graph, Seed(data=2))
    assert strategy.configs[place].dims == ("b",)
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), reduction)
