"""What users paste from elsewhere, for ``outside.py``: scans, splines, routers over depth, weights shared in three places,
products that few write, hooks of every kind, functions of functions, results of every form, losses over pairs.

Written before any of them was run.
"""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from outside_models import (
    ROW_WIDTH as WIDTH,
)
from outside_models import (
    Example,
    floats,
    row_batch,
    token_loss,
    tokens,
    two_layers,
    word_batch,
)
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint_sequential

# -- products that few write -------------------------------------------------------------------------


def kronecker_layers(batch_size: int = 8) -> Example:
    """PHM: weights that are sums of Kronecker products, and features that are such products themselves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(floats(2, 2, 2) * 0.5)
            self.s = nn.Parameter(floats(2, 4, 4) * 0.5)
            self.out = nn.Linear(WIDTH, WIDTH)
            self.gate = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            w = sum(torch.kron(self.a[i], self.s[i]) for i in range(2))
            h = F.linear(x, w)
            h = torch.kron(h[:, :4].contiguous(), torch.ones(1, 2, dtype=h.dtype)) * torch.kron(
                self.gate, torch.ones(2, dtype=h.dtype)
            )
            return F.mse_loss(self.out(h), y)

    return Net(), row_batch(batch_size)


def tensor_contractions(batch_size: int = 8) -> Example:
    """tensordot by numbers and by lists of dims, inner, a tensor train's cores, a Tucker head."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Parameter(floats(4, 3, 5) * 0.3)
            self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 5)
            self.cores = nn.ParameterList(
                [nn.Parameter(floats(*s) * 0.4) for s in ((1, 2, 2, 3), (3, 4, 4, 1))]
            )
            self.keys = nn.Parameter(floats(6, WIDTH) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.left(x), self.right(x)
            t = torch.tensordot(a, self.core, dims=([1], [0]))  # b, 3, 5
            t = torch.tensordot(t, b, dims=([2], [1])).diagonal(dim1=0, dim2=2).transpose(0, 1)
            h = x.view(-1, 2, 4)
            h = torch.tensordot(h, self.cores[0][0], dims=([1], [0]))  # b, 4, 2, 3
            h = torch.tensordot(h, self.cores[1][..., 0], dims=([1, 3], [1, 0]))  # b, 2, 4
            s = torch.inner(x, self.keys).softmax(-1)
            full = torch.tensordot(s, self.keys, 1)
            return F.mse_loss(h.flatten(1) + full, y) + t.pow(2).mean()

    return Net(), row_batch(batch_size)


def renormed_rows(batch_size: int = 8) -> Example:
    """Rows and columns held under a norm by renorm, of weights and of results."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(12, WIDTH))
            self.out = nn.Linear(12, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.linear(x.renorm(2, 0, 2.0), self.weight.renorm(p=2, dim=0, maxnorm=1.0))
            return F.mse_loss(self.out(torch.renorm(h.tanh(), 1, 1, 3.0)), y)

    return Net(), row_batch(batch_size)


def solved_by_factors(batch_size: int = 8) -> Example:
    """A system per sample that is factored once and solved twice, and one of the parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.shared = nn.Linear(WIDTH, 16), nn.Parameter(torch.eye(WIDTH) * 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            m = self.net(x).view(-1, 4, 4) * 0.2 + 2 * torch.eye(4, dtype=x.dtype)
            lu, pivots = torch.linalg.lu_factor(m)
            first = torch.linalg.lu_solve(lu, pivots, x.view(-1, 4, 2))
            second = torch.linalg.lu_solve(lu, pivots, first.sin())
            lu, pivots = torch.linalg.lu_factor(self.shared)
            z = torch.linalg.lu_solve(lu, pivots, x.t()).t()
            return F.mse_loss(second.flatten(1) + z, y)

    return Net(), row_batch(batch_size)


def dotted_einsums(batch_size: int = 8) -> Example:
    """Einsums with dots before, between and after, implicit results, operands of one letter, lists of places."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(floats(2, 4, 4) * 0.4)
            self.v = nn.Parameter(floats(WIDTH) * 0.4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.einsum("...hd,hde->...he", x.unflatten(-1, (2, 4)), self.w)
            g = torch.einsum("b...,b...->b...", h, h.tanh()).flatten(-2)
            s = torch.einsum("i...k,k", x, self.v)
            o = torch.einsum(x, [0, 1, 2], self.v, [2], [0, 1, 2])
            q = torch.einsum("...id,...jd->...ij", g, x).softmax(-1) @ o
            return F.mse_loss(q + s.mT[..., None] * 0.1, y)

    return Net(), row_batch(batch_size, 5)


# -- scans and sequences -----------------------------------------------------------------------------


def mamba_pasted(batch_size: int = 8) -> Example:
    """mamba.py: A by logs, a depthwise convolution that is cut, a scan by a power of two of steps in place."""

    class Block(nn.Module):
        def __init__(self, inner: int = 12, state: int = 3, rank: int = 2) -> None:
            super().__init__()
            self.state, self.rank = state, rank
            self.in_proj = nn.Linear(WIDTH, 2 * inner, bias=False)
            self.conv1d = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
            self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
            self.dt_proj = nn.Linear(rank, inner)
            a = torch.arange(1, state + 1, dtype=torch.float32).repeat(inner, 1)
            self.A_log = nn.Parameter(torch.log(a))
            self.A_log._no_weight_decay = True
            self.D = nn.Parameter(torch.ones(inner))
            self.out_proj = nn.Linear(inner, WIDTH, bias=False)

        def pscan(self, a: Tensor, x: Tensor) -> Tensor:
            a, x = a.transpose(1, 2).clone(), x.transpose(1, 2).clone()  # b, d, l, n
            length = a.shape[2]
            for k in range(int(math.log2(length))):
                step = 2**k
                ahead = x[:, :, step:] + a[:, :, step:] * x[:, :, :-step]
                rates = a[:, :, step:] * a[:, :, :-step]
                x = torch.cat([x[:, :, :step], ahead], 2)
                a = torch.cat([a[:, :, :step], rates], 2)
            return x.transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            _, length, _ = x.shape
            x, z = self.in_proj(x).chunk(2, dim=-1)
            x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
            x = F.silu(x)
            delta, b, c = torch.split(self.x_proj(x), [self.rank, self.state, self.state], dim=-1)
            delta = F.softplus(self.dt_proj(delta))
            rates = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.A_log))
            entering = delta.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
            hs = self.pscan(rates, entering)
            y = (hs @ c.unsqueeze(-1)).squeeze(3) + self.D * x
            return self.out_proj(y * F.silu(z))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            for norm, layer in zip(self.norms, self.layers):
                x = x + layer(norm(x))
            return token_loss(self.head(self.norms[-1](x)), labels)

    return Net(), word_batch(batch_size, 8)


def rotary_variants(batch_size: int = 8) -> Example:
    """Interleaved and halved rotary places, partial ones, two-dimensional ones, scaled ones (YaRN), one layer each."""

    def halved(x: Tensor, angle: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * angle.cos().repeat(1, 2) + torch.cat((-b, a), -1) * angle.sin().repeat(1, 2)

    def interleaved(x: Tensor, angle: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        out = torch.empty_like(x)
        out[..., ::2] = a * angle.cos() - b * angle.sin()
        out[..., 1::2] = a * angle.sin() + b * angle.cos()
        return out

    class Attention(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            freq = 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4))
            if kind == "scaled":
                ramp = torch.clamp((torch.arange(2) - 0.2) / 0.6, 0, 1)
                freq = freq / 4 * ramp + freq * (1 - ramp)
            self.register_buffer("freq", freq, persistent=False)

        def turn(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
            angle = torch.outer(place, self.freq.to(x.dtype))
            if self.kind == "interleaved":
                return interleaved(x, angle)
            if self.kind == "partial":
                return torch.cat((halved(x[..., :2], angle[:, :1]), x[..., 2:]), -1)
            if self.kind == "flat":
                row, column = place // 3, place % 3
                return torch.cat(
                    (
                        halved(x[..., :2], row[:, None] * self.freq[:1]),
                        halved(x[..., 2:], column[:, None] * self.freq[:1]),
                    ),
                    -1,
                )
            return halved(x, angle) * (1.1 if self.kind == "scaled" else 1.0)

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q, k, v = self.qkv(x).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
            o = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
            return x + self.out(o.transpose(1, 2).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            kinds = ("halved", "interleaved", "partial", "flat", "scaled")
            self.layers = nn.Sequential(*map(Attention, kinds))
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return token_loss(self.head(self.layers(self.embed(ids))), labels)

    return Net(), word_batch(batch_size)


def mixture_of_depths(batch_size: int = 8) -> Example:
    """A router lets the top tokens of each sequence through a block, weighed, and puts them back by scatter; its
    causal helper learns by a loss of its own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.helper = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            _, n, d = x.shape
            weights = self.router(x).squeeze(-1)
            k = max(1, n // 2)
            top, chosen = torch.topk(weights, k, dim=1, sorted=False)
            chosen, order = torch.sort(chosen, dim=1)
            top = torch.gather(top, 1, order)
            index = chosen.unsqueeze(-1).expand(-1, -1, d)
            picked = torch.gather(x, 1, index)
            done = self.block(picked) * top.sigmoid().unsqueeze(-1)
            out = torch.scatter_add(x, 1, index, done)
            target = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
            helper = self.helper(x.detach()).squeeze(-1)
            return out, F.binary_cross_entropy_with_logits(helper, target)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x, aux = self.embed(ids), []
            for layer in self.layers:
                x, loss = layer(x)
                aux.append(loss)
            return token_loss(self.head(x), labels) + 0.1 * torch.stack(aux).mean()

    return Net(), word_batch(batch_size)


def packed_both_ways(batch_size: int = 8) -> Example:
    """A packed bidirectional GRU, its last states, and attention over what was padded again."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
            self.rnn = nn.GRU(WIDTH, 6, batch_first=True, bidirectional=True)
            self.score, self.out = nn.Linear(12, 1), nn.Linear(24, 4)

        def forward(self, ids: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
            packed = pack_padded_sequence(
                self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            found, last = self.rnn(packed)
            h, _ = pad_packed_sequence(found, batch_first=True, total_length=ids.shape[1])
            mask = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
            a = self.score(h).squeeze(-1).masked_fill(~mask, float("-inf")).softmax(-1)
            pooled = (a.unsqueeze(1) @ h).squeeze(1)
            return F.cross_entropy(
                self.out(torch.cat([pooled, last.transpose(0, 1).flatten(1)], -1)), label
            )

    lengths = tokens(6, batch_size, low=2)
    return Net(), {
        "ids": tokens(20, batch_size, 6, low=1), "lengths": lengths, "label": tokens(4, batch_size),
    }  # fmt: skip


def padded_by_the_batch(batch_size: int = 8) -> Example:
    """A batch cut to its longest row before anything else, as data collators do in forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            mask = ids.ne(0)
            longest = int(mask.sum(1).max())
            ids, labels, mask = ids[:, :longest], labels[:, :longest], mask[:, :longest]
            h = self.layer(self.embed(ids), src_key_padding_mask=~mask)
            return F.cross_entropy(
                self.head(h).transpose(1, 2), labels.masked_fill(~mask, -100), ignore_index=-100
            )

    ids = tokens(20, batch_size, 7, low=1)
    ids[:, 5:] = 0
    ids[::2, 3:] = 0
    return Net(), {"ids": ids, "labels": tokens(20, batch_size, 7)}


def whole_transformer(batch_size: int = 8) -> Example:
    """nn.Transformer, batch second, with float masks, boolean padding and a memory mask, tied three times."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = nn.Embedding(20, WIDTH)
            self.target, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
            self.target.weight = self.out.weight = self.source.weight
            self.body = nn.Transformer(WIDTH, 2, 1, 2, 16, 0.0, norm_first=True)
            self.scale = math.sqrt(WIDTH)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            s, t = src.t(), tgt[:, :-1].t()
            causal = nn.Transformer.generate_square_subsequent_mask(len(t), dtype=torch.float64)
            h = self.body(
                self.source(s) * self.scale,
                self.target(t) * self.scale,
                tgt_mask=causal.to(self.out.weight.dtype),
                memory_mask=torch.ones(len(t), len(s), dtype=torch.bool).triu(4),
                src_key_padding_mask=src == 0,
                memory_key_padding_mask=src == 0,
            )
            return F.cross_entropy(self.out(h).flatten(0, 1), tgt[:, 1:].t().flatten())

    src = tokens(20, batch_size, 6, low=1)
    src[1::2, 4:] = 0
    return Net(), {"src": src, "tgt": tokens(20, batch_size, 5, low=1)}


# -- splines, fields, transforms --------------------------------------------------------------------


def efficient_kan(batch_size: int = 8) -> Example:
    """efficient-kan: B-splines by Cox and de Boor on a grid in a buffer, scaled splines, its two penalties."""

    class KANLinear(nn.Module):
        def __init__(self, into: int, out: int, size: int = 4, order: int = 3) -> None:
            super().__init__()
            self.into, self.out, self.order = into, out, order
            step = 2 / size
            grid = (torch.arange(-order, size + order + 1) * step - 1).expand(into, -1)
            self.register_buffer("grid", grid.contiguous())
            self.base_weight = nn.Parameter(floats(out, into) * 0.3)
            self.spline_weight = nn.Parameter(floats(out, into, size + order) * 0.1)
            self.spline_scaler = nn.Parameter(floats(out, into) * 0.5)

        def b_splines(self, x: Tensor) -> Tensor:
            grid = self.grid
            x = x.unsqueeze(-1)
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
                right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)])
                bases = left * bases[:, :, :-1] + right * bases[:, :, 1:]
            return bases.contiguous()

        @property
        def scaled(self) -> Tensor:
            return self.spline_weight * self.spline_scaler.unsqueeze(-1)

        def forward(self, x: Tensor) -> Tensor:
            shape = x.shape
            x = x.reshape(-1, self.into)
            base = F.linear(F.silu(x), self.base_weight)
            spline = F.linear(self.b_splines(x).view(x.size(0), -1), self.scaled.view(self.out, -1))
            return (base + spline).reshape(*shape[:-1], self.out)

        def penalty(self) -> Tensor:
            size = self.spline_weight.abs().mean(-1)
            p = size / size.sum()
            return size.sum() - torch.sum(p * p.log())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([KANLinear(WIDTH, 6), KANLinear(6, WIDTH)])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.tanh())
            return F.mse_loss(x, y) + 1e-3 * sum(layer.penalty() for layer in self.layers)

    return Net(), row_batch(batch_size)


def convolved_by_fft(batch_size: int = 8) -> Example:
    """Long filters by rfft with padding (fftconv), a short one by fft2, a spectrum filtered by complex weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.d = nn.Parameter(floats(4, 6) * 0.3), nn.Parameter(floats(4))
            self.kernel = nn.Parameter(floats(1, 1, 3, 3) * 0.3)
            self.freq = nn.Parameter(
                torch.view_as_real(torch.randn(4, 4, dtype=torch.cfloat)) * 0.1
            )
            self.out = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            n = x.shape[-1]
            k = torch.fft.rfft(self.k, n=2 * n) / (2 * n)
            u = torch.fft.rfft(x, n=2 * n)
            h = torch.fft.irfft(u * k, n=2 * n, norm="forward")[..., :n] + x * self.d.unsqueeze(-1)
            plane = torch.fft.fft2(h.unsqueeze(1)) * torch.fft.fft2(self.kernel, s=(4, n))
            h = h + torch.fft.ifft2(plane).real.squeeze(1)
            s = torch.fft.fftshift(torch.fft.rfft(h, dim=-1, norm="ortho"), dim=1)
            s = s * torch.view_as_complex(self.freq.contiguous()).to(s.dtype)
            h = h + torch.fft.irfft(torch.fft.ifftshift(s, dim=1), n=n, norm="ortho")
            return F.mse_loss(self.out(F.gelu(h)), y)

    x = floats(batch_size, 4, 6)
    return Net(), {"x": x, "y": x.flip(0)}


def complex_attention(batch_size: int = 8) -> Example:
    """Complex linear layers, attention on phases, a modulus with a bias (modReLU), a loss of magnitudes and angles."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (
                nn.Linear(4, 4, bias=False, dtype=torch.cfloat) for _ in range(3)
            )
            self.bias = nn.Parameter(torch.full((4,), -0.05))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.complex(x[..., :4], x[..., 4:]).to(self.q.weight.dtype)
            q, k, v = self.q(z), self.k(z), self.v(z)
            a = (q @ k.mH).real.div(2).softmax(-1)
            z = a.to(v.dtype) @ v
            size = z.abs()
            z = F.relu(size + self.bias) * z / (size + 1e-6)
            t = torch.polar(y[..., :4].abs(), y[..., 4:])
            return (z - t).abs().pow(2).mean() + (1 - torch.cos(z.angle() - t.angle())).mean()

    return Net(), row_batch(batch_size, 5)


def warped_fields(batch_size: int = 8) -> Example:
    """VoxelMorph: a flow by convolutions, squared and scaled, a grid in a buffer, gradients of the field."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(2, 8, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 2, 3, padding=1)
            )
            ticks = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
            self.register_buffer("grid", torch.stack(ticks).unsqueeze(0), persistent=False)

        def warp(self, image: Tensor, flow: Tensor) -> Tensor:
            places = self.grid + flow
            for i in range(2):
                places[:, i, ...] = 2 * (places[:, i, ...] / 5 - 0.5)
            places = places.permute(0, 2, 3, 1)[..., [1, 0]]
            return F.grid_sample(image, places, align_corners=True, padding_mode="border")

        def forward(self, moving: Tensor, fixed: Tensor) -> Tensor:
            v = self.net(torch.cat([moving, fixed], 1)) * 0.3 / 2**3
            for _ in range(3):
                v = v + self.warp(v, v)
            moved = self.warp(moving, v)
            dy, dx = torch.abs(v[:, :, 1:] - v[:, :, :-1]), torch.abs(v[..., 1:] - v[..., :-1])
            return F.mse_loss(moved, fixed) + 0.05 * ((dx * dx).mean() + (dy * dy).mean()) / 2

    return Net(), {
        "moving": floats(batch_size, 1, 6, 6),
        "fixed": floats(batch_size, 1, 6, 6).flip(0),
    }


# -- weights -----------------------------------------------------------------------------------------


def shared_in_three_places(batch_size: int = 8) -> Example:
    """One table as encoder's and decoder's embedding and as head, transposed in a fourth use; a norm that is shared."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Embedding(20, WIDTH)
            self.decoder, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.decoder.weight = self.encoder.weight
            self.head.weight = self.encoder.weight
            self.norm = nn.LayerNorm(WIDTH)
            self.stack = nn.Sequential(two_layers(), self.norm, two_layers(), self.norm)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.stack(self.encoder(ids)).mean(1, keepdim=True)
            h = self.norm(h + self.decoder(labels))
            soft = self.head(h).softmax(-1) @ self.encoder.weight
            return token_loss(self.head(h + soft), labels)

    return Net(), word_batch(batch_size)


def parametrized_thrice(batch_size: int = 8) -> Example:
    """Weight norm old and new, spectral norm old and new, orthogonal by Cayley and by products of reflections."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.utils.weight_norm(nn.Linear(WIDTH, 12), dim=0)
            self.b = parametrizations.weight_norm(nn.Linear(12, 12), dim=1)
            self.c = nn.utils.spectral_norm(nn.Linear(12, WIDTH))
            self.d = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
            self.e = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")
            self.f = parametrizations.orthogonal(nn.Linear(WIDTH, 4), orthogonal_map="householder")
            self.g = nn.Linear(4, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.c(self.b(self.a(x).tanh()).tanh())
            with parametrize.cached():
                h = self.e(self.d(h)) + self.e(h)
            return F.mse_loss(self.g(self.f(h)), y)

    return Net(), row_batch(batch_size)


def frozen_in_part(batch_size: int = 8) -> Example:
    """Frozen rows of a table by a mask on the result, a frozen trunk in evaluation mode by an overridden train,
    biases only trained (BitFit), a last layer that is frozen too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.extra = nn.Embedding(20, WIDTH), nn.Embedding(3, WIDTH)
            self.trunk = nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.ReLU())
            self.tuned, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 20)
            self.table.weight.requires_grad_(False)
            self.trunk.requires_grad_(False)
            self.tuned.weight.requires_grad = False
            for p in self.head.parameters():
                p.requires_grad = False

        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self.trunk.eval()
            return self

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            is_new = ids < 3
            h = torch.where(is_new[..., None], self.extra(ids.clamp(max=2)), self.table(ids))
            h = self.trunk(h.flatten(0, 1))
            return token_loss(self.head(self.tuned(h)), labels)

    return Net(), word_batch(batch_size)


def lists_and_dicts_of_weights(batch_size: int = 8) -> Example:
    """ParameterList of ParameterDicts, a ModuleDict by strings of the layer, weights stacked anew in each call."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList(
                nn.ParameterDict({"w": floats(WIDTH, WIDTH) * 0.3, "b": torch.zeros(WIDTH)})
                for _ in range(3)
            )
            self.acts = nn.ModuleDict(OrderedDict(lrelu=nn.LeakyReLU(), prelu=nn.PReLU(WIDTH)))
            self.scales = nn.ParameterList([torch.tensor(1.0), torch.ones(1), torch.ones(WIDTH)])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = x + self.acts["lrelu" if i % 2 else "prelu"](x @ layer["w"] + layer["b"])
                x = x * self.scales[i]
            every = torch.stack([layer["w"] for layer in self.layers])
            x = x + torch.baddbmm(torch.zeros((), dtype=x.dtype), x.expand(3, -1, -1), every).mean(
                0
            )
            return F.mse_loss(x, y) + 1e-3 * every.flatten(1).norm(dim=1).sum()

    return Net(), row_batch(batch_size)


def lazily_made(batch_size: int = 8) -> Example:
    """Lazy layers that one call has already shaped."""
    net = nn.Sequential(
        nn.LazyConv1d(6, 3, padding=1),
        nn.LazyBatchNorm1d(),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    net(floats(2, 4, WIDTH))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), label)

    return Net(), {"x": floats(batch_size, 4, WIDTH), "label": tokens(5, batch_size)}


def low_rank_plus_sparse(batch_size: int = 8) -> Example:
    """Block-diagonal, butterfly and low-rank weights (Monarch), permuted by views, with a fixed sparse mask."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(floats(2, 4, 4) * 0.5) for _ in range(2))
            self.u, self.v = nn.Parameter(floats(WIDTH, 2)), nn.Parameter(floats(2, WIDTH))
            self.sparse = nn.Parameter(floats(WIDTH, WIDTH) * 0.2)
            self.register_buffer("mask", floats(WIDTH, WIDTH) > 0.5)
            self.twiddle = nn.Parameter(floats(3, 4, 2, 2) * 0.6)

        def butterfly(self, x: Tensor) -> Tensor:
            for level in range(3):
                stride = 2**level
                h = x.view(-1, 4 // stride, 2, stride)
                t = self.twiddle[level].view(4 // stride, stride, 2, 2).permute(0, 2, 3, 1)
                x = (t.unsqueeze(0) * h.unsqueeze(2)).sum(3).reshape(-1, WIDTH)
            return x

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.einsum("bki,kij->bkj", x.view(-1, 2, 4), self.first)
            h = h.transpose(1, 2).reshape(-1, 2, 4)
            h = torch.einsum("bki,kij->bkj", h, self.second).transpose(1, 2).flatten(1)
            h = h + x @ self.u @ self.v + F.linear(x, self.sparse * self.mask)
            return F.mse_loss(self.butterfly(h), y)

    return Net(), row_batch(batch_size)


# -- functions of one's own and of functions -----------------------------------------------------------


class _TopMask(torch.autograd.Function):
    """Gives the largest elements and where they are; the mask has no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, k: int):
        values, index = x.topk(k, dim=-1)
        mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, index, True)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(mask)
        ctx.size = x.shape[-1]
        return values, mask

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        (index,) = ctx.saved_tensors
        full = grad.new_zeros(*grad.shape[:-1], ctx.size).scatter_(-1, index, grad)
        return full, None


