"""More models as others write them, for ``outside.py``: routers, gates, scans, adapters, hooks, densities."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, LONG, WORDS = 16, 8, 20


def _rows(batch_size: int, outputs: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, outputs).flip(0)}


def _tokens(batch_size: int) -> dict[str, Tensor]:
    return {"x": tokens(WORDS, batch_size, LONG), "y": tokens(WORDS, batch_size, LONG).roll(1, 1)}


def _images(batch_size: int) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 3, 16, 16), "y": floats(batch_size, 3, 16, 16).flip(0)}


class Language(nn.Module):
    """Words in, words out, with layers ``b l w`` between."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Regression(nn.Module):
    def __init__(self, body: nn.Module, inputs: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.body, self.last = (
            nn.Linear(inputs, WIDTH), body, nn.Linear(WIDTH, outputs),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.body(self.first(x))), y)


# -- experts ------------------------------------------------------------------------------------------


class Hit(nn.Module):
    """Only the experts that were hit, as older Mixtral code loops over them."""

    def __init__(self, experts: int = 4, top: int = 2, style: str = "hit") -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
            for _ in range(experts)
        )
        self.top, self.style = top, style

    def forward(self, h: Tensor) -> Tensor:
        flat = h.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        if self.style == "hit":
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
            for index in hit:
                place, token = torch.where(mask[index].squeeze(0))
                found = self.experts[index](flat[None, token].reshape(-1, WIDTH))
                out.index_add_(0, token, found * weights[token, place, None])
        elif self.style == "all":
            for index, expert in enumerate(self.experts):
                place, token = torch.where(mask[index])
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        elif self.style == "masked":
            for index, expert in enumerate(self.experts):
                rows, place = torch.where(chosen == index)
                out[rows] += weights[rows, place, None] * expert(flat[rows])
        else:  # a mask of rows, one choice each
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).any(-1)
                if rows.any():
                    share = (weights * (chosen == index)).sum(-1, keepdim=True)
                    out[rows] = out[rows] + share[rows] * expert(flat[rows])
        return out.view_as(h)


def experts_hit(batch_size: int = 4) -> Example:
    return Language(Hit(), Hit()), _tokens(batch_size)


def experts_all(batch_size: int = 4) -> Example:
    return Language(Hit(style="all"), nn.Linear(WIDTH, WIDTH)), _tokens(batch_size)


def experts_masked(batch_size: int = 4) -> Example:
    return Language(Hit(style="masked"), nn.Linear(WIDTH, WIDTH)), _tokens(batch_size)


def experts_rows(batch_size: int = 4) -> Example:
    return Language(Hit(style="rows"), nn.Linear(WIDTH, WIDTH)), _tokens(batch_size)


def soft_experts(batch_size: int = 4) -> Example:
    """Every expert sees slots that mix all tokens (Soft MoE)."""

    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slots = nn.Parameter(torch.randn(WIDTH, 4, 2) * 0.1)
            self.w1 = nn.Parameter(torch.randn(4, WIDTH, 24) * 0.1)
            self.w2 = nn.Parameter(torch.randn(4, 24, WIDTH) * 0.1)

        def forward(self, h: Tensor) -> Tensor:
            scores = torch.einsum("bmd,dnp->bmnp", h, self.slots)
            inside = torch.einsum("bmd,bmnp->bnpd", h, scores.softmax(1))
            made = torch.einsum(
                "bnph,nhd->bnpd", F.gelu(torch.einsum("bnpd,ndh->bnph", inside, self.w1)), self.w2
            )
            return torch.einsum(
                "bnpd,bmnp->bmd", made, scores.flatten(2).softmax(-1).view_as(scores)
            )

    return Language(Soft()), _tokens(batch_size)


# -- sequences ----------------------------------------------------------------------------------------


