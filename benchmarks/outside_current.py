"""Twenty-one models of kinds that were new in 2024 to 2026, for ``outside.py``: attention with sinks and caches, delta
rules, routers, denoisers with modulation, adapters that are parametrised, preferences, selective checkpointing.

Written before any of them was run.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH, HEADS, WORDS = 16, 4, 30


def _text(batch_size: int, length: int = 8) -> dict[str, Tensor]:
    ids = tokens(WORDS, batch_size, length, low=1)
    return {"input_ids": ids, "labels": ids.flip(1)}


def _next_word(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


class Norm(nn.Module):
    """RMS norm whose weight is a difference from one, computed in float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


def _rotated(x: Tensor, base: float = 1e4) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * base ** (
        -torch.arange(half, device=x.device) / half
    )
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


# -- attention ----------------------------------------------------------------------------------------


def gemma_windows(batch_size: int = 4) -> Example:
    """Gemma 2 and 3: local and global layers in turn, shared keys, norms of queries and keys, norms before and after,
    soft caps, a scaled embedding tied to the head."""

    class Attention(nn.Module):
        def __init__(self, window: int | None) -> None:
            super().__init__()
            self.window = window
            self.q_proj = nn.Linear(WIDTH, HEADS * 8, bias=False)
            self.k_proj, self.v_proj = (nn.Linear(WIDTH, 2 * 8, bias=False) for _ in range(2))
            self.o_proj = nn.Linear(HEADS * 8, WIDTH, bias=False)
            self.q_norm, self.k_norm = Norm(8), Norm(8)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (
                proj(x).view(b, t, -1, 8).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            base = 1e4 if self.window else 1e6
            q, k = _rotated(self.q_norm(q), base), _rotated(self.k_norm(k), base)
            k, v = (
                one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(b, HEADS, t, 8) for one in (k, v)
            )
            scores = q @ k.mT * 8**-0.5
            scores = torch.tanh(scores / 50.0) * 50.0
            mask = torch.full((t, t), torch.finfo(x.dtype).min, device=x.device).triu(1)
            if self.window:
                mask = mask + torch.full_like(mask, -1e9).tril(-self.window)
            weights = F.softmax(scores + mask, dim=-1, dtype=torch.float64).to(q.dtype)
            return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))

    class Block(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.attention = Attention(3 if index % 2 == 0 else None)
            self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
            self.down = nn.Linear(32, WIDTH, bias=False)
            self.norms = nn.ModuleList(Norm(WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            before, after, before_mlp, after_mlp = self.norms
            x = x + after(self.attention(before(x)))
            h = before_mlp(x)
            return x + after_mlp(self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h)))

    class Gemma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
            self.layers = nn.ModuleList(Block(index) for index in range(3))
            self.norm = Norm(WIDTH)
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            x = self.embed_tokens(input_ids)
            x = x * torch.tensor(WIDTH**0.5, dtype=x.dtype)
            for layer in self.layers:
                x = layer(x)
            logits = torch.tanh(self.lm_head(self.norm(x)) / 30.0) * 30.0
            return {"loss": _next_word(logits[:, :-1], labels[:, 1:]), "logits": logits}

    return Gemma(), _text(batch_size)


def attention_sinks(batch_size: int = 4) -> Example:
    """GPT-OSS: a learned logit per head that takes weight and gives nothing; keys are kept in a cache that is written
    while the sequence comes in pieces, as in blockwise training."""

    class Cache:
        def __init__(self, b: int, t: int, like: Tensor) -> None:
            self.keys = like.new_zeros(b, HEADS, t, 4)
            self.values = like.new_zeros(b, HEADS, t, 4)
            self.seen = 0

        def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            at = torch.arange(self.seen, self.seen + k.shape[2], device=k.device)
            self.keys = self.keys.index_copy(2, at, k)
            self.values[:, :, self.seen : self.seen + k.shape[2]] = v
            self.seen += k.shape[2]
            return self.keys[:, :, : self.seen], self.values[:, :, : self.seen].clone()

    class Sinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.sinks = nn.Parameter(torch.zeros(HEADS))
            self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

        def piece(self, x: Tensor, cache: Cache) -> Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, HEADS, 4).permute(2, 0, 3, 1, 4)
            k, v = cache.update(k, v)
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2
            late = (
                torch.arange(k.shape[2])[None] > torch.arange(cache.seen - t, cache.seen)[:, None]
            )
            scores = scores.masked_fill(late, float("-inf"))
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
            weights = torch.cat([scores, sinks], -1)
            weights = (weights - weights.max(-1, keepdim=True).values).softmax(-1)[..., :-1]
            return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, -1))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            cache = Cache(*input_ids.shape, x)
            x = torch.cat([self.piece(one, cache) for one in x.split(3, 1)], 1)
            return _next_word(self.head(x), labels)

    return Sinks(), _text(batch_size)


