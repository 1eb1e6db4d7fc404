"""What people train in the winter of 2026 that none of the other files has, for ``outside.py``: heads in a loop, streams that
are mixed doubly stochastically, recursion without gradients, scans in four directions, gates in place of activations, edges
that make matrices, several ways to aggregate, ensembles in one pass, pointwise attention over histories, two losses of speech.

Written before any of them was run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, next_words, token_loss, tokens, two_layers
from torch import Tensor, nn

# -- transformers -----------------------------------------------------------------------------------------


def heads_in_a_loop(batch_size: int = 8) -> Example:
    """A language model as courses write it: every head a module with its own maps, their results joined."""

    class Head(nn.Module):
        def __init__(self, width: int, length: int) -> None:
            super().__init__()
            self.key, self.query, self.value = (
                nn.Linear(WIDTH, width, bias=False) for _ in range(3)
            )
            self.register_buffer("tril", torch.tril(torch.ones(length, length)))

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            k, q = self.key(x), self.query(x)
            odds = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            odds = odds.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
            return F.softmax(odds, dim=-1) @ self.value(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Head(WIDTH // 4, 8) for _ in range(4))
            self.proj, self.feed = nn.Linear(WIDTH, WIDTH), two_layers()
            self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            x = x + self.proj(torch.cat([head(h) for head in self.heads], dim=-1))
            return x + self.feed(self.two(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(20, WIDTH), nn.Embedding(8, WIDTH)
            self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            many, length = ids.shape
            x = self.words(ids) + self.places(torch.arange(length, device=ids.device))
            scores = self.head(self.norm(self.blocks(x)))
            rows = scores.view(many * length, scores.shape[-1])
            return F.cross_entropy(rows, labels.view(many * length)), scores

    return Net(), next_words(batch_size)


def streams_mixed_by_sinkhorn(batch_size: int = 4) -> Example:
    """Several residual streams, mixed by matrices of every token that are made doubly stochastic, read and written by gates."""

    class Mixed(nn.Module):
        def __init__(self, inner: nn.Module, streams: int = 3) -> None:
            super().__init__()
            self.inner, self.norm, self.streams = inner, nn.RMSNorm(streams * WIDTH), streams
            self.maps = nn.Linear(streams * WIDTH, streams * (streams + 2))
            self.alpha = nn.Parameter(torch.full((3,), 0.1))
            self.bias = nn.Parameter(torch.zeros(streams, streams))

        def forward(self, x: Tensor) -> Tensor:
            said = self.maps(self.norm(x.flatten(-2)))
            reads, writes, mixes = said.split([self.streams, self.streams, self.streams**2], -1)
            reads = torch.sigmoid(self.alpha[0] * reads)
            writes = 2 * torch.sigmoid(self.alpha[1] * writes)
            mixed = self.alpha[2] * mixes.unflatten(-1, (self.streams, -1)) + self.bias
            mixed = torch.exp(mixed - mixed.amax((-2, -1), keepdim=True))
            for _ in range(4):
                mixed = mixed / mixed.sum(-1, keepdim=True)
                mixed = mixed / mixed.sum(-2, keepdim=True)
            made = self.inner((reads[..., None, :] @ x).squeeze(-2))
            return mixed @ x + writes[..., None] * made[..., None, :]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(h.transpose(1, 2).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
            self.layers = nn.ModuleList(
                Mixed(inner)
                for _ in range(2)
                for inner in (Attention(), nn.Sequential(nn.RMSNorm(WIDTH), two_layers()))
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.words(ids)[:, :, None].expand(-1, -1, 3, -1)
            for layer in self.layers:
                x = layer(x)
            return token_loss(self.head(x.mean(-2)), labels)

    return Net(), next_words(batch_size)


def tiny_recursion(batch_size: int = 4) -> Example:
    """One small network improves a thought and an answer again and again, all but the last round without gradients, under a
    loss for every answer and one for when to stop."""

    class Mixer(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.across, self.along = two_layers(length, length), two_layers()

        def forward(self, x: Tensor) -> Tensor:
            x = F.rms_norm(x + self.across(x.transpose(1, 2)).transpose(1, 2), (WIDTH,))
            return F.rms_norm(x + self.along(x), (WIDTH,))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.net = nn.Embedding(20, WIDTH), nn.Sequential(Mixer(8), Mixer(8))
            self.register_buffer("first", floats(2, WIDTH))
            self.head, self.stop = nn.Linear(WIDTH, 20, bias=False), nn.Linear(WIDTH, 1)

        def round(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(2):
                z = self.net(x + y + z)
            return self.net(y + z), z

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.words(ids) * math.sqrt(WIDTH)
            y, z = (one.expand_as(x) for one in self.first)
            loss = x.new_zeros(())
            for _ in range(2):
                with torch.no_grad():
                    y, z = self.round(x, y, z)
                y, z = self.round(x, y, z)
                scores = self.head(y)
                is_right = (scores.argmax(-1) == labels).all(-1)
                halt = self.stop(y[:, 0]).squeeze(-1)
                loss = loss + token_loss(scores, labels)
                loss = loss + 0.5 * F.binary_cross_entropy_with_logits(halt, is_right.to(halt))
                y, z = y.detach(), z.detach()
            return loss

    return Net(), next_words(batch_size)


def histories_by_pointwise_attention(batch_size: int = 4) -> Example:
    """Recommendations from what was clicked and when: attention by SiLU and no softmax, with biases of places and of times in
    buckets, and sampled negatives beside what came next."""

    class Unit(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.maps, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.by_place = nn.Parameter(floats(2 * length - 1) * 0.02)
            self.by_time = nn.Parameter(floats(9) * 0.02)
            places = torch.arange(length)
            self.register_buffer("apart", places[:, None] - places + length - 1)

        def forward(self, x: Tensor, times: Tensor, seen: Tensor) -> Tensor:
            u, v, q, k = F.silu(self.maps(self.norm(x))).chunk(4, -1)
            q, k, v = (one.unflatten(-1, (2, -1)) for one in (q, k, v))
            since = (times[:, :, None] - times[:, None]).abs().clamp(min=1)
            buckets = (torch.log(since.float()) / 0.5).long().clamp(max=8)
            bias = self.by_place[self.apart] + self.by_time[buckets]
            odds = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k) + bias[:, None]) / x.shape[1]
            h = torch.einsum("bhnm,bmhd->bnhd", odds * seen[:, None], v).flatten(2)
            return x + self.out(u * self.inner(h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(30, WIDTH, padding_idx=0)
            self.units = nn.ModuleList(Unit(8) for _ in range(2))

        def forward(self, items: Tensor, times: Tensor, after: Tensor, others: Tensor) -> Tensor:
            length = items.shape[1]
            is_there = items != 0
            causal = torch.ones(length, length, dtype=torch.bool, device=items.device).tril()
            seen = (is_there[:, None] & causal).float()
            x = self.items(items) * WIDTH**0.5 * is_there[..., None]
            for unit in self.units:
                x = unit(x, times, seen)
            x = F.normalize(x, dim=-1)
            right = (x * F.normalize(self.items(after), dim=-1)).sum(-1, keepdim=True)
            wrong = torch.einsum("bld,blkd->blk", x, F.normalize(self.items(others), dim=-1))
            wrong = wrong.masked_fill(others == after[..., None], -5e4)
            each = -F.log_softmax(torch.cat([right, wrong], -1) / 0.05, -1)[..., 0]
            return (each * is_there).sum() / is_there.sum()

    return Net(), {
        "items": tokens(30, batch_size, 8),
        "times": tokens(1000, batch_size, 8).cumsum(1),
        "after": tokens(30, batch_size, 8, low=1),
        "others": tokens(29, batch_size, 8, 5, low=1),
    }


# -- images and sounds ------------------------------------------------------------------------------------


def scans_in_four_directions(batch_size: int = 2) -> Example:
    """A selective scan of an image along rows and columns, both forth and back, added up."""

    class Scan(nn.Module):
        def __init__(self, width: int, states: int = 3, rank: int = 2) -> None:
            super().__init__()
            self.maps = nn.Parameter(floats(4, rank + 2 * states, width) * 0.3)
            self.steps = nn.Parameter(floats(4, width, rank) * 0.3)
            self.bias, self.skip = (
                nn.Parameter(floats(4, width)),
                nn.Parameter(torch.ones(4, width)),
            )
            self.logs = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(4, width, 1))
            self.sizes = [rank, states, states]

        def forward(self, x: Tensor) -> Tensor:
            high, wide = x.shape[2:]
            rows = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], 1)
            ways = torch.cat([rows, rows.flip(-1)], 1)
            said = torch.einsum("bkdl,kcd->bkcl", ways, self.maps)
            low, into, out = said.split(self.sizes, 2)
            step = F.softplus(
                torch.einsum("bkrl,kdr->bkdl", low, self.steps) + self.bias[..., None]
            )
            decay = torch.exp(step[..., None] * -torch.exp(self.logs)[None, :, :, None])
            drive = (step * ways)[..., None] * into.transpose(2, 3)[:, :, None]
            state, made = torch.zeros_like(drive[..., 0, :]), list[Tensor]()
            for place in range(high * wide):
                state = decay[..., place, :] * state + drive[..., place, :]
                made.append(torch.einsum("bkdn,bkn->bkd", state, out[..., place]))
            y = torch.stack(made, -1) + ways * self.skip[..., None]
            y = y[:, :2] + y[:, 2:].flip(-1)
            turned = y[:, 1].unflatten(-1, (wide, high)).transpose(2, 3)
            return y[:, 0].unflatten(-1, (high, wide)) + turned

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.near = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.scan, self.after, self.out = (
                Scan(WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )

        def forward(self, x: Tensor) -> Tensor:
            h, gate = self.into(self.norm(x)).chunk(2, -1)
            h = self.scan(F.silu(self.near(h.permute(0, 3, 1, 2)))).permute(0, 2, 3, 1)
            return x + self.out(self.after(h) * F.silu(gate))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 4, 4)
            self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 5)

        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            x = self.blocks(self.patches(pixels).permute(0, 2, 3, 1))
            return F.cross_entropy(self.head(x.mean((1, 2))), labels)

    return Net(), {"pixels": floats(batch_size, 3, 12, 16), "labels": tokens(5, batch_size)}


class _ChannelNorm(torch.autograd.Function):
    """Layer norm over channels with the gradient written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (var + eps).sqrt()
        ctx.save_for_backward(y, var, weight)
        return weight.view(1, -1, 1, 1) * y + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        y, var, weight = ctx.saved_tensors
        g = grad * weight.view(1, -1, 1, 1)
        mean, along = g.mean(1, keepdim=True), (g * y).mean(1, keepdim=True)
        back = (g - y * along - mean) / torch.sqrt(var + ctx.eps)
        return back, (grad * y).sum((0, 2, 3)), grad.sum((0, 2, 3)), None


