"""What repositories of methods hold, for ``outside.py``: filters and physics stepped in time, attention of kinds that are
rarely shown, matrices made orthogonal, losses over pairs and groups, heads that count, order and marginalise.

Written before any of them was run.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from enum import Enum
from typing import Any

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
from torch.autograd import Function
from torch.func import jvp


def _series(batch_size: int, length: int = 6, width: int = WIDTH) -> dict[str, Tensor]:
    x = floats(batch_size, length, width)
    return {"x": x, "y": x.roll(1, 1).tanh()}


# -- filters and physics, stepped in time --------------------------------------------------------------


def kalman_filter(batch_size: int = 8) -> Example:
    """Means and covariances of a linear state, predicted and corrected at every step, scored by innovations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.eye(4) * 0.9 + 0.05 * floats(4, 4))
            self.see = nn.Parameter(floats(2, 4) * 0.4)
            self.process, self.noise = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            batch = x.shape[0]
            mean = x.new_zeros(batch, 4)
            spread = torch.eye(4, dtype=x.dtype).expand(batch, 4, 4)
            q, r = torch.diag(F.softplus(self.process)), torch.diag(F.softplus(self.noise))
            total = x.new_zeros(batch)
            for seen in x.unbind(1):
                mean = mean @ self.turn.mT
                spread = self.turn @ spread @ self.turn.mT + q
                gap = seen - mean @ self.see.mT
                s = self.see @ spread @ self.see.mT + r
                gain = torch.linalg.solve(s, self.see @ spread).mT
                total = (
                    total + (gap.unsqueeze(1) @ torch.linalg.solve(s, gap.unsqueeze(-1))).flatten()
                )
                total = total + torch.logdet(s)
                mean = mean + (gain @ gap.unsqueeze(-1)).squeeze(-1)
                spread = spread - gain @ self.see @ spread
            return total.mean() * 0.5 + F.mse_loss(mean, y)

    return Net(), {"x": floats(batch_size, 5, 2), "y": floats(batch_size, 4)}


def particle_filter(batch_size: int = 8) -> Example:
    """Weighed particles, resampled at even places of the cumulated weights, each step from given noise."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move, self.see = two_layers(3, 3), two_layers(3, 2)
            self.scale = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor, noise: Tensor, y: Tensor) -> Tensor:
            count = noise.shape[2]
            state = noise[:, 0]
            places = (torch.arange(count, dtype=x.dtype) + 0.5) / count
            total = x.new_zeros(x.shape[0])
            for step, seen in enumerate(x.unbind(1)):
                state = state + self.move(state) + self.scale * noise[:, step]
                score = -(self.see(state) - seen.unsqueeze(1)).square().sum(-1)
                total = total + torch.logsumexp(score, 1) - math.log(count)
                weights = score.softmax(1)
                edges = weights.detach().cumsum(1)
                chosen = torch.searchsorted(edges, places.expand_as(edges).contiguous())
                chosen = chosen.clamp(max=count - 1)
                state = state.gather(1, chosen.unsqueeze(-1).expand_as(state))
            return F.mse_loss(state.mean(1), y) - total.mean()

    return Net(), {
        "x": floats(batch_size, 4, 2),
        "noise": floats(batch_size, 4, 5, 3),
        "y": floats(batch_size, 3),
    }


def springs(batch_size: int = 8) -> Example:
    """A chain of masses under Verlet steps, whose stiffness, damping and rest lengths are learnt."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stiff, self.rest = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5) * 0.5)
            self.damp = nn.Parameter(torch.tensor(0.1))
            self.register_buffer("ends", torch.tensor([[i, i + 1] for i in range(5)]))

        def force(self, place: Tensor) -> Tensor:
            a, b = self.ends.unbind(1)
            way = place[:, b] - place[:, a]
            length = way.norm(dim=-1, keepdim=True).clamp_min(1e-6)
            pull = self.stiff[:, None] * (length - self.rest[:, None]) * way / length
            return torch.zeros_like(place).index_add(1, a, pull).index_add(1, b, -pull)

        def forward(self, place: Tensor, y: Tensor) -> Tensor:
            before = place
            for _ in range(6):
                step = (1 - self.damp) * (place - before) + 0.01 * self.force(place)
                before, place = place, place + step
            return F.mse_loss(place, y)

    return Net(), {"place": floats(batch_size, 6, 2), "y": floats(batch_size, 6, 2) * 0.9}


def koopman(batch_size: int = 8) -> Example:
    """An autoencoder whose code moves by powers of one matrix, and by blocks of rotations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = two_layers(WIDTH, 6), two_layers(6, WIDTH)
            self.matrix = nn.Parameter(torch.eye(6) + 0.1 * floats(6, 6))
            self.angles, self.growth = nn.Parameter(floats(3)), nn.Parameter(floats(3) * 0.1)

        def turned(self, code: Tensor, times: int) -> Tensor:
            pairs = torch.view_as_complex(code.unflatten(-1, (3, 2)).contiguous())
            factor = torch.polar(torch.exp(self.growth * times), self.angles * times)
            return torch.view_as_real(pairs * factor).flatten(-2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            code, loss = self.encode(x[:, 0]), x.new_zeros(())
            for times in range(1, x.shape[1]):
                moved = code @ torch.linalg.matrix_power(self.matrix, times)
                turned = self.turned(code, times)
                loss = loss + F.mse_loss(self.decode(moved), y[:, times])
                loss = loss + F.l1_loss(self.decode(turned), y[:, times])
            return loss + F.mse_loss(self.decode(code), x[:, 0])

    return Net(), _series(batch_size, 4)


def sparse_dynamics(batch_size: int = 8) -> Example:
    """SINDy: derivatives pushed through the encoder by jvp, matched by a sparse library of products."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = two_layers(WIDTH, 3), two_layers(3, WIDTH)
            self.terms = nn.Parameter(floats(10, 3) * 0.1)
            self.register_buffer("mask", (floats(10, 3) > -0.5).double())

        def library(self, z: Tensor) -> Tensor:
            i, j = torch.triu_indices(3, 3)
            return torch.cat([torch.ones_like(z[:, :1]), z, z[:, i] * z[:, j]], 1)

        def forward(self, x: Tensor, dx: Tensor) -> Tensor:
            z, dz = jvp(self.encode, (x,), (dx,))
            weights = self.terms * self.mask.to(x.dtype)
            back, dback = jvp(self.decode, (z,), (self.library(z) @ weights,))
            fit = F.mse_loss(back, x) + F.mse_loss(dback, dx)
            return fit + F.mse_loss(dz, self.library(z) @ weights) + 1e-3 * weights.abs().mean()

    return Net(), {"x": floats(batch_size, WIDTH), "dx": floats(batch_size, WIDTH).roll(1, 0)}


def point_process(batch_size: int = 8) -> Example:
    """Neural Hawkes: intensities that decay between events, integrated by the trapezoid rule on a fixed grid."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(4, WIDTH)
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.decay, self.rates = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
            self.register_buffer("grid", torch.linspace(0, 1, 5))

        def forward(self, kinds: Tensor, gaps: Tensor) -> Tensor:
            h = torch.zeros(kinds.shape[0], WIDTH, dtype=gaps.dtype)
            seen = gaps.new_zeros(kinds.shape[0])
            whole = torch.zeros_like(seen)
            for kind, gap in zip(kinds.unbind(1), gaps.unbind(1), strict=True):
                speed = F.softplus(self.decay(h))
                times = gap[:, None] * self.grid.to(gap.dtype)
                faded = h[:, None] * torch.exp(-speed[:, None] * times[..., None])
                rates = F.softplus(self.rates(faded))
                whole = whole + torch.trapezoid(rates.sum(-1), times, dim=1)
                seen = seen + rates[:, -1].gather(1, kind[:, None]).squeeze(1).log()
                h = self.cell(self.kinds(kind), faded[:, -1])
            return (whole - seen).mean()

    return Net(), {
        "kinds": tokens(4, batch_size, 5),
        "gaps": floats(batch_size, 5).abs() + 0.1,
    }


def missing_values(batch_size: int = 8) -> Example:
    """GRU-D: values last seen and states decay with the time since; means come from what is there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay_x = nn.Parameter(torch.zeros(WIDTH))
            self.decay_h, self.cell = nn.Linear(WIDTH, 12), nn.GRUCell(2 * WIDTH, 12)
            self.out = nn.Linear(12, WIDTH)

        def forward(self, x: Tensor, seen: Tensor, gaps: Tensor, y: Tensor) -> Tensor:
            there = seen.to(x.dtype)
            mean = (x * there).sum(1) / there.sum(1).clamp(min=1)
            last, h = torch.zeros_like(mean), x.new_zeros(x.shape[0], 12)
            for t in range(x.shape[1]):
                last = torch.where(seen[:, t], x[:, t], last)
                fade = torch.exp(-F.relu(self.decay_x * gaps[:, t]))
                value = torch.where(seen[:, t], x[:, t], fade * last + (1 - fade) * mean)
                h = h * torch.exp(-F.relu(self.decay_h(gaps[:, t])))
                h = self.cell(torch.cat([value, there[:, t]], -1), h)
            return F.smooth_l1_loss(self.out(h), y)

    x = floats(batch_size, 5, WIDTH)
    seen = x > -0.3
    return Net(), {"x": x, "seen": seen, "gaps": x.abs().cumsum(1) * 0.2, "y": x[:, -1] * 0.5}