def flexible_attention(batch_size: int = 4) -> Example:
    """Documents packed into one row under flex attention: a score function with learned slopes, a block mask of
    document and position, grouped keys."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.q, self.kv = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 2 * 2 * 8)
            self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
            self.out, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            b, t = input_ids.shape
            document = (input_ids == 3).cumsum(1)

            def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (document[b, q] == document[b, k])

            def sloped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return score - self.slopes[h] * (q - k)

            mask = create_block_mask(visible, b, None, t, t, device="cpu")
            x = self.embed(input_ids)
            q = self.q(x).view(b, t, HEADS, 8).transpose(1, 2)
            k, v = self.kv(x).view(b, t, 2, 2, 8).permute(2, 0, 3, 1, 4)
            y = flex_attention(q, k, v, score_mod=sloped, block_mask=mask, enable_gqa=True)
            return _next_word(self.head(x + self.out(y.transpose(1, 2).flatten(2))), labels)

    return Packed(), _text(batch_size, 16)


def blocks_of_keys(batch_size: int = 4) -> Example:
    """Native sparse attention: compressed keys choose blocks, chosen blocks are gathered, a gate mixes them with a
    window."""

    class Sparse(nn.Module):
        def __init__(self, block: int = 4, count: int = 2) -> None:
            super().__init__()
            self.block, self.count = block, count
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
            self.compress = nn.Linear(block * WIDTH, WIDTH)
            self.position = nn.Parameter(torch.zeros(block, WIDTH))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            b, t, d = x.shape
            n = t // self.block
            q, k, v = self.qkv(x).chunk(3, -1)
            kb, vb = (one.view(b, n, self.block, d) for one in (k, v))
            kc, vc = (self.compress((one + self.position).flatten(2)) for one in (kb, vb))
            ends = (torch.arange(n) + 1) * self.block - 1
            early = ends[None] > torch.arange(t)[:, None]
            scores = (q @ kc.mT / d**0.5).masked_fill(early, -1e9)
            coarse = torch.where(early.all(1)[:, None], 0.0, scores.softmax(-1)) @ vc
            rank = scores.detach().masked_fill(
                torch.arange(t)[:, None] // self.block == torch.arange(n), 1e9
            )
            chosen = rank.topk(self.count, -1).indices
            rows = torch.arange(b)[:, None, None]
            kg, vg = kb[rows, chosen].flatten(2, 3), vb[rows, chosen].flatten(2, 3)
            at = (chosen[..., None] * self.block + torch.arange(self.block)).flatten(2)
            fine = torch.einsum("btd,btkd->btk", q, kg) / d**0.5
            fine = fine.masked_fill(at > torch.arange(t)[:, None], -1e9).softmax(-1)
            fine = torch.einsum("btk,btkd->btd", fine, vg)
            near = torch.ones(t, t, dtype=torch.bool).tril().triu(-3)
            window = F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], attn_mask=near
            )[:, 0]
            gates = self.gates(x).sigmoid()
            y = gates[..., :1] * coarse + gates[..., 1:2] * fine + gates[..., 2:] * window
            return _next_word(self.head(x + y), labels)

    return Sparse(), _text(batch_size, 16)


def complex_rotary(batch_size: int = 4) -> Example:
    """Llama's own rotation by complex numbers kept as a plain attribute, differential attention of two maps."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.lam = nn.Parameter(torch.randn(2, 4, generator=torch.Generator().manual_seed(3)))
            self.norm = nn.RMSNorm(8)
            self.head = nn.Linear(WIDTH, WORDS)
            angles = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(0, 4, 2) / 4))
            self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            b, t, _ = x.shape
            freqs = self.freqs_cis[:t].view(1, t, 1, 2)

            def turned(z: Tensor) -> Tensor:
                z = torch.view_as_complex(z.view(b, t, HEADS, 2, 2).float())
                return torch.view_as_real(z * freqs).flatten(3).type_as(x).transpose(1, 2)

            q, k = turned(self.wq(x)), turned(self.wk(x))
            v = self.wv(x).view(b, t, 2, 8).transpose(1, 2)
            mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1).type_as(x)
            maps = (q @ k.mT / 2 + mask).softmax(-1).view(b, 2, 2, t, t)
            lam = self.lam[0].exp().mean() - self.lam[1].exp().mean() + 0.8
            y = self.norm((maps[:, :, 0] - lam * maps[:, :, 1]) @ v) * 0.2
            return _next_word(self.head(x + y.transpose(1, 2).reshape(b, t, -1)), labels)

    return Complex(), _text(batch_size)


# -- recurrences --------------------------------------------------------------------------------------


