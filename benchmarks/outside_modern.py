"""Newer idioms, for ``outside.py``: latent attention, windows, scans, experts with room, transforms of
weights, losses over gathered features, results and arguments of many forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, LENGTH = 16, 40, 8


def _text(batch_size: int) -> dict[str, Tensor]:
    return {
        "x": tokens(VOCABULARY, batch_size, LENGTH),
        "y": tokens(VOCABULARY, batch_size, LENGTH),
    }


def _rows(batch_size: int) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, 4).flip(0)}


class Tied(nn.Module):
    """A language model whose head is its embedding, with a soft cap on scores."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x) * math.sqrt(WIDTH)
        for layer in self.layers:
            h = h + layer(self.norm(h))
        scores = 10 * torch.tanh(F.linear(self.norm(h), self.embed.weight) / 10)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def _rotated(h: Tensor, halves: bool = True) -> Tensor:
    size = h.shape[-1] // 2
    angles = torch.arange(h.shape[-2])[:, None] / 100 ** (torch.arange(size) / size)
    cos, sin = angles.cos().to(h), angles.sin().to(h)
    one, two = h.chunk(2, -1) if halves else (h[..., ::2], h[..., 1::2])
    turned = (one * cos - two * sin, one * sin + two * cos)
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


class Latent(nn.Module):
    """Keys and values from a narrow latent, part of the keys rotated and shared by all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, 2 * 12, bias=False), nn.Linear(WIDTH, 6 + 4)
        self.norm, self.up, self.out = nn.RMSNorm(6), nn.Linear(6, 2 * 16), nn.Linear(16, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, turned = self.q(h).unflatten(-1, (2, 12)).transpose(1, 2).split([8, 4], -1)
        latent, key = self.down(h).split([6, 4], -1)
        k, v = self.up(self.norm(latent)).unflatten(-1, (2, 16)).transpose(1, 2).chunk(2, -1)
        shared = _rotated(key.unsqueeze(1)).expand(-1, 2, -1, -1)
        q, k = torch.cat([q, _rotated(turned)], -1), torch.cat([k, shared], -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Windowed(nn.Module):
    """Grouped queries with normed heads, a sliding window, sinks, and a gate on what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.RMSNorm(4), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, h: Tensor) -> Tensor:
        b, s, _ = h.shape
        q, k, v = self.qkv(h).split([16, 8, 8], -1)
        q, k, v = (one.view(b, s, -1, 4).transpose(1, 2) for one in (q, k, v))
        q, k = _rotated(self.norm(q), False), _rotated(self.norm(k), False)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        at = torch.arange(s)
        seen = (at[:, None] >= at) & (at[:, None] - at < 4)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~seen, -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, s, -1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        mixed = (shares @ v).transpose(1, 2).reshape(b, s, -1)
        return self.out(mixed * torch.sigmoid(self.gate(h)))


def latent_attention(batch_size: int = 4) -> Example:
    return Tied(Latent(), Latent()), _text(batch_size)


def windowed_attention(batch_size: int = 4) -> Example:
    return Tied(Windowed(), nn.Linear(WIDTH, WIDTH)), _text(batch_size)