def path_signature(batch_size: int = 8) -> Example:
    """The signature of a path up to depth three, by products of increments cumulated over time."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.out = nn.Linear(WIDTH, 3), nn.Linear(3 + 9 + 27, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            steps = self.lift(x).diff(dim=1)
            one = steps.cumsum(1)
            before = F.pad(one, (0, 0, 1, 0))[:, :-1]
            two = (torch.einsum("bti,btj->btij", before + steps / 2, steps)).cumsum(1)
            earlier = torch.cat([torch.zeros_like(two[:, :1]), two[:, :-1]], 1)
            inner = torch.einsum("bti,btj->btij", before / 2 + steps / 6, steps)
            three = torch.einsum("btij,btk->btijk", earlier + inner, steps).sum(1)
            found = [one[:, -1], two[:, -1].flatten(1), three.flatten(1)]
            return F.mse_loss(self.out(torch.cat(found, -1)), y[:, 0])

    return Net(), _series(batch_size, 6)


def harmonic_synthesizer(batch_size: int = 8) -> Example:
    """DDSP: harmonics by cumulated phase below half the rate, noise filtered frame by frame in frequency."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(WIDTH, 12, batch_first=True)
            self.loud, self.bands = nn.Linear(12, 5), nn.Linear(12, 9)

        def forward(self, x: Tensor, pitch: Tensor, noise: Tensor, y: Tensor) -> Tensor:
            h, _ = self.rnn(x)
            up = functools.partial(
                F.interpolate, scale_factor=16, mode="linear", align_corners=True
            )
            pitches = up(pitch.unsqueeze(1)).squeeze(1)
            number = torch.arange(1, 6, dtype=x.dtype)
            phase = torch.cumsum(2 * math.pi * pitches, 1)[..., None] * number
            below = (pitches[..., None] * number < 0.5).to(x.dtype)
            loud = up((2 * torch.sigmoid(self.loud(h)) ** 2.3 + 1e-7).mT).mT * below
            tones = (loud / loud.sum(-1, keepdim=True).clamp_min(1e-7) * phase.sin()).sum(-1)
            filters = torch.fft.irfft(
                torch.sigmoid(self.bands(h)).to(
                    torch.complex128 if x.dtype == torch.float64 else torch.complex64
                ),
                n=16,
            )
            spectrum = torch.fft.rfft(noise.unflatten(1, (-1, 16)), n=32)
            hiss = torch.fft.irfft(spectrum * torch.fft.rfft(filters, n=32), n=32)
            hiss = F.fold(hiss.mT, (1, 16 * (x.shape[1] + 1)), (1, 32), stride=(1, 16))
            return F.l1_loss(tones + 0.1 * hiss.flatten(1)[:, : tones.shape[1]], y)

    return Net(), {
        "x": floats(batch_size, 4, WIDTH),
        "pitch": floats(batch_size, 4).abs() * 0.05 + 0.01,
        "noise": floats(batch_size, 64),
        "y": floats(batch_size, 64).flip(1),
    }


def recursive_filters(batch_size: int = 8) -> Example:
    """Second-order recursive filters in cascade, held stable by their parametrisation, sample by sample."""

    class Biquad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = (
                nn.Parameter(torch.tensor([1.0, 0.1, 0.0])),
                nn.Parameter(floats(2) * 0.3),
            )

        def forward(self, x: Tensor) -> Tensor:
            a1 = 2 * torch.tanh(self.a[0])
            a2 = ((2 - a1.abs()) * torch.tanh(self.a[1]) + a1.abs()) / 2
            b0, b1, b2 = self.b
            z1 = z2 = torch.zeros_like(x[:, 0])
            out = []
            for sample in x.unbind(1):
                y = b0 * sample + z1
                z1, z2 = b1 * sample - a1 * y + z2, b2 * sample - a2 * y
                out.append(y)
            return torch.stack(out, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cascade = nn.Sequential(Biquad(), nn.Softsign(), Biquad())
            self.emphasis = nn.Parameter(torch.tensor(0.85))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            gap = y - self.cascade(x)
            sharp = gap[:, 1:] - self.emphasis.detach() * gap[:, :-1]
            return sharp.square().sum() / y[:, 1:].square().sum().clamp_min(1e-5) + gap.mean() ** 2

    return Net(), {"x": floats(batch_size, 10), "y": floats(batch_size, 10).cumsum(1) * 0.2}


# -- attention that is rarely shown ----------------------------------------------------------------------


def nystrom_attention(batch_size: int = 8) -> Example:
    """Landmarks by segment means, and a pseudo-inverse by Newton steps from a start that norms of all samples give."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mix = nn.Conv2d(2, 2, (3, 1), padding=(1, 0), groups=2, bias=False)

        def inverse(self, a: Tensor) -> Tensor:
            eye = torch.eye(a.shape[-1], dtype=a.dtype)
            z = a.mT / (a.sum(-2).abs().max() * a.sum(-1).abs().max())
            for _ in range(4):
                az = a @ z
                z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
            return z

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            ql, kl = (t.unflatten(2, (2, -1)).mean(3) for t in (q, k))
            left, middle, right = (
                (q @ kl.mT).softmax(-1),
                (ql @ kl.mT).softmax(-1),
                (ql @ k.mT).softmax(-1),
            )
            h = left @ self.inverse(middle) @ (right @ v) + self.mix(v)
            return F.mse_loss(self.out(h.transpose(1, 2).flatten(2)), y)

    return Net(), _series(batch_size, 6)


def disentangled_attention(batch_size: int = 8) -> Example:
    """DeBERTa: content to position and position to content, gathered by clamped relative places."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(20, WIDTH), nn.Embedding(8, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.place_q, self.place_k = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH, bias=False),
            )
            self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-7), nn.Linear(WIDTH, 20)

        def heads(self, x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], 2, 4).transpose(-3, -2)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.words(ids)
            q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
            pq, pk = (
                self.heads(self.place_q(self.places.weight)),
                self.heads(self.place_k(self.places.weight)),
            )
            length = ids.shape[1]
            where = torch.arange(length)
            far = (where[:, None] - where[None, :] + 4).clamp(0, 7)
            index = far.expand(*q.shape[:2], length, length)
            to_place = torch.gather(q @ pk.mT, -1, index)
            from_place = torch.gather(k @ pq.mT, -1, (8 - far).clamp(0, 7).expand_as(index)).mT
            scores = (q @ k.mT + to_place + from_place) / math.sqrt(3 * 4)
            keeps = (ids != 3)[:, None, None, :] & (ids != 3)[:, None, :, None]
            shares = scores.masked_fill(~keeps, torch.finfo(x.dtype).min).softmax(-1)
            shares = shares.masked_fill(~keeps, 0.0)
            h = self.norm((shares @ v).transpose(1, 2).flatten(2) + x)
            return token_loss(self.head(h), labels)

    return Net(), word_batch(batch_size)