def mamba_of_documents(batch_size: int = 4) -> Example:
    """Mamba 2 in chunks with segment sums, grouped states and a convolution, whose state begins anew with each
    document of a packed row."""

    def segsum(x: Tensor) -> Tensor:
        t = x.size(-1)
        x = x[..., None].expand(*x.shape, t)
        x = x.masked_fill(~torch.ones(t, t, dtype=torch.bool, device=x.device).tril(-1), 0)
        x = torch.cumsum(x, dim=-2)
        return x.masked_fill(
            ~torch.ones(t, t, dtype=torch.bool, device=x.device).tril(0), -torch.inf
        )

    class Mixer(nn.Module):
        def __init__(self, inner: int = 32, state: int = 4, chunk: int = 4) -> None:
            super().__init__()
            self.inner, self.state, self.chunk = inner, state, chunk
            self.in_proj = nn.Linear(WIDTH, 2 * inner + 2 * state + HEADS, bias=False)
            self.conv1d = nn.Conv1d(
                inner + 2 * state, inner + 2 * state, 4, groups=inner + 2 * state, padding=3
            )
            self.dt_bias = nn.Parameter(torch.log(torch.expm1(torch.linspace(0.01, 0.1, HEADS))))
            self.A_log = nn.Parameter(torch.log(torch.arange(1.0, HEADS + 1)))
            self.D = nn.Parameter(torch.ones(HEADS))
            self.norm = nn.RMSNorm(inner)
            self.out_proj = nn.Linear(inner, WIDTH, bias=False)

        def forward(self, u: Tensor, segment: Tensor) -> Tensor:
            b, t, _ = u.shape
            z, xbc, dt = torch.split(
                self.in_proj(u), [self.inner, self.inner + 2 * self.state, HEADS], dim=-1
            )
            dt = F.softplus(dt + self.dt_bias)
            xbc = F.silu(self.conv1d(xbc.transpose(1, 2)).transpose(1, 2)[:, :t])
            x, B, C = torch.split(xbc, [self.inner, self.state, self.state], dim=-1)
            x = x.view(b, t, HEADS, -1)
            begins = torch.cat([torch.zeros_like(segment[:, :1]), segment.diff(dim=1)], 1) != 0
            A = -torch.exp(self.A_log) * dt - 30.0 * begins[..., None]
            n = t // self.chunk
            xd = (x * dt.unsqueeze(-1)).view(b, n, self.chunk, HEADS, -1)
            A = A.view(b, n, self.chunk, HEADS).permute(0, 3, 1, 2)
            B, C = (one.view(b, n, self.chunk, -1) for one in (B, C))
            total = torch.cumsum(A, dim=-1)
            y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, B, torch.exp(segsum(A)), xd)
            states = torch.einsum(
                "bcln,bhcl,bclhp->bchpn", B, torch.exp(total[..., -1:] - total), xd
            )
            states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
            decay = torch.exp(segsum(F.pad(total[..., -1], (1, 0))))
            states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)[:, :-1]
            y = y + torch.einsum("bcln,bchpn,bhcl->bclhp", C, states, torch.exp(total))
            y = y.reshape(b, t, HEADS, -1) + x * self.D[:, None]
            return self.out_proj(self.norm(y.flatten(2) * F.silu(z)))

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.mixers = nn.ModuleList(Mixer() for _ in range(2))
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            segment = torch.cumsum(input_ids == 3, 1)
            labels = labels.masked_fill(input_ids == 3, -100)
            x = self.embed(input_ids)
            for norm, mixer in zip(self.norms, self.mixers, strict=True):
                x = x + mixer(norm(x), segment)
            return _next_word(self.head(x), labels)

    return Packed(), _text(batch_size, 12)


