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
# another, one that the head follows. Before the first adapter no gradient flows: one more.
FEWEST_LAYERS = 3


def capture_decoder(shape: Decoder, global_batch: int, precision: str) -> OperatorGraph:
    """Capture a decoder at a global batch size; of many equal layers only some, then repeated."""
    fewest = FEWEST_LAYERS + bool(shape.adapters)
    few = replace(shape, layers=min(shape.layers, fewest))
    with torch.device("meta"):
        module = _Model(few)
        tokens = torch.empty((2, shape.seq), dtype=torch.long)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    captured = capture(module, batch, global_batch=global_batch, precision=precision)
    return _with_kernels(deepened(captured.graph, shape.layers - few.layers), shape)


def _with_kernels(graph: OperatorGraph, shape: Decoder) -> OperatorGraph:
    """Note which kernels run where memory depends on it (``operators.keeping.kept``)."""
    kernel_of = {
        "shardwright.vocabulary_cross_entropy_sum": shape.loss,
        "aten.einsum.default": shape.grouped if shape.experts else "",
    }
    operators = tuple(
        replace(operator, attributes=(*operator.attributes, ("kernel", kernel)))
        if (kernel := kernel_of.get(operator.kind, ""))
        else operator
        for operator in graph.operators
    )
    return replace(graph, operators=operators)


