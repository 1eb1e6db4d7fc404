"""What people train in the autumn of 2026 that none of the other files has, for ``outside.py``: streams of several modalities,
states that turn, sequences that choose their own pieces, networks without norms, tables read at once, features taken apart, what lies otherwise in memory.

Written before any of them was run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, next_words, row_batch, token_loss, tokens, two_layers
from torch import Tensor, nn
from torch.nn.utils import parametrize


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


# -- transformers -----------------------------------------------------------------------------------------


def networks_without_norms(batch_size: int = 8) -> Example:
    """Dynamic tanh in place of norms, register tokens, and a learned scale on every branch."""

    class DynamicTanh(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.full((1,), 0.5))
            self.weight, self.bias = (
                nn.Parameter(torch.ones(width)),
                nn.Parameter(torch.zeros(width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.alpha * x) * self.weight + self.bias

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = DynamicTanh(WIDTH), DynamicTanh(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.mlp = two_layers(hidden=24)
            self.scales = nn.Parameter(torch.full((2, WIDTH), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            x = x + self.scales[0] * self.attention(h, h, h, need_weights=False)[0]
            return x + self.scales[1] * self.mlp(self.two(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.registers = nn.Parameter(floats(1, 2, WIDTH) * 0.02)
            self.blocks = nn.Sequential(Block(), Block())
            self.out = DynamicTanh(WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
            h = self.out(self.blocks(h))[:, self.registers.shape[1] :]
            return F.smooth_l1_loss(h, y)

    return Net(), row_batch(batch_size, 6)


def on_the_sphere(batch_size: int = 4) -> Example:
    """nGPT: every weight is of length one when it is used, every state is too, and a branch is a step along the sphere
    whose length is learned for each feature."""

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(floats(3 * WIDTH, WIDTH))
            self.out, self.up = nn.Parameter(floats(WIDTH, WIDTH)), nn.Parameter(floats(24, WIDTH))
            self.down = nn.Parameter(floats(WIDTH, 24))
            self.steps = nn.Parameter(torch.full((2, WIDTH), 0.05))
            self.sharpness = nn.Parameter(torch.ones(2, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = F.linear(x, unit(self.qkv)).unflatten(-1, (3, 2, 4)).unbind(2)
            q, k = (unit(one.transpose(1, 2)) * self.sharpness for one in (q, k))
            h = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, scale=2.0)
            h = unit(F.linear(h.transpose(1, 2).flatten(2), unit(self.out.mT).mT))
            x = unit(x.lerp(h, self.steps[0].abs()))
            h = unit(F.linear(F.silu(F.linear(x, unit(self.up)) * math.sqrt(WIDTH)), self.down))
            return unit(x + self.steps[1].abs() * (h - x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.scale = nn.Parameter(torch.ones(20))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = unit(self.embed(ids))
            for block in self.blocks:
                h = block(h)
            return token_loss(F.linear(h, unit(self.head.weight)) * self.scale * 4, labels)

    return Net(), next_words(batch_size)


def joint_streams(batch_size: int = 4) -> Example:
    """MM-DiT: pictures and words have weights of their own and one attention, each modulated by time and pooled words;
    a straight path from noise is followed, times drawn towards the middle."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
            self.mlp = two_layers(hidden=16)
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

        def before(self, x: Tensor, c: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            parts = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, -1)
            q, k, v = (
                self.qkv(self.norm(x) * (1 + parts[0]) + parts[1])
                .unflatten(-1, (3, 2, 4))
                .unbind(2)
            )
            heads = [self.q_norm(q), self.k_norm(k), v]
            return [one.transpose(1, 2) for one in heads], list(parts[2:])

        def after(self, x: Tensor, h: Tensor, parts: list[Tensor]) -> Tensor:
            gate, scale, shift, last = parts
            x = x + gate * self.out(h)
            return x + last * self.mlp(self.norm(x) * (1 + scale) + shift)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture, self.text = Stream(), Stream()

        def forward(self, x: Tensor, t: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            (of_x, px), (of_t, pt) = self.picture.before(x, c), self.text.before(t, c)
            q, k, v = (torch.cat(pair, 2) for pair in zip(of_t, of_x, strict=True))
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            words, pixels = h.split([t.shape[1], x.shape[1]], 1)
            return self.picture.after(x, pixels, px), self.text.after(t, words, pt)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.time = nn.Conv2d(3, WIDTH, 2, 2), two_layers(8, WIDTH)
            self.words, self.pool = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.out = nn.Linear(WIDTH, 12)

        def forward(self, image: Tensor, noise: Tensor, ids: Tensor, drawn: Tensor) -> Tensor:
            t = drawn.sigmoid()
            mixed = (1 - t)[:, None, None, None] * image + t[:, None, None, None] * noise
            angles = t[:, None] * 10.0 ** torch.arange(4, device=t.device)
            x, words = self.patch(mixed).flatten(2).mT, self.words(ids)
            c = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.pool(words.mean(1))
            for block in self.blocks:
                x, words = block(x, words, c)
            velocity = F.pixel_shuffle(self.out(x).mT.unflatten(-1, (4, 4)), 2)
            return F.mse_loss(velocity, noise - image)

    image = floats(batch_size, 3, 8, 8)
    return Net(), {
        "image": image, "noise": image.flip(0), "ids": tokens(20, batch_size, 5), "drawn": floats(batch_size),
    }  # fmt: skip


def experts_of_modalities(batch_size: int = 4) -> Example:
    """A policy over vision, language and action: a prefix that sees itself, states and chunks of actions with weights of
    their own that see all, actions denoised along a flow whose time is mixed into every one of them."""

    class Expert(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.kv, self.out = (
                nn.Linear(width, 8),
                nn.Linear(width, 8),
                nn.Linear(8, width),
            )
            self.gate, self.up, self.down = (
                nn.Linear(width, 12),
                nn.Linear(width, 12),
                nn.Linear(12, width),
            )

        def mlp(self, x: Tensor) -> Tensor:
            h = self.after(x)
            return x + self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.words = nn.Linear(12, WIDTH), nn.Embedding(20, WIDTH)
            self.state, self.action = nn.Linear(5, 4), nn.Linear(3, 4)
            self.timed = two_layers(8, 4)
            self.layers = nn.ModuleList(nn.ModuleList([Expert(WIDTH), Expert(4)]) for _ in range(2))
            self.out = nn.Linear(4, 3)

        def forward(
            self,
            pixels: Tensor,
            ids: Tensor,
            state: Tensor,
            actions: Tensor,
            noise: Tensor,
            time: Tensor,
        ) -> Tensor:
            prefix = torch.cat([self.see(pixels), self.words(ids)], 1)
            t = time[:, None, None]
            noisy = self.action(t * noise + (1 - t) * actions)
            angles = time[:, None] * torch.tensor([1.0, 4.0], device=time.device, dtype=time.dtype)
            waves = torch.cat([angles.sin(), angles.cos()], -1)[:, None].expand(
                -1, noisy.shape[1], -1
            )
            suffix = torch.cat(
                [self.state(state)[:, None], self.timed(torch.cat([noisy, waves], -1))], 1
            )
            p, s = prefix.shape[1], suffix.shape[1]
            groups = torch.cat([torch.zeros(p), torch.ones(1), torch.full((s - 1,), 2.0)])
            mask = groups[None] <= groups[:, None]
            streams = [prefix, suffix]
            for layer in self.layers:
                hs = [own.norm(x) for own, x in zip(layer, streams, strict=True)]
                q = torch.cat([own.q(h) for own, h in zip(layer, hs, strict=True)], 1)
                kv = torch.cat([own.kv(h) for own, h in zip(layer, hs, strict=True)], 1)
                q, (k, v) = q.unflatten(-1, (2, 4)).transpose(1, 2), kv.unsqueeze(1).chunk(2, -1)
                h = F.scaled_dot_product_attention(
                    q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), mask.to(q.device)
                )
                h = h.transpose(1, 2).flatten(2).split([p, s], 1)
                streams = [
                    own.mlp(x + own.out(one)) for own, x, one in zip(layer, streams, h, strict=True)
                ]
            return F.mse_loss(self.out(streams[1][:, 1:]), noise - actions)

    actions = floats(batch_size, 4, 3)
    return Net(), {
        "pixels": floats(batch_size, 3, 12), "ids": tokens(20, batch_size, 4), "state": floats(batch_size, 5),
        "actions": actions, "noise": actions.flip(0), "time": floats(batch_size).sigmoid(),
    }  # fmt: skip


def drafts_ahead(batch_size: int = 4) -> Example:
    """EAGLE-3: a drafting layer reads features of three depths of a frozen trunk, and is trained as it will be used: its own
    guesses are fed back, two steps ahead, against the trunk's soft words."""

    class Layer(nn.Module):
        def __init__(self, into: int) -> None:
            super().__init__()
            self.norm, self.qkv = nn.RMSNorm(into), nn.Linear(into, 3 * WIDTH)
            self.out, self.mlp = nn.Linear(WIDTH, WIDTH), two_layers()

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            return h + self.mlp(h)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.trunk = nn.ModuleList(Layer(WIDTH) for _ in range(3))
            for frozen in (self.embed, self.head, self.trunk):
                frozen.requires_grad_(False)
            self.mix, self.draft = nn.Linear(3 * WIDTH, WIDTH), Layer(2 * WIDTH)
            self.norm, self.own = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.embed(ids)
                depths = []
                for layer in self.trunk:
                    h = layer(h, h)
                    depths.append(h)
                soft = self.head(h).softmax(-1)
            state, losses = self.mix(torch.cat(depths, -1)), []
            for ahead in range(2):
                shifted = self.embed(ids.roll(-1 - ahead, 1))
                state = self.draft(torch.cat([shifted, state], -1), state)
                scores = self.own(self.norm(state)).log_softmax(-1)
                aim = soft.roll(-1 - ahead, 1)
                losses.append(
                    -(aim * scores).sum(-1)[:, : ids.shape[1] - 1 - ahead].mean() * 0.8**ahead
                )
            return torch.stack(losses).sum()

    return Net(), {"ids": tokens(20, batch_size, 8)}


def pointwise_events(batch_size: int = 4) -> Example:
    """HSTU: attention by SiLU without a softmax, biases by distance and by the bucket of the time between, gates made beside
    queries; losses against sampled negatives, corrected by how often they are drawn."""

    class Layer(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.norm, self.into, self.out = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 32),
                nn.Linear(8, WIDTH),
            )
            self.after = nn.LayerNorm(8)
            self.places, self.times = nn.Parameter(torch.zeros(2 * length - 1)), nn.Embedding(8, 1)

        def forward(self, x: Tensor, stamps: Tensor, seen: Tensor) -> Tensor:
            u, v, q, k = F.silu(self.into(self.norm(x))).unflatten(-1, (4, 2, 4)).unbind(2)
            n = x.shape[1]
            apart = torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1
            gaps = (
                (stamps[:, :, None] - stamps[:, None]).abs().clamp(min=1).log().long().clamp(max=7)
            )
            bias = self.places[apart.to(x.device)] + self.times(gaps).squeeze(-1)
            scores = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k) + bias[:, None]) / n
            h = torch.einsum("bhnm,bmhd->bnhd", scores * seen[:, None], v).flatten(2)
            return x + self.out(self.after(h) * u.flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(30, WIDTH, padding_idx=0)
            self.layers = nn.ModuleList(Layer(8) for _ in range(2))
            self.register_buffer("counted", torch.linspace(1, 3, 30).softmax(0).log())

        def forward(self, items: Tensor, stamps: Tensor, negatives: Tensor) -> Tensor:
            h, there = self.items(items) * math.sqrt(WIDTH), items > 0
            seen = _causal(items.shape[1]).to(items.device) & there[:, None]
            for layer in self.layers:
                h = layer(h, stamps, seen)
            h = F.normalize(h[:, :-1], dim=-1)
            right = (h * F.normalize(self.items(items[:, 1:]), dim=-1)).sum(-1, keepdim=True) / 0.1
            wrong = (
                torch.einsum("bnd,bkd->bnk", h, F.normalize(self.items(negatives), dim=-1)) / 0.1
            )
            wrong = wrong - self.counted[negatives][:, None]
            wrong = wrong.masked_fill(negatives[:, None] == items[:, 1:, None], -1e4)
            losses = -torch.cat([right, wrong], -1).log_softmax(-1)[..., 0]
            weights = (there[:, 1:] & there[:, :-1]).to(losses.dtype)
            return (losses * weights).sum() / weights.sum().clamp(min=1)

    return Net(), {
        "items": tokens(30, batch_size, 8), "stamps": tokens(500, batch_size, 8).cumsum(1),
        "negatives": tokens(29, batch_size, 5) + 1,
    }  # fmt: skip


def tables_in_context(batch_size: int = 4) -> Example:
    """TabPFN: whole tables are samples; attention between features of a row, then between rows of a feature where rows to
    predict see only those told; the answer in bins."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.rows = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.mlp = two_layers()

        def forward(self, x: Tensor, told: int) -> Tensor:
            b, n, f, _ = x.shape
            h = x.flatten(0, 1)
            h = self.norms[0](h + self.features(h, h, h, need_weights=False)[0]).unflatten(
                0, (b, n)
            )
            h = h.transpose(1, 2).flatten(0, 1)
            h = self.norms[1](h + self.rows(h, h[:, :told], h[:, :told], need_weights=False)[0])
            h = h.unflatten(0, (b, f)).transpose(1, 2)
            return self.norms[2](h + self.mlp(h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.label = nn.Linear(2, WIDTH), nn.Linear(1, WIDTH)
            self.column, self.unknown = (
                nn.Parameter(floats(5, WIDTH) * 0.1),
                nn.Parameter(torch.zeros(WIDTH)),
            )
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.bins = nn.Linear(WIDTH, 10)
            self.register_buffer("borders", torch.linspace(-2, 2, 9))

        def forward(self, table: Tensor, labels: Tensor) -> Tensor:
            told = 5
            known = table[:, :told]
            spread = known.nan_to_num().std(1, keepdim=True) + 1e-3
            missing = table.isnan()
            cells = (table.nan_to_num() - known.nan_to_num().mean(1, keepdim=True)) / spread
            h = self.cell(torch.stack([cells, missing.to(cells.dtype)], -1)) + self.column
            seen = self.label(labels[:, :told, None])
            asked = self.unknown.expand(len(table), table.shape[1] - told, -1)
            h = torch.cat([h, torch.cat([seen, asked], 1)[:, :, None]], 2)
            for layer in self.layers:
                h = layer(h, told)
            aims = torch.bucketize(labels[:, told:].contiguous(), self.borders)
            return token_loss(self.bins(h[:, told:, -1]), aims)

    table = floats(batch_size, 8, 5)
    table[:, 2, 1], table[:, 6, 3] = math.nan, math.nan
    return Net(), {"table": table, "labels": table.nan_to_num().sum(-1).tanh()}


# -- sequences --------------------------------------------------------------------------------------------


def chunks_by_likeness(batch_size: int = 4) -> Example:
    """H-Net: a place begins a piece where it is unlike the one before, by cosine; the body sees beginnings first, sorted to
    the front; what it says is smoothed and given back to all places, with straight-through gates and a loss on the rate."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.ones_like(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.q, self.k = (
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.Linear(WIDTH, WIDTH, bias=False),
            )
            self.body, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), two_layers(WIDTH, 20)
            self.skip = nn.Linear(WIDTH, WIDTH)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = torch.tanh(self.encoder(self.embed(ids)))
            likeness = F.cosine_similarity(self.q(h[:, 1:]), self.k(h[:, :-1]), dim=-1)
            chance = F.pad((1 - likeness) / 2, (1, 0), value=1.0)
            begins = chance > 0.5
            order = torch.argsort(
                (~begins).int() * ids.shape[1] + torch.arange(ids.shape[1]).to(ids.device), dim=1
            )
            pieces = h.gather(1, order[..., None].expand(-1, -1, h.shape[-1]))
            said = self.body(pieces)[0]
            kept = chance.gather(1, order)[..., None].clamp(1e-3, 1 - 1e-3)
            state, smooth = said[:, 0], []
            for place in range(said.shape[1]):
                state = kept[:, place] * said[:, place] + (1 - kept[:, place]) * state
                smooth.append(state)
            which = (begins.cumsum(1) - 1).clamp(min=0)
            back = torch.stack(smooth, 1).gather(1, which[..., None].expand(-1, -1, h.shape[-1]))
            sure = torch.where(begins, chance, 1 - chance)
            out = back * Through.apply(sure)[..., None] + self.skip(h)
            share, mean = begins.to(h.dtype).mean(), chance.mean()
            rate = 3 / 2 * (2 * share * mean + (1 - share) * (1 - mean))
            return token_loss(self.decoder(out), labels) + 0.03 * rate

    return Net(), next_words(batch_size)