def gates_without_activations(batch_size: int = 4) -> Example:
    """Restoring pictures by halves of channels that multiply each other, a norm whose gradient is written by hand, channels
    weighed by their mean, and an hourglass whose steps up are shuffled pixels; the loss is a ratio of signal and noise."""

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.ones(width)),
                nn.Parameter(torch.zeros(width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return _ChannelNorm.apply(x, self.weight, self.bias, 1e-6)

    def gated(x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        return one * two

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = Norm(width), Norm(width)
            self.wide, self.near = (
                nn.Conv2d(width, 2 * width, 1),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
            )
            self.weigh, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
            self.up, self.down = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
            self.beta, self.gamma = (
                nn.Parameter(torch.full((1, width, 1, 1), 0.1)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            h = gated(self.near(self.wide(self.one(x))))
            h = self.out(h * self.weigh(F.adaptive_avg_pool2d(h, 1)))
            y = x + h * self.beta
            return y + self.down(gated(self.up(self.two(y)))) * self.gamma

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (
                nn.Conv2d(3, WIDTH, 3, padding=1),
                nn.Conv2d(WIDTH, 3, 3, padding=1),
            )
            self.above, self.after = Block(WIDTH), Block(WIDTH)
            self.down, self.below = nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2), Block(2 * WIDTH)
            self.up = nn.Sequential(
                nn.Conv2d(2 * WIDTH, 4 * WIDTH, 1, bias=False), nn.PixelShuffle(2)
            )

        def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
            skip = self.above(self.first(noisy))
            x = self.after(self.up(self.below(self.down(skip))) + skip)
            error = (self.last(x) + noisy - clean).pow(2).mean((1, 2, 3))
            return 10 / math.log(10) * torch.log(error + 1e-8).mean()

    return Net(), {
        "noisy": floats(batch_size, 3, 8, 8),
        "clean": floats(batch_size, 3, 8, 8).flip(0) * 0.5,
    }


def denoising_actions(batch_size: int = 8) -> Example:
    """A policy that denoises sequences of actions: a hourglass of convolutions in time under scales and shifts from what is
    seen and from how noisy it is, Mish and group norms."""

    class Block(nn.Module):
        def __init__(self, into: int, out: int, told: int) -> None:
            super().__init__()
            self.one, self.two = (
                nn.Sequential(nn.Conv1d(width, out, 3, padding=1), nn.GroupNorm(2, out), nn.Mish())
                for width in (into, out)
            )
            self.film = nn.Sequential(
                nn.Mish(), nn.Linear(told, 2 * out), nn.Unflatten(-1, (-1, 1))
            )
            self.skip = nn.Conv1d(into, out, 1) if into != out else nn.Identity()

        def forward(self, x: Tensor, told: Tensor) -> Tensor:
            scale, shift = self.film(told).reshape(len(x), 2, -1, 1).unbind(1)
            return self.two(scale * self.one(x) + shift) + self.skip(x)

    class Net(nn.Module):
        def __init__(self, actions: int = 3, seen: int = 5, told: int = 12) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(WIDTH, 16), nn.Mish(), nn.Linear(16, told - seen))
            self.down = nn.ModuleList([Block(actions, 8, told), Block(8, 16, told)])
            self.shrink, self.middle = nn.Conv1d(8, 8, 3, 2, 1), Block(16, 16, told)
            self.grow, self.up = nn.ConvTranspose1d(16, 8, 4, 2, 1), Block(16, 8, told)
            self.out = nn.Conv1d(8, actions, 1)
            betas = torch.linspace(1e-3, 0.2, 50)
            self.register_buffer("kept", torch.cumprod(1 - betas, 0))

        def forward(self, seen: Tensor, actions: Tensor, step: Tensor, noise: Tensor) -> Tensor:
            half = WIDTH // 2
            rates = torch.exp(
                torch.arange(half, device=step.device) * -(math.log(10000) / (half - 1))
            )
            angles = step[:, None] * rates[None]
            told = torch.cat([self.time(torch.cat((angles.sin(), angles.cos()), -1)), seen], -1)
            kept = self.kept[step].view(-1, 1, 1)
            noisy = (kept.sqrt() * actions + (1 - kept).sqrt() * noise).moveaxis(-1, -2)
            one = self.down[0](noisy, told)
            two = self.middle(self.down[1](self.shrink(one), told), told)
            made = self.out(self.up(torch.cat((self.grow(two), one), 1), told)).moveaxis(-1, -2)
            weight = torch.clamp(kept / (1 - kept), max=5.0)
            return (F.mse_loss(made, noise, reduction="none") * weight).flatten(1).mean(1).mean()

    return Net(), {
        "seen": floats(batch_size, 5),
        "actions": floats(batch_size, 8, 3),
        "step": tokens(50, batch_size),
        "noise": floats(batch_size, 8, 3).flip(0),
    }


def two_losses_of_speech(batch_size: int = 4) -> Example:
    """Frames thinned by convolutions, an encoder under CTC and a decoder under smoothed labels, weighed against each other;
    frames and words have lengths of their own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thin = nn.Sequential(
                nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU()
            )
            self.into, self.words = nn.Linear(4 * 3, WIDTH), nn.Embedding(12, WIDTH)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True),
                2,
                enable_nested_tensor=False,
            )
            self.decoder = nn.TransformerDecoder(
                nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), 1
            )
            self.by_frame, self.by_word = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)

        def forward(self, frames: Tensor, lengths: Tensor, words: Tensor, counts: Tensor) -> Tensor:
            x = self.thin(frames[:, None])
            x = self.into(x.transpose(1, 2).flatten(2))
            lengths = ((lengths - 1) // 2 - 1) // 2
            beyond = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
            x = self.encoder(x, src_key_padding_mask=beyond)
            odds = F.log_softmax(self.by_frame(x), -1).transpose(0, 1)
            ctc = F.ctc_loss(odds, words, lengths, counts, zero_infinity=True)
            before = F.pad(words[:, :-1], (1, 0), value=11)
            places = torch.arange(words.shape[1], device=x.device)
            mask = places[:, None] < places
            h = self.decoder(
                self.words(before), x, tgt_mask=mask, memory_key_padding_mask=beyond,
                tgt_key_padding_mask=places >= counts[:, None],
            )  # fmt: skip
            labels = words.masked_fill(places >= counts[:, None], -100)
            said = self.by_word(h).flatten(0, 1)
            attention = F.cross_entropy(said, labels.flatten(), label_smoothing=0.1)
            return 0.3 * ctc + 0.7 * attention

    counts = 2 + tokens(3, batch_size)
    return Net(), {
        "frames": floats(batch_size, 47, 15),
        "lengths": 40 + tokens(7, batch_size),
        "words": tokens(11, batch_size, 4, low=1),
        "counts": counts,
    }


# -- graphs, tables and series ----------------------------------------------------------------------------


def several_aggregators(batch_size: int = 4) -> Example:
    """Means, spreads, greatest and least of what neighbours say, each scaled up and down by how many they are."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(13 * WIDTH, WIDTH)
            self.edges, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, edges: Tensor, told: Tensor) -> Tensor:
            source, target = edges.unbind(1)
            rows = torch.arange(len(x), device=x.device)[:, None]
            said = self.before(torch.cat([x[rows, source], x[rows, target], self.edges(told)], -1))
            where = target[..., None].expand_as(said)
            zeros = torch.zeros_like(x)
            count = torch.zeros_like(x[..., 0]).scatter_add(
                1, target, torch.ones_like(said[..., 0])
            )
            safe = count.clamp(min=1)[..., None]
            mean = zeros.scatter_add(1, where, said) / safe
            square = zeros.scatter_add(1, where, said * said) / safe
            spread = torch.sqrt(torch.relu(square - mean * mean) + 1e-5)
            most = zeros.scatter_reduce(1, where, said, "amax", include_self=False)
            least = zeros.scatter_reduce(1, where, said, "amin", include_self=False)
            every = torch.cat([mean, spread, most, least], -1)
            scale = torch.log(safe + 1) / 1.1
            h = self.after(torch.cat([x, every, every * scale, every / scale], -1))
            return x + torch.relu(self.norm(h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atoms, self.layers = nn.Embedding(9, WIDTH), nn.ModuleList([Layer(), Layer()])
            self.head = two_layers(WIDTH, 1)

        def forward(self, atoms: Tensor, edges: Tensor, told: Tensor, y: Tensor) -> Tensor:
            x = self.atoms(atoms)
            for layer in self.layers:
                x = layer(x, edges, told)
            return F.l1_loss(self.head(x.sum(1)).squeeze(-1), y)

    return Net(), {
        "atoms": tokens(9, batch_size, 6),
        "edges": tokens(6, batch_size, 2, 10),
        "told": floats(batch_size, 10, 4),
        "y": floats(batch_size),
    }


def edges_make_matrices(batch_size: int = 4) -> Example:
    """Edges' features make a matrix each that a neighbour's state is multiplied by; a cell takes the sums in, and a recurrence
    that attends to all atoms reads the graph out."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.matrices = nn.Linear(5, WIDTH), two_layers(4, WIDTH * WIDTH)
            self.cell, self.reader = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(2 * WIDTH, WIDTH)
            self.head = two_layers(2 * WIDTH, 2)

        def forward(self, atoms: Tensor, edges: Tensor, bonds: Tensor, y: Tensor) -> Tensor:
            many, count, _ = atoms.shape
            h = torch.relu(self.into(atoms))
            each = self.matrices(bonds).view(many, -1, WIDTH, WIDTH)
            source, target = (one[..., None].expand(-1, -1, WIDTH) for one in edges.unbind(1))
            for _ in range(3):
                said = torch.matmul(each, h.gather(1, source).unsqueeze(-1)).squeeze(-1)
                told = torch.zeros_like(h).scatter_add(1, target, said)
                h = self.cell(told.view(-1, WIDTH), h.view(-1, WIDTH)).view(many, count, WIDTH)
            query, state = h.new_zeros(many, 2 * WIDTH), h.new_zeros(many, WIDTH)
            cell = torch.zeros_like(state)
            for _ in range(3):
                state, cell = self.reader(query, (state, cell))
                odds = (h * state[:, None]).sum(-1, keepdim=True).softmax(1)
                query = torch.cat([state, (odds * h).sum(1)], -1)
            return F.smooth_l1_loss(self.head(query), y)

    return Net(), {
        "atoms": floats(batch_size, 6, 5),
        "edges": tokens(6, batch_size, 2, 10),
        "bonds": floats(batch_size, 10, 4),
        "y": floats(batch_size, 2),
    }


def ensembles_in_one_pass(batch_size: int = 8) -> Example:
    """Many members share weights and scale what goes in and out of them; numbers become pieces of lines, and every member has a
    head and a loss of its own."""

    class Shared(nn.Module):
        def __init__(self, into: int, out: int, members: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(out, into) / math.sqrt(into))
            self.r, self.s = (
                nn.Parameter(floats(members, into).sign()),
                nn.Parameter(torch.ones(members, out)),
            )
            self.bias = nn.Parameter(torch.zeros(members, out))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addcmul(self.bias, (x * self.r) @ self.weight.T, self.s)

    class Net(nn.Module):
        def __init__(self, members: int = 4, bins: int = 5) -> None:
            super().__init__()
            self.register_buffer("edges", torch.linspace(-2, 2, bins + 1))
            self.pieces = nn.Parameter(floats(6, bins, 4) * 0.3)
            self.kinds = nn.ModuleList(nn.Embedding(size, 4) for size in (3, 5))
            self.layers = nn.ModuleList([Shared(8 * 4, 16, members), Shared(16, 16, members)])
            self.heads = nn.Parameter(floats(members, 16, 3) * 0.2)
            self.members = members

        def forward(self, numbers: Tensor, kinds: Tensor, labels: Tensor) -> Tensor:
            low, high = self.edges[:-1], self.edges[1:]
            share = ((numbers[..., None] - low) / (high - low)).clamp(0, 1)
            rows = torch.relu(torch.einsum("bfk,fkd->bfd", share, self.pieces))
            named = torch.stack([one(kinds[:, i]) for i, one in enumerate(self.kinds)], 1)
            x = torch.cat([rows, named], 1).flatten(1)[:, None].expand(-1, self.members, -1)
            for layer in self.layers:
                x = F.dropout(torch.relu(layer(x)), 0.0, self.training)
            scores = torch.einsum("bkd,kdc->bkc", x, self.heads)
            return F.cross_entropy(scores.flatten(0, 1), labels.repeat_interleave(self.members))

    return Net(), {
        "numbers": floats(batch_size, 6),
        "kinds": tokens(3, batch_size, 2),
        "labels": tokens(3, batch_size),
    }


def forecasts_interpolated(batch_size: int = 8) -> Example:
    """Stacks that read a series at several rates, each taking off what it explains and adding few numbers that are interpolated
    to the forecast, under quantile losses."""

    class Block(nn.Module):
        def __init__(self, pooled: int, few: int) -> None:
            super().__init__()
            self.pool = nn.MaxPool1d(pooled, pooled, ceil_mode=True)
            self.net = two_layers(-(-24 // pooled), 24 + 3 * few, 20)
            self.few = few

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = self.net(self.pool(x[:, None]).squeeze(1))
            back, knots = made[:, :24], made[:, 24:].view(len(x), 3, self.few)
            return back, F.interpolate(knots, size=8, mode="linear", align_corners=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(*one) for one in ((8, 2), (4, 4), (1, 8)))
            self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9])[:, None])

        def forward(self, past: Tensor, mask: Tensor, future: Tensor) -> Tensor:
            rest, mask = past.flip(-1), mask.flip(-1)
            made = past[:, None, -1:]
            for block in self.blocks:
                back, ahead = block(rest)
                rest, made = (rest - back) * mask, made + ahead
            error = future[:, None] - made
            return torch.maximum(self.levels * error, (self.levels - 1) * error).mean()

    return Net(), {
        "past": floats(batch_size, 24),
        "mask": (floats(batch_size, 24) > -1.5).float(),
        "future": floats(batch_size, 8),
    }