def function_with_a_mask(batch_size: int = 8) -> Example:
    """A gradient of one's own with two results, one of which has none."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = two_layers(out=12), nn.Linear(4, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            values, mask = _TopMask.apply(h, 4)
            rest = h.masked_fill(mask, 0.0)
            return F.mse_loss(self.out(values), y) + rest.pow(2).mean()

    return Net(), row_batch(batch_size)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x * torch.sigmoid(x), torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad: Tensor | None, second: Tensor | None):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        out = torch.zeros_like(x)
        if grad is not None:
            out = out + grad * (s * (1 + x * (1 - s)))
        if second is not None:
            out = out + second * s * (1 - s)
        return out


def function_without_all_gradients(batch_size: int = 8) -> Example:
    """The memory-saving swish of EfficientNet with two results, of which one is used here and both there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(WIDTH, 12), nn.Linear(12, 12), nn.Linear(12, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h, _ = _Swish.apply(self.a(x))
            h, gate = _Swish.apply(self.b(h))
            return F.mse_loss(self.c(h * gate), y)

    return Net(), row_batch(batch_size)


def functions_of_functions(batch_size: int = 8) -> Example:
    """A functional call with changed weights (MAML's inner step by vjp), a directional derivative, a Jacobian per
    sample."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rate = two_layers(), nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weights = dict(self.net.named_parameters())

            def loss_of(w: dict[str, Tensor]) -> Tensor:
                return F.mse_loss(functional_call(self.net, w, (x,)), y)

            loss, pull = vjp(loss_of, weights)
            (grads,) = pull(torch.ones_like(loss))
            fast = {name: w - self.rate * grads[name] for name, w in weights.items()}
            _, along = jvp(self.net, (x,), (torch.ones_like(x),))
            jacobians = vmap(jacrev(self.net))(x)
            return loss_of(fast) + along.pow(2).mean() + 0.1 * jacobians.pow(2).mean()

    return Net(), row_batch(batch_size)


def ensemble_of_states(batch_size: int = 8) -> Example:
    """Three members whose states are stacked in each forward, run by vmap with their own inputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(two_layers() for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            names = [name for name, _ in self.members[0].named_parameters()]
            stacked = {
                name: torch.stack([m.get_parameter(name) for m in self.members]) for name in names
            }
            views = torch.stack([x, x.flip(-1), -x])

            def one(w: dict[str, Tensor], rows: Tensor) -> Tensor:
                return functional_call(self.members[0], w, (rows,))

            found = vmap(one)(stacked, views)
            return F.mse_loss(found.mean(0), y) - 0.01 * found.var(0).mean()

    return Net(), row_batch(batch_size)


def checkpointed_in_sequence(batch_size: int = 8) -> Example:
    """checkpoint_sequential over blocks with batch norm and dropout of zero, in three segments."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
                    for _ in range(5)
                )
            )
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = checkpoint_sequential(self.body, 3, x, use_reentrant=False)
            return F.mse_loss(self.head(h), y)

    return Net(), row_batch(batch_size)


# -- hooks, writes, forms of results -------------------------------------------------------------------


def hooks_before_and_behind(batch_size: int = 8) -> Example:
    """Pre-hooks that change arguments, hooks that change results, and full backward hooks that scale gradients."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(WIDTH, 12), nn.Linear(12, 12), nn.Linear(12, WIDTH)
            self.a.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
            self.b.register_forward_hook(lambda _, args, out: out + args[0])
            self.c.register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.c(self.b(self.a(x).relu())), y)

    return Net(), row_batch(batch_size)


def written_through_views(batch_size: int = 8) -> Example:
    """Views of a result written by add_, mul_ under masks, fill_diagonal_, index_add_, clamp_ of a transposed view,
    and a cache of keys that is filled slice by slice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x).clone()
            h[:, ::2].add_(1.0)
            h.transpose(1, 2)[:, :3].clamp_(max=1.5)
            h[:, 1:3, 2:4] *= 0.5
            h.select(1, 0).sub_(h[:, -1])
            h.view(len(x), -1).index_add_(
                1, torch.tensor([0, 3, 3]), torch.ones(len(x), 3, dtype=h.dtype)
            )
            h.masked_fill_(h > 2, 2.0)
            cache = h.new_zeros(len(x), 5, WIDTH)
            for i in range(5):
                cache[:, i] = h[:, i] + (cache[:, i - 1] if i else 0)
            return F.mse_loss(self.out(cache), y)

    return Net(), row_batch(batch_size, 5)


class _Found(NamedTuple):
    hidden: Tensor
    scores: Tensor
    extra: dict[str, Tensor]


@dataclass
class _Output:
    loss: Tensor
    logits: Tensor
    parts: dict[str, Tensor]


_Pair = namedtuple("_Pair", "mean spread")


def results_of_many_forms(batch_size: int = 8) -> Example:
    """Modules that hand on a NamedTuple with a dict, a namedtuple and a dataclass, and a loss among other parts."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.score = two_layers(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> _Found:
            h = self.net(x)
            return _Found(h, self.score(h), {"norm": h.norm(dim=-1)})

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, found: _Found) -> _Pair:
            h = found.hidden * found.scores.sigmoid()
            return _Pair(mean=self.mean(h), spread=F.softplus(self.spread(h)) + 0.1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(), Head()

        def forward(self, x: Tensor, y: Tensor) -> _Output:
            found = self.encoder(x)
            pair = self.head(found)
            nll = F.gaussian_nll_loss(pair.mean, y, pair.spread)
            reg = found.extra["norm"].mean()
            return _Output(nll + 0.1 * reg, pair.mean, {"nll": nll, "reg": reg})

    return Net(), row_batch(batch_size)


def losses_by_name(batch_size: int = 8) -> Example:
    """A dict of losses with a sum under loss, weights by a schedule in a buffer that forward counts up."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.cls = two_layers(), nn.Linear(WIDTH, 4)
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, y: Tensor, label: Tensor) -> dict[str, Tensor]:
            h = self.net(x)
            losses = {
                "regression": F.smooth_l1_loss(h, y, beta=0.5),
                "classes": F.cross_entropy(self.cls(h), label),
                "sparsity": h.abs().mean(),
            }
            warm = torch.clamp(self.step / 10.0, max=1.0).to(h.dtype)
            if self.training:
                self.step += 1
            total = losses["regression"] + losses["classes"] + warm * losses["sparsity"]
            return {**losses, "loss": total}

    return Net(), {**row_batch(batch_size), "label": tokens(4, batch_size)}


# -- losses over pairs and groups -----------------------------------------------------------------------


def sums_over_pairs(batch_size: int = 8) -> Example:
    """Lifted structure, alignment and uniformity, N-pairs, circle loss: all by distances of every two samples."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            z = F.normalize(self.net(x), dim=-1)
            n = len(z)
            same = (label[:, None] == label[None]).to(z.dtype) - torch.eye(n, dtype=z.dtype)
            other = 1 - same - torch.eye(n, dtype=z.dtype)
            sim = z @ z.t()
            d = (2 - 2 * sim).clamp(min=1e-6).sqrt()
            lifted = (same * F.relu((other * (1 - d).exp()).sum(1, keepdim=True).log1p() + d)).sum()
            uniform = torch.pdist(z).pow(2).mul(-2).exp().mean().log()
            ap, an = F.relu(1.25 - sim.detach()), F.relu(sim.detach() + 0.25)
            minus = torch.finfo(z.dtype).min
            circle = F.softplus(
                torch.logsumexp((an * (sim - 0.25) * 4).masked_fill(other == 0, minus), 1)
                + torch.logsumexp((-ap * (sim - 0.75) * 4).masked_fill(same == 0, minus / 2), 1)
            ).mean()
            return lifted / same.sum().clamp(min=1) + uniform + circle

    label = torch.arange(batch_size) // 2
    return Net(), {"x": floats(batch_size, WIDTH), "label": label}


def reduced_by_scatter(batch_size: int = 8) -> Example:
    """scatter_reduce of all kinds over groups within a sample, segment_reduce over lengths, index_reduce."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, group: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            index = group[..., None].expand_as(h)
            empty = h.new_zeros(len(x), 3, WIDTH)
            total = empty.scatter_reduce(1, index, h, "sum")
            mean = empty.scatter_reduce(1, index, h, "mean", include_self=False)
            top = empty.scatter_reduce(1, index, h, "amax", include_self=False)
            low = empty.scatter_reduce(1, index, h, "amin", include_self=True)
            count = torch.zeros(len(x), 3, dtype=h.dtype).scatter_add(
                1, group, torch.ones_like(group, dtype=h.dtype)
            )
            mixed = (total / count.clamp(min=1)[..., None] + mean + top + low).flatten(0, 1)
            runs = torch.segment_reduce(
                mixed, "sum", lengths=torch.full((len(x),), 3, dtype=torch.long), axis=0
            )
            return F.mse_loss(self.out(runs), y)

    return Net(), {
        "x": floats(batch_size, 6, WIDTH), "group": tokens(3, batch_size, 6), "y": floats(batch_size, 4),
    }  # fmt: skip


def indexed_in_all_ways(batch_size: int = 8) -> Example:
    """Rows by ranges and labels, ellipsis with tensors, None in the middle, masks of two dims, take_along_dim,
    an outer index by ix, negative indices, tuples of slices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)
            self.table = nn.Parameter(floats(5, 4, WIDTH) * 0.3)

        def forward(self, x: Tensor, label: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)  # b, 6, w
            rows = torch.arange(len(x))
            last = h[rows, label]
            pair = self.table[label[:, None], torch.arange(4)]
            mid = h[..., [0, 2, -1]][:, None, :, 1]
            near = torch.take_along_dim(h, h.argsort(1, descending=True), 1)[:, :2]
            cut = h[(slice(None), slice(1, -1, 2), ...)]
            top = h[:, [[0, 1], [2, 3]]].mean((1, 2))
            where = h[rows[:, None], torch.stack([label, 5 - label], 1)].sum(1)
            return (
                F.mse_loss(last + pair.mean(1) + top + where, y)
                + mid.pow(2).mean()
                + near.mean().abs()
                + cut.std()
            )

    return Net(), {
        "x": floats(batch_size, 6, WIDTH), "label": tokens(5, batch_size), "y": floats(batch_size, WIDTH),
    }  # fmt: skip