def states_that_turn(batch_size: int = 4) -> Example:
    """Mamba-3: a trapezoid between steps, states turned by angles that add up from the input, several inputs and outputs a
    head, biases on both projections, no convolution; all by one product over masks of decay."""

    class Layer(nn.Module):
        heads, size, rank = 2, 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.bc = nn.Linear(WIDTH, 2 * self.rank * self.size)
            self.steps = nn.Linear(WIDTH, 3 * self.heads)
            self.b_bias = nn.Parameter(torch.ones(self.heads, self.rank, self.size))
            self.c_bias = nn.Parameter(torch.ones(self.heads, self.rank, self.size))
            self.mix = nn.Parameter(floats(2, self.heads, self.rank, WIDTH // self.heads) * 0.5)
            self.out = nn.Linear(WIDTH, WIDTH)

        def turned(self, x: Tensor, angles: Tensor) -> Tensor:
            one, two = x.chunk(2, -1)
            c, s = angles.cos()[:, :, :, None, None], angles.sin()[:, :, :, None, None]
            return torch.cat([one * c - two * s, one * s + two * c], -1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            value, gate = self.into(h).chunk(2, -1)
            b, c = self.bc(h).unflatten(-1, (2, 1, self.rank, self.size)).unbind(2)
            dt, blend, turn = self.steps(h).unflatten(-1, (3, self.heads)).unbind(2)
            dt, blend = F.softplus(dt), blend.sigmoid()
            angles = (dt * turn.tanh() * math.pi).cumsum(1)
            b = self.turned(F.normalize(b, dim=-1) + self.b_bias, angles)
            c = self.turned(F.normalize(c, dim=-1) + self.c_bias, angles)
            decay = -dt.cumsum(1).transpose(1, 2)
            length = x.shape[1]
            mask = _causal(length).to(x.device)
            falls = (decay[..., None] - decay[..., None, :]).masked_fill(~mask, -math.inf).exp()
            now = blend * dt
            later = F.pad(((1 - blend) * dt)[:, 1:], (0, 0, 0, 1))
            weights = (now + later).transpose(1, 2)[..., None, :] - torch.diag_embed(
                later.transpose(1, 2)
            )
            v = torch.einsum("blhp,hrp->blhrp", value.unflatten(-1, (self.heads, -1)), self.mix[0])
            scores = torch.einsum("blhrn,bmhsn->bhlmrs", c, b) * (falls * weights)[..., None, None]
            y = torch.einsum("bhlmrs,bmhsp,hrp->blhp", scores, v, self.mix[1]).flatten(2)
            return x + self.out(y * F.silu(gate))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(20, WIDTH), nn.Sequential(Layer(), Layer())
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return token_loss(self.head(self.layers(self.embed(ids))), labels)

    return Net(), next_words(batch_size)


def products_of_reflections(batch_size: int = 4) -> Example:
    """Gated DeltaProduct: each token makes several Householder steps on a matrix of states, the first of which forgets, with
    keys of length one and strengths up to two, so that eigenvalues may be negative; short convolutions before."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(4)
            self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
            self.short = nn.Conv1d(8, 8, 3, groups=8, padding=2)
            self.strength, self.forget = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)
            self.rate, self.out = nn.Parameter(torch.zeros(2)), nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            q = F.silu(self.short(self.q(h).mT)[..., : x.shape[1]].mT).unflatten(-1, (2, 4))
            k = F.normalize(F.silu(self.k(h)).unflatten(-1, (2, 2, 4)), dim=-1)
            v, beta = (
                self.v(h).unflatten(-1, (2, 2, 4)),
                2 * self.strength(h).sigmoid().unflatten(-1, (2, 2)),
            )
            keep = (-self.rate.exp() * F.softplus(self.forget(h))).exp()
            state, outs = x.new_zeros(len(x), 2, 4, 4), []
            for t in range(x.shape[1]):
                state = state * keep[:, t, :, None, None]
                for step in range(2):
                    key, strength = k[:, t, step], beta[:, t, step, :, None]
                    error = v[:, t, step] - torch.einsum("bhij,bhi->bhj", state, key)
                    state = state + torch.einsum("bhi,bhj->bhij", key, strength * error)
                outs.append(torch.einsum("bhij,bhi->bhj", state, q[:, t]))
            return x + self.out(self.after(torch.stack(outs, 1)).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer, self.head = (
                nn.Embedding(20, WIDTH),
                Layer(),
                nn.Linear(WIDTH, 20),
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return token_loss(self.head(self.layer(self.embed(ids))), labels)

    return Net(), next_words(batch_size, 6)


def rates_of_frames(batch_size: int = 4) -> Example:
    """Zipformer: stacks at halved rates between bypasses, norms by a bias and a length, activations that swoosh, losses of
    CTC in the middle too, whose guesses are fed back."""

    class BiasNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return (
                x
                * ((x - self.bias).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                * self.scale.exp()
            )

    def swoosh(x: Tensor) -> Tensor:
        return torch.logaddexp(x.new_zeros(()), x - 1.0) - 0.08 * x - 0.313261687

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.value = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), BiasNorm()
            self.bypass = nn.Parameter(torch.full((WIDTH,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.weights(x).chunk(2, -1)
            attention = (q @ k.mT / 3).softmax(-1)
            h = x + attention @ self.value(x)
            h = h + swoosh(self.conv(h.mT)).mT
            h = h + attention @ (self.value(h) * torch.tanh(h))
            h = self.norm(h + self.down(swoosh(self.up(h))))
            return x + (h - x) * self.bypass

    class Slower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weights = Layer(), nn.Parameter(torch.zeros(2))
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            h = (x.unflatten(1, (-1, 2)) * self.weights.softmax(0)[:, None]).sum(2)
            h = self.layer(h).repeat_interleave(2, 1)
            return x * self.scale + h * (1 - self.scale)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Conv1d(6, WIDTH, 3, padding=1)
            self.stacks = nn.ModuleList([Layer(), Slower(), Layer()])
            self.head, self.back = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

        def forward(self, sound: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            h, losses = swoosh(self.front(sound)).mT, []
            for number, stack in enumerate(self.stacks):
                h = stack(h)
                scores = self.head(h).log_softmax(-1)
                frames = torch.full_like(lengths, h.shape[1])
                losses.append(
                    F.ctc_loss(scores.transpose(0, 1), labels, frames, lengths, zero_infinity=True)
                )
                if number < 2:
                    h = h + self.back(scores.exp())
            return 0.7 * losses[-1] + 0.15 * sum(losses[:-1])

    return Net(), {
        "sound": floats(batch_size, 6, 12), "labels": tokens(6, batch_size, 3) + 1,
        "lengths": tokens(2, batch_size) + 2,
    }  # fmt: skip


def noise_of_every_token(batch_size: int = 4) -> Example:
    """Diffusion forcing: every step of a trajectory has a noise of its own, a causal network takes it off, and the loss is
    weighed by signal to noise, fused along what came before."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.level = nn.Linear(3, WIDTH), nn.Embedding(10, WIDTH)
            layer = nn.TransformerEncoderLayer(
                WIDTH, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.body, self.out = (
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                nn.Linear(WIDTH, 3),
            )
            self.register_buffer("signal", torch.linspace(0.98, 0.1, 10).cumprod(0))

        def forward(self, path: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
            alpha = self.signal[levels][..., None]
            noisy = alpha.sqrt() * path + (1 - alpha).sqrt() * noise
            mask = nn.Transformer.generate_square_subsequent_mask(
                path.shape[1], device=path.device, dtype=path.dtype
            )
            h = self.body(self.into(noisy) + self.level(levels), mask, is_causal=True)
            aim = alpha.sqrt() * noise - (1 - alpha).sqrt() * path
            ratio = (alpha / (1 - alpha)).squeeze(-1).clamp(max=5)
            fused = [ratio[:, 0]]
            for step in range(1, ratio.shape[1]):
                fused.append(0.9 * fused[-1] + 0.1 * ratio[:, step])
            weights = torch.stack(fused, 1) / (ratio + 1)
            return ((self.out(h) - aim).square().mean(-1) * weights).mean()

    path = floats(batch_size, 6, 3)
    return Net(), {"path": path, "noise": path.flip(1), "levels": tokens(10, batch_size, 6)}


# -- pictures, codes, and what is learned without labels ----------------------------------------------------


def gaussian_views(batch_size: int = 8) -> Example:
    """LeJEPA: no teacher and no stop of gradients; views predict the mean of the global ones, and a test of characteristic
    functions along given directions keeps embeddings Gaussian over the batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                nn.Linear(32, WIDTH),
            )  # fmt: skip
            self.projector = two_layers(WIDTH, WIDTH)
            self.register_buffer("knots", torch.linspace(-3, 3, 9))
            self.register_buffer("directions", F.normalize(floats(16, WIDTH), dim=1))

        def forward(self, globals_: Tensor, locals_: Tensor) -> Tensor:
            views = [*globals_.unbind(1), *locals_.unbind(1)]
            found = torch.stack([self.projector(self.encoder(view)) for view in views])
            centre = found[:2].mean(0)
            predicted = (found - centre).square().mean()
            turned = (found @ self.directions.mT)[..., None] * self.knots
            real, imaginary = turned.cos().mean(1), turned.sin().mean(1)
            normal = torch.exp(-self.knots.square() / 2)
            error = ((real - normal).square() + imaginary.square()) * normal
            return (
                0.95 * predicted
                + 0.05 * torch.trapezoid(error, self.knots, dim=-1).mean() * found.shape[1]
            )

    return Net(), {
        "globals_": floats(batch_size, 2, 3, 8, 8),
        "locals_": floats(batch_size, 3, 3, 4, 4),
    }


def codes_of_bits(batch_size: int = 8) -> Example:
    """Binary spherical quantisation: codes are signs on a sphere, straight through; entropies of every bit's soft choice for
    each place and for all, and a decoder with a perceptual loss by frozen features."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 6, 3, 2, 1))
            self.up = nn.Sequential(
                nn.Conv2d(6, 16, 3, padding=1), nn.PixelShuffle(2), nn.SiLU(), nn.Conv2d(4, 12, 3, padding=1),
                nn.PixelShuffle(2),
            )  # fmt: skip
            self.judge = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)])
            self.judge.requires_grad_(False)

        def entropy(self, p: Tensor) -> Tensor:
            return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))

        def seen(self, x: Tensor) -> list[Tensor]:
            found = []
            for layer in self.judge:
                x = F.relu(layer(x))
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-6))
            return found

        def forward(self, image: Tensor) -> Tensor:
            z = F.normalize(self.down(image), dim=1)
            hard = torch.where(z > 0, 1.0, -1.0).to(z.dtype) / math.sqrt(z.shape[1])
            code = z + (hard - z).detach()
            made = self.up(code)
            soft = torch.sigmoid(4 * math.sqrt(z.shape[1]) * z)
            certain, used = self.entropy(soft).mean(), self.entropy(soft.mean((0, 2, 3))).mean()
            pairs = zip(self.seen(made), self.seen(image), strict=True)
            perceived = sum((one - two).square().mean() for one, two in pairs)
            return (
                F.l1_loss(made, image)
                + perceived
                + 0.1 * (certain - used)
                + F.mse_loss(z, hard.detach())
            )

    return Net(), {"image": floats(batch_size, 3, 8, 8).tanh()}


