"""Small models for choosing plans on CPUs: some where computation weighs, some where messages do.

Drawn into two halves once, by name: constants may be looked at on ``TUNED``, results count on all.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import choice_others
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TUNED = ("wide", "convolution", "tiny")
BATCHES = {"wide": 64, "decoder": 16, "convolution": 32, "deep": 128, "words": 32, "tiny": 64}
ALL = BATCHES | choice_others.BATCHES


def spec(name: str) -> str:
    """Return a model by the name that a command takes."""
    file = __file__ if name in BATCHES else choice_others.__file__
    return f"{Path(file).resolve()}:{name}"


class Perceptron(nn.Module):
    """Linear layers: with few samples their gradients outweigh their work."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class Layer(nn.Module):
    """One layer of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.first(x)
        parts = [
            linear(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(depth)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.layers(self.embedding(tokens)))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Convolution(nn.Module):
    """Convolutions: much work for few parameters."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 64)
        self.layers = nn.Sequential(
            *(
                part
                for a, b in itertools.pairwise(sizes)
                for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            )
        )
        self.head = nn.Linear(64 * 16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).flatten(1)), y)


def _perceptron_batch(batch_size: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, width), "y": torch.randn(batch_size, width)}


def _tokens(batch_size: int, length: int, words: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, words, (batch_size, length)) for name in ("tokens", "targets")}


def wide() -> nn.Module:
    return Perceptron(1024, 4)


def wide_batch(batch_size: int = 64) -> dict[str, Tensor]:
    return _perceptron_batch(batch_size, 1024)


def tiny() -> nn.Module:
    return Perceptron(128, 4)


def tiny_batch(batch_size: int = 64) -> dict[str, Tensor]:
    return _perceptron_batch(batch_size, 128)


def deep() -> nn.Module:
    return Perceptron(384, 16)


def deep_batch(batch_size: int = 128) -> dict[str, Tensor]:
    return _perceptron_batch(batch_size, 384)


def decoder() -> nn.Module:
    return Decoder(128, 4, 256)


def decoder_batch(batch_size: int = 16) -> dict[str, Tensor]:
    return _tokens(batch_size, 128, 256)


def words() -> nn.Module:
    return Decoder(128, 1, 8192)


def words_batch(batch_size: int = 32) -> dict[str, Tensor]:
    return _tokens(batch_size, 16, 8192)


def convolution() -> nn.Module:
    return Convolution()


def convolution_batch(batch_size: int = 32) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, 3, 32, 32), "y": torch.randint(0, 10, (batch_size,))}