def selective_scan(batch_size: int = 4) -> Example:
    """Mamba's layer with its scan written step by step."""

    class Mamba(nn.Module):
        def __init__(self, state: int = 4) -> None:
            super().__init__()
            inner = 2 * WIDTH
            self.into, self.out = (
                nn.Linear(WIDTH, 2 * inner, bias=False),
                nn.Linear(inner, WIDTH, bias=False),
            )
            self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
            self.x_proj, self.dt = nn.Linear(inner, 2 * state + 2, bias=False), nn.Linear(2, inner)
            self.log_a = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
            self.skip, self.state = nn.Parameter(torch.ones(inner)), state

        def forward(self, h: Tensor) -> Tensor:
            x, gate = self.into(h).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., : h.shape[1]].transpose(1, 2))
            dt, b, c = self.x_proj(x).split([2, self.state, self.state], -1)
            dt = F.softplus(self.dt(dt))
            decay = torch.exp(dt[..., None] * -self.log_a.exp())
            push = dt[..., None] * b[:, :, None] * x[..., None]
            held, seen = x.new_zeros(x.shape[0], x.shape[2], self.state), []
            for step in range(x.shape[1]):
                held = decay[:, step] * held + push[:, step]
                seen.append((held * c[:, step, None]).sum(-1))
            return self.out((torch.stack(seen, 1) + x * self.skip) * F.silu(gate))

    return Language(Mamba()), _tokens(batch_size)


def linear_attention_chunks(batch_size: int = 4) -> Example:
    """Retention in chunks, with a decay mask made of ``arange``."""

    class Retention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.GroupNorm(2, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            b, n, w = h.shape
            q, k, v = self.qkv(h).view(b, n, 3, 2, w // 2).permute(2, 0, 3, 1, 4).unbind(0)
            at = torch.arange(n, device=h.device)
            decay = (0.9 ** (at[:, None] - at[None]).to(h.dtype)).tril()
            out = ((q @ k.transpose(-1, -2)) * decay) @ v
            return self.norm(out.transpose(1, 2).reshape(b * n, w)).view(b, n, w)

    return Language(Retention(), Retention()), _tokens(batch_size)


def rwkv_mix(batch_size: int = 4) -> Example:
    """Time mixing with a shift by one and a running maximum."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.ZeroPad2d((0, 0, 1, -1))
            self.mu = nn.Parameter(torch.rand(3, WIDTH))
            self.key, self.value, self.gate = (
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
            )
            self.decay, self.first = (
                nn.Parameter(torch.rand(WIDTH)),
                nn.Parameter(torch.rand(WIDTH)),
            )

        def forward(self, h: Tensor) -> Tensor:
            before = self.shift(h)
            k, v, r = (
                layer(torch.lerp(before, h, mu))
                for layer, mu in zip((self.key, self.value, self.gate), self.mu, strict=True)
            )
            num, den = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
            top, made = torch.full_like(num, -1e38), torch.empty_like(h)
            for t in range(h.shape[1]):
                new = torch.maximum(top, self.first + k[:, t])
                one, two = torch.exp(top - new), torch.exp(self.first + k[:, t] - new)
                made[:, t] = (one * num + two * v[:, t]) / (one * den + two)
                new = torch.maximum(top - self.decay.exp(), k[:, t])
                one, two = torch.exp(top - self.decay.exp() - new), torch.exp(k[:, t] - new)
                num, den, top = one * num + two * v[:, t], one * den + two, new
            return torch.sigmoid(r) * made

    return Language(Mix()), _tokens(batch_size)


def hyena(batch_size: int = 4) -> Example:
    """Long convolutions by FFT of filters that a small network makes of positions."""

    class Hyena(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.filter = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, WIDTH))
            t = torch.linspace(0, 1, LONG)[:, None]
            self.register_buffer("places", torch.cat([t, torch.sin(6 * t), torch.cos(6 * t)], -1))

        def forward(self, h: Tensor) -> Tensor:
            one, two, v = self.into(h).chunk(3, -1)
            n = 2 * h.shape[1]
            kernel = torch.fft.rfft(self.filter(self.places).t(), n=n)
            seen = torch.fft.rfft((one * v).transpose(1, 2), n=n)
            mixed = torch.fft.irfft(seen * kernel, n=n)[..., : h.shape[1]].transpose(1, 2)
            return self.out(mixed * two)

    return Language(Hyena()), _tokens(batch_size)


def rotary_grouped(batch_size: int = 4) -> Example:
    """Grouped queries, rotary places of complex numbers, and key norms."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.o = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, 8),
                nn.Linear(WIDTH, WIDTH),
            )
            self.norm = nn.RMSNorm(4)
            angles = torch.outer(torch.arange(LONG), torch.tensor([1.0, 0.1]))
            self.register_buffer(
                "turns", torch.polar(torch.ones_like(angles), angles), persistent=False
            )

        def turn(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], 2, 2))
            return torch.view_as_real(pairs * self.turns[:, None]).flatten(-2).type_as(x)

        def forward(self, h: Tensor) -> Tensor:
            b, n, _ = h.shape
            q, (k, v) = self.q(h).view(b, n, 4, 4), self.kv(h).view(b, n, 2, 1, 4).unbind(2)
            q, k = self.turn(q), self.turn(self.norm(k))
            k, v = (one.repeat_interleave(4, dim=2).transpose(1, 2) for one in (k, v))
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
            return self.o(out.transpose(1, 2).flatten(2))

    return Language(Attention()), _tokens(batch_size)