def scale_after_scale(batch_size: int = 4) -> Example:
    """VAR: maps of residual codes from one to four pixels wide, each predicted at once from those before, which are added
    up, resized and looked up anew; attention within a scale and to coarser ones."""

    class Net(nn.Module):
        sides = (1, 2, 4)

        def __init__(self) -> None:
            super().__init__()
            self.codes, self.smooth = nn.Embedding(12, 4), nn.Conv2d(4, 4, 3, padding=1)
            for frozen in (self.codes, self.smooth):
                frozen.requires_grad_(False)
            self.into, self.start = nn.Linear(4, WIDTH), nn.Embedding(5, WIDTH)
            self.level, self.head = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, 12)
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)
            )
            self.mlps = nn.ModuleList(two_layers() for _ in range(2))
            self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
            counts = torch.tensor([side * side for side in self.sides])
            of_place = torch.repeat_interleave(torch.arange(3), counts)
            self.register_buffer("of_place", of_place, persistent=False)
            self.register_buffer("hidden", of_place[:, None] < of_place[None], persistent=False)

        @torch.no_grad()
        def told(self, features: Tensor) -> tuple[Tensor, Tensor]:
            rest, added, picks, inputs = features, torch.zeros_like(features), [], []
            for side in self.sides:
                small = F.interpolate(rest, (side, side), mode="area")
                rows = small.permute(0, 2, 3, 1).flatten(0, 2)
                pick = (
                    torch.cdist(rows, self.codes.weight)
                    .argmin(1)
                    .unflatten(0, (len(features), side, side))
                )
                wide = F.interpolate(self.codes(pick).permute(0, 3, 1, 2), (4, 4), mode="bicubic")
                wide = 0.5 * wide + 0.5 * self.smooth(wide)
                rest, added = rest - wide, added + wide
                picks.append(pick.flatten(1))
                inputs.append(added)
            wanted = [
                F.interpolate(one, (side, side), mode="area").flatten(2).mT
                for one, side in zip(inputs, self.sides[1:])
            ]
            return torch.cat(picks, 1), torch.cat(wanted, 1)

        def forward(self, features: Tensor, label: Tensor) -> Tensor:
            aims, inputs = self.told(features)
            condition = self.start(label)
            h = torch.cat([condition[:, None], self.into(inputs)], 1) + self.level(self.of_place)
            scale, shift, gate, last = self.modulation(F.silu(condition))[:, None].chunk(4, -1)
            for layer, mlp in zip(self.layers, self.mlps, strict=True):
                n = F.layer_norm(h, (WIDTH,)) * (1 + scale) + shift
                h = h + gate * layer(n, n, n, attn_mask=self.hidden, need_weights=False)[0]
                h = h + last * mlp(F.layer_norm(h, (WIDTH,)))
            return token_loss(self.head(h), aims)

    return Net(), {"features": floats(batch_size, 4, 4, 4), "label": tokens(5, batch_size)}


