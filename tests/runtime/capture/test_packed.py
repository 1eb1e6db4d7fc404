"""Packed sequences stay padded in the graph, split over samples, and train as PyTorch trains them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwright.operators.splitting import find_samples
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.verbs.coverage import random_strategy
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch
LENGTHS = torch.tensor([3, 6, 1, 6, 4, 2, 5, 3])


class Tagger(nn.Module):
    """Two recurrent layers over packed sequences, of which one also says where it ended."""

    def __init__(self, kind: type[nn.RNNBase], is_batch_first: bool) -> None:
        super().__init__()
        self.is_batch_first = is_batch_first
        self.first = kind(5, 4, 2, batch_first=is_batch_first, bidirectional=True)  # type: ignore[arg-type]
        self.second = kind(8, 3, batch_first=is_batch_first)  # type: ignore[arg-type]
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        x = x if self.is_batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), self.is_batch_first, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, last = self.second(packed)
        h, sizes = pad_packed_sequence(packed, batch_first=True, total_length=6)
        end = sum(one.sum() for one in last) if isinstance(last, tuple) else last.sum()
        behind = torch.arange(h.shape[1]) < sizes[:, None]
        error = F.mse_loss(self.head(h), y, reduction="none").sum(-1)
        return (error * behind).sum() / len(x) + 0.01 * end


KINDS = [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, True)]


def made(kind: type[nn.RNNBase], is_batch_first: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, 5, dtype=torch.float64), torch.randn(8, 6, 2, dtype=torch.float64)
    return Tagger(kind, is_batch_first).double(), {"x": x, "lengths": LENGTHS, "y": y}


@pytest.mark.parametrize(("kind", "is_batch_first"), KINDS)
def test_packed_sequences_train_as_in_pytorch(kind: type[nn.RNNBase], is_batch_first: bool) -> None:
    graph = capture(*made(kind, is_batch_first)).graph
    assert [one.kind for one in graph.operators].count("shardwright.packed_recurrence") == 2
    assert find_samples(graph).blocker == ""
    ways = {
        "microbatches": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2)),
        "pipeline": lambda graph: seed_strategy(graph, Seed(stages=2, num_microbatches=2)),
        "ZeRO-3": lambda graph: seed_strategy(graph, Seed(data=2, zero=3)),
        "random": lambda graph: random_strategy(graph, 1),
    }
    assert_equivalent(2, lambda: made(kind, is_batch_first), ways)


class Longest(Tagger):
    """Padded to the longest of a batch, which the graph does not know: the next batch's may be shorter."""

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = self.first(pack_padded_sequence(x, lengths, True, False))[0]
        return pad_packed_sequence(packed, True)[0].square().mean() + y.sum() * 0


class Filled(Tagger):
    """What is not padded with zeros stays as it is."""

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = self.first(pack_padded_sequence(x, lengths, True, False))[0]
        h, _ = pad_packed_sequence(packed, True, padding_value=1.0)
        return h.square().mean() + y.sum() * 0


@pytest.mark.parametrize("model", [Longest, Filled])
def test_other_padding_stays_opaque(model: type[Tagger]) -> None:
    _, batch = made(nn.LSTM, True)
    graph = capture(model(nn.LSTM, True).double(), batch).graph
    assert [one.kind for one in graph.operators if one.kind.startswith("opaque.")]