def conditional_field(batch_size: int = 4) -> Example:
    """A linear-chain conditional random field on top of an LSTM."""

    class Field(nn.Module):
        def __init__(self, tags: int = 5) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, tags)
            self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
            self.moves, self.start = (
                nn.Parameter(torch.randn(tags, tags)),
                nn.Parameter(torch.randn(tags)),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores, mask = self.head(self.lstm(self.words(x))[0]), x.ne(0)
            path = self.start[y[:, 0]] + scores[:, 0].gather(1, y[:, :1]).squeeze(1)
            alpha = self.start + scores[:, 0]
            for t in range(1, x.shape[1]):
                step = (
                    scores[:, t].gather(1, y[:, t : t + 1]).squeeze(1)
                    + self.moves[y[:, t - 1], y[:, t]]
                )
                path = path + step * mask[:, t]
                new = torch.logsumexp(alpha[:, :, None] + self.moves + scores[:, t, None], 1)
                alpha = torch.where(mask[:, t, None], new, alpha)
            return (alpha.logsumexp(-1) - path).mean()

    return Field(), {"x": tokens(WORDS, batch_size, LONG), "y": tokens(5, batch_size, LONG)}


def transducer_free_ctc(batch_size: int = 4) -> Example:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(8, WIDTH, 3, 2, 1), nn.Linear(WIDTH, 6)

        def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
            scores = self.head(F.relu(self.conv(x)).transpose(1, 2)).log_softmax(-1).transpose(0, 1)
            given = torch.full((x.shape[0],), scores.shape[0], dtype=torch.long)
            return F.ctc_loss(scores, y, given, lengths, blank=0, zero_infinity=True)

    y = tokens(5, batch_size, 4) + 1
    return Speech(), {
        "x": floats(batch_size, 8, 24),
        "y": y,
        "lengths": torch.arange(batch_size) % 3 + 2,
    }


# -- images and densities -------------------------------------------------------------------------------


def diffusion_unet(batch_size: int = 4) -> Example:
    """Noise predicted by a U-Net with attention, group norms, and a time embedding."""

    class Block(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(1, a), nn.GroupNorm(4, b)
            self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
            self.time, self.skip = nn.Linear(WIDTH, 2 * b), nn.Conv2d(a, b, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            h = self.conv1(F.silu(self.norm1(x)))
            scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
            return self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift)) + self.skip(x)

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            self.down, self.mid, self.up = Block(3, 8), Block(8, 8), Block(16, 8)
            self.attention, self.norm = (
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.GroupNorm(2, 8),
            )
            self.out = nn.Conv2d(8, 3, 3, padding=1)
            self.register_buffer("alphas", torch.linspace(0.99, 0.1, 50).cumprod(0))

        def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
            a = self.alphas[t][:, None, None, None]
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            turns = t[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
            time = self.time(torch.cat([turns.sin(), turns.cos()], -1).to(x.dtype))
            one = self.down(noisy, time)
            low = self.mid(F.avg_pool2d(one, 2), time)
            flat = self.norm(low).flatten(2).transpose(1, 2)
            low = low + self.attention(flat, flat, flat)[0].transpose(1, 2).view_as(low)
            high = self.up(
                torch.cat([F.interpolate(low, scale_factor=2.0, mode="nearest"), one], 1), time
            )
            return F.mse_loss(self.out(high), noise)

    rows = _images(batch_size)
    return Unet(), {"x": rows["x"], "t": tokens(50, batch_size), "noise": rows["y"]}


def flow_matching(batch_size: int = 4) -> Example:
    """Velocities of straight ways between noise and data, drawn in forward, with channels last."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(4, 8, 3, padding=1), nn.Mish(), nn.Conv2d(8, 3, 3, padding=1)
            )

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            x = x.contiguous(memory_format=torch.channels_last)
            t = t.view(-1, 1, 1, 1)
            moved = torch.lerp(y, x, t)
            return (
                (self.net(torch.cat([moved, t.expand_as(x[:, :1])], 1)) - (x - y)).square().mean()
            )

    return Flow().to(memory_format=torch.channels_last), {
        **_images(batch_size),
        "t": torch.rand(batch_size),
    }


def quantised_codes(batch_size: int = 4) -> Example:
    """VQ-VAE with a straight gradient, a commitment loss and perplexity."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.inner, self.outer = (
                nn.Embedding(12, 8),
                nn.Conv2d(3, 8, 4, 2, 1),
                nn.ConvTranspose2d(8, 3, 4, 2, 1),
            )

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            z = self.inner(x).permute(0, 2, 3, 1).contiguous()
            flat = z.view(-1, 8)
            far = (
                flat.pow(2).sum(1, keepdim=True)
                + self.codes.weight.pow(2).sum(1)
                - 2 * flat @ self.codes.weight.t()
            )
            chosen = far.argmin(1)
            found = self.codes(chosen).view(z.shape)
            loss = F.mse_loss(found, z.detach()) + 0.25 * F.mse_loss(found.detach(), z)
            found = z + (found - z).detach()
            shares = F.one_hot(chosen, 12).to(x.dtype).mean(0)
            perplexity = torch.exp(-(shares * (shares + 1e-10).log()).sum())
            return {
                "loss": loss + F.mse_loss(self.outer(found.permute(0, 3, 1, 2)), y),
                "perplexity": perplexity,
            }

    return Codes(), _images(batch_size)


def finite_scalars(batch_size: int = 4) -> Example:
    """Finite scalar quantisation: rounding under ``no_grad``, written back into what was computed."""

    class Scalars(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            bounded = torch.tanh(h) * 3
            with torch.no_grad():
                rounded = bounded.round()
            bounded.data.copy_(rounded)
            return bounded / 3

    return Regression(Scalars()), _rows(batch_size)


def wasserstein(batch_size: int = 4) -> Example:
    """A critic with spectral norm and hinge losses, beside its generator with frozen critic weights."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 4))
            self.judge = nn.Sequential(
                parametrizations.spectral_norm(nn.Linear(4, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, 1)
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            fake = self.make(x)
            critic = F.relu(1 - self.judge(y)).mean() + F.relu(1 + self.judge(fake.detach())).mean()
            frozen = {name: one.detach() for name, one in self.judge.named_parameters()}
            fooled = -torch.func.functional_call(self.judge, frozen, (fake,)).mean()
            return critic + fooled

    return Pair(), _rows(batch_size)


def detection_head(batch_size: int = 4) -> Example:
    """Focal loss and box regression over anchors made of a grid, with targets by overlap."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
            )
            self.classes, self.boxes = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
            grid = torch.stack(
                torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1
            ).view(-1, 2)
            self.register_buffer("anchors", torch.cat([grid / 4, (grid + 2) / 4], -1))

        def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
            h = self.body(x)
            scores = self.classes(h).flatten(2).transpose(1, 2)
            moves = self.boxes(h).flatten(2).transpose(1, 2)
            low = torch.maximum(self.anchors[None, :, None, :2], boxes[:, None, :, :2])
            high = torch.minimum(self.anchors[None, :, None, 2:], boxes[:, None, :, 2:])
            both = (high - low).clamp(min=0).prod(-1)
            size = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None] + 0.25 - both
            best, which = (both / size).max(-1)
            good = best > 0.3
            wanted = torch.where(good[..., None], F.one_hot(labels.gather(1, which), 3), 0).to(
                x.dtype
            )
            p, ce = (
                scores.sigmoid(),
                F.binary_cross_entropy_with_logits(scores, wanted, reduction="none"),
            )
            focal = (ce * (1 - (p * wanted + (1 - p) * (1 - wanted))) ** 2).sum()
            near = boxes.gather(1, which[..., None].expand(-1, -1, 4)) - self.anchors
            fit = (F.smooth_l1_loss(moves, near, reduction="none").sum(-1) * good).sum()
            return {"loss": (focal + fit) / good.sum().clamp(min=1), "focal": focal}

    boxes = torch.rand(batch_size, 3, 4).sort(-1).values[..., [0, 1, 2, 3]]
    return Head(), {
        "x": floats(batch_size, 3, 16, 16),
        "boxes": boxes,
        "labels": tokens(3, batch_size, 3),
    }