def depth_up_to_scale(batch_size: int = 4) -> Example:
    """Depth whose scale and shift nobody knows: both are put right by medians and mean deviations for each picture, the worst
    tenth of places is left out, and differences at several scales must fit, where depth was measured."""

    def centred(x: Tensor, seen: Tensor) -> Tensor:
        middle = torch.where(seen, x, math.nan).nanmedian(1, keepdim=True).values.nan_to_num()
        spread = ((x - middle).abs() * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp(
            min=1
        )
        return (x - middle) / (spread + 1e-4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 8, 3, padding=1), nn.ELU()
            )
            self.head = nn.Conv2d(8, 1, 1)

        def forward(self, image: Tensor, depth: Tensor) -> Tensor:
            found, seen = self.head(self.body(image)).squeeze(1), depth > 0
            one, two = (
                centred(found.flatten(1), seen.flatten(1)),
                centred(depth.flatten(1), seen.flatten(1)),
            )
            errors = ((one - two).abs() * seen.flatten(1)).sort(1).values
            kept = errors[:, : int(errors.shape[1] * 0.9)]
            loss = kept.sum() / seen.sum().clamp(min=1)
            gap, mask = (one - two).view_as(depth), seen
            for _ in range(3):
                for dim in (1, 2):
                    both = mask.narrow(dim, 1, mask.shape[dim] - 1) & mask.narrow(
                        dim, 0, mask.shape[dim] - 1
                    )
                    change = gap.diff(dim=dim).abs() * both
                    loss = loss + 0.5 * change.sum() / mask.sum().clamp(min=1)
                gap, mask = gap[:, ::2, ::2], mask[:, ::2, ::2]
            return loss

    return Net(), {
        "image": floats(batch_size, 3, 8, 8),
        "depth": floats(batch_size, 8, 8).mul(2).exp() - 0.4,
    }