class Experts(nn.Module):
    """Weights of all experts in one tensor, a shared expert beside them, in a loop over those hit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, WIDTH)
        scores = self.gate(flat).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        with torch.no_grad():
            mask = F.one_hot(chosen, 4).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        for index in hit:
            place, row = torch.where(mask[index[0]])
            gate, up = F.linear(flat[row], self.up[index[0]]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[index[0]]) * weights[row, place, None]
            out.index_add_(0, row, made)
        return out.view_as(h) + self.shared(h)


class Sorted(Experts):
    """The same by a sort, and pieces as long as Python is told."""

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        order = chosen.view(-1).argsort()
        counts = chosen.view(-1).bincount(minlength=4).tolist()
        made = [
            F.linear(F.silu(F.linear(piece, up[:WIDTH])), down)
            for piece, up, down in zip(
                flat[order // 2].split(counts), self.up, self.down, strict=True
            )
        ]
        back = torch.empty(len(order), WIDTH, dtype=h.dtype).index_copy(0, order, torch.cat(made))
        out = (back.view(*chosen.shape, WIDTH) * weights.unsqueeze(-1)).sum(1)
        return out.view_as(h) + self.shared(h)


class Roomy(Experts):
    """Experts with room for so many tokens (a mixture with capacity), as products of one-hot masks."""

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        mask = F.one_hot(chosen, 4).to(h.dtype)
        place = (mask.cumsum(0) - 1) * mask
        mask = mask * (place < len(flat) // 2)
        place = F.one_hot((place * mask).sum(-1).long(), len(flat) // 2).to(h.dtype)
        sent = torch.einsum("te,tc->tec", mask, place)
        inside = torch.einsum("tec,td->ecd", sent, flat)
        made = torch.einsum("ecd,efd->ecf", inside, self.down)
        out = torch.einsum("tec,ecf->tf", sent * weight[:, None, None], made)
        return out.view_as(h) + self.shared(h)


def experts_of_one_tensor(batch_size: int = 4) -> Example:
    return Tied(Experts(), Experts()), _text(batch_size)


def experts_sorted(batch_size: int = 4) -> Example:
    return Tied(Sorted(), Windowed()), _text(batch_size)


def experts_with_room(batch_size: int = 4) -> Example:
    return Tied(Roomy(), Windowed()), _text(batch_size)


class StateSpace(nn.Module):
    """Mamba-2's scan, in chunks, as one masked product."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH + 8 + 2), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.decay, self.skip = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

    def forward(self, h: Tensor) -> Tensor:
        b, s, _ = h.shape
        z, x, keys, step = self.into(h).split([WIDTH, WIDTH, 8, 2], -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :s]).transpose(1, 2).reshape(b, s, 2, 8)
        write, read = keys.chunk(2, -1)
        step = F.softplus(step)
        along = (-self.decay.exp() * step).cumsum(1)
        lag = along.unsqueeze(2) - along.unsqueeze(1)
        causal = torch.ones(s, s, dtype=torch.bool).tril()[None, :, :, None]
        mixing = (
            lag.masked_fill(~causal, -torch.inf).exp() * (read @ write.transpose(1, 2))[..., None]
        )
        y = torch.einsum("btsh,bsh,bshp->bthp", mixing, step, x) + x * self.skip[:, None]
        return self.out(y.reshape(b, s, -1) * F.silu(z))


def state_space(batch_size: int = 4) -> Example:
    return Tied(StateSpace(), StateSpace()), _text(batch_size)


class Contrast(nn.Module):
    """Two towers, features gathered from all samples, a learned and clamped temperature, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, WIDTH), nn.Linear(4, WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, two = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = one @ two.t() * self.scale.clamp(max=4.6).exp()
        target = torch.arange(len(x))
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2
        return {"loss": loss, "similarity": scores.diagonal().mean()}


def contrastive(batch_size: int = 4) -> Example:
    return Contrast(), _rows(batch_size)


class Adapted(nn.Module):
    """A low-rank update as a parametrization of a frozen weight, beside spectral and weight norm."""

    def __init__(self) -> None:
        super().__init__()

        class LowRank(nn.Module):
            def __init__(self, rows: int, columns: int) -> None:
                super().__init__()
                self.a = nn.Parameter(torch.randn(2, columns) * 0.1)
                self.b = nn.Parameter(torch.zeros(rows, 2))

            def forward(self, weight: Tensor) -> Tensor:
                return weight + self.b @ self.a

        self.first = nn.Linear(8, WIDTH)
        parametrize.register_parametrization(self.first, "weight", LowRank(WIDTH, 8))
        self.first.parametrizations.weight.original.requires_grad_(False)
        self.second = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.third = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, *, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.second(F.gelu(self.first(x))))
        return F.smooth_l1_loss(self.last(self.third(h)), y)


def adapted(batch_size: int = 4) -> Example:
    return Adapted(), _rows(batch_size)


def lipschitz(batch_size: int = 4) -> Example:
    """A critic with spectral norm, of real and generated samples in one loss."""

    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
            self.critic = nn.Sequential(
                parametrizations.spectral_norm(nn.Linear(4, WIDTH)), nn.LeakyReLU(0.2),
                parametrizations.spectral_norm(nn.Linear(WIDTH, 1)),
            )  # fmt: skip

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            fake = self.maker(x)
            critic = (
                F.relu(1 - self.critic(y)).mean() + F.relu(1 + self.critic(fake.detach())).mean()
            )
            return critic - self.critic(fake).mean()

    return Game(), _rows(batch_size)


class Clipped(torch.autograd.Function):
    """Rounds forward, and passes gradients where nothing was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x / scale)
        return (x / scale).round().clamp(-7, 7) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (q,) = ctx.saved_tensors
        return grad * (q.abs() <= 7), None


