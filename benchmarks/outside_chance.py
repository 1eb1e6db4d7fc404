"""What is decided by the toss of a coin while it is trained, for ``outside.py``: layers and residuals left out, words
that were right or that the model said itself, guesses that are read again, conditions and senses that are missing.

Written before any of them was run.
"""

from __future__ import annotations

import random
from random import random as tossed

import numpy as np
import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, next_words, token_loss, tokens, two_layers
from torch import Tensor, nn


def translation_forced_by_chance(batch_size: int = 4) -> Example:
    """A recurrent translator with attention, whose next word is the right one or its own, tossed at every step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
            self.reads = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.look, self.worth = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)
            self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(3 * WIDTH, 20)

        def step(self, word: Tensor, h: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
            seen = torch.cat([h[:, None].expand(-1, read.shape[1], -1), read], -1)
            odds = self.worth(torch.tanh(self.look(seen))).squeeze(-1).softmax(-1)
            found = torch.bmm(odds[:, None], read).squeeze(1)
            embedded = self.target(word)
            h = self.cell(torch.cat([embedded, found], -1), h)
            return self.head(torch.cat([h, found, embedded], -1)), h

        def forward(self, ids: Tensor, labels: Tensor, forced: float = 0.5) -> Tensor:
            read, last = self.reads(self.source(ids))
            h, word, said = last.squeeze(0), labels[:, 0], list[Tensor]()
            for place in range(1, labels.shape[1]):
                scores, h = self.step(word, h, read)
                said.append(scores)
                word = labels[:, place] if random.random() < forced else scores.argmax(1)
            made = torch.stack(said, 1)
            return F.cross_entropy(made.flatten(0, 1), labels[:, 1:].flatten())

    return Net(), next_words(batch_size)


def residuals_left_out(batch_size: int = 4) -> Example:
    """A residual network of stochastic depth as first published: a coin for each block and batch, later ones rarer kept,
    and the norms inside keep statistics."""

    class Block(nn.Module):
        def __init__(self, keeps: float) -> None:
            super().__init__()
            self.keeps = keeps
            self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and np.random.rand() >= self.keeps:
                return x
            h = F.relu(self.norms[0](self.one(x)))
            return F.relu(x + self.norms[1](self.two(h)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
            self.blocks = nn.Sequential(*(Block(1 - 0.5 * n / 4) for n in range(1, 5)))

        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            h = self.blocks(F.relu(self.stem(pixels))).mean((2, 3))
            return F.cross_entropy(self.head(h), labels)

    return Net(), {"pixels": floats(batch_size, 3, 8, 8), "labels": tokens(5, batch_size)}


class _Dropped(nn.ModuleList):
    """Yields its layers but for those that are left out this time."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        drawn = torch.empty(len(self)).uniform_()
        for number, layer in enumerate(super().__iter__()):
            if not self.training or drawn[number] > 0.2:
                yield layer


def speech_with_layers_left_out(batch_size: int = 4) -> Example:
    """Speech by convolutions and a transformer whose list of layers yields only some of them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hears = nn.Sequential(
                nn.Conv1d(1, WIDTH, 5, 2), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 3, 2)
            )
            self.places = nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=4)
            self.layers = _Dropped(
                [
                    nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
                    for _ in range(3)
                ]
            )
            self.head = nn.Linear(WIDTH, 6)

        def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
            x = self.hears(sound[:, None])
            x = (x + F.gelu(self.places(x)[..., :-1])).transpose(1, 2)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x.mean(1)), labels)

    return Net(), {"sound": floats(batch_size, 48), "labels": tokens(6, batch_size)}


def denoiser_that_reads_its_guess(batch_size: int = 4) -> Example:
    """A denoiser that reads its own first guess, made without gradients, every other time, and zeros else; the condition
    is missing every tenth time."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.body = nn.Linear(2 * 12, WIDTH), two_layers()
            self.kinds, self.out = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 12)
            self.nothing = nn.Parameter(torch.zeros(WIDTH))

        def guess(
            self, x: Tensor, level: Tensor, kind: Tensor, last: Tensor | None = None
        ) -> Tensor:
            last = torch.zeros_like(x) if last is None else last
            h = self.into(torch.cat([last, x], -1)) + level[:, None].cos() + kind
            return self.out(h + self.body(F.silu(h)))

        def forward(self, clean: Tensor, noise: Tensor, level: Tensor, kinds: Tensor) -> Tensor:
            x = level[:, None] * clean + (1 - level[:, None]) * noise
            kind = self.kinds(kinds)
            if tossed() < 0.1:
                kind = self.nothing.expand_as(kind)
            last = None
            if tossed() < 0.5:
                with torch.no_grad():
                    last = self.guess(x, level, kind).detach()
            return F.mse_loss(self.guess(x, level, kind, last), noise)

    return Net(), {
        "clean": floats(batch_size, 12), "noise": floats(batch_size, 12) * 0.5,
        "level": floats(batch_size).sigmoid(), "kinds": tokens(5, batch_size),
    }  # fmt: skip


def senses_that_are_missing(batch_size: int = 4) -> Example:
    """Text beside an image and a sound, each of which is taken away at times, read by one transformer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.sees = nn.Embedding(20, WIDTH), nn.Linear(12, WIDTH)
            self.hears, self.head = nn.Linear(10, WIDTH), nn.Linear(WIDTH, 20)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)

        def forward(self, ids: Tensor, image: Tensor, sound: Tensor, labels: Tensor) -> Tensor:
            seen, heard = self.sees(image), self.hears(sound)
            if self.training and torch.rand(1).item() < 0.3:
                seen = torch.zeros_like(seen)
            if self.training and torch.rand(()) < 0.3:
                heard = heard * 0
            x = self.layer(torch.cat([seen, heard, self.words(ids)], 1))
            return token_loss(self.head(x[:, -ids.shape[1] :]), labels)

    return Net(), next_words(batch_size) | {
        "image": floats(batch_size, 4, 12), "sound": floats(batch_size, 3, 10),
    }  # fmt: skip