def planes_and_lines(batch_size: int = 6) -> Example:
    """TensoRF: a field as sums of planes times lines, read by interpolation, densities and colours composed along rays, total
    variation of the planes, and a shrunk box given with the batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.planes = nn.ParameterList(nn.Parameter(floats(1, 6, 5, 5) * 0.3) for _ in range(3))
            self.lines = nn.ParameterList(nn.Parameter(floats(1, 6, 5, 1) * 0.3) for _ in range(3))
            self.basis, self.colour = nn.Linear(12, 6, bias=False), two_layers(6 + 3, 3)

        def features(self, points: Tensor) -> Tensor:
            found = []
            for axis, (plane, line) in enumerate(zip(self.planes, self.lines, strict=True)):
                others = [0, 1, 2]
                others.remove(axis)
                at = points[..., others].reshape(1, -1, 1, 2)
                along = torch.stack(
                    [torch.zeros_like(points[..., axis]), points[..., axis]], -1
                ).reshape(1, -1, 1, 2)
                one = F.grid_sample(plane, at, align_corners=True)
                two = F.grid_sample(line, along, align_corners=True)
                found.append((one * two).reshape(6, *points.shape[:-1]))
            return torch.stack(found)

        def forward(self, origins: Tensor, ways: Tensor, rgb: Tensor, box: Tensor) -> Tensor:
            ways = F.normalize(ways, dim=-1)
            far = torch.linspace(0.1, 1.5, 8, device=ways.device, dtype=ways.dtype)
            points = origins[:, None] + ways[:, None] * far[:, None]
            inside = (points.abs() < box[:, None]).all(-1)
            both = self.features(points / box[:, None])
            density = F.softplus(both[:, :2].sum((0, 1)) - 1) * inside
            alpha = 1 - torch.exp(-density * 0.2)
            passed = torch.cumprod(
                torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1
            )[:, :-1]
            seen = self.basis(both[:, 2:].flatten(0, 1).movedim(0, -1))
            colours = self.colour(torch.cat([seen, ways[:, None].expand(-1, 8, -1)], -1)).sigmoid()
            weights = alpha * passed
            out = (weights[..., None] * colours).sum(1) + 1 - weights.sum(1, keepdim=True)
            smooth = sum(
                p.diff(dim=2).square().mean() + p.diff(dim=3).square().mean() for p in self.planes
            )
            return F.mse_loss(out, rgb) + 0.01 * smooth

    return Net(), {
        "origins": floats(batch_size, 3) * 0.3, "ways": floats(batch_size, 3).flip(1), "rgb": floats(batch_size, 3).sigmoid(),
        "box": floats(batch_size, 3).sigmoid() + 0.7,
    }  # fmt: skip


# -- science ----------------------------------------------------------------------------------------------


def products_of_harmonics(batch_size: int = 4) -> Example:
    """Tensor field networks: features of degree nought, one and two of a molecule's atoms, combined with harmonics of the
    directions by products that keep degrees apart, with radial weights of Bessel functions and a smooth cut-off."""

    def harmonics(way: Tensor) -> Tensor:
        x, y, z = way.unbind(-1)
        two = [x * y, y * z, (3 * z * z - 1) / math.sqrt(12), x * z, (x * x - y * y) / 2]
        return math.sqrt(3) * torch.stack(two, -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atoms, self.radial = (
                nn.Embedding(5, 6),
                nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 30)),
            )
            self.mix = nn.Linear(6, 6, bias=False)
            self.gate, self.out = nn.Linear(6, 12), two_layers(18, 1)

        def forward(self, kinds: Tensor, places: Tensor, energy: Tensor) -> Tensor:
            apart = places[:, :, None] - places[:, None]
            far = (
                apart.square().sum(-1).add(torch.eye(places.shape[1], device=places.device)).sqrt()
            )
            way = apart / far[..., None]
            waves = torch.arange(1, 5, device=far.device) * math.pi * far[..., None] / 4
            u = (far / 4).clamp(max=1)
            smooth = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
            smooth = smooth * (
                1 - torch.eye(places.shape[1], device=places.device, dtype=places.dtype)
            )
            weights = (self.radial(waves.sin() / far[..., None]) * smooth[..., None]).unflatten(
                -1, (5, 6)
            )
            s = self.atoms(kinds)
            one, two = way, harmonics(way)
            scalar = torch.einsum("bijc,bjc->bic", weights[..., 0, :], s)
            vector = torch.einsum("bijc,bjc,bijm->bicm", weights[..., 1, :], s, one)
            tensor = torch.einsum("bijc,bjc,bijm->bicm", weights[..., 2, :], s, two)
            h = self.mix(scalar)
            a, b = self.gate(h).sigmoid().chunk(2, -1)
            vector, tensor = vector * a[..., None], tensor * b[..., None]
            h = h + torch.einsum("bijc,bjcm,bijm->bic", weights[..., 3, :], vector, one)
            h = h + torch.einsum("bijc,bjcm,bijm->bic", weights[..., 4, :], tensor, two)
            whole = torch.cat([h, vector.square().sum(-1), tensor.square().sum(-1)], -1)
            return F.mse_loss(self.out(whole).sum((1, 2)), energy)

    return Net(), {
        "kinds": tokens(5, batch_size, 5), "places": floats(batch_size, 5, 3), "energy": floats(batch_size),
    }  # fmt: skip


def signs_do_not_matter(batch_size: int = 6) -> Example:
    """SignNet: eigenvectors of each graph's Laplacian, found in forward, whose signs must not count, as places of a
    transformer over nodes with a mask for those that are not there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.phi, self.rho = (
                nn.Embedding(6, WIDTH),
                two_layers(2, 4),
                two_layers(12, WIDTH),
            )
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.out = nn.Linear(WIDTH, 3)

        def forward(self, kinds: Tensor, edges: Tensor, label: Tensor) -> Tensor:
            there = kinds > 0
            with torch.no_grad():
                joined = (
                    ((edges + edges.mT) > 1).to(edges.dtype) * there[:, None] * there[..., None]
                )
                degree = joined.sum(-1).clamp(min=1).rsqrt()
                laplacian = (
                    torch.eye(kinds.shape[1], device=kinds.device)
                    - degree[:, None] * joined * degree[..., None]
                )
                values, vectors = torch.linalg.eigh(laplacian)
            pairs = torch.stack(
                [vectors[..., 1:4], values[:, None, 1:4].expand(-1, kinds.shape[1], -1)], -1
            )
            flipped = pairs * torch.tensor([-1.0, 1.0], device=pairs.device, dtype=pairs.dtype)
            h = self.nodes(kinds) + self.rho((self.phi(pairs) + self.phi(flipped)).flatten(-2))
            h = self.layer(h, src_key_padding_mask=~there)
            mean = (h * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
            return F.cross_entropy(self.out(mean), label)

    kinds = tokens(5, batch_size, 7) + 1
    kinds[:, 5:] = kinds[:, 5:] * (tokens(2, batch_size, 1) > 0)
    return Net(), {
        "kinds": kinds,
        "edges": floats(batch_size, 7, 7).abs(),
        "label": tokens(3, batch_size),
    }


def waves_on_a_sphere(batch_size: int = 4) -> Example:
    """Spherical Fourier operators of weather models: a transform along longitude and a product with Legendre functions along
    latitude, complex weights for each degree, and a loss weighed by the area of cells."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sines, _ = torch.linspace(-0.95, 0.95, 6).sort()
            rows = [torch.ones_like(sines), sines]
            for degree in range(2, 4):
                rows.append(
                    ((2 * degree - 1) * sines * rows[-1] - (degree - 1) * rows[-2]) / degree
                )
            legendre = torch.stack(rows)
            self.register_buffer("forth", torch.linalg.pinv(legendre.mT))
            self.register_buffer("back", legendre.mT.contiguous())
            self.register_buffer("area", (1 - sines.square()).sqrt())
            self.lift, self.lower = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 3, 1)
            self.weights = nn.ParameterList(
                nn.Parameter(floats(4, 6, 6, 2) * 0.3) for _ in range(2)
            )
            self.skips = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2))

        def forward(self, now: Tensor, later: Tensor) -> Tensor:
            h = self.lift(now)
            for weight, skip in zip(self.weights, self.skips, strict=True):
                waves = torch.fft.rfft(h, dim=-1, norm="ortho")[..., :4]
                degrees = torch.einsum("ly,bcym->bclm", self.forth.to(waves.dtype), waves)
                degrees = torch.einsum("bclm,lcd->bdlm", degrees, torch.view_as_complex(weight))
                waves = torch.einsum("yl,bclm->bcym", self.back.to(waves.dtype), degrees)
                h = F.gelu(torch.fft.irfft(waves, n=h.shape[-1], dim=-1, norm="ortho") + skip(h))
            error = (now + self.lower(h) - later).square() * self.area[:, None]
            return error.mean() / self.area.mean()

    now = floats(batch_size, 3, 6, 8)
    return Net(), {"now": now, "later": now.roll(1, -1)}


def slices_of_physics(batch_size: int = 4) -> Example:
    """Transolver: points of a mesh are softly sorted into slices, attention is between slices, and they are dealt back; the
    loss is relative to each sample's norm, with forces at the surface beside the field."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), two_layers()
            self.value, self.slice = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
            self.sort, self.heat = nn.Linear(4, 3), nn.Parameter(torch.full((1, 2, 1, 1), 0.5))
            self.qkv, self.out = nn.Linear(4, 12, bias=False), nn.Linear(8, WIDTH)
            nn.init.orthogonal_(self.sort.weight)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            value, to = (
                f(h).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.value, self.slice)
            )
            weights = (self.sort(to) / self.heat.clamp(min=0.1)).softmax(-1)
            sums = torch.einsum("bhns,bhnd->bhsd", weights, value)
            slices = sums / (weights.sum(2)[..., None] + 1e-5)
            slices = F.scaled_dot_product_attention(*self.qkv(slices).chunk(3, -1))
            back = torch.einsum("bhsd,bhns->bhnd", slices, weights)
            x = x + self.out(back.transpose(1, 2).flatten(2))
            return x + self.mlp(self.after(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.blocks, self.out = (
                nn.Linear(5, WIDTH),
                nn.Sequential(Block(), Block()),
                nn.Linear(WIDTH, 4),
            )

        def forward(
            self, points: Tensor, normals: Tensor, field: Tensor, surface: Tensor
        ) -> Tensor:
            found = self.out(self.blocks(self.into(torch.cat([points, normals], -1))))
            error = torch.linalg.vector_norm((found - field).flatten(1), dim=1)
            relative = (error / torch.linalg.vector_norm(field.flatten(1), dim=1)).mean()
            forces = [
                (one[..., 3:] * normals * surface[..., None]).sum(1) for one in (found, field)
            ]
            return relative + 0.1 * F.l1_loss(*forces)

    return Net(), {
        "points": floats(batch_size, 9, 3), "normals": F.normalize(floats(batch_size, 9, 2), dim=-1),
        "field": floats(batch_size, 9, 4), "surface": tokens(2, batch_size, 9).float(),
    }  # fmt: skip


# -- decisions, embeddings, and what lies in features -------------------------------------------------------


def rollouts_in_latents(batch_size: int = 6) -> Example:
    """TD-MPC2: latents as groups of simplices, rolled out under given actions against a target's latents, rewards and values
    as two hot bins of symmetric logarithms, five critics of which two drawn ones give the target."""

    class SimNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)

    def mish(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(into, 12), nn.LayerNorm(12), nn.Mish(), nn.Linear(12, out))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(mish(5, WIDTH), SimNorm())
            self.dynamics = nn.Sequential(mish(WIDTH + 2, WIDTH), SimNorm())
            self.reward, self.policy = mish(WIDTH + 2, 9), mish(WIDTH, 2)
            self.critics = nn.ModuleList(mish(WIDTH + 2, 9) for _ in range(5))
            self.targets = nn.ModuleList(mish(WIDTH + 2, 9) for _ in range(5)).requires_grad_(False)
            self.register_buffer("bins", torch.linspace(-4, 4, 9))

        def number(self, scores: Tensor) -> Tensor:
            x = (scores.softmax(-1) * self.bins).sum(-1)
            return x.sign() * (x.abs().exp() - 1)

        def two_hot(self, x: Tensor) -> Tensor:
            x = (x.sign() * torch.log1p(x.abs())).clamp(-4, 4)
            low = (x + 4).floor().clamp(max=7)
            share = x + 4 - low
            whole = low.long()
            return (
                F.one_hot(whole, 9) * (1 - share)[..., None]
                + F.one_hot(whole + 1, 9) * share[..., None]
            )

        def told(self, scores: Tensor, x: Tensor) -> Tensor:
            return -(self.two_hot(x) * scores.log_softmax(-1)).sum(-1)

        def forward(self, seen: Tensor, actions: Tensor, rewards: Tensor, pair: Tensor) -> Tensor:
            with torch.no_grad():
                later = self.encoder(seen[:, 1:])
                ahead = torch.cat([later, self.policy(later).tanh()], -1)
                values = torch.stack([self.number(critic(ahead)) for critic in self.targets])
                aims = rewards + 0.97 * values.index_select(0, pair[0]).amin(0)
            z, loss = self.encoder(seen[:, 0]), 0.0
            for step in range(actions.shape[1]):
                both = torch.cat([z, actions[:, step]], -1)
                weight = 0.5**step
                loss = loss + weight * self.told(self.reward(both), rewards[:, step]).mean()
                for critic in self.critics:
                    loss = loss + weight * self.told(critic(both), aims[:, step]).mean() / 5
                z = self.dynamics(both)
                loss = loss + 20 * weight * F.mse_loss(z, later[:, step])
            return loss / actions.shape[1]

    return Net(), {
        "seen": floats(batch_size, 4, 5), "actions": floats(batch_size, 3, 2).tanh(), "rewards": floats(batch_size, 3),
        "pair": torch.tensor([[1, 3]]).expand(batch_size, -1).clone(),
    }  # fmt: skip


def features_taken_apart(batch_size: int = 8) -> Example:
    """A sparse crosscoder: activations of several layers in one dictionary, the largest of each row kept, features that were
    seldom used explain what is left, decoders of length one by a parametrisation, a loss for each layer."""

    class Unit(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / weight.square().sum((1, 2), keepdim=True).sqrt()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Parameter(floats(3, WIDTH, 24) * 0.2)
            self.decoder = nn.Parameter(floats(24, 3, WIDTH))
            parametrize.register_parametrization(self, "decoder", Unit())
            self.bias, self.centre = (
                nn.Parameter(torch.zeros(24)),
                nn.Parameter(torch.zeros(3, WIDTH)),
            )
            self.register_buffer("seldom", torch.arange(24) % 3 == 0)

        def forward(self, x: Tensor) -> Tensor:
            scores = F.relu(torch.einsum("bld,ldf->bf", x - self.centre, self.encoder) + self.bias)
            large = scores.topk(4, dim=-1)
            kept = torch.zeros_like(scores).scatter(-1, large.indices, large.values)
            made = torch.einsum("bf,fld->bld", kept, self.decoder) + self.centre
            error = x - made
            left = scores.masked_fill(~self.seldom, 0).topk(3, dim=-1)
            again = torch.zeros_like(scores).scatter_(-1, left.indices, left.values)
            aux = (
                (error.detach() - torch.einsum("bf,fld->bld", again, self.decoder))
                .square()
                .sum((1, 2))
            )
            spread = (x - x.mean(0)).square().sum(-1).mean(0)
            each = error.square().sum(-1).mean(0) / spread
            return (
                each.sum()
                + aux.mean() / 32
                + 1e-3 * (kept * self.decoder.norm(dim=(1, 2))).sum(-1).mean()
            )

    return Net(), {"x": floats(batch_size, 3, WIDTH)}


def nested_embeddings(batch_size: int = 6) -> Example:
    """Matryoshka embeddings: the first two, four and all numbers must rank, with hard negatives for each query, false ones
    masked by a margin, both ways, and ranks of a teacher's scores followed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, WIDTH, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.out = nn.Linear(WIDTH, WIDTH)

        def embedded(self, ids: Tensor) -> Tensor:
            there = ids > 0
            h = self.layer(self.words(ids), src_key_padding_mask=~there)
            last = there.sum(1).sub(1).clamp(min=0)
            return self.out(h[torch.arange(len(ids), device=ids.device), last])

        def forward(self, queries: Tensor, texts: Tensor, teacher: Tensor) -> Tensor:
            q = self.embedded(queries)
            t = self.embedded(texts.flatten(0, 1)).unflatten(0, texts.shape[:2])
            loss = q.new_zeros(())
            for size in (2, 4, WIDTH):
                one, many = F.normalize(q[:, :size], dim=-1), F.normalize(t[..., :size], dim=-1)
                own = torch.einsum("bd,bkd->bk", one, many)
                others = one @ many[:, 0].mT
                right = others.diagonal()[:, None]
                itself = torch.eye(len(q), dtype=torch.bool, device=q.device)
                others = others.masked_fill((others > right + 0.1) & ~itself, -math.inf)
                aims = torch.arange(len(q), device=q.device)
                scores = torch.cat([others, own[:, 1:]], 1) / 0.1
                both = F.cross_entropy(scores, aims) + F.cross_entropy(others.mT / 0.1, aims)
                ranks = F.kl_div(
                    (own / 0.1).log_softmax(-1),
                    teacher.log_softmax(-1),
                    log_target=True,
                    reduction="batchmean",
                )
                loss = loss + both + ranks
            return loss / 3

    texts = tokens(29, batch_size, 3, 5) + 1
    texts[..., 4] = 0
    return Net(), {
        "queries": tokens(29, batch_size, 5) + 1,
        "texts": texts,
        "teacher": floats(batch_size, 3),
    }


def orthogonal_in_forward(batch_size: int = 8) -> Example:
    """Weights made orthogonal by Newton-Schulz steps where they are used, as Muon does to updates, by a parametrisation, with
    sizes turned where they are tall, activations that sort their groups, and a margin that is certified."""

    class NewtonSchulz(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            tall = weight.shape[0] > weight.shape[1]
            x = weight.mT if tall else weight
            x = x / (x.norm() + 1e-7)
            for a, b, c in (
                (3.4445, -4.7750, 2.0315),
                (3.4445, -4.7750, 2.0315),
                (1.875, -1.25, 0.375),
            ):
                gram = x @ x.mT
                x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
            return x.mT if tall else x

    class GroupSort(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(WIDTH, 12), nn.Linear(12, 12), nn.Linear(12, 4)]
            for layer in layers:
                parametrize.register_parametrization(layer, "weight", NewtonSchulz())
            self.net = nn.Sequential(layers[0], GroupSort(), layers[1], GroupSort(), layers[2])

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.net(x)
            right = scores.gather(1, labels[:, None])
            margins = right - scores
            radius = margins.masked_fill(F.one_hot(labels, 4).bool(), math.inf).amin(1) / math.sqrt(
                2
            )
            return F.multi_margin_loss(scores, labels, margin=0.5) - 0.1 * F.relu(radius).mean()

    return Net(), {"x": floats(batch_size, WIDTH), "labels": tokens(4, batch_size)}


def vectors_of_adapters(batch_size: int = 8) -> Example:
    """VeRA: one pair of frozen random matrices for all layers, of which each cuts what it needs and trains two vectors; put in
    by name into a frozen trunk, with several adapters whose weights the batch chooses row by row."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear, shared: tuple[Tensor, Tensor], adapters: int) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.register_buffer("a", shared[0][:, : base.in_features], persistent=False)
            self.register_buffer("b", shared[1][: base.out_features], persistent=False)
            self.d = nn.Parameter(torch.full((adapters, shared[0].shape[0]), 0.1))
            self.scale = nn.Parameter(floats(adapters, base.out_features) * 0.1)
            self.chosen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            low = F.linear(x, self.a) * self.d[self.chosen]
            return self.base(x) + F.linear(low, self.b) * self.scale[self.chosen]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH)
            )
            self.trunk.requires_grad_(False)
            shared = floats(4, 12) / 3, floats(12, 4) / 2
            for name, module in list(self.trunk.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(self.trunk, name, Adapted(module, shared, 3))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor, adapter: Tensor) -> Tensor:
            for module in self.trunk.modules():
                if isinstance(module, Adapted):
                    module.chosen = adapter
            return F.mse_loss(self.head(self.trunk(x)), y)

    return Net(), {**row_batch(batch_size), "adapter": tokens(3, batch_size)}