# -- training code inside the model ---------------------------------------------------------------------


def momentum_target(batch_size: int = 8) -> Example:
    """SimSiam and BYOL together: a target network in buffers moved by lerp_ in forward before it is used."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.predictor = two_layers(), two_layers()
            for name, p in self.online.named_parameters():
                self.register_buffer("target_" + name.replace(".", "_"), p.detach().clone())

        def target(self) -> dict[str, Tensor]:
            return {
                name: getattr(self, "target_" + name.replace(".", "_"))
                for name, _ in self.online.named_parameters()
            }

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    for name, p in self.online.named_parameters():
                        self.target()[name].lerp_(p, 0.1)
            with torch.no_grad():
                goal = F.normalize(functional_call(self.online, self.target(), (y,)), dim=-1)
            p = F.normalize(self.predictor(self.online(x)), dim=-1)
            z = F.normalize(self.online(y).detach(), dim=-1)
            return 2 - 2 * (p * goal).sum(-1).mean() - 0.5 * (p * z).sum(-1).mean()

    return Net(), row_batch(batch_size)


def scaled_by_hand(batch_size: int = 8) -> Example:
    """A loss scaled up, its gradient taken inside and unscaled, as a penalty; a scale that grows in a buffer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()
            self.register_buffer("scale", torch.tensor(4.0))
            self.register_buffer("good", torch.zeros((), dtype=torch.int))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            loss = F.mse_loss(self.net(x), y)
            scale = self.scale.clone()
            (grad,) = torch.autograd.grad(loss * scale, x, create_graph=True)
            penalty = (grad / scale).norm(dim=-1).sub(0.1).pow(2).mean()
            with torch.no_grad():
                self.good.add_(1)
                self.scale.mul_(torch.where(self.good % 2 == 0, 2.0, 1.0))
            return loss + penalty

    return Net(), row_batch(batch_size)