def two_streams(batch_size: int = 8) -> Example:
    """XLNet: one order for all samples, a query stream that does not see its own word, losses at the last places."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blank = (
                nn.Embedding(20, WIDTH),
                nn.Parameter(floats(1, 1, WIDTH) * 0.1),
            )
            self.where = nn.Parameter(floats(6, WIDTH) * 0.1)
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)
            )
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            order = torch.tensor([3, 0, 5, 1, 4, 2])
            self.register_buffer("hides", order[:, None] < order[None, :], persistent=False)
            self.register_buffer("late", order >= 3, persistent=False)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.words(ids) + self.where
            g = self.blank.expand_as(h) + self.where
            strict = self.hides | torch.eye(6, dtype=torch.bool)
            strict = strict & ~strict.all(1, keepdim=True)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                g = norm(g + layer(g, h, h, attn_mask=strict, need_weights=False)[0])
                h = norm(h + layer(h, h, h, attn_mask=self.hides, need_weights=False)[0])
            scores = g @ self.words.weight.mT
            each = F.cross_entropy(scores.flatten(0, 1), ids.flatten(), reduction="none")
            del labels
            return (each.view_as(ids) * self.late).sum() / (self.late.sum() * ids.shape[0])

    return Net(), word_batch(batch_size)


def modern_hopfield(batch_size: int = 8) -> Example:
    """Patterns retrieved in several steps that share one memory, a temperature per head, a trace of energies."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.Parameter(floats(10, WIDTH))
            self.beta = nn.Parameter(torch.zeros(2))
            self.value, self.norm = (
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH, elementwise_affine=False),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            state = self.norm(x).unflatten(-1, (2, 4))
            memory = self.norm(self.memory).unflatten(-1, (2, 4))
            beta = self.beta.exp()
            energies = []
            for _ in range(3):
                scores = torch.einsum("bhd,nhd->bhn", state, memory) * beta[:, None]
                energies.append(-torch.logsumexp(scores, -1) / beta + state.square().sum(-1) / 2)
                state = torch.einsum("bhn,nhd->bhd", scores.softmax(-1), memory)
            fall = torch.stack(energies).diff(dim=0).relu().mean()
            return F.mse_loss(self.value(state.flatten(1)), y) + fall

    return Net(), row_batch(batch_size)


def talking_heads(batch_size: int = 8) -> Example:
    """Heads mixed before and behind softmax, queries and keys normalised, values gated, cosine scores in part."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 4)
            self.before, self.behind = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4) * 0.9)
            self.q_norm, self.k_norm = nn.RMSNorm(2), nn.RMSNorm(2)
            self.heat, self.out = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            plain = self.q_norm(q) @ self.k_norm(k).mT
            cosine = (
                F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.heat.clamp(max=10).exp()
            )
            scores = torch.einsum("bhqk,hg->bgqk", plain + cosine, self.before)
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            h = torch.einsum("bgqk,gh->bhqk", shares, self.behind) @ v
            h = h * self.gate(x).sigmoid().mT.unsqueeze(-1)
            return F.mse_loss(self.out(h.transpose(1, 2).reshape(x.shape)), y)

    return Net(), _series(batch_size, 5)


def moving_averages(batch_size: int = 8) -> Example:
    """MEGA: damped moving averages as one long convolution in frequency, then gated attention in chunks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha, self.delta = nn.Parameter(floats(WIDTH, 2)), nn.Parameter(floats(WIDTH, 2))
            self.beta, self.eta = (
                nn.Parameter(floats(WIDTH, 2)),
                nn.Parameter(floats(WIDTH, 2) * 0.3),
            )
            self.omega = nn.Parameter(torch.ones(WIDTH))
            self.qk, self.v = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
            self.scale, self.shift = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(2, 4))
            self.gates = nn.Linear(WIDTH, 2 * WIDTH)

        def kernel(self, length: int) -> Tensor:
            p, d = torch.sigmoid(self.alpha), torch.sigmoid(self.delta)
            powers = torch.arange(length, dtype=p.dtype) * torch.log(1 - p * d)[..., None]
            return torch.einsum("dn,dnl->dl", p * self.beta * self.eta, powers.exp())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            length = x.shape[1]
            spectrum = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(
                self.kernel(length), n=2 * length
            )
            mx = F.silu(torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT + x * self.omega)
            z = F.silu(self.qk(mx))
            q, k = (z.unsqueeze(2) * self.scale + self.shift).unbind(2)
            q, k, v = (t.unflatten(1, (-1, 3)) for t in (q, k, F.silu(self.v(x))))
            shares = 0.5 * (
                1
                + torch.erf(
                    (q @ k.mT / 3 - math.sqrt(0.5)) / (math.sqrt(0.25 * math.pi) * math.sqrt(2))
                )
            )
            update, reset = self.gates(mx).sigmoid().chunk(2, -1)
            h = torch.tanh((shares @ v).flatten(1, 2) * reset)
            return F.mse_loss(torch.lerp(x, h, update), y)

    return Net(), _series(batch_size, 6)