def quantised_channels(batch_size: int = 4) -> Example:
    """Training aware of four bits, a scale for each row of the weights and for each token."""

    class Quantised(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
            token = h.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 7
            return F.linear(Clipped.apply(h, token), Clipped.apply(self.weight, scale), self.bias)

    return Tied(Quantised(WIDTH, WIDTH), Windowed()), _text(batch_size)


@dataclass
class Answer:
    loss: Tensor
    scores: list[Tensor]
    parts: dict[str, Tensor]


class Many(nn.Module):
    """Many heads, losses weighed by learned uncertainty, a dataclass out and a list in."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 4) for name in ("a", "b", "c")})
        self.doubt = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, inputs: list[Tensor], y: Tensor) -> Answer:
        h = checkpoint(self.trunk, inputs[0] + inputs[1], use_reentrant=False)
        scores = [head(h) for head in self.heads.values()]
        parts = {
            name: F.mse_loss(score, y) * torch.exp(-self.doubt[name]) + self.doubt[name]
            for name, score in zip(self.heads, scores, strict=True)
        }
        return Answer(torch.stack(list(parts.values())).sum(), scores, parts)


def many_heads(batch_size: int = 4) -> Example:
    x = floats(batch_size, 8)
    return Many(), {"inputs": [x, x.flip(0)], "y": floats(batch_size, 4)}


class Averaged(nn.Module):
    """A teacher that follows by a moving average kept in buffers, and a centre of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, WIDTH)
        self.register_buffer("weight", self.student.weight.detach().clone())
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.lerp_(self.student.weight, 0.1)
            target = F.linear(x.flip(-1), self.weight)
            goal = ((target - self.centre) / 0.5).softmax(-1)
            self.centre.mul_(0.9).add_(target.mean(0), alpha=0.1)
        return -(goal * self.student(x).log_softmax(-1)).sum(-1).mean() + 0 * y.sum()


def averaged_teacher(batch_size: int = 4) -> Example:
    return Averaged(), _rows(batch_size)