def rwkv_7(batch_size: int = 4) -> Example:
    """RWKV 7: a generalised delta rule, low-rank decays and gates, the first layer's values mixed into later ones."""

    class TimeMix(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.mix = nn.Parameter(torch.linspace(0, 1, 6)[:, None].repeat(1, WIDTH))
            self.r, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.w0, self.a0, self.v0 = (nn.Parameter(torch.zeros(1, 1, WIDTH)) for _ in range(3))
            for name in ("w", "a", "v", "g"):
                self.register_parameter(f"{name}1", nn.Parameter(torch.randn(WIDTH, 4) * 0.1))
                self.register_parameter(f"{name}2", nn.Parameter(torch.randn(4, WIDTH) * 0.1))
            self.k_k, self.k_a = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
            self.r_k = nn.Parameter(torch.zeros(HEADS, WIDTH // HEADS))
            self.ln_x = nn.GroupNorm(HEADS, WIDTH, eps=64e-5)

        def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            b, t, c = x.shape
            shifted = F.pad(x, (0, 0, 1, -1)) - x
            xr, xw, xk, xv, xa, xg = (x + shifted * mix for mix in self.mix)
            r, k, v = self.r(xr), self.k(xk), self.v(xv)
            w = torch.exp(-0.606531 * torch.sigmoid(self.w0 + torch.tanh(xw @ self.w1) @ self.w2))
            if first is None:
                first = v
            else:
                v = torch.lerp(v, first, torch.sigmoid(self.v0 + (xv @ self.v1) @ self.v2))
            a = torch.sigmoid(self.a0 + (xa @ self.a1) @ self.a2)
            g = torch.sigmoid(xg @ self.g1) @ self.g2
            kk = F.normalize((k * self.k_k).view(b, t, HEADS, -1), dim=-1)
            k = k * (1 + (a - 1) * self.k_a)
            r, w, k, v, a = (one.view(b, t, HEADS, -1) for one in (r, w, k, v, a))
            state, out = x.new_zeros(b, HEADS, c // HEADS, c // HEADS), []
            for at in range(t):
                removed = (state @ -kk[:, at, :, :, None]) @ (kk * a)[:, at, :, None]
                state = (
                    state * w[:, at, :, None] + removed + v[:, at, ..., None] @ k[:, at, :, None]
                )
                out.append((state @ r[:, at, ..., None]).squeeze(-1))
            y = self.ln_x(torch.stack(out, 1).view(b * t, c)).view(b, t, c)
            y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(2)
            return self.o(y * g), first

    class Rwkv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.mixes = nn.ModuleList(TimeMix(index) for index in range(2))
            self.key, self.value = (
                nn.Linear(WIDTH, 32, bias=False),
                nn.Linear(32, WIDTH, bias=False),
            )
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x, first = self.embed(input_ids), None
            for norm, mix in zip(self.norms, self.mixes):
                y, first = mix(norm(x), first)
                x = x + y
            x = x + self.value(torch.relu(self.key(self.norms[2](x))) ** 2)
            return _next_word(self.head(x), labels)

    return Rwkv(), _text(batch_size, 6)


def delta_in_chunks(batch_size: int = 4) -> Example:
    """Kimi's linear attention: gated delta rule in chunks, whose inner system is solved as a triangle."""

    class Delta(nn.Module):
        def __init__(self, chunk: int = 4) -> None:
            super().__init__()
            self.chunk = chunk
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.qkv, self.beta, self.decay = (
                nn.Linear(WIDTH, 48),
                nn.Linear(WIDTH, 2),
                nn.Linear(WIDTH, 2),
            )
            self.norm, self.gate = nn.RMSNorm(8), nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            b, t, _ = x.shape
            n, c = t // self.chunk, self.chunk
            q, k, v = self.qkv(x).view(b, n, c, 3, 2, 8).permute(3, 0, 4, 1, 2, 5)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            beta = self.beta(x).sigmoid().view(b, n, c, 2, 1).permute(0, 3, 1, 2, 4)
            g = F.logsigmoid(self.decay(x)).view(b, n, c, 2).permute(0, 3, 1, 2).cumsum(-1)
            decays = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
            lower = (beta * (k @ k.mT) * decays).tril(-1)
            eye = torch.eye(c, dtype=x.dtype)
            right = torch.cat([beta * v, beta * k * g.exp()[..., None]], -1)
            solved = torch.linalg.solve_triangular(
                eye + lower, right, upper=False, unitriangular=True
            )
            u, w = solved.split(8, -1)
            state, out = x.new_zeros(b, 2, 8, 8), []
            for i in range(n):
                fresh = u[:, :, i] - w[:, :, i] @ state
                inner = (q[:, :, i] @ k[:, :, i].mT * decays[:, :, i]) @ fresh
                out.append(q[:, :, i] * g[:, :, i, :, None].exp() @ state + inner)
                rest = (g[:, :, i, -1:] - g[:, :, i]).exp()[..., None]
                state = state * g[:, :, i, -1, None, None].exp() + (k[:, :, i] * rest).mT @ fresh
            y = self.norm(torch.stack(out, 2)).permute(0, 2, 3, 1, 4).reshape(b, t, -1)
            return _next_word(self.head(x + y * F.silu(self.gate(x))), labels)

    return Delta(), _text(batch_size, 8)


# -- routers and residual streams ---------------------------------------------------------------------


def deepseek_v3(batch_size: int = 4) -> Example:
    """Sigmoid scores, groups of experts that are chosen first, a bias that only chooses, a
    shared expert, and a second head that predicts a further word through tied weights."""

    class Experts(nn.Module):
        def __init__(self, count: int = 8, groups: int = 4, k: int = 2) -> None:
            super().__init__()
            self.count, self.groups, self.k = count, groups, k
            self.weight = nn.Parameter(
                torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))
            )
            self.register_buffer("bias", torch.zeros(count))
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
                for _ in range(count)
            )
            self.shared = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, WIDTH)
            scores = F.linear(flat, self.weight).sigmoid()
            biased = scores + self.bias
            best = biased.view(-1, self.groups, 2).topk(2, dim=-1)[0].sum(-1)
            mask = torch.zeros_like(best).scatter_(1, best.topk(2, dim=-1)[1], 1)
            kept = biased.masked_fill(~mask.bool().repeat_interleave(2, 1), float("-inf"))
            indices = kept.topk(self.k, dim=-1)[1]
            weights = scores.gather(1, indices)
            weights = 2.5 * weights / weights.sum(-1, keepdim=True)
            y = torch.zeros_like(flat)
            counts = torch.bincount(indices.flatten(), minlength=self.count).tolist()
            for i, expert in enumerate(self.experts):
                if counts[i] == 0:
                    continue
                rows, top = torch.where(indices == i)
                y[rows] += expert(flat[rows]) * weights[rows, top, None]
            return (y + self.shared(flat)).view_as(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.mixer, self.experts, self.norm = (
                nn.Linear(WIDTH, WIDTH),
                Experts(),
                nn.RMSNorm(WIDTH),
            )
            self.join, self.further = (
                nn.Linear(2 * WIDTH, WIDTH, bias=False),
                nn.Linear(WIDTH, WIDTH),
            )
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            x = x + F.silu(self.mixer(x)).cumsum(1) / 4
            x = x + self.experts(self.norm(x))
            loss = _next_word(self.head(x), labels)
            ahead = self.join(
                torch.cat([self.norm(x[:, :-1]), self.norm(self.embed(labels[:, :-1]))], -1)
            )
            return loss + 0.3 * _next_word(self.head(F.silu(self.further(ahead))), labels[:, 1:])

    return Model(), _text(batch_size)


def hyper_connected(batch_size: int = 4) -> Example:
    """Manifold-constrained hyper-connections: several residual streams, mixed by matrices that Sinkhorn's steps make
    doubly stochastic."""

    class Connection(nn.Module):
        def __init__(self, inner: nn.Module, streams: int = 4) -> None:
            super().__init__()
            self.inner, self.streams = inner, streams
            self.norm = nn.RMSNorm(streams * WIDTH, elementwise_affine=False)
            self.pre, self.post = (nn.Linear(streams * WIDTH, streams) for _ in range(2))
            self.mix = nn.Linear(streams * WIDTH, streams**2)
            self.alpha = nn.Parameter(torch.full((3,), 0.01))

        def forward(self, h: Tensor) -> Tensor:
            flat = self.norm(h.flatten(-2))
            pre = torch.sigmoid(self.alpha[0] * self.pre(flat))
            post = 2 * torch.sigmoid(self.alpha[1] * self.post(flat))
            mix = (self.alpha[2] * self.mix(flat)).unflatten(-1, (self.streams, self.streams)).exp()
            for _ in range(5):
                mix = mix / mix.sum(-1, keepdim=True)
                mix = mix / mix.sum(-2, keepdim=True)
            y = self.inner(torch.einsum("bts,btsd->btd", pre, h))
            return mix @ h + post[..., None] * y[..., None, :]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            block = partial(nn.Linear, WIDTH, 32)
            self.layers = nn.Sequential(
                *(
                    Connection(nn.Sequential(block(), nn.GELU(), nn.Linear(32, WIDTH)))
                    for _ in range(3)
                )
            )
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(input_ids)[..., None, :].repeat(1, 1, 4, 1)
            return _next_word(self.head(self.layers(h).mean(-2)), labels)

    return Model(), _text(batch_size)


def speedrun(batch_size: int = 4) -> Example:
    """The record runs of GPT-2: embeddings added to values, skips as in a U-Net, scalars for every mixture, squared
    ReLU, one stacked bank of weights, zeros that are cast while they are used."""

    class Bank(nn.Module):
        def __init__(self, layers: int = 4) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.value_embeds = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(2))
            made = torch.Generator().manual_seed(6)
            self.qkvo = nn.Parameter(torch.randn(layers, 4, WIDTH, WIDTH, generator=made) * 0.2)
            self.fc = nn.Parameter(torch.randn(layers, 32, WIDTH, generator=made) * 0.2)
            self.proj = nn.Parameter(torch.zeros(layers, 32, WIDTH))
            self.scalars = nn.Parameter(
                torch.cat(
                    [torch.ones(2), *(torch.tensor([1.0, 0.0, 0.5, 0.5]) for _ in range(layers))]
                )
            )
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = x0 = F.rms_norm(self.embed(input_ids), (WIDTH,))
            values = [embed(input_ids) for embed in self.value_embeds]
            values = [values[0], None, None, values[1]]
            lambdas = self.scalars[2:].view(-1, 4)
            skips: list[Tensor] = []
            for i in range(len(self.fc)):
                if i >= 2:
                    x = x + self.scalars[i - 2] * skips.pop()
                x = lambdas[i, 0] * x + lambdas[i, 1] * x0
                h = F.rms_norm(x, (WIDTH,))
                b, t, _ = h.shape
                qkv = F.linear(h, self.qkvo[i, :3].flatten(end_dim=1).type_as(h))
                q, k, v = qkv.view(b, t, 3 * HEADS, 4).chunk(3, dim=-2)
                q, k = (_rotated(F.rms_norm(one, (4,)).transpose(1, 2)) for one in (q, k))
                v = lambdas[i, 2] * v
                if values[i] is not None:
                    v = v + lambdas[i, 3] * values[i].view_as(v)
                y = F.scaled_dot_product_attention(
                    q, k, v.transpose(1, 2), is_causal=True, scale=0.12
                )
                x = x + F.linear(y.transpose(1, 2).reshape(b, t, -1), self.qkvo[i, 3])
                x = (
                    x
                    + F.relu(F.linear(F.rms_norm(x, (WIDTH,)), self.fc[i])).square() @ self.proj[i]
                )
                if i < 2:
                    skips.append(x)
            logits = 30 * torch.sigmoid(self.head(F.rms_norm(x, (WIDTH,))) / 7.5)
            return (
                F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                / labels.numel()
            )

    return Bank(), _text(batch_size)