def spatial_gates(batch_size: int = 8) -> Example:
    """gMLP and aFT: gates over places by a Toeplitz matrix of parameters, exponentials normalised over time."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)
            self.norm, self.lags = nn.LayerNorm(8), nn.Parameter(floats(11) * 0.1)
            self.bias, self.kv = nn.Parameter(torch.ones(6, 1)), nn.Linear(WIDTH, 2 * WIDTH)
            self.near = nn.Parameter(floats(6, 6) * 0.1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            u, v = F.gelu(self.up(x), approximate="tanh").chunk(2, -1)
            i = torch.arange(6)
            toeplitz = self.lags[i[:, None] - i[None, :] + 5]
            x = x + self.down(u * (toeplitz @ self.norm(v) + self.bias))
            k, value = self.kv(x).split(WIDTH, -1)
            top = k.amax(1, keepdim=True).detach()
            weights = torch.exp(self.near)
            num, den = weights @ ((k - top).exp() * value), weights @ (k - top).exp()
            return F.huber_loss(x.sigmoid() * num / den, y, delta=0.7)

    return Net(), _series(batch_size, 6)


# -- cells and memories -------------------------------------------------------------------------------


def stack_machine(batch_size: int = 8) -> Example:
    """A recurrent net with a soft stack: pushed, popped and kept in shares, beside a soft queue."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = (
                nn.Embedding(20, WIDTH),
                nn.RNNCell(2 * WIDTH, 12, nonlinearity="relu"),
            )
            self.act, self.push, self.out = (
                nn.Linear(12, 3),
                nn.Linear(12, WIDTH),
                nn.Linear(12, 20),
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            batch = ids.size(0)
            stack = torch.zeros(batch, 4, WIDTH).to(self.out.weight)
            h = stack.new_zeros((batch, 12))
            told = []
            for word in self.words(ids).transpose(0, 1):
                h = self.cell(torch.cat((word, stack[:, 0]), 1), h)
                push, pop, stay = self.act(h).softmax(1)[..., None, None].unbind(1)
                pushed = torch.cat([torch.sigmoid(self.push(h)).unsqueeze(1), stack[:, :-1]], 1)
                popped = torch.cat([stack[:, 1:], torch.zeros_like(stack[:, :1])], 1)
                stack = push * pushed + pop * popped + stay * stack
                told += [self.out(h)]
            return token_loss(torch.stack(told, dim=1), labels)

    return Net(), word_batch(batch_size, 5)


def quasi_recurrent(batch_size: int = 8) -> Example:
    """QRNN, SRU, IndRNN and a clockwork cell in a row: gates of convolutions, pooled step by step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, 3 * WIDTH, 2)
            self.sru = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.vf, self.vr = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.ind, self.into = (
                nn.Parameter(torch.linspace(-1, 1, WIDTH)),
                nn.Linear(WIDTH, WIDTH),
            )
            self.clock = nn.Linear(2 * WIDTH, WIDTH)
            self.periods = (1, 2, 4, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z, f, o = self.conv(F.pad(x.mT, (1, 0))).chunk(3, 1)
            z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
            c, out = torch.zeros_like(z[..., 0]), []
            for t in range(z.size(2)):
                c = f[..., t] * c + (1 - f[..., t]) * z[..., t]
                out.append(o[..., t] * c)
            x = torch.stack(out, 1)
            u, ft, rt = self.sru(x).chunk(3, -1)
            c, out = torch.zeros_like(c), []
            for t in range(x.size(1)):
                f1 = torch.sigmoid(ft[:, t] + self.vf * c)
                r1 = torch.sigmoid(rt[:, t] + self.vr * c)
                c = f1 * c + (1 - f1) * u[:, t]
                out.append(r1 * c + (1 - r1) * x[:, t])
            h, states = torch.zeros_like(c), []
            for step in torch.stack(out, 1).unbind(1):
                h = F.relu(self.into(step) + self.ind.clamp(-1, 1) * h)
                states.append(h)
            h = torch.zeros_like(h)
            for t, step in enumerate(states):
                new = torch.tanh(self.clock(torch.cat([step, h], -1)))
                wakes = torch.tensor([t % p == 0 for p in self.periods for _ in range(2)])
                h = torch.where(wakes, new, h)
            return F.mse_loss(h, y[:, -1])

    return Net(), _series(batch_size, 5)


def linked_memory(batch_size: int = 8) -> Example:
    """DNC: allocation by sorted usage, temporal links, reads forward, backward and by content."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.face = (
                nn.LSTMCell(WIDTH + 4, 12),
                nn.Linear(12, 4 * 3 + 2 + 1 + 1 + 3 + 1 + 1),
            )
            self.out = nn.Linear(16, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, n = x.shape[0], 5
            memory, usage = x.new_full((b, n, 4), 1e-6), x.new_zeros(b, n)
            link, order = x.new_zeros(b, n, n), x.new_zeros(b, n)
            read_w, read, state = x.new_zeros(b, n), x.new_zeros(b, 4), None
            out = []
            for step in x.unbind(1):
                state = self.cell(torch.cat([step, read], -1), state)
                key_r, key_w, erase, free, alloc, gate, mode, br, bw = torch.split(
                    self.face(state[0]), [4, 4, 4, 1, 1, 2, 3, 1, 1], -1
                )
                usage = (usage + read_w - usage * read_w) * (1 - free.sigmoid() * read_w)
                low, place = torch.sort(usage, dim=-1)
                ahead = torch.cumprod(F.pad(low, (1, 0), value=1.0)[:, :-1] + 1e-6, -1)
                allocated = torch.zeros_like(usage).scatter(1, place, (1 - low) * ahead)
                near = F.cosine_similarity(memory, key_w.unsqueeze(1), dim=-1) * F.softplus(bw)
                g = alloc.sigmoid()
                write = gate[:, :1].sigmoid() * (g * allocated + (1 - g) * near.softmax(-1))
                memory = memory * (1 - write[..., None] * erase.sigmoid()[:, None])
                memory = memory + write[..., None] * key_w.tanh()[:, None]
                pair = write[:, :, None] + write[:, None, :]
                link = ((1 - pair) * link + write[:, :, None] * order[:, None, :]) * (
                    1 - torch.eye(n)
                )
                order = (1 - write.sum(-1, keepdim=True)) * order + write
                there, back = (
                    (link @ read_w[..., None]).squeeze(-1),
                    (link.mT @ read_w[..., None]).squeeze(-1),
                )
                near = F.cosine_similarity(memory, key_r.unsqueeze(1), dim=-1) * F.softplus(br)
                ways = torch.stack([back, near.softmax(-1), there], 1)
                read_w = (mode.softmax(-1)[..., None] * ways).sum(1)
                read = torch.bmm(read_w.unsqueeze(1), memory).squeeze(1)
                out.append(self.out(torch.cat([state[0], read], -1)))
            return F.mse_loss(torch.stack(out, 1), y)

    return Net(), _series(batch_size, 4)


# -- matrices ------------------------------------------------------------------------------------------


def orthogonal_adapters(batch_size: int = 8) -> Example:
    """OFT by Cayley's map in blocks, Householder products, VeRA's frozen projections, IA3, a bias alone."""

    class Turned(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.skew = nn.Parameter(floats(2, 4, 4) * 0.1)
            self.mirrors = nn.Parameter(floats(2, base.out_features) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            skew = self.skew - self.skew.transpose(1, 2)
            eye = torch.eye(4, dtype=x.dtype).expand_as(skew)
            weight = (
                torch.block_diag(*torch.linalg.solve(eye - skew, eye + skew)) @ self.base.weight.mT
            )
            for v in self.mirrors:
                v = v / v.norm()
                weight = weight - 2 * torch.outer(weight @ v, v)
            return F.linear(x, weight.mT, self.base.bias)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned, self.base = Turned(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
            self.base.weight.requires_grad_(False)
            self.register_buffer("a", floats(3, WIDTH))
            self.register_buffer("b", floats(WIDTH, 3))
            self.d, self.e = (
                nn.Parameter(torch.full((3,), 0.1)),
                nn.Parameter(torch.full((WIDTH,), 0.2)),
            )
            self.ia3 = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.gelu(self.turned(x)) * self.ia3
            h = self.base(h) + F.linear(F.linear(h, self.a) * self.d, self.b) * self.e
            return F.mse_loss(h, y)

    return Net(), row_batch(batch_size)


def planar_flows(batch_size: int = 8) -> Example:
    """Planar, radial and Sylvester flows, with log-determinants by hand and a learnt base."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.w, self.b = (
                nn.Parameter(floats(*s) * 0.3) for s in ((3, 4), (3, 4), (3,))
            )
            self.centre, self.pull = nn.Parameter(floats(4)), nn.Parameter(torch.zeros(2))
            self.q, self.r = nn.Parameter(floats(4, 4)), nn.Parameter(floats(2, 4, 4) * 0.2)
            self.mean, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            z, total = x, x.new_zeros(x.shape[0])
            for u, w, b in zip(self.u, self.w, self.b, strict=True):
                dot = (w * u).sum()
                u = u + (F.softplus(dot) - 1 - dot) * w / w.square().sum()
                h = torch.tanh(z @ w + b)
                total = total + torch.log1p((1 - h**2) * (w @ u))
                z = z + u * h[:, None]
            r = (z - self.centre).norm(dim=1, keepdim=True)
            alpha = F.softplus(self.pull[0])
            beta, h = F.softplus(self.pull[1]) - alpha, 1 / (alpha + r)
            total = total + (
                3 * torch.log1p(beta * h) + torch.log1p(beta * h - beta * r * h**2)
            ).squeeze(1)
            z = z + beta * h * (z - self.centre)
            q, _ = torch.linalg.qr(self.q)
            r1, r2 = self.r[0].triu(), self.r[1].triu()
            ahead = z @ q @ r2.mT
            total = total + torch.log(
                (1 + (1 - ahead.tanh() ** 2) * (r1.diagonal() * r2.diagonal())).abs()
            ).sum(1)
            z = z + ahead.tanh() @ r1.mT @ q.mT
            base = torch.distributions.Normal(self.mean, self.scale.exp())
            return -(base.log_prob(z).sum(1) + total).mean()

    return Net(), {"x": floats(batch_size, 4)}


def rotated_kernels(batch_size: int = 8) -> Example:
    """A net on the group of quarter turns: kernels turned and rolled, pooled over turns at the end."""

    class Lift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(4, 1, 3, 3) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.stack([torch.rot90(self.weight, k, (2, 3)) for k in range(4)], 1)
            return F.conv2d(x, turned.flatten(0, 1), padding=1).unflatten(1, (4, 4))

    class Group(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(floats(3, 4, 4, 3, 3) * 0.2),
                nn.Parameter(torch.zeros(3)),
            )

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.stack(
                [torch.rot90(self.weight, k, (3, 4)).roll(k, 2) for k in range(4)], 1
            )
            h = F.conv2d(x.flatten(1, 2), turned.reshape(12, 16, 3, 3), padding=1)
            return h.view(-1, 3, 4, *h.shape[2:]) + self.bias.view(1, 3, 1, 1, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.group, self.norm = Lift(), Group(), nn.BatchNorm3d(4)
            self.head = nn.Linear(3, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.group(F.relu(self.norm(self.lift(x))))
            return F.cross_entropy(self.head(h.amax(2).mean((2, 3))), y)

    return Net(), {"x": floats(batch_size, 1, 6, 6), "y": tokens(5, batch_size)}


def wavelet_net(batch_size: int = 8) -> Example:
    """Lifting steps over even and odd samples to three levels, shrunk by learnt thresholds, and back."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict, self.update = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1)

        def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
            even, odd = x[..., ::2], x[..., 1::2]
            detail = odd - self.predict(even)
            return even + self.update(detail), detail

        def join(self, coarse: Tensor, detail: Tensor) -> Tensor:
            even = coarse - self.update(detail)
            return torch.stack([even, detail + self.predict(even)], -1).flatten(-2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.least = (
                nn.ModuleList(Step() for _ in range(3)),
                nn.Parameter(torch.full((3, 2, 1), 0.1)),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            details: list[Tensor] = []
            for step, least in zip(self.steps, self.least, strict=True):
                x, detail = step.split(x)
                details.append(torch.sign(detail) * F.relu(detail.abs() - least.abs()))
            sparse = sum(one.abs().mean() for one in details)
            for step in reversed(self.steps):
                x = step.join(x, details.pop())
            return F.mse_loss(x, y) + 0.01 * sparse

    return Net(), {"x": floats(batch_size, 2, 16), "y": floats(batch_size, 2, 16).flip(2)}


def phase_retrieval(batch_size: int = 8) -> Example:
    """A picture seen by magnitudes of its transform under learnt masks, reconstructed by unrolled projections."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(floats(3, 6, 6))
            self.clean = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
            self.step = nn.Parameter(torch.tensor([0.5, 0.4]))

        def forward(self, x: Tensor) -> Tensor:
            masks = torch.exp(1j * self.phase)
            seen = torch.fft.fft2(x[:, None] * masks, norm="ortho").abs()
            guess = torch.complex(torch.ones_like(x), torch.zeros_like(x)) * x.abs().mean(
                (1, 2), keepdim=True
            )
            for size in self.step:
                wave = torch.fft.fft2(guess[:, None] * masks, norm="ortho")
                fixed = seen * torch.sgn(wave)
                back = (torch.fft.ifft2(fixed, norm="ortho") * masks.conj()).mean(1)
                guess = guess + size * (back - guess)
                pair = torch.view_as_real(guess).permute(0, 3, 1, 2)
                guess = torch.view_as_complex(
                    (pair + self.clean(pair)).permute(0, 2, 3, 1).contiguous()
                )
            return F.l1_loss(guess.real, x) + guess.imag.square().mean()

    return Net(), {"x": floats(batch_size, 6, 6)}


# -- choices, trees, orders ------------------------------------------------------------------------------


class _Entmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = (x - x.amax(-1, keepdim=True)) / 2
        low, high = torch.full_like(x[..., :1], -1.0), torch.zeros_like(x[..., :1])
        for _ in range(40):
            middle = (low + high) / 2
            over = (x - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        p = (x - low).clamp(min=0).square()
        p = p / p.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        root = p.sqrt()
        wave = given * root
        return wave - (wave.sum(-1, keepdim=True) / root.sum(-1, keepdim=True)) * root


def oblivious_trees(batch_size: int = 8) -> Example:
    """NODE: features chosen by entmax, a soft split per level, leaves weighed by products of choices."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choose, self.split = (
                nn.Parameter(floats(WIDTH, 4, 3)),
                nn.Parameter(floats(4, 3) * 0.1),
            )
            self.heat, self.leaves = (
                nn.Parameter(torch.zeros(4, 3)),
                nn.Parameter(floats(4, 3, 8) * 0.5),
            )
            bits = torch.arange(8)[:, None].bitwise_right_shift(torch.arange(3)) & 1
            self.register_buffer("codes", torch.stack([bits, 1 - bits], -1).float())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            picked = torch.einsum(
                "bi,itd->btd", x, _Entmax.apply(self.choose.movedim(0, -1)).movedim(-1, 0)
            )
            turned = (picked - self.split) * torch.exp(-self.heat)
            both = (torch.stack([-turned, turned], -1) + 0.5).clamp(0, 1)
            share = torch.einsum("btds,lds->btdl", both, self.codes.to(x.dtype)).prod(-2)
            return F.cross_entropy(torch.einsum("btl,tcl->bc", share, self.leaves), y)

    return Net(), {"x": floats(batch_size, WIDTH), "y": tokens(3, batch_size)}


def ordered_grades(batch_size: int = 8) -> Example:
    """CORAL and cumulative links for ordered grades, and a squared earth mover's distance between both."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score = two_layers(), nn.Linear(WIDTH, 1, bias=False)
            self.cuts, self.gaps = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, grade: Tensor) -> Tensor:
            edges = torch.cat([self.cuts, self.cuts + F.softplus(self.gaps).cumsum(0)])
            ahead = self.score(torch.tanh(self.body(x))) - edges
            levels = (grade[:, None] > torch.arange(4)).to(x.dtype)
            coral = -(
                F.logsigmoid(ahead) * levels + (F.logsigmoid(ahead) - ahead) * (1 - levels)
            ).sum(1)
            above = F.pad(torch.sigmoid(ahead), (1, 1))
            above = torch.cat([torch.ones_like(above[:, :1]), above[:, 1:]], 1)
            shares = (above[:, :-1] - above[:, 1:]).clamp_min(1e-9)
            target = F.one_hot(grade, 5).to(x.dtype)
            moved = (shares.cumsum(1) - target.cumsum(1)).square().sum(1)
            return (coral + moved - shares.gather(1, grade[:, None]).squeeze(1).log()).mean()

    return Net(), {"x": floats(batch_size, WIDTH), "grade": tokens(5, batch_size)}


def retrieved_passages(batch_size: int = 8) -> Example:
    """RAG: likelihoods of answers summed over passages in logarithms, sequence-wise and token-wise, with a prior."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.store = nn.Embedding(20, WIDTH), nn.Parameter(floats(12, WIDTH))
            self.query, self.mix, self.head = (
                two_layers(),
                nn.Linear(2 * WIDTH, WIDTH),
                nn.Linear(WIDTH, 20),
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.words(ids)
            near, chosen = (self.query(h.mean(1)) @ self.store.mT).topk(3, dim=-1)
            prior = near.log_softmax(-1)
            found = self.store[chosen].unsqueeze(2).expand(-1, -1, ids.shape[1], -1)
            both = torch.cat([h.unsqueeze(1).expand_as(found), found], -1)
            told = self.head(self.mix(both).relu()).log_softmax(-1)
            each = told.gather(-1, labels[:, None, :, None].expand(-1, 3, -1, 1)).squeeze(-1)
            whole = torch.logsumexp(prior + each.sum(-1), 1)
            by_token = torch.logsumexp(prior[..., None] + each, 1).sum(-1)
            return -(whole + by_token).mean() / ids.shape[1]

    return Net(), word_batch(batch_size, 4)


def generator_and_discriminator(batch_size: int = 8) -> Example:
    """ELECTRA: a small generator fills masked words (argmax of scores and given noise), the large net says which."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.project = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 4)
            layer = functools.partial(nn.TransformerEncoderLayer, batch_first=True, dropout=0.0)
            self.small, self.large = layer(4, 1, 8), layer(WIDTH, 2, 16, norm_first=True)
            self.back, self.judge = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
            self.bias = nn.Parameter(torch.zeros(20))

        def forward(self, ids: Tensor, hidden: Tensor, noise: Tensor) -> Tensor:
            masked = ids.masked_fill(hidden, 0)
            scores = (
                self.back(self.small(self.project(self.words(masked)))) @ self.words.weight.T
                + self.bias
            )
            each = F.cross_entropy(scores.transpose(1, 2), ids, reduction="none")
            small = (each * hidden).sum() / hidden.sum()
            with torch.no_grad():
                drawn = (scores - torch.log(-torch.log(noise))).argmax(-1)
            filled = torch.where(hidden, drawn, ids)
            said = self.judge(self.large(self.words(filled))).squeeze(-1)
            return small + 50 * F.binary_cross_entropy_with_logits(
                said, (filled != ids).to(said.dtype)
            )

    ids = tokens(20, batch_size, 6, low=1)
    noise = torch.sigmoid(floats(batch_size, 6, 20))
    return Net(), {"ids": ids, "hidden": floats(batch_size, 6) > 0.3, "noise": noise}


def mixture_of_softmaxes(batch_size: int = 8) -> Example:
    """Several softmaxes mixed per word, words made of characters under a highway, repeated words held down."""

    class Highway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(WIDTH, 2 * WIDTH)
            nn.init.constant_(self.both.bias[WIDTH:], -1.0)

        def forward(self, x: Tensor) -> Tensor:
            h, gate = self.both(x).chunk(2, -1)
            return torch.lerp(x, h.relu(), gate.sigmoid())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(10, 4, padding_idx=0)
            self.convs = nn.ModuleList(nn.Conv1d(4, 4, k, padding="same") for k in (1, 2))
            self.highway, self.rnn = (
                nn.Sequential(Highway(), Highway()),
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
            )
            self.prior, self.latent = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, 15)

        def forward(self, letters: Tensor, labels: Tensor) -> Tensor:
            flat = self.letters(letters).flatten(0, 1).mT
            words = torch.cat([conv(flat).tanh().amax(-1) for conv in self.convs], -1)
            h, _ = self.rnn(self.highway(words).unflatten(0, letters.shape[:2]))
            experts = self.out(torch.tanh(self.latent(h)).unflatten(-1, (3, WIDTH))).softmax(-1)
            told = (self.prior(h).softmax(-1).unsqueeze(-1) * experts).sum(-2).clamp_min(1e-8)
            fit = F.nll_loss(told.log().flatten(0, 1), labels.flatten())
            seen = F.one_hot(labels, 15).cumsum(1).roll(1, 1).clamp(max=1).to(told.dtype)
            seen = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, 1:]], 1)
            seen = seen * (1 - F.one_hot(labels, 15).to(told.dtype))
            return fit - 0.5 * (torch.log1p(-told + 1e-6) * seen).sum(-1).mean()

    return Net(), {"letters": tokens(10, batch_size, 4, 3), "labels": tokens(15, batch_size, 4)}


# -- idioms of repositories --------------------------------------------------------------------------------


class _Mode(Enum):
    MEAN = "mean"
    MAX = "max"
    ATTEND = "attend"


def cached_by_shape(batch_size: int = 8) -> Example:
    """Masks and tables that are made once per length and kept on the module, by lru_cache, and by a property."""

    @functools.lru_cache(maxsize=4)
    def _mask(length: int) -> Tensor:
        return torch.full((length, length), -1e9, dtype=torch.float64).triu(1)

    class Net(nn.Module):
        table: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self._places: dict[tuple[int, torch.dtype], Tensor] = {}

        def places(self, length: int, like: Tensor) -> Tensor:
            key = (length, like.dtype)
            if key not in self._places:
                at = torch.arange(length, dtype=like.dtype)[:, None]
                rate = torch.exp(
                    torch.arange(0, WIDTH, 2, dtype=like.dtype) * (-math.log(1e4) / WIDTH)
                )
                self._places[key] = torch.cat([(at * rate).sin(), (at * rate).cos()], 1)
            return self._places[key]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.table is None or self.table.shape[0] < x.shape[1]:
                self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
            x = x + self.places(x.shape[1], x) + self.table[: x.shape[1], None]
            q, k, v = self.qkv(x).chunk(3, -1)
            shares = torch.softmax(q @ k.mT / WIDTH**0.5 + _mask(x.shape[1]).to(x.dtype), -1)
            return F.mse_loss(self.out(shares @ v), y)

    return Net(), _series(batch_size, 5)


def pooled_in_modes(batch_size: int = 8) -> Example:
    """Enums, match, generators, walrus, star arguments, try and warnings within forward."""

    class Pool(nn.Module):
        def __init__(self, mode: _Mode) -> None:
            super().__init__()
            self.mode, self.score = mode, nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            match self.mode:
                case _Mode.MEAN:
                    return x.mean(1)
                case _Mode.MAX:
                    return x.max(1).values
                case _Mode.ATTEND:
                    return (self.score(x).softmax(1) * x).sum(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pools = nn.ModuleDict({mode.value: Pool(mode) for mode in _Mode})
            for name in ("mean", "max"):
                self.pools[name].score.requires_grad_(False)
            self.out, self.spare = nn.Linear(3 * WIDTH, WIDTH), None

        def pooled(self, *args: Tensor) -> Iterator[Tensor]:
            for pool in self.pools.values():
                yield from (pool(one) for one in args)

        def forward(self, x: Tensor, y: Tensor, *, weight: Tensor | None = None) -> Tensor:
            try:
                head = self.spare.weight  # type: ignore[union-attr]
            except AttributeError:
                head = self.out.weight
            if (count := x.shape[1]) > 100:
                warnings.warn("long", stacklevel=2)
            h = F.linear(torch.cat([*self.pooled(x)], dim=-1), head, self.out.bias) / count**0.5
            each = F.mse_loss(h, y[:, 0], reduction="none").mean(-1)
            return each.mean() if weight is None else (each * weight).sum() / weight.sum()

    return Net(), {**_series(batch_size, 5), "weight": floats(batch_size).abs() + 0.1}


def deep_supervision(batch_size: int = 8) -> Example:
    """Losses registered by forward hooks on named layers, scaled by learnt variances and averaged by magnitudes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Mish()) for _ in range(4))
            )
            self.heads = nn.ModuleDict({"1": nn.Linear(WIDTH, WIDTH), "3": nn.Linear(WIDTH, WIDTH)})
            self.log_var = nn.ParameterDict(
                {name: nn.Parameter(torch.zeros(())) for name in self.heads}
            )
            self.kept: dict[str, Tensor] = {}
            for name, layer in self.layers.named_children():
                if name in self.heads:
                    layer.register_forward_hook(functools.partial(self.keep, name))

        def keep(self, name: str, module: nn.Module, given: Any, result: Tensor) -> None:
            del module, given
            self.kept[name] = result

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.kept.clear()
            last = self.layers(x)
            losses = {name: F.mse_loss(self.heads[name](h), y) for name, h in self.kept.items()}
            magnitudes = torch.stack([loss.detach() for loss in losses.values()])
            total = sum(
                torch.exp(-self.log_var[n]) * loss + self.log_var[n] for n, loss in losses.items()
            )
            return total + (last - y).abs().mean() / (1 + magnitudes.mean())

    return Net(), row_batch(batch_size)


# -- losses over pairs and groups ----------------------------------------------------------------------------


def total_correlation(batch_size: int = 8) -> Example:
    """beta-TCVAE: densities of every code under every sample's posterior, with given noise; an MMD beside."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = two_layers(WIDTH, 6), two_layers(3, WIDTH)

        def kernel(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.exp(-torch.cdist(a, b, p=2).square() / 3).mean()

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            mean, log_var = self.encode(x).chunk(2, -1)
            z = mean + noise * torch.exp(0.5 * log_var)
            pair = -0.5 * (
                (z[:, None] - mean[None]) ** 2 / log_var.exp()[None]
                + log_var[None]
                + math.log(2 * math.pi)
            )
            n = math.log(x.shape[0])
            joint = torch.logsumexp(pair.sum(2), 1) - n
            each = (torch.logsumexp(pair, 1) - n).sum(1)
            own = pair.diagonal().sum(0)
            prior = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
            terms = (own - joint) + 4 * (joint - each) + (each - prior)
            far = self.kernel(z, z) + self.kernel(noise, noise) - 2 * self.kernel(z, noise)
            return F.mse_loss(self.decode(z), x) + 0.1 * terms.mean() + far

    return Net(), {"x": floats(batch_size, WIDTH), "noise": floats(batch_size, 3).flip(0)}


def importance_weighted(batch_size: int = 8) -> Example:
    """IWAE with doubly reparametrised weights, and a ladder of two levels with a learnt mixture prior."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up1, self.up2 = two_layers(WIDTH, 8), two_layers(4, 6)
            self.down1, self.down2 = two_layers(3, 8), two_layers(4, WIDTH)
            self.centres, self.shares = nn.Parameter(floats(5, 3)), nn.Parameter(torch.zeros(5))

        @staticmethod
        def density(z: Tensor, mean: Tensor, log_sd: Tensor) -> Tensor:
            return (-0.5 * ((z - mean) * torch.exp(-log_sd)).square() - log_sd).sum(-1)

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            m1, s1 = self.up1(x).chunk(2, -1)
            z1 = m1 + s1.exp() * noise[..., :4]
            m2, s2 = self.up2(z1).chunk(2, -1)
            z2 = m2 + s2.exp() * noise[..., 4:]
            p1, q1 = self.down1(z2).chunk(2, -1)
            prior = torch.logsumexp(
                self.density(z2.unsqueeze(-2), self.centres, torch.zeros_like(self.centres))
                + self.shares.log_softmax(0),
                -1,
            )
            fit = -(self.down2(z1) - x).square().sum(-1)
            log_w = fit + self.density(z1, p1, q1.tanh()) + prior
            log_w = (
                log_w
                - self.density(z1, m1.detach(), s1.detach())
                - self.density(z2, m2.detach(), s2.detach())
            )
            share = log_w.detach().softmax(0)
            return -(share.square() * log_w).sum(0).mean()

    return Net(), {"x": floats(batch_size, WIDTH), "noise": floats(3, batch_size, 7)}


def circle_and_proxies(batch_size: int = 8) -> Example:
    """Circle loss, multi-similarity, proxies, a centre per class, uniformity: all pairs of the batch under masks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.proxies = two_layers(WIDTH, 4), nn.Parameter(floats(3, 4))

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            z = F.normalize(self.embed(x), dim=-1)
            near = z @ z.T
            same = label[:, None] == label[None, :]
            self_pair = torch.eye(len(label), dtype=torch.bool)
            alike, unlike = same & ~self_pair, ~same
            low = torch.finfo(x.dtype).min / 2
            ap, an = (1.25 - near.detach()).clamp_min(0), (near.detach() + 0.25).clamp_min(0)
            logit_p, logit_n = -8 * ap * (near - 0.75), 8 * an * (near - 0.25)
            circle = F.softplus(
                torch.logsumexp(logit_p.masked_fill(~alike, low), 1)
                + torch.logsumexp(logit_n.masked_fill(~unlike, low), 1)
            )
            multi = torch.log1p((torch.exp(-2 * (near - 0.5)) * alike).sum(1)) / 2
            multi = multi + torch.log1p((torch.exp(10 * (near - 0.5)) * unlike).sum(1)) / 10
            to_proxy = torch.cdist(z, F.normalize(self.proxies, dim=1)).square()
            proxy = F.cross_entropy(-to_proxy, label)
            uniform = torch.pdist(z).square().mul(-2).exp().mean().log()
            return circle.mean() + multi.mean() + proxy + 0.1 * uniform

    return Net(), {"x": floats(batch_size, WIDTH), "label": torch.arange(batch_size) % 3}


def episodes(batch_size: int = 8) -> Example:
    """Prototypes per episode by class means, a relation net, and a head fitted within forward by ridge steps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.relate = two_layers(WIDTH, 6), two_layers(12, 1)
            self.heat, self.ridge = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))

        def forward(self, support: Tensor, query: Tensor, label: Tensor) -> Tensor:
            s, q = self.embed(support), self.embed(query)  # b, ways, shots, d and b, n, d
            centre = s.mean(2)
            far = torch.cdist(q, centre, p=2.0).square()
            pairs = torch.cat(torch.broadcast_tensors(q[:, :, None], centre[:, None]), -1)
            related = self.relate(pairs).squeeze(-1)
            flat = s.flatten(1, 2)
            target = torch.eye(3, dtype=s.dtype).repeat_interleave(2, 0).expand(s.shape[0], -1, -1)
            gram = flat @ flat.mT + F.softplus(self.ridge) * torch.eye(6, dtype=s.dtype)
            head = flat.mT @ torch.cholesky_solve(target, torch.linalg.cholesky(gram))
            told = torch.stack([-far * self.heat, related, q @ head])
            return F.cross_entropy(told.flatten(0, 2), label.expand(3, -1, -1).flatten())

    return Net(), {
        "support": floats(batch_size, 3, 2, WIDTH),
        "query": floats(batch_size, 4, WIDTH).flip(0),
        "label": tokens(3, batch_size, 4),
    }


def group_relative(batch_size: int = 8) -> Example:
    """GRPO: advantages normalised within groups of answers, ratios clipped per token, a KL to a frozen reference."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.head = (
                nn.Embedding(20, WIDTH),
                two_layers(),
                nn.Linear(WIDTH, 20),
            )
            self.reference = (
                nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20))
                .eval()
                .requires_grad_(False)
            )

        def forward(self, ids: Tensor, reward: Tensor, old: Tensor, mask: Tensor) -> Tensor:
            groups = reward.unflatten(1, (1, 4))
            centred = groups - groups.mean(-1, keepdim=True)
            gain = (centred / (groups.std(-1, keepdim=True) + 1e-4)).flatten(1)[..., None]
            into, out = ids[..., :-1], ids[..., 1:].unsqueeze(-1)
            told = (
                self.head(self.body(self.words(into))).log_softmax(-1).gather(-1, out).squeeze(-1)
            )
            with torch.inference_mode(False), torch.no_grad():
                base = torch.gather(self.reference(into).log_softmax(-1), -1, out).squeeze(-1)
            ratio = torch.exp(told - old)
            policy = torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
            apart = torch.exp(base - told) - (base - told) - 1
            m = mask.to(told.dtype)
            return -((policy - 0.04 * apart) * m).sum() / m.sum().clamp(min=1)

    return Net(), {
        "ids": tokens(20, batch_size, 4, 6),
        "reward": floats(batch_size, 4),
        "old": -floats(batch_size, 4, 5).abs() - 1,
        "mask": floats(batch_size, 4, 5) > -0.8,
    }


# -- pictures ------------------------------------------------------------------------------------------


def bilateral_grid(batch_size: int = 8) -> Example:
    """HDRNet: affine colours sliced out of a low grid by a learnt guide with five-dimensional grid_sample."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 12 * 4, 3, 2, 1)
            )
            self.guide = nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.PReLU(4), nn.Conv2d(4, 1, 1), nn.Tanh()
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, _, h, w = x.shape
            grid = self.low(x).view(b, 12, 4, h // 4, w // 4)
            rows, columns = torch.meshgrid(
                torch.linspace(-1, 1, h, dtype=x.dtype),
                torch.linspace(-1, 1, w, dtype=x.dtype),
                indexing="ij",
            )
            where = torch.stack(
                [columns.expand(b, h, w), rows.expand(b, h, w), self.guide(x).squeeze(1)], -1
            )
            sliced = F.grid_sample(
                grid, where.unsqueeze(1), align_corners=True, padding_mode="border"
            ).squeeze(2)
            affine = sliced.view(b, 3, 4, h, w)
            out = (affine[:, :, :3] * x.unsqueeze(1)).sum(2) + affine[:, :, 3]
            smooth = sum(out.diff(dim=d).abs().mean() for d in (2, 3))
            return F.mse_loss(out, y) + 0.01 * smooth

    return Net(), {"x": floats(batch_size, 3, 8, 8), "y": floats(batch_size, 3, 8, 8).flip(0)}


def soft_raster(batch_size: int = 8) -> Example:
    """Triangles drawn softly: signed distances to edges, sigmoids, depths aggregated by softmax, silhouettes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move, self.colour = two_layers(WIDTH, 12), nn.Parameter(floats(2, 3))
            self.register_buffer("faces", torch.tensor([[0, 1, 2], [1, 3, 2]]))
            self.register_buffer(
                "rest",
                torch.tensor(
                    [[-0.8, -0.8, 1.0], [0.8, -0.8, 1.1], [-0.8, 0.8, 1.2], [0.8, 0.8, 1.3]]
                ),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            corners = self.rest.to(x.dtype) + 0.1 * self.move(x).view(-1, 4, 3)
            face = corners[:, self.faces]  # b, f, 3, 3
            at = torch.cartesian_prod(*[torch.linspace(-1, 1, 5, dtype=x.dtype)] * 2)
            edge = face.roll(-1, 2)[..., :2] - face[..., :2]
            to = at[:, None, None] - face[:, None, ..., :2]  # b, p, f, 3, 2
            cross = edge[:, None, ..., 0] * to[..., 1] - edge[:, None, ..., 1] * to[..., 0]
            inside = torch.sigmoid(cross.amin(-1) / 0.1)
            depth = face[..., 2].mean(-1)[:, None]
            share = inside * torch.exp(-depth / 0.2)
            drawn = (share[..., None] * self.colour.sigmoid()).sum(2) / (
                share.sum(2, keepdim=True) + 1e-3
            )
            outline = 1 - torch.prod(1 - inside, dim=2)
            target = y[..., :3]
            overlap = (outline * y[..., 3]).sum(1) / (
                outline + y[..., 3] - outline * y[..., 3]
            ).sum(1).clamp_min(1e-6)
            return F.mse_loss(drawn, target) + (1 - overlap).mean()

    return Net(), {"x": floats(batch_size, WIDTH), "y": floats(batch_size, 25, 4).sigmoid()}


def shuffled_and_dilated(batch_size: int = 8) -> Example:
    """Channel shuffles, ghosts, octaves, ASPP, coordinates, CBAM, a fast weighed pyramid with blurred pooling."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.conv = (
                nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)),
                nn.Conv2d(2, 1, 3, padding=1),
            )

        def forward(self, x: Tensor) -> Tensor:
            both = self.mlp(F.adaptive_avg_pool2d(x, 1).flatten(1)) + self.mlp(
                F.adaptive_max_pool2d(x, 1).flatten(1)
            )
            x = x * both.sigmoid()[..., None, None]
            return x * self.conv(torch.cat([x.mean(1, True), x.max(1, True)[0]], 1)).sigmoid()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(5, 4, 3, padding=1)
            self.cheap = nn.Conv2d(4, 4, 3, padding=1, groups=4)
            self.grouped = nn.Conv2d(8, 8, 1, groups=2)
            self.aspp = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 3))
            self.high, self.low = nn.Conv2d(12, 8, 1), nn.Conv2d(12, 8, 1)
            self.gate, self.share = Gate(), nn.Parameter(torch.ones(3))
            blur = torch.outer(torch.tensor([1.0, 2, 1]), torch.tensor([1.0, 2, 1])) / 16
            self.register_buffer("blur", blur.expand(8, 1, 3, 3).clone())
            self.head = nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, _, h, w = x.shape
            rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(b, 1, h, w)
            columns = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(b, 1, h, w)
            x = F.hardswish(self.stem(torch.cat([x, rows, columns], 1)))
            x = self.grouped(torch.cat([x, self.cheap(x)], 1))
            x = F.channel_shuffle(x, 2) if not torch.jit.is_scripting() else x
            x = torch.cat([conv(x) for conv in self.aspp], 1)
            high, low = self.high(x), self.low(F.avg_pool2d(x, 2))
            down = F.conv2d(
                F.pad(high, (1, 1, 1, 1), mode="reflect"), self.blur.to(x.dtype), stride=2, groups=8
            )
            share = F.relu(self.share)
            up = F.interpolate(low + down, size=(h, w), mode="nearest")
            out = self.gate((share[0] * high + share[1] * up) / (share[:2].sum() + 1e-4))
            scores = self.head(out * share[2])
            p = scores.softmax(1)
            hot = F.one_hot(y, 3).movedim(-1, 1).to(p.dtype)
            true, wrong, missed = (
                (p * hot).sum((0, 2, 3)),
                (p * (1 - hot)).sum((0, 2, 3)),
                ((1 - p) * hot).sum((0, 2, 3)),
            )
            tversky = 1 - ((true + 1) / (true + 0.3 * wrong + 0.7 * missed + 1)).mean()
            focal = F.cross_entropy(scores, y, reduction="none")
            return tversky**0.75 + ((1 - torch.exp(-focal)) ** 2 * focal).mean()

    return Net(), {"x": floats(batch_size, 3, 8, 8), "y": tokens(3, batch_size, 8, 8)}


