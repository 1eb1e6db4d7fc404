"""Models of published evaluations that have no `hf:` name, built without weights for planning.

FlexFlow's and PaSE's (IPDPS 2021, section IV; sizes as its program has them), and Alpa's (OSDI 2022,
section 8.1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from planning_models import language_model
from torch import Tensor, nn

LENGTH = 256


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
    """Two recurrent layers between an embedding and a projection on the vocabulary."""

    def __init__(self, words: int, width: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(words))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """A residual block whose 3x3 convolution is ``factor`` times wider."""

    def __init__(self, wide: int, inner: int, factor: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(wide, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner * factor, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner * factor), nn.ReLU(),
            nn.Conv2d(inner * factor, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = (
            nn.Identity()
            if wide == out and stride == 1
            else nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.body(x))


class WideResNet(nn.Module):
    """A ResNet of 50 layers with more channels and wider 3x3 convolutions."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        wide = channels
        for stage, count in enumerate((3, 4, 6, 3)):
            inner = channels * 2**stage
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(wide, inner, factor, stride))
                wide = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(wide, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


def gpt(layers: int, width: int, heads: int) -> nn.Module:
    """Build Alpa's GPT: 1,024 tokens, a vocabulary of 51,200."""
    return language_model(
        "AutoModelForCausalLM", "gpt2",
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=51200, n_positions=1024,
    )  # fmt: skip


def transformer() -> nn.Module:
    """Build PaSE's translation model: six and six layers of 512, a vocabulary of 50,000."""
    return language_model(
        "AutoModelForSeq2SeqLM", "marian",
        vocab_size=50000, d_model=512, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=LENGTH,
        pad_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip


def images(batch_size: int) -> dict[str, Tensor]:
    """Return images and classes."""
    pixels = torch.zeros(batch_size, 3, 224, 224)
    return {"images": pixels, "labels": torch.zeros(batch_size, dtype=torch.long)}


def words(batch_size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Return words and the next ones."""
    tokens = torch.zeros(batch_size, length, dtype=torch.long)
    return {"words": tokens, "targets": tokens}
