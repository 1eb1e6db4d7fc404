"""Attention over equal pieces of a sequence is one operator, whose samples are the pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.verify import gaps, train_here, train_plainly

pytestmark = pytest.mark.torch
WIDTH, HEADS = 8, 2


class Pieces(nn.Module):
    """Patches of all images in one row, each image attending to itself."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        super().__init__()
        self.lengths, self.options = lengths, options
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.heads(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        cut = [one.unsqueeze(0).split(self.lengths, dim=2) for one in rows]
        found: list[Tensor] = []
        for query, key, value in zip(*cut, strict=True):
            mixed = F.scaled_dot_product_attention(query, key, value, **self.options)
            found.append(mixed.transpose(1, 2).contiguous())
        hidden = torch.cat(found, dim=1).reshape(len(x), WIDTH)
        return F.mse_loss(self.last(hidden), y)


def attentions(net: nn.Module, batch: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of what each attention makes."""
    graph = capture(net, batch).graph
    calls = [one for one in graph.operators if "scaled_dot_product" in one.kind]
    return [graph.tensors[one.outputs[0]].shape for one in calls]


def made(lengths: list[int], **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    count = sum(lengths)
    batch = {"x": torch.randn(count, WIDTH), "y": torch.randn(count, 1)}
    return Pieces(lengths, **options).double(), {name: one.double() for name, one in batch.items()}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_equal_pieces_are_samples_of_one_attention(options: dict[str, Any]) -> None:
    net, batch = made([3] * 4, **options)
    assert attentions(net, batch) == [(4, HEADS, 3, WIDTH // HEADS)]
    captured = capture(net, batch)
    plain = train_plainly(net, [batch], clips=False, tell=lambda _: None)
    for seed in (Seed(data=2), Seed(tensor=2), Seed(data=2, num_microbatches=2)):
        program = lower(captured.graph, seed_strategy(captured.graph, seed))
        trained = train_here(captured, program, net, [batch], lambda _: None)
        assert gaps(trained, plain, captured)[0].difference < 1e-12, seed


def test_pieces_of_different_lengths_stay_apart() -> None:
    assert len(attentions(*made([3, 5, 4]))) == 3


def test_pieces_that_drop_at_random_stay_apart() -> None:
    assert len(attentions(*made([3, 3], dropout_p=0.5))) == 2


class Others(Pieces):
    """Pieces in another order, of which the graph must not say that they lie in a row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.heads(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        query, key, value = (one.unsqueeze(0).split(self.lengths, dim=2) for one in rows)
        found = [
            F.scaled_dot_product_attention(query[n], key[1 - n], value[1 - n]).transpose(1, 2)
            for n in (0, 1)
        ]
        return F.mse_loss(self.last(torch.cat(found, dim=1).reshape(len(x), WIDTH)), y)


def test_pieces_in_another_order_stay_apart() -> None:
    _, batch = made([3, 3])
    torch.manual_seed(2)
    assert len(attentions(Others([3, 3]).double(), batch)) == 2


class Rewritten(Pieces):
    """Values that are written between one piece and the next."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.heads(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        query, key = (one.unsqueeze(0) for one in rows[:2])
        value = x.view(1, len(x), HEADS, -1).transpose(1, 2).clone()
        parts = [one.split(self.lengths, dim=2) for one in (query, key, value)]
        (q0, q1), (k0, k1), (v0, v1) = parts
        first = F.scaled_dot_product_attention(q0, k0, v0).transpose(1, 2)
        value[:, :, 0] = 0.0
        second = F.scaled_dot_product_attention(q1, k1, v1).transpose(1, 2)
        hidden = torch.cat([first, second], dim=1).reshape(len(x), WIDTH)
        return F.mse_loss(self.last(hidden), y)


def test_pieces_between_which_something_is_written_stay_apart() -> None:
    _, batch = made([3, 3])
    torch.manual_seed(2)
    assert len(attentions(Rewritten([3, 3]).double(), batch)) == 2


class Strided(nn.Module):
    """What is read as memory lies, which capture writes anew, beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lain = x.as_strided((len(x), WIDTH), (WIDTH, 1))
        return F.mse_loss(self.last(torch.cat([lain, x * 2], dim=1)), y)


def test_what_capture_wrote_anew_may_be_laid_beside_another() -> None:
    _, batch = made([3, 3])
    kinds = [one.kind for one in capture(Strided().double(), batch).graph.operators]
    assert "aten.cat.default" in kinds