# -- denoisers ----------------------------------------------------------------------------------------


def dit(batch_size: int = 4) -> Example:
    """DiT: modulation that begins at zero, labels dropped for guidance where the batch says so, learned variances
    with the mean held in their loss."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
            self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.mlp = nn.Sequential(
                nn.Linear(WIDTH, 32), nn.GELU(approximate="tanh"), nn.Linear(32, WIDTH)
            )
            self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
            nn.init.zeros_(self.modulation[-1].weight)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift, scale, gate, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
            h = self.norm1(x) * (1 + scale) + shift
            x = x + gate * self.attn(h, h, h, need_weights=False)[0]
            return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    class DiT(nn.Module):
        def __init__(self, size: int = 8, patch: int = 2) -> None:
            super().__init__()
            self.patch, self.n = patch, size // patch
            self.embed = nn.Conv2d(4, WIDTH, patch, patch)
            self.pos = nn.Parameter(torch.randn(1, self.n**2, WIDTH), requires_grad=False)
            self.label = nn.Embedding(11, WIDTH)
            self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.out = nn.Linear(WIDTH, patch**2 * 8)
            betas = torch.linspace(1e-4, 0.02, 100)
            self.register_buffer("bar", torch.cumprod(1 - betas, 0), persistent=False)

        def forward(
            self, x: Tensor, noise: Tensor, t: Tensor, y: Tensor, drop: Tensor
        ) -> dict[str, Tensor]:
            bar = self.bar[t][:, None, None, None]
            noisy = bar.sqrt() * x + (1 - bar).sqrt() * noise
            freqs = torch.exp(-math.log(1e4) * torch.arange(8, dtype=x.dtype) / 8)
            args = t[:, None].to(x.dtype) * freqs
            y = torch.where(drop < 0.1, 10, y)
            c = self.time(torch.cat([args.cos(), args.sin()], -1)) + self.label(y)
            h = self.embed(noisy).flatten(2).transpose(1, 2) + self.pos
            for block in self.blocks:
                h = block(h, c)
            h = self.out(h).view(-1, self.n, self.n, self.patch, self.patch, 8)
            h = torch.einsum("nhwpqc->nchpwq", h).reshape(
                -1, 8, self.n * self.patch, self.n * self.patch
            )
            eps, var = h.chunk(2, 1)
            mse = (eps - noise).square().mean((1, 2, 3))
            frac = (var + 1) / 2
            log_var = frac * -2.0 + (1 - frac) * -5.0
            kl = 0.5 * (log_var + ((eps.detach() - noise) ** 2 + 0.1) * torch.exp(-log_var) - 1)
            losses = mse + 1e-3 * kl.mean((1, 2, 3))
            return {"loss": losses.mean(), "mse": mse.detach(), "t": t}

    images = floats(2 * batch_size, 4, 8, 8)
    return DiT(), {
        "x": images[:batch_size],
        "noise": images[batch_size:],
        "t": tokens(100, batch_size),
        "y": tokens(10, batch_size),
        "drop": floats(batch_size).sigmoid(),
    }


def mean_flow(batch_size: int = 4) -> Example:
    """MeanFlow: the target of the average velocity holds a derivative along the path, by forward mode."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 8)
            )

        def u(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
            return self.net(torch.cat([z, r, t], -1))

        def forward(self, x: Tensor, e: Tensor, times: Tensor) -> Tensor:
            r, t = times.sort(-1).values.split(1, -1)
            z, v = (1 - t) * x + t * e, e - x
            u, du = torch.func.jvp(self.u, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
            error = (u - (v - (t - r) * du).detach()).square().sum(-1)
            return (error / (error.detach() + 1e-3)).mean()

    rows = floats(2 * batch_size, 8)
    times = floats(batch_size, 2).sigmoid()
    return Flow(), {"x": rows[:batch_size], "e": rows[batch_size:], "times": times}


def masked_diffusion(batch_size: int = 4) -> Example:
    """LLaDA: words are hidden at a rate of their own in every sample, and the loss is weighted by it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS + 1, WIDTH)
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 32, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Tensor, t: Tensor, draw: Tensor, prompt: Tensor) -> Tensor:
            p = (1 - 1e-3) * t[:, None] + 1e-3
            hidden = (draw < p) & (torch.arange(ids.shape[1]) >= prompt[:, None])
            logits = self.head(self.encoder(self.embed(torch.where(hidden, WORDS, ids))))
            p = p.expand_as(ids)
            token = F.cross_entropy(logits[hidden], ids[hidden], reduction="none") / p[hidden]
            answer = (ids.shape[1] - prompt)[:, None].expand_as(ids)
            return torch.sum(token / answer[hidden]) / ids.shape[0]

    return Masked(), {
        "ids": tokens(WORDS, batch_size, 8),
        "t": floats(batch_size).sigmoid(),
        "draw": floats(batch_size, 8).sigmoid(),
        "prompt": tokens(4, batch_size),
    }


# -- adapters and parametrisations --------------------------------------------------------------------


def adapters_with_magnitudes(batch_size: int = 4) -> Example:
    """DoRA beside LoRA as parametrisations of frozen weights, the norm held, one adapter switched off."""

    class Low(nn.Module):
        def __init__(self, out: int, into: int, is_on: bool = True) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(2, into, generator=torch.Generator().manual_seed(7)))
            self.b, self.is_on = nn.Parameter(torch.zeros(out, 2)), is_on

        def forward(self, weight: Tensor) -> Tensor:
            return weight + 0.5 * self.b @ self.a if self.is_on else weight

    class Dora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.low = Low(base.out_features, base.in_features)
            self.magnitude = nn.Parameter(base.weight.norm(p=2, dim=1).detach())

        def forward(self, x: Tensor) -> Tensor:
            extra = F.linear(F.linear(x, self.low.a), self.low.b) * 0.5
            norm = torch.linalg.norm(self.low(self.base.weight), dim=1).detach()
            scale = (self.magnitude / norm).view(1, -1)
            plain = F.linear(x, self.base.weight)
            return self.base(x) + (scale - 1) * plain + scale * extra

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
            self.up, self.down = (
                Dora(nn.Linear(WIDTH, 32)),
                nn.Linear(32, WIDTH).requires_grad_(False),
            )
            self.side = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            parametrize.register_parametrization(self.down, "weight", Low(WIDTH, 32))
            parametrize.register_parametrization(self.side, "weight", Low(WIDTH, WIDTH, False))
            self.side.parametrizations.weight[0].requires_grad_(False)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return _next_word(self.head(x + self.side(self.down(F.silu(self.up(x))))), labels)

    return Adapted(), _text(batch_size)


def constrained_weights(batch_size: int = 4) -> Example:
    """Orthogonal weights in two ways, weight norms along two dims, one parametrised weight used by two layers."""

    class Constrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")
            self.b = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="householder")
            self.c = parametrizations.weight_norm(nn.Linear(8, 16), dim=None)
            self.d = parametrizations.weight_norm(nn.Conv1d(1, 4, 3, padding=1))
            self.out = nn.Linear(64, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with parametrize.cached():
                for _ in range(2):
                    x = x + torch.tanh(self.b(torch.tanh(self.a(x))))
            h = F.gelu(self.d(self.c(x)[:, None])).flatten(1)
            return F.smooth_l1_loss(self.out(h), y)

    return Constrained(), {"x": floats(batch_size, 8), "y": floats(batch_size, 4).flip(0)}


# -- graphs, pairs, preferences -----------------------------------------------------------------------


def principal_neighbours(batch_size: int = 4) -> Example:
    """Graphs of a batch with aggregators and scalers by degree: means, deviations, extremes and products by
    ``scatter_reduce`` over edges that every graph brings."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre, self.post = nn.Linear(2 * 8, 8), nn.Linear(8 + 4 * 3 * 8, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            b, n, d = x.shape
            source, target = (edges[:, i, :, None].expand(-1, -1, d) for i in (0, 1))
            sent = torch.tanh(self.pre(torch.cat([x.gather(1, source), x.gather(1, target)], -1)))
            degree = x.new_zeros(b, n).scatter_add_(
                1, edges[:, 1], torch.ones_like(edges[:, 1], dtype=x.dtype)
            )
            reduced = partial(torch.zeros_like(x).scatter_reduce, 1, target, include_self=False)
            mean = reduced(sent, reduce="mean")
            std = (reduced(sent * sent, reduce="mean") - mean * mean).clamp(min=0).add(1e-5).sqrt()
            found = torch.cat(
                [mean, reduced(sent, reduce="amax"), reduced(sent, reduce="amin"), std], -1
            )
            log = torch.log(degree + 1)[..., None]
            found = torch.cat([found, found * log, found / log.clamp(min=math.log(2))], -1)
            return x + self.post(torch.cat([x, found], -1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edges)
            return F.l1_loss(self.out(x.mean(1)).squeeze(-1), y)

    return Net(), {
        "x": floats(batch_size, 6, 8),
        "edges": tokens(6, batch_size, 2, 14),
        "y": floats(batch_size),
    }


def sigmoid_pairs(batch_size: int = 4) -> Example:
    """SigLIP over nested widths: every image with every text, a learned temperature and bias, a loss per prefix."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(
                nn.Flatten(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, WIDTH)
            )
            self.text = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", padding_idx=0)
            self.scale, self.bias = (
                nn.Parameter(torch.tensor(2.3)),
                nn.Parameter(torch.tensor(-10.0)),
            )

        def forward(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            image, text = self.image(pixels), self.text(ids)
            loss = torch.zeros((), dtype=image.dtype)
            for width, weight in ((4, 1.0), (8, 0.5), (WIDTH, 1.0)):
                a, b = (F.normalize(one[:, :width], dim=-1) for one in (image, text))
                logits = torch.matmul(a, b.t()) * self.scale.exp() + self.bias
                signs = 2 * torch.eye(len(a)) - torch.ones(len(a), len(b))
                loss = loss - weight * F.logsigmoid(signs * logits).sum(-1).mean()
            hit = (logits.argmax(-1) == torch.arange(len(a))).double().mean()
            return loss, {"accuracy": hit}

    return Pairs(), {"pixels": floats(batch_size, 3, 4, 4), "ids": tokens(WORDS, batch_size, 5)}


def preferences(batch_size: int = 4) -> Example:
    """GRPO with a frozen copy: log-probabilities of words that were drawn, rewards set off against their group of the
    batch, clipped ratios, the third estimator of divergence, masks of completions."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(
                nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WORDS)
            )
            self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()

        def log_probs(self, model: nn.Module, ids: Tensor) -> Tensor:
            logits = model(ids[:, :-1])
            chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
            return chosen - torch.stack([one.logsumexp(-1) for one in logits.unbind(1)], 1)

        def forward(self, ids: Tensor, mask: Tensor, rewards: Tensor, old: Tensor) -> Tensor:
            new = self.log_probs(self.model, ids)
            with torch.no_grad():
                reference = self.log_probs(self.reference, ids)
            grouped = rewards.view(-1, 4)
            advantage = (grouped - grouped.mean(1, keepdim=True)) / (
                grouped.std(1, keepdim=True) + 1e-4
            )
            advantage = advantage.flatten()[:, None]
            ratio = torch.exp(new - old)
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = torch.exp(reference - new) - (reference - new) - 1
            token = -(gain - 0.04 * kl) * mask
            return (token.sum(1) / mask.sum(1).clamp(min=1)).mean()

    mask = (torch.arange(7)[None] < 1 + tokens(7, batch_size)[:, None]).float()
    return Policy(), {
        "ids": tokens(WORDS, batch_size, 8),
        "mask": mask,
        "rewards": floats(batch_size),
        "old": -3 + 0.1 * floats(batch_size, 7),
    }


# -- ways of saving memory ----------------------------------------------------------------------------


def selective_checkpoints(batch_size: int = 4) -> Example:
    """Recomputing by policy: products are kept, the rest is made again; a compiled layer inside, keyword arguments."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 32),
                nn.Linear(32, WIDTH),
            )

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x + self.down(F.silu(self.up(self.norm(x)))) * scale

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.blocks[1].compile(backend="eager")
            self.scales = nn.Parameter(torch.ones(3, WIDTH))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block, scale in zip(self.blocks, self.scales, strict=True):
                x = checkpoint(
                    block, x, scale=scale, use_reentrant=False, preserve_rng_state=False,
                    context_fn=partial(create_selective_checkpoint_contexts, policy),
                )  # fmt: skip
            losses = [
                checkpoint(
                    lambda a, b: _next_word(self.head(a), b) * b.numel(), a, b, use_reentrant=False
                )
                for a, b in zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True)
            ]
            return torch.stack(losses).sum() / labels.numel()

    return Recomputed(), _text(batch_size)


class _FusedLinearLoss(torch.autograd.Function):
    """Liger's: the gradient of head and loss is made in forward, chunk by chunk, and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        grad_x, grad_w, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        for begin in range(0, len(x), 8):
            rows = slice(begin, begin + 8)
            logits = x[rows] @ weight.t()
            log = logits.log_softmax(-1)
            loss = loss - log.gather(1, target[rows, None]).sum()
            grad = log.exp()
            grad.scatter_add_(1, target[rows, None], -torch.ones_like(log[:, :1]))
            grad /= len(x)
            grad_x[rows] = grad @ weight
            torch.addmm(grad_w, grad.t(), x[rows], out=grad_w)
        ctx.save_for_backward(grad_x, grad_w)
        return loss / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * upstream, grad_w * upstream, None


def fused_head(batch_size: int = 4) -> Example:
    """A recurrent trunk under a head and loss of one function."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            x = x + self.mixer(x)[0]
            return _FusedLinearLoss.apply(x.flatten(0, 1), self.head.weight, labels.flatten())

    return Fused(), _text(batch_size)