# -- what lies otherwise in memory --------------------------------------------------------------------------


def swin_like_shifts(batch_size: int = 4) -> Example:
    """Windows of a picture that are shifted by half between layers, with a bias looked up by distance and a mask between
    what meets only because the picture was rolled."""
    side, window = 8, 4

    class Block(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift = shift
            self.norm, self.qkv, self.out = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.table = nn.Parameter(floats((2 * window - 1) ** 2, 2) * 0.02)
            grid = torch.stack(
                torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
            ).flatten(1)
            apart = grid[:, :, None] - grid[:, None] + window - 1
            self.register_buffer("where", apart[0] * (2 * window - 1) + apart[1])
            region = torch.zeros(side, side)
            for number, (i, j) in enumerate(
                (i, j)
                for i in (
                    slice(0, -window),
                    slice(-window, -shift or None),
                    slice(-shift or side, None),
                )
                for j in (
                    slice(0, -window),
                    slice(-window, -shift or None),
                    slice(-shift or side, None),
                )
            ):
                region[i, j] = number
            parts = self.windows(region[None, :, :, None])[..., 0]
            self.register_buffer(
                "mask", torch.where(parts[:, None] == parts[:, :, None], 0.0, -1e4)
            )

        @staticmethod
        def windows(x: Tensor) -> Tensor:
            n, h, w, c = x.shape
            x = x.view(n, h // window, window, w // window, window, c)
            return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, c)

        def forward(self, x: Tensor) -> Tensor:
            n = len(x)
            h = self.windows(torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)))
            q, k, v = self.qkv(h).view(len(h), -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            bias = self.table[self.where.view(-1)].view(window**2, window**2, 2).permute(2, 0, 1)
            scores = (q / math.sqrt(WIDTH // 2)) @ k.transpose(-2, -1) + bias
            if self.shift:
                scores = scores.view(n, -1, *scores.shape[1:]) + self.mask[:, None]
                scores = scores.flatten(0, 1)
            h = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            h = (
                h.view(n, side // window, side // window, window, window, WIDTH)
                .permute(0, 1, 3, 2, 4, 5)
                .reshape(x.shape)
            )
            return x + torch.roll(h, (self.shift, self.shift), (1, 2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.blocks = nn.Conv2d(3, WIDTH, 2, 2), nn.Sequential(Block(0), Block(2))
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            h = self.blocks(self.patches(pixels).permute(0, 2, 3, 1))
            return F.cross_entropy(self.head(h.mean((1, 2))), labels)

    return Net(), {"pixels": floats(batch_size, 3, 16, 16), "labels": tokens(5, batch_size)}


def convolutions_of_the_twenties(batch_size: int = 4) -> Example:
    """ConvNeXt V2: wide convolutions of each channel by itself, channels last between, global response norm."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )
            self.gamma, self.beta = (
                nn.Parameter(torch.zeros(1, 1, 1, 4 * width)),
                nn.Parameter(torch.zeros(1, 1, 1, 4 * width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(self.norm(self.spread(x).permute(0, 2, 3, 1))))
            size = torch.norm(h, p=2, dim=(1, 2), keepdim=True)
            h = self.gamma * (h * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.beta + h
            return x + self.down(h).permute(0, 3, 1, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first = nn.Conv2d(3, WIDTH, 4, 4), Block(WIDTH)
            self.norm, self.shrink, self.second = (
                nn.LayerNorm(WIDTH),
                nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2),
                Block(2 * WIDTH),
            )
            self.head = nn.Linear(2 * WIDTH, 5)

        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            h = self.first(self.stem(pixels))
            h = self.second(self.shrink(self.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))
            return F.cross_entropy(self.head(h.mean((-2, -1))), labels, label_smoothing=0.1)

    return Net(), {"pixels": floats(batch_size, 3, 32, 32), "labels": tokens(5, batch_size)}


def latents_and_half_rotated_heads(batch_size: int = 4) -> Example:
    """Keys and values from a small latent, a rotated part shared by heads that is written beside the other part into
    memory made for both, shared and routed experts chosen by groups under a bias that no gradient moves."""

    def rotated(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 0.1 ** torch.arange(
            2, dtype=x.dtype
        )
        one, two = x.unflatten(-1, (2, 2)).unbind(-1)
        return torch.stack(
            [one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1
        ).flatten(-2)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.down, self.norm = (
                nn.Linear(WIDTH, 16),
                nn.Linear(WIDTH, 6 + 4),
                nn.RMSNorm(6),
            )
            self.up, self.out = nn.Linear(6, 16), nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            n, length, _ = x.shape
            q = self.q(x).view(n, length, 2, 8).transpose(1, 2)
            latent, turned = self.down(x).split([6, 4], -1)
            k, v = (
                self.up(self.norm(latent)).view(n, length, 2, 8).transpose(1, 2).split([4, 4], -1)
            )
            queries, keys = q.new_empty(q.shape), k.new_empty(n, 2, length, 8)
            queries[..., :4], queries[..., 4:] = q[..., :4], rotated(q[..., 4:])
            keys[..., :4], keys[..., 4:] = k, rotated(turned.view(n, 1, length, 4))
            h = F.scaled_dot_product_attention(queries, keys, F.pad(v, [0, 4]), is_causal=True)[
                ..., :4
            ]
            return self.out(h.transpose(1, 2).reshape(n, length, 8))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.shared = nn.Linear(WIDTH, 4, bias=False), two_layers()
            self.experts = nn.ModuleList(two_layers() for _ in range(4))
            self.register_buffer("bias", torch.linspace(-0.1, 0.1, 4))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.route(x).sigmoid()
            chosen = scores + self.bias
            group = chosen.unflatten(-1, (2, 2)).sum(-1).argmax(-1, keepdim=True)
            inside = (
                torch.zeros_like(scores[..., :2]).scatter(-1, group, 1).repeat_interleave(2, -1)
            )
            picked = chosen.masked_fill(inside == 0, float("-inf")).topk(2, -1).indices
            weights = scores.gather(-1, picked)
            weights = weights / weights.sum(-1, keepdim=True)
            gate = torch.zeros_like(scores).scatter(-1, picked, weights)
            return self.shared(x) + sum(
                gate[..., i, None] * one(x) for i, one in enumerate(self.experts)
            )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.attend, self.feed = (
                nn.ModuleList(Attention() for _ in range(2)),
                nn.ModuleList(Experts() for _ in range(2)),
            )
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            for i, (attend, feed) in enumerate(zip(self.attend, self.feed, strict=True)):
                h = h + attend(self.norms[2 * i](h))
                h = h + feed(self.norms[2 * i + 1](h))
            return token_loss(self.head(h), labels)

    return Net(), next_words(batch_size)


def noise_before_the_router(batch_size: int = 4) -> Example:
    """A switch: tokens times noise between two bounds choose one expert, whose load is balanced by a loss beside it."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.experts = (
                nn.Linear(WIDTH, 4, bias=False),
                nn.ModuleList(two_layers() for _ in range(4)),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            noisy = x * torch.empty_like(x).uniform_(1 - 1e-9, 1 + 1e-9)
            odds = self.route(noisy).softmax(-1)
            best, which = odds.max(-1)
            one_hot = F.one_hot(which, 4).to(x.dtype)
            made = sum(one_hot[..., i, None] * one(x) for i, one in enumerate(self.experts))
            load = 4 * (one_hot.mean(1) * odds.mean(1)).sum(-1).mean()
            return x + best[..., None] * made, load

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = (
                nn.Embedding(20, WIDTH),
                nn.ModuleList(Switch() for _ in range(2)),
                nn.Linear(WIDTH, 20),
            )

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h, total = self.embed(ids), 0.0
            for layer in self.layers:
                h, load = layer(h)
                total = total + load
            return token_loss(self.head(h), labels) + 0.01 * total

    return Net(), next_words(batch_size)


def rows_of_state(batch_size: int = 4) -> Example:
    """Mamba as it is written without kernels: a short convolution of transposed halves, a scan step by step."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.conv = (
                nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                nn.Conv1d(2 * WIDTH, 2 * WIDTH, 4, padding=3, groups=2 * WIDTH),
            )
            self.x, self.dt, self.out = (
                nn.Linear(2 * WIDTH, 2 + 8, bias=False),
                nn.Linear(2, 2 * WIDTH),
                nn.Linear(2 * WIDTH, WIDTH, bias=False),
            )
            self.a, self.d = (
                nn.Parameter(torch.arange(1.0, 5).log().repeat(2 * WIDTH, 1)),
                nn.Parameter(torch.ones(2 * WIDTH)),
            )

        def forward(self, x: Tensor) -> Tensor:
            h, gate = self.into(x).transpose(1, 2).chunk(2, 1)
            h = F.silu(self.conv(h)[..., : x.shape[1]])
            step, b, c = self.x(h.transpose(1, 2)).split([2, 4, 4], -1)
            step = F.softplus(self.dt(step)).transpose(1, 2)
            keep = torch.exp(-self.a.exp()[None, :, None] * step[..., None])
            add = step[..., None] * b[:, None] * h[..., None]
            state, rows = h.new_zeros(len(x), h.shape[1], 4), []
            for i in range(x.shape[1]):
                state = keep[:, :, i] * state + add[:, :, i]
                rows.append((state @ c[:, i, :, None])[..., 0])
            y = (torch.stack(rows, -1) + h * self.d[:, None]) * F.silu(gate)
            return self.out(y.transpose(1, 2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = (
                nn.Embedding(20, WIDTH),
                nn.ModuleList(Mixer() for _ in range(2)),
                nn.Linear(WIDTH, 20),
            )
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            for norm, layer in zip(self.norms, self.layers, strict=True):
                h = h + layer(norm(h))
            return token_loss(self.head(h), labels)

    return Net(), next_words(batch_size)


def channels_cut_and_shuffled(batch_size: int = 4) -> Example:
    """ShuffleNet V2 and YOLO's C2f: halves of the channels go on as they are, the rest is convolved, all are joined and shuffled."""

    class Unit(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            half = width // 2
            self.branch = nn.Sequential(
                nn.Conv2d(half, half, 1, bias=False),
                nn.BatchNorm2d(half),
                nn.SiLU(),
                nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
                nn.BatchNorm2d(half),
                nn.Conv2d(half, half, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            kept, more = x.chunk(2, 1)
            h = torch.cat([kept, self.branch(more)], 1)
            n, c, height, width = h.shape
            return (
                h.view(n, 2, c // 2, height, width)
                .transpose(1, 2)
                .contiguous()
                .view(n, c, height, width)
            )

    class C2f(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(width, width, 1), nn.Conv2d(2 * width, width, 1)
            self.steps = nn.ModuleList(
                nn.Conv2d(width // 2, width // 2, 3, padding=1) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            parts = list(self.one(x).chunk(2, 1))
            parts.extend(step(parts[-1]) for step in self.steps)
            return self.two(torch.cat(parts, 1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(3, 16, 3, 2, 1),
                nn.ReLU(),
                Unit(16),
                C2f(16),
                nn.MaxPool2d(3, 2, 1),
                Unit(16),
            )
            self.head = nn.Linear(16, 5)

        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.net(pixels).mean((2, 3))), labels)

    return Net(), {"pixels": floats(batch_size, 3, 16, 16), "labels": tokens(5, batch_size)}


def series_inverted(batch_size: int = 4) -> Example:
    """iTransformer: each series is a token, numbers are normalised per series and put back, a batch norm over features of tokens."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norms, self.feed = (
                nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2)),
                two_layers(),
            )

        def normed(self, i: int, x: Tensor) -> Tensor:
            return self.norms[i](x.transpose(1, 2)).transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.normed(0, x + self.attend(x, x, x, need_weights=False)[0])
            return self.normed(1, x + self.feed(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = (
                nn.Linear(12, WIDTH),
                nn.Sequential(Layer(), Layer()),
                nn.Linear(WIDTH, 4),
            )

        def forward(self, past: Tensor, future: Tensor) -> Tensor:
            mean = past.mean(1, keepdim=True).detach()
            scale = (past - mean).var(1, keepdim=True, unbiased=False).add(1e-5).sqrt()
            h = self.layers(self.embed(((past - mean) / scale).transpose(1, 2)))
            made = self.head(h).transpose(1, 2) * scale[:, :1] + mean[:, :1]
            return F.mse_loss(made, future)

    return Net(), {"past": floats(batch_size, 12, 5), "future": floats(batch_size, 4, 5)}


def three_factors_at_once(batch_size: int = 4) -> Example:
    """Triangle updates and an outer mean as one einsum of three operands, gated, as protein models have them."""

    class Triangle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.parts, self.gate, self.out = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, pair: Tensor) -> Tensor:
            h = self.norm(pair)
            a, b = (self.parts(h) * self.gate(h).sigmoid()).chunk(2, -1)
            return pair + self.out(
                torch.einsum("bikc,bjkc,c->bijc", a, b, self.scale) / pair.shape[1]
            )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks, self.head = nn.Sequential(Triangle(), Triangle()), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            pair = self.left(x)[:, :, None] + self.right(x)[:, None]
            return F.cross_entropy(self.head(self.blocks(pair)).permute(0, 3, 1, 2), y)

    return Net(), {"x": floats(batch_size, 6, WIDTH), "y": tokens(4, batch_size, 6, 6)}