def branches_in_training(batch_size: int = 8) -> Example:
    """Parts that only training runs: auxiliary heads, a noise given by the batch, exits, a norm of the weights."""

    class Net(nn.Module):
        def __init__(self, aux: bool = True) -> None:
            super().__init__()
            self.stages = nn.ModuleList(two_layers() for _ in range(3))
            self.exits = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))
            self.aux, self.noise = aux, 0.1

        def forward(
            self, x: Tensor, noise: Tensor | None = None, label: Tensor | None = None
        ) -> Tensor | tuple[Tensor, ...]:
            outs = []
            for stage, out in zip(self.stages, self.exits):
                x = x + stage(x)
                if self.training and noise is not None:
                    x = x + self.noise * noise
                if (self.aux and self.training) or stage is self.stages[-1]:
                    outs.append(out(x))
            if label is None:
                return tuple(outs)
            weights = [0.3 * (i + 1) for i in range(len(outs))]
            return sum(w * F.cross_entropy(o, label) for w, o in zip(weights, outs, strict=True))

    return Net(), {
        "x": floats(batch_size, WIDTH), "noise": floats(batch_size, WIDTH), "label": tokens(4, batch_size),
    }  # fmt: skip


def last_channels(batch_size: int = 8) -> Example:
    """Pictures and weights in channels_last, permuted norms (ConvNeXt), a squeeze and excite, a mean over places."""

    class Block(nn.Module):
        def __init__(self, dim: int = 8) -> None:
            super().__init__()
            self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.up, self.down = nn.Linear(dim, 16), nn.Linear(16, dim)
            self.gamma = nn.Parameter(0.1 * torch.ones(dim))
            self.se = nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(dim, 2, 1),
                nn.SiLU(),
                nn.Conv2d(2, dim, 1),
                nn.Sigmoid(),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.dwconv(x).permute(0, 2, 3, 1)
            h = self.gamma * self.down(F.gelu(self.up(self.norm(h))))
            h = h.permute(0, 3, 1, 2)
            return x + h * self.se(h)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(3, 8, 2, 2), nn.Sequential(Block(), Block())
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            x = x.contiguous(memory_format=torch.channels_last)
            h = self.blocks(self.stem(x)).to(memory_format=torch.channels_last)
            return F.cross_entropy(self.head(h.mean((-2, -1))), label)

    net = Net().to(memory_format=torch.channels_last)
    return net, {"x": floats(batch_size, 3, 8, 8), "label": tokens(4, batch_size)}


