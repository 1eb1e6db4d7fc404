"""Layers that a model leaves out at random (LayerDrop), in the ways in which models are written."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as tossed

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.operators.splitting import find_samples
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH = 8
SELDOM = 1e-9  # less than the smallest number that is drawn, but no number says so

# Whether a layer is left out, given its number, how often it is to be, and what was drawn for all.
SKIPS: dict[str, Callable[[int, float, Tensor], object]] = {
    "a tensor": lambda _i, p, _d: torch.rand([]) < p,
    "an item": lambda _i, p, _d: not torch.rand(1).item() > p,
    "drawn before": lambda i, p, drawn: not drawn[i] > p,
    "Python's": lambda _i, p, _d: random.uniform(0, 1) < p,
    "Python's, by another name": lambda _i, p, _d: tossed() < p,
    "NumPy's": lambda _i, p, _d: np.random.random() < p,
}


class Layer(nn.Module):
    """A block, and something besides that nobody reads; its norm keeps statistics where ``counts``."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if counts else nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(self.norm(x)).tanh()
        return x + h, h


class Dropping(nn.Module):
    """Layers of which each may be left out."""

    def __init__(self, is_left: Callable[[int, float, Tensor], object], p: float) -> None:
        super().__init__()
        self.is_left, self.p = is_left, p
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        drawn = torch.empty(len(self.layers)).uniform_()
        for number, layer in enumerate(self.layers):
            if self.training and self.is_left(number, self.p, drawn):
                continue
            x, _ = layer(x)
        return F.cross_entropy(self.head(x), y)


class Noisy(nn.Module):
    """Turns its input around, or reads another, by the toss of a coin; what it does with a third is ``other``."""

    seen: Tensor

    def __init__(self, other: Callable[[Tensor], object] = lambda x: x) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(WIDTH, 4), other
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = x.flip(-1)
            self.other(self.seen)
        return F.cross_entropy(self.head(x + self.seen), y)


class Translating(nn.Module):
    """Reads what was right, or what it said itself last, by chance: once for all, or at every step."""

    def __init__(self, p: float, steps: bool) -> None:
        super().__init__()
        self.words, self.cell, self.head = (
            nn.Embedding(6, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 6),
        )  # fmt: skip
        self.reads, self.p, self.steps = nn.GRU(WIDTH, WIDTH, batch_first=True), p, steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, word, scores = self.reads(x)[1].squeeze(0), y[:, 0], []
        if not self.steps:
            is_forced = random.random() < self.p
            for place in range(1, y.shape[1]):
                h = self.cell(self.words(word), h)
                scores.append(self.head(h))
                if is_forced:
                    word = y[:, place]
                else:
                    word = scores[-1].topk(1)[1].squeeze(-1).detach()
        else:
            for place in range(1, y.shape[1]):
                h = self.cell(self.words(word), h)
                scores.append(self.head(h))
                is_forced = random.random() < self.p
                word = y[:, place] if is_forced else scores[-1].argmax(1)
        made = torch.stack(scores, 1)
        return F.cross_entropy(made.flatten(0, 1), y[:, 1:].flatten())


class Guessing(nn.Module):
    """Reads a first guess of its own, made without gradients, by chance, and zeros else."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(2 * WIDTH, WIDTH), p

    def guess(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        last = torch.zeros_like(x) if last is None else last
        return self.linear(torch.cat([last, x], -1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        last = None
        if tossed() < self.p:
            with torch.no_grad():
                last = self.guess(x)
        return F.mse_loss(self.guess(x, last), y)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named], lr=0.1)


def dropping(how: str, p: float) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, WIDTH).double(), "y": torch.randint(4, (4,))}
    return Dropping(SKIPS[how], p).double(), batch


def opaque(captured: Captured) -> list[str]:
    return [one.kind for one in captured.graph.operators if one.kind.startswith("opaque.")]


@pytest.mark.parametrize("how", SKIPS)
@pytest.mark.parametrize("p", [0.0, SELDOM, 1 - SELDOM])
def test_layers_that_may_be_left_out_train_as_they_are_written(how: str, p: float) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        return dropping(how, p)

    module, batch = build()
    captured = capture(module, batch)
    assert not opaque(captured)
    assert bool(captured.graph.notes[1:]) == (p > 0)  # behind that of the mean loss
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), how)


def test_all_ranks_leave_out_the_same_layers() -> None:
    module, batch = dropping("a tensor", 0.5)
    captured = capture(module, batch)
    assert "what chance decides at test_skipping.py:" in captured.graph.notes[-1]
    alone, *others = (
        train_rehearsed(captured, seed_strategy(captured.graph, seed), module, batch, sgd)[0][0]
        for seed in (Seed(), Seed(data=2), Seed(tensor=2), Seed(stages=2), Seed(recompute=True))
    )
    for run in others:
        assert_close(run, alone, "the same draws")


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("p", [SELDOM, 0.5, 1 - SELDOM])
def test_a_decoder_that_is_forced_by_chance_trains_as_it_is_written(p: float, steps: bool) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        batch = {"x": torch.randn(4, 3, WIDTH).double(), "y": torch.randint(6, (4, 5))}
        return Translating(p, steps).double(), batch

    module, batch = build()
    captured = capture(module, batch)
    assert not opaque(captured)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    if p == 0.5:
        alone = seed_strategy(captured.graph, Seed())
        plain = train_rehearsed(captured, alone, module, batch, sgd)[0][0]
    else:
        plain = train_plain(build, sgd)
    assert_close(runs[0], plain, "forced")


@pytest.mark.parametrize("p", [SELDOM, 1 - SELDOM])
def test_a_guess_without_gradients_that_is_read_by_chance_has_none(p: float) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64)
        return Guessing(p).double(), {"x": x, "y": y}

    module, batch = build()
    captured = capture(module, batch)
    assert not opaque(captured)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), "guess")


def test_what_is_no_layer_may_be_left_out_too() -> None:
    batch = {"x": torch.randn(4, WIDTH), "y": torch.randint(4, (4,))}
    graph = capture(Noisy().float(), batch).graph
    assert "aten.where.self" in [one.kind for one in graph.operators]
    assert not find_samples(graph).blocker


@pytest.mark.parametrize("other", [lambda x: x.add_(1), lambda x: x[1:].mul_(2)])
def test_buffers_that_are_written_only_sometimes_are_so(other: Callable[[Tensor], object]) -> None:
    batch = {"x": torch.randn(4, WIDTH).double(), "y": torch.randint(4, (4,))}
    assert not opaque(capture(Noisy(other).double(), batch))


@pytest.mark.parametrize("p", [SELDOM, 1 - SELDOM])
def test_statistics_of_layers_that_are_left_out_stay(p: float) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        module, batch = dropping("a tensor", p)
        module.layers = nn.ModuleList(Layer(counts=True) for _ in range(3))
        return module.double(), batch

    module, batch = build()
    captured = capture(module, batch, batch_norm="synchronised")
    assert not opaque(captured)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), "statistics")
