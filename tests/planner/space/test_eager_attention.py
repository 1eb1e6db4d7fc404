"""Megatron's pattern in attention that is written out: scores plus masks, biases and slopes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
HEADS, WIDTH, LENGTH = 4, 16, 6


class Eager(nn.Module):
    """A pre-norm layer whose scores get a mask (of the batch, or of all), and a bias by position:
    learned as T5's, or slopes as ALiBi's; queries, keys and values in one product as Falcon's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(2 * LENGTH, HEADS)
        self.slopes = nn.Buffer(torch.tensor([0.5**head for head in range(HEADS)]))
        self.head = nn.Linear(WIDTH, 4)

    def offset(self, x: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        apart = place[None] - place[:, None]
        if self.kind == "t5":
            return self.bias(apart + LENGTH).permute(2, 0, 1)[None]
        if self.kind == "alibi":
            return self.slopes[:, None, None] * apart
        if self.kind == "padded":  # a mask of its own for every sample
            return torch.where(x[:, :, 0] > 2, -9.0, 0.0)[:, None, None].to(x.dtype)
        return torch.full((LENGTH, LENGTH), -torch.inf).triu(1).to(x.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.stem(x)
        mixed = self.mixed(self.norm(z)).view(*x.shape[:2], HEADS, 3, -1)
        query, key, value = (mixed[:, :, :, part].transpose(1, 2) for part in range(3))
        if self.kind == "broadcast":
            key = torch.broadcast_to(key, query.shape)
        if self.kind in ("bloom", "merged", "written"):
            return self.finish(self.merged(query, key, value, self.offset(x)), z, y)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + self.offset(x)
        return self.finish(scores.softmax(-1) @ value, z, y)

    def merged(self, query: Tensor, key: Tensor, value: Tensor, offset: Tensor) -> Tensor:
        """Attend with samples and heads merged into one dim for the products."""
        samples, length = query.shape[0], query.shape[2]
        query, value = query.reshape(-1, length, 4), value.reshape(-1, length, 4)
        if self.kind == "bloom":
            key = key.reshape(-1, length, 4).transpose(-1, -2)
            slopes = self.slopes.repeat(samples)[:, None, None] * torch.arange(length)
            scores = slopes.baddbmm(query, key, beta=0.5, alpha=0.3)
        else:
            scores = torch.bmm(query, key.reshape(-1, length, 4).transpose(1, 2))
        apart = scores.view(samples, HEADS, length, length)
        if self.kind == "written":
            apart.add_(offset)  # seen through the merged one
        else:
            scores = apart + offset
        shares = scores.softmax(-1).view(-1, length, length)
        return torch.bmm(shares, value).view(samples, HEADS, length, -1)

    def finish(self, mixed: Tensor, z: Tensor, y: Tensor) -> Tensor:
        found = mixed.transpose(1, 2).reshape(z.shape)
        return F.cross_entropy(self.head(z + self.out(found)).flatten(0, 1), y.flatten())


def build(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Eager(kind).double()
    x = torch.randn(4, LENGTH, 8, dtype=torch.float64)
    return module, {"x": x, "y": torch.arange(4 * LENGTH).view(4, LENGTH) % 4}


@pytest.mark.parametrize(
    "kind", ["causal", "padded", "t5", "alibi", "broadcast", "bloom", "merged"]
)
def test_eager_attention_is_split_by_heads_and_equal(kind: str) -> None:
    module, batch = build(kind)
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(tensor=2))
    split = {
        captured.graph.tensors[operator.inputs[1]].name: config.dims[-1]
        for operator, config in zip(captured.graph.operators, strategy.configs, strict=True)
        if operator.kind == "aten.linear.default"
    }
    assert (split["mixed.weight"], split["out.weight"], split["stem.weight"]) == ("n", "k", "")
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(lambda: build(kind), sgd), kind)


def test_what_is_written_through_a_view_of_merged_heads_is_seen() -> None:
    module, batch = build("written")
    captured = capture(module, batch)
    runs, _ = train_rehearsed(
        captured, seed_strategy(captured.graph, Seed(data=2)), module, batch, sgd
    )
    assert_close(runs[0], train_plain(lambda: build("written"), sgd), "written")


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
