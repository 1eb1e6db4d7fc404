"""Models of FlexFlow's evaluation that have no `hf:` name, written out for planning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, LENGTH = 10_000, 2048, 40


class AlexNet(nn.Module):
    """Krizhevsky's network in one column: most work in convolutions, most parameters behind them."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.first, self.second = nn.Linear(256 * 36, 4096), nn.Linear(4096, 4096)
        self.last = nn.Linear(4096, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.features(images).flatten(1)
        return F.cross_entropy(self.last(F.relu(self.second(F.relu(self.first(x))))), labels)


class RNNLM(nn.Module):
    """Two recurrent layers of 2,048 over 40 words, and a projection on the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(words))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


def alexnet() -> nn.Module:
    """Build the model."""
    return AlexNet()


def alexnet_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images and classes."""
    images = torch.zeros(batch_size, 3, 224, 224)
    return {"images": images, "labels": torch.zeros(batch_size, dtype=torch.long)}


def rnnlm() -> nn.Module:
    """Build the model."""
    return RNNLM()


def rnnlm_batch(batch_size: int) -> dict[str, Tensor]:
    """Return words and the next ones."""
    words = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    return {"words": words, "targets": words}
