"""Decoders of any published dimensions, built without weights and captured as a few layers.

Published runs name dimensions, not modules. These modules have the operators that such a run
executes, so that it can be priced: they are for planning, nothing trains them. Where a framework
runs several steps as one kernel (rotary embedding, scale, mask and softmax), ``fused`` makes it one
operator that moves the same bytes; it does not compute the same values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.decoder import Decoder
from shardwright.core.graph import OperatorGraph
from shardwright.runtime.capture.deepen import deepened
from shardwright.runtime.capture.export import capture

# Layers that are captured where a model has more: one that follows the embedding, one that follows
# another, one that the head follows.
FEWEST_LAYERS = 3


def capture_decoder(shape: Decoder, global_batch: int, precision: str) -> OperatorGraph:
    """Capture a decoder at a global batch size; of many equal layers only some, then repeated."""
    few = replace(shape, layers=min(shape.layers, FEWEST_LAYERS))
    with torch.device("meta"):
        module = _Model(few)
        tokens = torch.empty((2, shape.seq), dtype=torch.long)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    captured = capture(module, batch, global_batch=global_batch, precision=precision)
    return deepened(captured.graph, shape.layers - few.layers)


class _Model(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.place = nn.Embedding(shape.seq, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList([_Layer(shape) for _ in range(shape.layers)])
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x_BSH = self.embed(tokens)
        if self.place is not None:
            x_BSH = x_BSH + self.place(torch.arange(self.shape.seq, device=tokens.device))
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        scores = self.head(self.norm(x_BSH)).float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.before_attention = _norm(shape)
        self.attention = _Attention(shape)
        self.before_forward = _norm(shape)
        self.forward_layer = _FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.forward_layer(self.before_forward(x))


class _Attention(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.is_one = wide == narrow
        self.query = nn.Linear(shape.hidden, 3 * wide if self.is_one else wide, bias=shape.bias)
        if not self.is_one:
            self.key_value = nn.Linear(shape.hidden, 2 * narrow, bias=shape.bias)
        self.out = nn.Linear(wide, shape.hidden, bias=shape.bias)
        half = torch.empty(shape.seq, shape.head_size)
        self.register_buffer("cos", half if shape.rotary else None)
        self.register_buffer("sin", half.clone() if shape.rotary and not shape.fused else None)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        if self.is_one:
            query, key, value = self.query(x).chunk(3, -1)
        else:
            query, (key, value) = self.query(x), self.key_value(x).chunk(2, -1)
        query, key, value = (
            one.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for one in (query, key, value)
        )
        if shape.rotary:
            query, key = self._turn(query), self._turn(key)
        mixed = self._mix(query, key, value).transpose(1, 2)
        return self.out(mixed.flatten(2))

    def _turn(self, x: Tensor) -> Tensor:
        if self.shape.fused:
            return x * self.cos
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = self.shape
        grouped = shape.kv_heads != shape.heads
        if shape.flash:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped
            )
        if grouped:
            times = shape.heads // shape.kv_heads
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        return (query @ key.transpose(2, 3)).softmax(-1) @ value


class _FeedForward(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        inner = 2 * shape.ffn if shape.gated else shape.ffn
        self.up = nn.Linear(shape.hidden, inner, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape.gated:
            gate, up = self.up(x).chunk(2, -1)
            return self.down(_activated(gate, self.shape.activation) * up)
        return self.down(_activated(self.up(x), self.shape.activation))


def _activated(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.relu(x).square() if name == "relu2" else F.gelu(x)


def _norm(shape: Decoder) -> nn.Module:
    return nn.RMSNorm(shape.hidden) if shape.rms else nn.LayerNorm(shape.hidden)
