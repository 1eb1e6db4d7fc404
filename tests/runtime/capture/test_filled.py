"""Rows that a model picks by values of the batch: where it picks them all it is captured whole, and a batch of which some
fall out is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.graph import OperatorGraph
from shardwright.errors import ShardwrightError
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.verify import gaps, train_here, train_plainly

Batch = dict[str, Tensor]


class Padded(nn.Module):
    """Takes as many pictures as the fullest sample has, and leaves out those of nothing but zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.last = nn.Linear(6, 2)

    def is_real(self, pixels: Tensor) -> Tensor:
        return (pixels == 0).sum(-1) != pixels.shape[-1]

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        count, each, _ = pixels.shape
        flat = pixels.reshape(count * each, -1)
        real = self.is_real(flat)
        counts = real.view(count, each).sum(1)  # told only when all is picked
        hidden = F.gelu(self.embed(flat[real]))
        marks = torch.ones_like(flat)[real].sum(-1, keepdim=True)
        found = [one.mean(0) for one in (hidden * marks).split(counts.tolist())]
        return F.mse_loss(self.last(torch.stack(found)), target)


class Kept(Padded):
    """Keeps one picture where a batch has none, by a write into its marks."""

    def is_real(self, pixels: Tensor) -> Tensor:
        real = super().is_real(pixels)
        real[0] |= ~torch.any(real)
        return real


class Whitened(Padded):
    """Writes into the pixels before it looks at them."""

    def is_real(self, pixels: Tensor) -> Tensor:
        pixels = pixels * 1
        flat = pixels.view(-1)
        flat[::2] = 0
        return super().is_real(pixels)


class Marked(nn.Module):
    """Picks words by marks of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        return self.layer(x)[marks > 0].square().mean()


class Checked(nn.Module):
    """Counts by sizes, and checks that as many words are marked as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, marks: Tensor, sizes: Tensor) -> Tensor:
        hidden = self.layer(x)
        torch._check(hidden[marks > 0].shape[0] == len(x))
        return torch.stack([one.mean() for one in hidden[:, 0].split(sizes[:, 0].tolist())]).sum()


def batch_of(count: int, seed: int = 0, each: int = 2) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixels": torch.randn(count, each, 4, dtype=torch.float64, generator=draw),
        "target": torch.randn(count, 2, dtype=torch.float64, generator=draw),
    }


def with_padding(batch: Batch) -> Batch:
    pixels = batch["pixels"].clone()
    pixels[1, 1] = 0
    return {**batch, "pixels": pixels}


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def opaque(graph: OperatorGraph) -> list[str]:
    return [one.kind for one in graph.operators if one.kind.startswith(("opaque.", "rowwise."))]


def gap(captured: Captured, net: nn.Module, batches: list[Batch], ranks: int) -> float:
    plain = train_plainly(net, batches, clips=False, tell=lambda _: None)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=ranks)))
    trained = train_here(captured, program, net, batches, lambda _: None)
    return gaps(trained, plain, captured)[0].difference


@pytest.mark.parametrize("kind", [Padded, Kept])
def test_a_model_that_leaves_out_padding_is_whole_where_there_is_none(
    kind: type[nn.Module],
) -> None:
    net, batches = built(kind), [batch_of(4), batch_of(4, 1)]
    captured = capture(net, batches[0])
    assert opaque(captured.graph) == []
    assert any("padding of pixels" in note for note in captured.graph.notes)
    assert gap(captured, net, batches, 2) < 1e-12


def test_a_batch_with_padding_is_refused_by_what_was_captured_without() -> None:
    net = built(Padded)
    captured = capture(net, batch_of(4))
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2)))
    with pytest.raises(ShardwrightError, match=r"padding of pixels.*capture with a batch that has"):
        train_here(captured, program, net, [with_padding(batch_of(4))], lambda _: None)


def test_captured_with_padding_such_a_model_takes_any() -> None:
    net, batches = built(Padded), [with_padding(batch_of(4)), batch_of(4, 1)]
    captured = capture(net, batches[0])
    assert opaque(captured.graph) != []
    assert captured.filled == ()
    assert gap(captured, net, batches, 1) < 1e-12


def test_padding_is_looked_for_at_the_global_batch() -> None:
    captured = capture(built(Padded), batch_of(2), global_batch=6)
    assert opaque(captured.graph) == []
    assert captured.filled[0].holds(batch_of(6))
    assert not captured.filled[0].holds(with_padding(batch_of(6)))


def test_what_is_picked_by_pixels_that_were_written_stays_opaque() -> None:
    net, batch = built(Whitened), batch_of(4)
    captured = capture(net, batch)
    assert opaque(captured.graph) != []
    assert gap(captured, net, [batch], 1) < 1e-12


def test_marks_of_words_may_differ_in_the_next_batch() -> None:
    net = built(Marked)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    batches = [
        {"x": x, "marks": torch.ones(4, 5).long()},
        {"x": x, "marks": torch.ones(4, 5).long().tril()},
    ]
    captured = capture(net, batches[0])
    assert opaque(captured.graph) != []
    assert gap(captured, net, batches, 1) < 1e-12


def test_rows_that_are_picked_by_words_to_be_counted_are_not_taken_to_be_all() -> None:
    net = built(Checked)
    batch = {
        "x": torch.randn(6, 5, 4, dtype=torch.float64),
        "marks": F.one_hot(torch.arange(6) % 5, 5),
        "sizes": torch.tensor([[3, 1], [3, 1]]),
    }
    captured = capture(net, batch)
    assert opaque(captured.graph) == []
    assert captured.fixed == {"sizes": (3, 1)}
    assert captured.filled == ()