def counted_in_buffers(batch_size: int = 8) -> Example:
    """Whitening by running means and covariances, a codebook's use, a temperature that anneals by a step count."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.code = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("cov", torch.eye(4))
            self.register_buffer("used", torch.zeros(4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            if self.training:
                with torch.no_grad():
                    centred = h - h.mean(0)
                    self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                    self.cov.copy_(0.9 * self.cov + 0.1 * centred.t() @ centred / len(h))
                    self.used += F.one_hot(h.argmax(-1), 4).sum(0)
                    self.steps += 1
            root = torch.linalg.cholesky(self.cov + 1e-3 * torch.eye(4, dtype=h.dtype))
            white = torch.linalg.solve_triangular(root, (h - self.mean).t(), upper=False).t()
            heat = torch.clamp(1.0 - 0.1 * self.steps.to(h.dtype), min=0.5)
            usage = (self.used + 1) / (self.used + 1).sum()
            return F.mse_loss(self.code((white / heat).softmax(-1) - usage), y)

    return Net(), row_batch(batch_size)


def scripted_parts(batch_size: int = 8) -> Example:
    """A small activation and a gate behind torch.jit.script functions, as many repositories have them."""

    @torch.jit.script
    def fused_gelu(x: Tensor, bias: Tensor) -> Tensor:
        x = x + bias
        return x * 0.5 * (1.0 + torch.erf(x / 1.41421))

    @torch.jit.script
    def gated(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) * torch.sigmoid(b)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.bias = nn.Linear(WIDTH, 12, bias=False), nn.Parameter(torch.zeros(12))
            self.two, self.out = nn.Linear(12, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = fused_gelu(self.up(x), self.bias)
            return F.mse_loss(self.out(gated(*self.two(h).chunk(2, -1))), y)

    return Net(), row_batch(batch_size)


def graphs_as_one(batch_size: int = 8) -> Example:
    """GraphSAGE and GIN over dense adjacencies with self loops, a virtual node, normed by degrees, DiffPool."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps = nn.Parameter(torch.zeros(()))
            self.gin, self.sage = two_layers(), nn.Linear(2 * WIDTH, WIDTH)
            self.pool, self.out = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 4)
            self.virtual = nn.Parameter(floats(1, 1, WIDTH))

        def forward(self, x: Tensor, adj: Tensor, label: Tensor) -> Tensor:
            adj = (adj + adj.mT > 0.5).to(x.dtype)
            h = self.gin((1 + self.eps) * x + adj.bmm(x))
            degree = adj.sum(-1, keepdim=True).clamp(min=1)
            h = F.normalize(self.sage(torch.cat([h, adj @ h / degree], -1)), dim=-1)
            h = h + self.virtual + h.mean(1, keepdim=True)
            s = self.pool(h).softmax(-1)
            small, coarse = s.mT @ h, s.mT @ adj @ s
            link = torch.linalg.matrix_norm(adj - s @ s.mT).mean()
            entropy = -(s * (s + 1e-9).log()).sum(-1).mean()
            loss = F.cross_entropy(self.out((coarse @ small).amax(1)), label)
            return loss + 0.1 * link + 0.1 * entropy

    return Net(), {
        "x": floats(batch_size, 5, WIDTH), "adj": floats(batch_size, 5, 5), "label": tokens(4, batch_size),
    }  # fmt: skip


