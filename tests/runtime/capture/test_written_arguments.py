"""Opaque modules that write what they are given: whoever reads it behind them reads what was written."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
sgd = partial(torch.optim.SGD, lr=0.1)


class Shift(nn.Module):
    """Writes labels that count for nothing over with a word, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)

    def forward(self, labels: Tensor) -> Tensor:
        labels.masked_fill_(labels == -100, 1)
        return self.words(labels.roll(1, 1)) * (2.0 if bool((labels == 0).any()) else 1.0)


class Decoder(nn.Module):
    """Takes its loss at labels that the module before has written."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.out = Shift(), nn.Linear(8, 9)

    def forward(self, labels: Tensor, x: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.shift(labels) + x))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Reader(nn.Module):
    """Has such a decoder behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder = nn.Linear(8, 8), Decoder()

    def forward(self, labels: Tensor, x: Tensor) -> Tensor:
        return self.decoder(labels, self.first(x))


class Doubled(nn.Module):
    """Doubles what it is given where it lies, which nobody reads behind it, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return self.inner(x) * (2.0 if bool((x > 0).any()) else 1.0)


class Doubling(nn.Module):
    """Hands a part of its batch to a module that writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled, self.out = Doubled(), nn.Linear(8, 9)

    def forward(self, labels: Tensor, x: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.doubled(x)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (4, 6), generator=draw)
    labels[:, ::3] = -100
    return {"labels": labels, "x": torch.randn(4, 6, 8, generator=draw, dtype=torch.float64)}


@pytest.mark.parametrize("kind", [Reader, Doubling])
def test_what_an_opaque_module_writes_trains_as_in_plain_pytorch(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().double()
    captured = capture(module, batch())
    plain = train_plain(lambda: (copy.deepcopy(module), batch()), sgd)
    for seed in (Seed(), Seed(data=2), Seed(stages=2)):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, module, batch(), sgd)
        for run in runs:
            assert_close(run, plain, repr(seed))


def test_only_what_nobody_reads_behind_it_is_written_by_a_module_of_its_own() -> None:
    assert "opaque.Doubled" in {op.kind for op in capture(Doubling(), single()).graph.operators}
    assert {op.kind for op in capture(Reader(), single()).graph.operators} >= {"opaque.Decoder"}


def single() -> dict[str, Tensor]:
    return {name: one.float() if one.is_floating_point() else one for name, one in batch().items()}