def mixture_logistics(batch_size: int = 4) -> Example:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3 * 4 * 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            share, mean, log = self.net(x).view(-1, 4, 3, 3).unbind(-1)
            mixture = torch.distributions.Categorical(logits=share)
            parts = torch.distributions.Normal(mean, log.clamp(-3, 3).exp())
            return -torch.distributions.MixtureSameFamily(mixture, parts).log_prob(y).mean()

    return Mixture(), _rows(batch_size)


def siren(batch_size: int = 4) -> Example:
    class Sine(nn.Module):
        def __init__(self, inputs: int, outputs: int, scale: float = 30.0) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(inputs, outputs), scale
            with torch.no_grad():
                self.linear.weight.uniform_(
                    -math.sqrt(6 / inputs) / scale, math.sqrt(6 / inputs) / scale
                )

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.scale * self.linear(x))

    return Regression(nn.Sequential(Sine(WIDTH, WIDTH), Sine(WIDTH, WIDTH))), _rows(batch_size)


# -- fixed points, adapters, quantisers, hooks -------------------------------------------------------------


def equilibrium(batch_size: int = 4) -> Example:
    """A fixed point found without gradients, and one step with them."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def step(self, z: Tensor, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(0.5 * self.w(z) + x))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(6):
                    z = self.step(z, x)
            return self.step(z, x)

    return Regression(Fixed()), _rows(batch_size)


def equilibrium_exact(batch_size: int = 4) -> Example:
    """A fixed point whose gradient is solved for in a hook."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(6):
                    z = torch.tanh(0.3 * self.w(z) + x)
            z = torch.tanh(0.3 * self.w(z) + x)
            if self.training:
                z0 = z.clone().detach().requires_grad_()
                f0 = torch.tanh(0.3 * self.w(z0) + x)

                def solve(gradient: Tensor) -> Tensor:
                    found = gradient
                    for _ in range(6):
                        found = torch.autograd.grad(f0, z0, found, retain_graph=True)[0] + gradient
                    return found

                z.register_hook(solve)
            return z

    return Regression(Fixed()), _rows(batch_size)