class Neighbours(nn.Module):
    """Edges to the nearest points, found anew in feature space (DGCNN), and a vote of all points."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.ModuleList([nn.Linear(6, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, points: Tensor, y: Tensor) -> Tensor:
        h = points
        for layer in self.edges:
            near = torch.cdist(h.detach(), h.detach()).topk(3, largest=False).indices
            index = near.flatten(1).unsqueeze(-1).expand(-1, -1, h.shape[-1])
            other = h.gather(1, index).view(*near.shape, -1)
            h = F.leaky_relu(
                layer(torch.cat([other - h.unsqueeze(2), h.unsqueeze(2).expand_as(other)], -1))
            )
            h = h.amax(2)
        return F.mse_loss(self.last(h.mean(1)), y)


def neighbours(batch_size: int = 4) -> Example:
    return Neighbours(), {"points": floats(batch_size, 10, 3), "y": floats(batch_size, 4)}


class Spectral(nn.Module):
    """Complex weights on the lowest frequencies of an image, and a short-time spectrum loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.last = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 1, 1)
        self.weight = nn.Parameter(torch.randn(6, 6, 3, 3, 2) * 0.1)

    def forward(self, image: Tensor, y: Tensor) -> Tensor:
        h = self.lift(image)
        low = torch.fft.rfft2(h, norm="ortho")
        kept = torch.zeros_like(low)
        weight = torch.view_as_complex(self.weight).to(low.dtype)
        kept[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", low[:, :, :3, :3], weight)
        made = self.last(F.gelu(torch.fft.irfft2(kept, s=h.shape[-2:], norm="ortho") + h))
        spectra = [torch.fft.rfft(one.flatten(1)).abs() for one in (made, y)]
        return F.mse_loss(made, y) + (spectra[0] - spectra[1]).abs().mean()


def spectral(batch_size: int = 4) -> Example:
    return Spectral(), {"image": floats(batch_size, 1, 8, 8), "y": floats(batch_size, 1, 8, 8)}


class Vocoder(nn.Module):
    """Weight-normed transposed convolutions, snake activations, residual dilations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(4, 8, 7, padding=3))
        self.up = parametrizations.weight_norm(nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1))
        self.around = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(4, 4, 3, dilation=d, padding=d)) for d in (1, 3)
        )
        self.alpha, self.last = nn.Parameter(torch.ones(1, 8, 1)), nn.Conv1d(4, 1, 7, padding=3)

    def forward(self, mel: Tensor, y: Tensor) -> Tensor:
        h = self.first(mel)
        h = self.up(h + torch.sin(self.alpha * h).square() / (self.alpha + 1e-9))
        for layer in self.around:
            h = h + layer(F.leaky_relu(h, 0.1))
        return F.l1_loss(torch.tanh(self.last(h)), y)


def snake_vocoder(batch_size: int = 4) -> Example:
    return Vocoder(), {"mel": floats(batch_size, 4, 8), "y": floats(batch_size, 1, 16)}


class Ranked(nn.Module):
    """Retrieval: a memory of learned keys, the best few read, and a margin to the hardest negative."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.keys = nn.Parameter(torch.randn(20, WIDTH) * 0.3)
        self.values = nn.Embedding(20, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.query(x) @ self.keys.t()
        best, place = scores.topk(4, -1)
        read = (best.softmax(-1).unsqueeze(-1) * self.values(place)).sum(1)
        hardest = scores.masked_fill(scores >= best[:, :1], -torch.inf).amax(-1)
        return F.mse_loss(self.last(read), y) + F.relu(0.2 + hardest - best[:, 0]).mean()


def retrieval(batch_size: int = 4) -> Example:
    return Ranked(), _rows(batch_size)


class Gated(nn.Module):
    """RWKV-7's state: decay and a rank-one correction, step by step, with tokens shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(4, WIDTH))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        b, s, _ = h.shape
        before = F.pad(h, (0, 0, 1, -1))
        r, w, k, v = (
            part(torch.lerp(h, before, mix)).view(b, s, 2, 8)
            for part, mix in zip(self.parts, self.mix, strict=True)
        )
        w, k = torch.exp(-torch.exp(w)), F.normalize(k, dim=-1)
        state, outs = h.new_zeros(b, 2, 8, 8), []
        for t in range(s):
            old = torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            state = state * w[:, t, :, None] + (v[:, t] - old)[..., None] * k[:, t, :, None]
            outs.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
        y = torch.stack(outs, 1).reshape(b * s, WIDTH)
        return self.out(self.norm(y).view(b, s, WIDTH))


def gated_delta(batch_size: int = 4) -> Example:
    return Tied(Gated(), nn.Linear(WIDTH, WIDTH)), _text(batch_size)


class Crossed(nn.Module):
    """A recommender: hashed features in one table, crosses of low rank, and a ragged history."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.history = nn.Embedding(50, 4), nn.EmbeddingBag(50, 4, mode="mean")
        self.u, self.v = nn.Linear(24, 3, bias=False), nn.Linear(3, 24)
        self.last = nn.Linear(24, 1)

    def forward(self, ids: Tensor, bag: Tensor, y: Tensor) -> Tensor:
        offsets = torch.tensor([0, 11, 23, 31])
        x = torch.cat(
            [
                self.table((ids + offsets) % 50).flatten(1),
                self.history(bag),
                self.history(bag.flip(1)),
            ],
            1,
        )
        x = x + x * self.v(self.u(x))
        return F.binary_cross_entropy_with_logits(self.last(x).squeeze(-1), y)


def crossed_features(batch_size: int = 4) -> Example:
    ids, bag = tokens(50, batch_size, 4), tokens(50, batch_size, 5)
    return Crossed(), {"ids": ids, "bag": bag, "y": floats(batch_size, 1)[:, 0].sigmoid()}
