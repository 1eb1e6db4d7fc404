"""The demo's model and data: a byte-level GPT, and Python's own standard library as text.

This file is what a user's model file looks like: ``build`` makes the module, ``example_batch`` a
batch of the right form, and ``training_data`` the batches to train on. Nothing in it knows about
Shardwright.
"""

from __future__ import annotations

import functools
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
Batch = dict[str, Tensor]
# Shape suffixes: B batch, S sequence, D model width, H heads, V bytes.


class Attention(nn.Module):
    """Causal self-attention with separate projections, so that each can be split over heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Mix positions, each looking only back."""
        batch, seq, width = x_BSD.shape
        shape = (batch, seq, self.heads, width // self.heads)
        query, key, value = (
            layer(x_BSD).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Attend, then transform each position."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))


class ByteGPT(nn.Module):
    """A GPT over bytes; its forward returns the mean cross entropy of the next byte."""

    def __init__(self, layers: int = 6, width: int = 192, heads: int = 6, seq: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting ``targets`` from ``tokens``, both of shape (B, S)."""
        places_S = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSD = self.embed(tokens) + self.position(places_S)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV = self.head(self.norm(x_BSD))
        return F.cross_entropy(logits_BSV.reshape(-1, BYTES), targets.reshape(-1))


def build() -> nn.Module:
    """Make the model of the demo: 2.8 M parameters, equal on every rank."""
    torch.manual_seed(0)
    return ByteGPT()


def example_batch(batch_size: int = 16, seq: int = 128) -> Batch:
    """Make a batch of the right shapes and types."""
    shape = (batch_size, seq)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "targets")}


def training_data(batch_size: int = 16, seq: int = 128, start: int = 0) -> Iterator[Batch]:
    """Yield global batches for ever, from step ``start``; equal on every rank."""
    text = corpus(held_out=False)
    for step in itertools.count(start):
        yield cut(text, batch_size, seq, (0, step))


def held_out_data(batch_size: int = 16, seq: int = 128) -> Iterator[Batch]:
    """Yield batches from files that training never sees."""
    text = corpus(held_out=True)
    for index in itertools.count():
        yield cut(text, batch_size, seq, (1, index))


def cut(text: np.ndarray, batch_size: int, seq: int, seed: tuple[int, int]) -> Batch:
    """Cut random windows: bytes, and the byte after each."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(text) - seq - 1, size=batch_size)
    windows = torch.from_numpy(np.stack([text[s : s + seq + 1] for s in starts]).astype(np.int64))
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


@functools.cache
def corpus(held_out: bool) -> np.ndarray:
    """Return the standard library's sources as bytes; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if not files:
        raise FileNotFoundError("this Python has no standard-library sources to train on")
    chosen = [file for index, file in enumerate(files) if (index % 10 == 0) == held_out]
    return np.frombuffer(b"\n".join(file.read_bytes() for file in chosen), dtype=np.uint8)