def low_rank(batch_size: int = 4) -> Example:
    """Adapters beside frozen weights, with tied embeddings."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.scale = base.requires_grad_(False), 2.0
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            self.drop = nn.Dropout(0.1)

        def forward(self, h: Tensor) -> Tensor:
            return self.base(h) + self.b(self.a(self.drop(h))) * self.scale

    model = Language(Adapted(nn.Linear(WIDTH, WIDTH)), nn.GELU(), Adapted(nn.Linear(WIDTH, WIDTH)))
    model.head.weight = model.words.weight
    return model, _tokens(batch_size)


def fake_quantised(batch_size: int = 4) -> Example:
    """Torch's own observers and fake quantisation, per channel and per tensor."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("zero", torch.zeros(WIDTH, dtype=torch.int32))

        def forward(self, h: Tensor) -> Tensor:
            scale = self.linear.weight.detach().abs().amax(1).float() / 127
            weight = torch.fake_quantize_per_channel_affine(
                self.linear.weight.float(), scale, self.zero, 0, -128, 127
            )
            seen = torch.fake_quantize_per_tensor_affine(h.float(), 0.05, 0, -128, 127)
            return F.linear(seen, weight, self.linear.bias.float()).to(h.dtype)

    return Regression(Quantised()), _rows(batch_size)