def structural_similarity(batch_size: int = 8) -> Example:
    """MS-SSIM under Gaussian windows, features of a frozen net, Gram matrices, a guided filter by box means."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 6, 3, padding=1), nn.ELU(), nn.Conv2d(6, 3, 3, padding=1)
            )
            self.seen = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)
            ).requires_grad_(False)
            g = torch.exp(-(torch.linspace(-1, 1, 3) ** 2))
            self.register_buffer("window", torch.outer(g / g.sum(), g / g.sum()).repeat(3, 1, 1, 1))

        def similarity(self, a: Tensor, b: Tensor) -> Tensor:
            mean = functools.partial(F.conv2d, weight=self.window.to(a.dtype), groups=3)
            ma, mb = mean(a), mean(b)
            va, vb, vab = mean(a * a) - ma**2, mean(b * b) - mb**2, mean(a * b) - ma * mb
            near = (2 * ma * mb + 1e-2) / (ma**2 + mb**2 + 1e-2)
            return (near * (2 * vab + 9e-2) / (va + vb + 9e-2)).mean((1, 2, 3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            box = functools.partial(
                F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False
            )
            slope = (box(x * out) - box(x) * box(out)) / (box(x * x) - box(x) ** 2 + 0.1)
            out = box(slope) * x + box(box(out) - slope * box(x))
            small = [F.avg_pool2d(t, 2) for t in (out, y)]
            alike = (
                self.similarity(out, y).clamp_min(1e-3) ** 0.6
                * self.similarity(*small).clamp_min(1e-3) ** 0.4
            )
            fold, fy = self.seen(out), self.seen(y)
            go, gy = (torch.einsum("bchw,bdhw->bcd", f, f) / f[0].numel() for f in (fold, fy))
            return (1 - alike).mean() + F.mse_loss(fold, fy) + (go - gy).pow(2).sum((1, 2)).mean()

    return Net(), {"x": floats(batch_size, 3, 8, 8), "y": floats(batch_size, 3, 8, 8).roll(1, 3)}


def joints_and_homographies(batch_size: int = 8) -> Example:
    """Soft-argmax of heatmaps, a homography solved from four points, a picture warped by it, affine grids."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heat = nn.Sequential(
                nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1)
            )
            self.affine = nn.Linear(64, 6)
            nn.init.zeros_(self.affine.weight)
            self.affine.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
            self.register_buffer("square", torch.tensor([[-1.0, -1], [1, -1], [1, 1], [-1, 1]]))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, _, h, w = x.shape
            share = self.heat(x).flatten(2).softmax(-1).view(b, 4, h, w)
            line = torch.linspace(-1, 1, w, dtype=x.dtype)
            points = torch.stack([(share.sum(2) * line).sum(-1), (share.sum(3) * line).sum(-1)], -1)
            to = self.square.to(x.dtype) + 0.2 * points
            px, py = self.square.to(x.dtype).unbind(-1)
            one, nil = torch.ones_like(px), torch.zeros_like(px)
            top = torch.stack([px, py, one, nil, nil, nil], -1).expand(b, 4, 6)
            low = torch.stack([nil, nil, nil, px, py, one], -1).expand(b, 4, 6)
            side = torch.stack([px, py], -1)
            rows = torch.cat(
                [
                    torch.cat([top, -to[..., :1] * side], -1),
                    torch.cat([low, -to[..., 1:] * side], -1),
                ],
                1,
            )
            found = torch.linalg.solve(
                rows, torch.cat([to[..., 0], to[..., 1]], 1).unsqueeze(-1)
            ).squeeze(-1)
            matrix = F.pad(found, (0, 1), value=1.0).view(b, 3, 3)
            flat = torch.stack(
                [*torch.meshgrid(line, line, indexing="xy"), torch.ones(h, w, dtype=x.dtype)], -1
            )
            moved = flat.view(1, -1, 3) @ matrix.mT
            grid = (moved[..., :2] / moved[..., 2:].clamp_min(0.1)).view(b, h, w, 2)
            warped = F.grid_sample(
                x, grid, mode="bilinear", padding_mode="reflection", align_corners=False
            )
            theta = self.affine(x.flatten(1)).view(-1, 2, 3)
            turned = F.grid_sample(
                x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False
            )
            return F.mse_loss(warped, y) + F.l1_loss(turned, y) + points.square().mean()

    return Net(), {"x": floats(batch_size, 1, 8, 8), "y": floats(batch_size, 1, 8, 8).roll(1, 2)}