class _Model(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.place = nn.Embedding(shape.seq, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList([_Layer(shape) for _ in range(shape.layers)])
        self.norm = _norm(shape, shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        if shape.adapters:
            for name, one in self.named_parameters():
                one.requires_grad_(".inner." in name or ".outer." in name)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x_BSH = self.embed(tokens)
        if self.place is not None:
            x_BSH = x_BSH + self.place(torch.arange(self.shape.seq, device=tokens.device))
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        scores = self.head(self.norm(x_BSH))
        if self.shape.loss != "compiled":
            scores = scores.float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.before_attention = _norm(shape, shape.hidden)
        self.attention = _Attention(shape)
        self.before_forward = _norm(shape, shape.hidden)
        self.forward_layer = _Experts(shape) if shape.experts else _FeedForward(shape)

        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + _dropped(self.attention(self.before_attention(x)), self.dropout)
        return x + _dropped(self.forward_layer(self.before_forward(x)), self.dropout)


class _Adapted(nn.Module):
    """A frozen linear with a trained product of low rank beside it."""

    def __init__(self, plain: nn.Linear, rank: int) -> None:
        super().__init__()
        self.plain = plain
        self.inner = nn.Linear(plain.in_features, rank, bias=False)
        self.outer = nn.Linear(rank, plain.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.outer(self.inner(x))


def _linear(shape: Decoder, width: int, wide: int) -> nn.Module:
    """Make a linear of queries, keys or values, adapted where only adapters are trained: these alone are by
    default, in PEFT and in NeMo."""
    plain = nn.Linear(width, wide, bias=shape.bias)
    return _Adapted(plain, shape.adapters) if shape.adapters else plain


def _parts(linear: nn.Module, x: Tensor, count: int) -> list[Tensor]:
    """Return the equal parts of a linear's result, to each of which its adapter's is added."""
    if not isinstance(linear, _Adapted):
        return list(linear(x).chunk(count, -1)) if count > 1 else [linear(x)]
    pairs = zip(
        _parts(linear.plain, x, count), _parts(linear.outer, linear.inner(x), count), strict=True
    )
    return [plain + more for plain, more in pairs]


class _Attention(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        if shape.apart:
            widths, self.counts = [wide, narrow, narrow], (1, 1, 1)
        elif shape.adapters and wide != narrow:
            widths, self.counts = [wide, 2 * narrow], (1, 2)
        else:
            widths, self.counts = [wide + 2 * narrow], (3,)
        self.makers = nn.ModuleList(_linear(shape, shape.hidden, width) for width in widths)
        self.out = nn.Linear(wide, shape.hidden, bias=shape.bias)
        width = shape.head_size
        self.norms = nn.ModuleList(_norm(shape, width) for _ in range(2 * shape.qk_norm))
        half = torch.empty(shape.seq, shape.head_size)
        self.register_buffer("cos", half if shape.rotary else None)
        self.register_buffer("sin", half.clone() if shape.rotary and not shape.fused else None)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        query, key, value = (one.transpose(1, 2) for one in self._made(x))
        if shape.qk_norm:
            query, key = (norm(one) for norm, one in zip(self.norms, (query, key), strict=True))
        if shape.rotary:
            query, key = self._turn(query), self._turn(key)
        mixed = self._mix(query, key, value).transpose(1, 2)
        return self.out(mixed.flatten(2))

    def _made(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, head by head."""
        shape = self.shape
        if len(self.makers) == 1 and shape.heads != shape.kv_heads:
            # Of each key the queries that share it, itself and its value.
            made = self.makers[0](x).unflatten(-1, (shape.kv_heads, -1, shape.head_size))
            parts = made.split((shape.heads // shape.kv_heads, 1, 1), -2)
            return [part.flatten(2, 3) for part in parts]
        pairs = zip(self.makers, self.counts, strict=True)
        parts = [part for maker, count in pairs for part in _parts(maker, x, count)]
        return [part.unflatten(-1, (-1, shape.head_size)) for part in parts]

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
        weights = (query @ key.transpose(2, 3)).softmax(-1)
        return _dropped(weights, shape.dropout) @ value


class _Experts(nn.Module):
    """Experts that get equal shares of every sample's tokens, as balancing losses aim at.

    Copies of tokens are put in order by one operator and added up by another, each moving what a
    permutation of the routed tokens moves. Which token goes where does not matter for the price.
    Where they are put back in order first, a copy moves what that moves. Shares that are no whole
    tokens are rounded up. Neighbours in a sample go to different experts: a rank that has a part of a
    sample's tokens has tokens of all.
    """

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        parts = (2, shape.ffn) if shape.gated else (shape.ffn,)  # gates lie beside what they open
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, *parts))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.hidden))
        self.shared = _FeedForward(replace(shape, ffn=shape.shared)) if shape.shared else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        shape = self.shape
        weights = self.router(x_BSH).float().softmax(-1)[..., : shape.topk].to(x_BSH.dtype)
        copies = x_BSH.repeat_interleave(shape.topk, 1)
        num_copies = copies.shape[1]
        missing = -num_copies % shape.experts
        if missing:
            copies = F.pad(copies, (0, 0, 0, missing))
        # b samples, c tokens of a sample and expert, e experts, d hidden, p gate and what it opens, f inner
        routed = copies.unflatten(1, (-1, shape.experts))
        if shape.gated:
            gate, inner = torch.einsum("bced,edpf->bcepf", routed, self.up).unbind(-2)
            inner = _activated(gate, shape.activation) * inner
        else:
            inner = _activated(torch.einsum("bced,edf->bcef", routed, self.up), shape.activation)
        made = torch.einsum("bcef,efd->bced", inner, self.down)
        made = made.flatten(1, 2)
        if missing:
            made = made[:, :num_copies]
        if shape.sorts:
            made = made.flip(1)
        made = made.unflatten(1, (-1, shape.topk))
        mixed = (made * weights.unsqueeze(-1)).sum(2)
        return mixed if self.shared is None else mixed + self.shared(x_BSH)


class _FeedForward(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        pieces = 1 + shape.gated
        count = pieces if shape.apart else 1
        self.each = pieces // count
        self.makers = nn.ModuleList(
            nn.Linear(shape.hidden, self.each * shape.ffn, bias=shape.bias) for _ in range(count)
        )
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        name = self.shape.activation
        *gates, up = [part for maker in self.makers for part in _parts(maker, x, self.each)]
        return self.down(_activated(gates[0], name) * up if gates else _activated(up, name))


def _activated(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.relu(x).square() if name == "relu2" else F.gelu(x)


def _dropped(x: Tensor, share: float) -> Tensor:
    return F.dropout(x, share) if share else x


class _Stepwise(nn.Module):
    """RMS norm as PyTorch's before 2.9 and those of model code: every step a kernel, most in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (wide * scale).to(x.dtype) * self.weight


def _norm(shape: Decoder, width: int) -> nn.Module:
    if not shape.rms:
        return nn.LayerNorm(width)
    return _Stepwise(width) if shape.stepwise else nn.RMSNorm(width)