def vector_quantised_diffusion(batch_size: int = 8) -> Example:
    """Discrete diffusion by transition matrices: cumulative products of a schedule, posteriors by Bayes in logs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            betas = torch.linspace(0.05, 0.4, 5)
            one = [(1 - b) * torch.eye(6) + b / 6 for b in betas]
            every = [one[0]]
            for step in one[1:]:
                every.append(every[-1] @ step)
            self.register_buffer("one", torch.stack(one))
            self.register_buffer("every", torch.stack(every))
            self.embed, self.time = nn.Embedding(6, WIDTH), nn.Embedding(5, WIDTH)
            self.net, self.head = two_layers(), nn.Linear(WIDTH, 6)

        def forward(self, words: Tensor, t: Tensor, draws: Tensor) -> Tensor:
            start = F.one_hot(words, 6).to(self.every.dtype)
            chances = start @ self.every[t]
            gumbel = -(-(draws.sigmoid()).log()).log()
            noisy = (chances.clamp(min=1e-9).log() + gumbel).argmax(-1)
            h = self.net(self.embed(noisy) + self.time(t)[:, None])
            found = self.head(h).softmax(-1)
            now = F.one_hot(noisy, 6).to(start.dtype) @ self.one[t].mT
            before = self.every[(t - 1).clamp(min=0)]

            def posterior(p: Tensor) -> Tensor:
                logs = (now + 1e-9).log() + (p @ before + 1e-9).log()
                return logs.log_softmax(-1)

            kl = F.kl_div(posterior(found), posterior(start), log_target=True, reduction="none")
            nll = F.nll_loss((found + 1e-9).log().transpose(1, 2), words, reduction="none")
            first = (t == 0).to(kl.dtype)[:, None]
            return (first * nll + (1 - first) * kl.sum(-1)).mean()

    return Net(), {
        "words": tokens(6, batch_size, 4), "t": tokens(5, batch_size), "draws": floats(batch_size, 4, 6),
    }  # fmt: skip


def stacked_hourglass(batch_size: int = 8) -> Example:
    """Recursion over scales with skips and interpolation, heat maps decoded by soft argmax, losses of all stacks."""

    class Hourglass(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.up, self.low = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.inner = Hourglass(depth - 1) if depth > 1 else nn.Conv2d(6, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            low = self.inner(F.relu(self.low(F.max_pool2d(x, 2))))
            return F.relu(self.up(x)) + F.interpolate(low, scale_factor=2, mode="nearest")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 3, padding=1)
            self.stacks = nn.ModuleList(Hourglass(2) for _ in range(2))
            self.heads = nn.ModuleList(nn.Conv2d(6, 3, 1) for _ in range(2))
            self.back = nn.Conv2d(3, 6, 1)

        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            h, loss = self.stem(x), 0.0
            ticks = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
            for stack, head in zip(self.stacks, self.heads):
                f = stack(h)
                maps = head(f)
                p = maps.flatten(2).softmax(-1).view_as(maps)
                found = torch.stack([(p.sum(2) * ticks).sum(-1), (p.sum(3) * ticks).sum(-1)], -1)
                loss = loss + F.l1_loss(found, points)
                h = h + f + self.back(maps)
            return loss

    return Net(), {"x": floats(batch_size, 3, 8, 8), "points": floats(batch_size, 3, 2).tanh()}


def unstacked_states(batch_size: int = 8) -> Example:
    """A recurrent policy whose stacked member states come from stack_module_state at build, kept as parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            cells = [nn.GRUCell(WIDTH, 6) for _ in range(2)]
            weights, _ = stack_module_state(cells)
            self.names = list(weights)
            self.weights = nn.ParameterList(w.detach() for w in weights.values())
            self.base = [nn.GRUCell(WIDTH, 6)]
            self.head = nn.Linear(12, 3)

        def forward(self, x: Tensor, action: Tensor, gain: Tensor) -> Tensor:
            state = dict(zip(self.names, self.weights))
            h = x.new_zeros(2, len(x), 6)
            logs = []

            def one(w: dict[str, Tensor], row: Tensor, kept: Tensor) -> Tensor:
                return functional_call(self.base[0], w, (row, kept))

            for t in range(x.shape[1]):
                h = vmap(one, in_dims=(0, None, 0))(state, x[:, t], h)
                scores = self.head(h.movedim(0, 1).flatten(1)).log_softmax(-1)
                logs.append(scores.gather(1, action[:, t : t + 1]))
            left = gain.flip(1).cumsum(1).flip(1)
            return -(torch.cat(logs, 1) * left).mean()

    return Net(), {
        "x": floats(batch_size, 4, WIDTH), "action": tokens(3, batch_size, 4), "gain": floats(batch_size, 4),
    }  # fmt: skip