def weight_standard(batch_size: int = 4) -> Example:
    """Weights normed anew in each forward, and by parametrizations."""
    body = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"),
    )
    return Regression(body), _rows(batch_size)


def features_by_hooks(batch_size: int = 4) -> Example:
    """Features that hooks keep in a list of the model, read by its own forward."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
            )
            self.kept: list[Tensor] = []
            for layer in (self.net[1], self.net[3]):
                layer.register_forward_hook(lambda _m, _i, result: self.kept.append(result))

        def forward(self, h: Tensor) -> Tensor:
            self.kept.clear()
            self.net(h)
            return torch.stack(self.kept).sum(0)

    return Regression(Features()), _rows(batch_size)


def collected_losses(batch_size: int = 4) -> Example:
    """Layers leave a loss of their own in an attribute, which the model adds up."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            gates = self.linear(h).softmax(-1)
            self.extra = gates.mean(0).pow(2).sum()
            return h * gates

    class Sums(Regression):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().forward(x, y)
            return loss + 0.01 * sum(one.extra for one in self.modules() if isinstance(one, Gate))

    return Sums(nn.Sequential(Gate(), nn.Tanh(), Gate())), _rows(batch_size)


def stochastic_depth(batch_size: int = 4) -> Example:
    class Drop(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate, self.inner = rate, nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            keep = 1 - self.rate
            mask = h.new_empty(h.shape[0], *[1] * (h.dim() - 1)).bernoulli_(keep) / keep
            return h + (self.inner(h) * mask if self.rate else self.inner(h))

    return Regression(nn.Sequential(Drop(0.0), Drop(0.0))), _rows(batch_size)


def recomputed_stack(batch_size: int = 4) -> Example:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, norm_first=True)
                for _ in range(2)
            )

        def forward(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = checkpoint(partial(layer, is_causal=False), h, use_reentrant=False)
            return h

    return Language(Stack()), _tokens(batch_size)


def followed_teacher(batch_size: int = 4) -> Example:
    """A teacher in buffers that follows the student inside forward."""

    class Followed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(8, 4)
            self.register_buffer("weight", self.student.weight.detach().clone())
            self.register_buffer("bias", self.student.bias.detach().clone())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.lerp_(self.student.weight, 0.1)
                self.bias.mul_(0.9).add_(self.student.bias, alpha=0.1)
                aim = F.linear(x.flip(1), self.weight, self.bias)
            out = self.student(x)
            return F.mse_loss(out, y) + F.mse_loss(out, aim)

    return Followed(), _rows(batch_size)
