"""What newer papers and old corners of fields hold that the other lists lack, for ``outside.py``: attention that subtracts,
forgets and picks blocks, bytes cut into patches, features that turn with space, tables encoded in pieces, graphs with sparse
matrices, losses over populations, loops that search while they run.

Written before any of them was run.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from outside_models import Example, floats, next_words, token_loss, tokens
from torch import Tensor, nn

WIDTH = 8


def _rows(batch_size: int, *lengths: int) -> dict[str, Tensor]:
    x = floats(batch_size, *lengths, WIDTH)
    return {"x": x, "y": x.roll(1, -1) * 0.5}


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


# -- attention -------------------------------------------------------------------------------------------


def differential_attention(batch_size: int = 4) -> Example:
    """Differential Transformer: two softmaxes subtracted, a lambda of four vectors, a norm of every head, RMS norms."""

    class Attention(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.heads, self.dim = 2, 2
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
            self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
            for name in ("q1", "k1", "q2", "k2"):
                self.register_parameter(f"lambda_{name}", nn.Parameter(floats(self.dim) * 0.1))
            self.norm = nn.RMSNorm(2 * self.dim, eps=1e-5, elementwise_affine=False)

        def forward(self, x: Tensor) -> Tensor:
            b, s, _ = x.shape
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = (t.view(b, s, 2 * self.heads, self.dim).transpose(1, 2) for t in (q, k))
            v = v.view(b, s, self.heads, 2 * self.dim).transpose(1, 2)
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.dim)
            scores = scores + torch.triu(torch.full_like(scores, float("-inf")), 1)
            share = scores.softmax(-1, dtype=torch.float32).type_as(scores)
            one = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, -1).float())
            two = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, -1).float())
            full = (one - two + self.start).type_as(x)
            share = share.view(b, self.heads, 2, s, s)
            share = share[:, :, 0] - full * share[:, :, 1]
            made = self.norm(share @ v) * (1 - self.start)
            return self.out(made.transpose(1, 2).reshape(b, s, WIDTH))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.layers = nn.ModuleList([Attention(depth) for depth in range(2)])
            self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            for norm, layer in zip(self.norms, self.layers, strict=True):
                h = h + layer(norm(h))
            return token_loss(self.head(h), labels)

    return Net(), next_words(batch_size)


def forgetting_attention(batch_size: int = 4) -> Example:
    """Forgetting Transformer: log forget gates added up decay the scores, keys shifted by a learned mix."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, False) for _ in range(3))
            self.forget, self.mix = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2, bias=False)
            self.out, self.gate, self.head = (
                nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20)
            )  # fmt: skip

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            s = h.shape[1]
            share = torch.sigmoid(self.mix(h)).repeat_interleave(WIDTH // 2, -1)
            k = self.k(h)
            k = share * F.pad(k, (0, 0, 1, 0))[:, :-1] + (1 - share) * k
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (self.q(h), k, self.v(h)))
            decay = F.logsigmoid(self.forget(h)).cumsum(1).transpose(1, 2)
            bias = decay.unsqueeze(-1) - decay.unsqueeze(-2)
            bias = bias.masked_fill(~_causal(s), float("-inf"))
            made = F.scaled_dot_product_attention(
                F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, attn_mask=bias
            )
            made = made.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(h))
            return token_loss(self.head(h + self.out(made)), labels)

    return Net(), next_words(batch_size)


def chosen_blocks(batch_size: int = 4) -> Example:
    """Native sparse attention: keys pressed into blocks, the best blocks of every query gathered, a window, three gates."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
            self.press_k, self.press_v = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.position = nn.Parameter(floats(2, WIDTH) * 0.1)
            self.gates, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            b, s, d = h.shape
            q, k, v = self.qkv(h).chunk(3, -1)
            blocks = s // 2
            bk, bv = (t.reshape(b, blocks, 2, d) for t in (k, v))
            ck = self.press_k((bk + self.position).flatten(2))
            cv = self.press_v((bv + self.position).flatten(2))
            block_of = torch.arange(s) // 2
            seen = block_of[:, None] >= torch.arange(blocks)[None]
            coarse = (q @ ck.mT / d**0.5).masked_fill(~seen, -1e9).softmax(-1)
            best = coarse.topk(2, -1).indices
            index = (best.unsqueeze(-1) * 2 + torch.arange(2)).flatten(2)
            gk, gv = (
                torch.gather(
                    t.unsqueeze(1).expand(b, s, s, d), 2, index[..., None].expand(-1, -1, -1, d)
                )
                for t in (k, v)
            )
            fine = (q.unsqueeze(2) @ gk.mT).squeeze(2) / d**0.5
            fine = fine.masked_fill(index > torch.arange(s)[:, None], -1e9).softmax(-1)
            fine = (fine.unsqueeze(2) @ gv).squeeze(2)
            near = _causal(s) & ~torch.ones(s, s, dtype=torch.bool).tril(-3)
            near = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
            g = torch.sigmoid(self.gates(h)).unsqueeze(-1)
            made = g[:, :, 0] * (coarse @ cv) + g[:, :, 1] * fine + g[:, :, 2] * near
            return token_loss(self.head(h + made), labels)

    return Net(), next_words(batch_size)


def factored_attention(batch_size: int = 4) -> Example:
    """Tensor product attention: queries, keys and values as sums of outer products, turned by rotary angles."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.heads, self.dim, self.rank = 2, 4, 2
            for name in ("q", "k", "v"):
                self.add_module(f"a_{name}", nn.Linear(WIDTH, self.rank * self.heads, False))
                self.add_module(f"b_{name}", nn.Linear(WIDTH, self.rank * self.dim, False))
            self.out = nn.Linear(WIDTH, WIDTH)

        def turned(self, x: Tensor) -> Tensor:
            angle = torch.outer(torch.arange(x.shape[1]), 10.0 ** -torch.arange(0, 1, 0.5))
            cos, sin = (f(angle).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
            one, two = x.chunk(2, -1)
            return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            b, s, _ = h.shape
            made = []
            for name in ("q", "k", "v"):
                a = getattr(self, f"a_{name}")(h).view(b, s, self.rank, self.heads)
                c = getattr(self, f"b_{name}")(h).view(b, s, self.rank, self.dim)
                c = c if name == "v" else self.turned(c)
                made.append(torch.einsum("bsrh,bsrd->bhsd", a, c) / self.rank)
            out = F.scaled_dot_product_attention(*made, is_causal=True)
            return token_loss(self.head(h + self.out(out.transpose(1, 2).flatten(2))), labels)

    return Net(), next_words(batch_size)


def moving_average_gates(batch_size: int = 4) -> Example:
    """MEGA: damped averages in many directions by a long convolution through Fourier space, gates, Laplace attention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n = 3
            self.delta, self.alpha = (nn.Parameter(floats(WIDTH, n, 1)) for _ in range(2))
            self.beta, self.gamma = (nn.Parameter(floats(WIDTH, n) * 0.3) for _ in range(2))
            self.omega = nn.Parameter(floats(WIDTH))
            self.z, self.scale = nn.Linear(WIDTH, 4), nn.Parameter(floats(2, 4) * 0.5 + 1)
            self.shift = nn.Parameter(torch.zeros(2, 4))
            self.v, self.r, self.u, self.h = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.norm = nn.LayerNorm(WIDTH)

        def averaged(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            p = torch.sigmoid(self.delta)
            q = torch.log(1.0 - p * torch.sigmoid(self.alpha))
            kernel = torch.exp(torch.arange(length).view(1, 1, -1).to(x.dtype) * q)
            kernel = torch.einsum("dnl,dn->dl", p * self.beta.unsqueeze(-1) * kernel, self.gamma)
            y = x.transpose(1, 2)
            kf, yf = torch.fft.rfft(kernel, n=2 * length), torch.fft.rfft(y, n=2 * length)
            out = torch.fft.irfft(kf * yf, n=2 * length)[..., :length]
            return F.silu(out + y * self.omega.unsqueeze(-1)).transpose(1, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            n = self.norm(x)
            m = self.averaged(n)
            z = F.silu(self.z(m)).unsqueeze(-2) * self.scale + self.shift
            q, k = z.unbind(-2)
            score = q @ k.mT / x.shape[1]
            share = 0.5 * (1 + torch.erf((score - math.sqrt(0.5)) / math.sqrt(0.5 / math.pi)))
            share = share.masked_fill(~_causal(x.shape[1]), 0.0)
            h = F.silu(self.h(m) + torch.sigmoid(self.r(m)) * (share @ F.silu(self.v(n))))
            return F.mse_loss(torch.lerp(x, h, torch.sigmoid(self.u(m))), y)

    return Net(), _rows(batch_size, 6)


def memory_at_test_time(batch_size: int = 4) -> Example:
    """Titans: a small network whose weights learn in chunks inside forward, with momentum and forgetting, by its own gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, False) for _ in range(3))
            self.rate, self.keep, self.carry = (nn.Linear(WIDTH, 1) for _ in range(3))
            self.start = nn.Parameter(floats(WIDTH, WIDTH) * 0.2)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b = x.shape[0]
            memory = self.start.expand(b, -1, -1)
            surprise = torch.zeros_like(memory)
            found = []
            for part in x.split(2, 1):
                q, k, v = self.q(part), F.normalize(self.k(part), dim=-1), self.v(part)
                found.append(q @ memory)
                gap = k @ memory - v
                gradient = k.mT @ gap
                rate, keep, carry = (
                    torch.sigmoid(gate(part.mean(1, keepdim=True)))
                    for gate in (self.rate, self.keep, self.carry)
                )
                surprise = carry * surprise - rate * gradient
                memory = (1 - 0.1 * keep) * memory + surprise
            return F.mse_loss(self.out(torch.cat(found, 1)), y)

    return Net(), _rows(batch_size, 6)


def bytes_in_patches(batch_size: int = 4) -> Example:
    """Byte latents: boundaries by a small model's entropy, bytes summed into patches, patches spread back, hashed n-grams."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20))
            self.bytes, self.hashes = nn.Embedding(20, WIDTH), nn.Embedding(31, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, "gelu", batch_first=True)
            self.latent = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(2 * WIDTH, 20)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            b, s = ids.shape
            with torch.no_grad():
                odds = self.small(ids).log_softmax(-1)
                entropy = -(odds.exp() * odds).sum(-1)
                is_start = entropy > entropy.mean(1, keepdim=True)
                is_start[:, 0] = True
                patch = is_start.long().cumsum(1) - 1
            grams = F.pad(ids, (1, 0))[:, :-1] * 7 + ids * 13
            local = self.bytes(ids) + self.hashes(grams % 31)
            summed = local.new_zeros(b, s, WIDTH).scatter_add(
                1, patch.unsqueeze(-1).expand_as(local), local
            )
            count = local.new_zeros(b, s).scatter_add(1, patch, torch.ones_like(local[..., 0]))
            pooled = summed / count.clamp_min(1).unsqueeze(-1)
            latent = self.latent(
                pooled, mask=~_causal(s), src_key_padding_mask=count == 0, is_causal=True
            ).masked_fill((count == 0).unsqueeze(-1), 0.0)
            spread = torch.gather(latent, 1, patch.unsqueeze(-1).expand(-1, -1, WIDTH))
            loss = token_loss(self.head(torch.cat([local, spread], -1)), labels)
            return loss + token_loss(self.small(ids), labels)

    return Net(), next_words(batch_size)


def recursion_by_router(batch_size: int = 4) -> Example:
    """Mixture of recursions: one block run again on the tokens that a router keeps at every depth, and an auxiliary loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.block = nn.TransformerEncoderLayer(
                WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True
            )
            self.routers = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(3))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h, kept, extra = self.embed(ids), ids.shape[1], 0.0
            for router in self.routers:
                kept = max(kept * 3 // 4, 2)
                score = torch.sigmoid(router(h)).squeeze(-1)
                weight, index = score.topk(kept, 1, sorted=False)
                index, order = index.sort(1)
                weight = weight.gather(1, order)
                at = index.unsqueeze(-1).expand(-1, -1, WIDTH)
                run = self.block(h.gather(1, at), src_mask=~_causal(kept))
                h = h.scatter(1, at, h.gather(1, at) + weight.unsqueeze(-1) * run)
                target = torch.zeros_like(score).scatter(1, index, 1.0)
                extra = extra + F.binary_cross_entropy(score, target.detach())
            return token_loss(self.head(h), labels) + 0.01 * extra

    return Net(), next_words(batch_size)


def tokens_ahead(batch_size: int = 4) -> Example:
    """Multi-token prediction: modules chained in depth share embedding and head, each told one token later, weighed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            make = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)  # noqa: E731
            self.trunk = nn.ModuleList(make() for _ in range(2))
            self.ahead = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "hidden": nn.RMSNorm(WIDTH), "token": nn.RMSNorm(WIDTH),
                        "join": nn.Linear(2 * WIDTH, WIDTH, bias=False), "block": make(),
                    }
                )
                for _ in range(2)
            )  # fmt: skip

        def said(self, h: Tensor) -> Tensor:
            return F.linear(h, self.embed.weight)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            mask = ~_causal(ids.shape[1])
            h = self.embed(ids)
            for block in self.trunk:
                h = block(h, src_mask=mask)
            losses = [token_loss(self.said(h), labels)]
            for depth, part in enumerate(self.ahead, 1):
                later = self.embed(ids.roll(-depth, 1))
                h = part["join"](torch.cat([part["hidden"](h), part["token"](later)], -1))
                h = part["block"](h, src_mask=mask)
                losses.append(
                    token_loss(self.said(h)[:, :-depth], labels.roll(-depth, 1)[:, :-depth])
                )
            return losses[0] + 0.3 * torch.stack(losses[1:]).mean()

    return Net(), next_words(batch_size)


# -- space and graphs ------------------------------------------------------------------------------------


def turning_products(batch_size: int = 4) -> Example:
    """Features of degrees 0, 1 and 2 joined by Clebsch-Gordan products, gated by scalars, a radial network of every path."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.species, self.radial = (
                nn.Embedding(4, 4),
                nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4 * 6)),
            )
            self.mix0, self.mix1 = nn.Linear(12, 8), nn.Linear(12, 4, bias=False)
            self.energy = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
            self.register_buffer("centres", torch.linspace(0, 3, 5))

        def forward(self, kinds: Tensor, places: Tensor, y: Tensor) -> Tensor:
            n = places.shape[1]
            apart = places.unsqueeze(2) - places.unsqueeze(1)
            far = (apart.square().sum(-1) + torch.eye(n, dtype=apart.dtype)).sqrt()
            u = apart / far.unsqueeze(-1)
            y2 = torch.einsum("bijp,bijq->bijpq", u, u) - torch.eye(3, dtype=u.dtype) / 3
            cut = (
                0.5
                * (1 + torch.cos(math.pi * (far / 3).clamp(max=1)))
                * (1 - torch.eye(n, dtype=u.dtype))
            )
            r = self.radial(torch.exp(-((far.unsqueeze(-1) - self.centres) ** 2)))
            r = (r * cut.unsqueeze(-1)).unflatten(-1, (6, 4))
            s = self.species(kinds)
            a0 = torch.einsum("bijc,bjc->bic", r[..., 0, :], s)
            a1 = torch.einsum("bijc,bijp,bjc->bicp", r[..., 1, :], u, s)
            a2 = torch.einsum("bijc,bijpq,bjc->bicpq", r[..., 2, :], y2, s)
            scalars = torch.cat(
                [a0, (a1 * a1).sum(-1), torch.einsum("bicpq,bicqp->bic", a2, a2)], -1
            )
            vectors = torch.cat(
                [a1 * a0.unsqueeze(-1), torch.einsum("bicpq,bicq->bicp", a2, a1),
                 torch.linalg.cross(a1, torch.einsum("bijc,bijp,bjc->bicp", r[..., 3, :], u, s))], 2
            )  # fmt: skip
            h0 = F.silu(self.mix0(scalars))
            h1 = self.mix1(vectors.transpose(2, 3)).transpose(2, 3) * torch.sigmoid(
                h0[..., :4, None]
            )
            dipole = h1.mean(2).sum(1)
            return F.mse_loss(self.energy(h0).sum((1, 2)) + dipole.square().sum(-1), y)

    batch = {
        "kinds": tokens(4, batch_size, 5),
        "places": floats(batch_size, 5, 3),
        "y": floats(batch_size),
    }
    return Net(), batch


def polarised_atoms(batch_size: int = 4) -> Example:
    """PaiNN on edge lists: scalars and vectors sent by index, added up with index_add, updated by norms of vectors."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.filters = nn.Embedding(5, WIDTH), nn.Linear(6, 3 * WIDTH)
            self.message = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH)
            )
            self.mix = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.update = nn.Sequential(
                nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH)
            )
            self.read = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

        def forward(self, z: Tensor, places: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            b, n = z.shape
            offset = (torch.arange(b) * n).view(b, 1)
            source, sink = ((edges[:, i] + offset).flatten() for i in (0, 1))
            q, mu = self.embed(z).flatten(0, 1), None
            mu = q.new_zeros(b * n, 3, WIDTH)
            points = places.flatten(0, 1)
            d = points[source] - points[sink]
            length = torch.linalg.vector_norm(d, dim=-1, keepdim=True).clamp_min(1e-3)
            rbf = torch.sin(length * torch.arange(1, 7) * math.pi / 4) / length
            w = self.filters(rbf)
            dq, dr, dm = (self.message(q)[source] * w).chunk(3, -1)
            q = q.index_add(0, sink, dq)
            mu = mu.index_add(
                0, sink, dr.unsqueeze(1) * (d / length).unsqueeze(-1) + dm.unsqueeze(1) * mu[source]
            )
            v, u = self.mix(mu).chunk(2, -1)
            a, s, g = self.update(torch.cat([q, (u.square().sum(1) + 1e-6).sqrt()], -1)).chunk(
                3, -1
            )
            q = q + a + s * (u * v).sum(1)
            mu = mu + g.unsqueeze(1) * v
            whole = self.read(q).view(b, n).sum(1) + 0.1 * mu.square().view(b, -1).mean(1)
            return F.smooth_l1_loss(whole, y)

    edges = tokens(5, batch_size, 2, 9)
    batch = {
        "z": tokens(5, batch_size, 5),
        "places": floats(batch_size, 5, 3),
        "edges": edges,
        "y": floats(batch_size),
    }
    return Net(), batch


def graphormer(batch_size: int = 4) -> Example:
    """Graphormer: degrees as embeddings, path lengths and edge features as biases of attention, a virtual node."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atom, self.degree = nn.Embedding(6, WIDTH, padding_idx=0), nn.Embedding(9, WIDTH)
            self.far, self.edge = nn.Embedding(8, 2), nn.Embedding(4, 2)
            self.virtual, self.virtual_far = (
                nn.Parameter(floats(1, 1, WIDTH)),
                nn.Parameter(torch.zeros(2)),
            )
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norm, self.ffn = (
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
            )
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, atoms: Tensor, paths: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            b, n = atoms.shape
            degree = (paths == 1).sum(-1).clamp(max=8)
            h = self.atom(atoms) + self.degree(degree)
            h = torch.cat([self.virtual.expand(b, -1, -1), h], 1)
            bias = h.new_zeros(b, 2, n + 1, n + 1)
            bias[:, :, 1:, 1:] = (self.far(paths) + self.edge(edges)).permute(0, 3, 1, 2)
            bias[:, :, 0, :] += self.virtual_far.view(1, 2, 1)
            bias[:, :, :, 0] += self.virtual_far.view(1, 2, 1)
            blank = torch.cat([torch.zeros(b, 1, dtype=torch.bool), atoms == 0], 1)
            bias = bias.masked_fill(blank[:, None, None], float("-inf"))
            n1 = self.norm(h)
            h = h + self.attention(n1, n1, n1, attn_mask=bias.flatten(0, 1), need_weights=False)[0]
            h = h + self.ffn(self.norm(h))
            return F.l1_loss(self.head(h[:, 0]).squeeze(-1), y)

    atoms = tokens(6, batch_size, 6)
    batch = {
        "atoms": atoms,
        "paths": tokens(8, batch_size, 6, 6),
        "edges": tokens(4, batch_size, 6, 6),
        "y": floats(batch_size),
    }
    return Net(), batch


def light_graph(batch_size: int = 4) -> Example:
    """LightGCN: users and items spread over a sparse adjacency kept as a buffer, layers averaged, BPR and its penalty."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            users, items = 6, 8
            self.users, self.items = nn.Embedding(users, WIDTH), nn.Embedding(items, WIDTH)
            likes = tokens(2, users, items).float()
            full = torch.zeros(users + items, users + items)
            full[:users, users:], full[users:, :users] = likes, likes.T
            scale = full.sum(1).clamp_min(1).rsqrt()
            self.register_buffer("adjacent", (scale[:, None] * full * scale[None]).to_sparse())

        def forward(self, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
            h = torch.cat([self.users.weight, self.items.weight])
            layers = [h]
            for _ in range(2):
                h = torch.sparse.mm(self.adjacent.to(h.dtype), h)
                layers.append(h)
            users, items = torch.stack(layers, 1).mean(1).split([6, 8])
            u, p, n = users[user], items[liked], items[other]
            gap = (u * p).sum(-1) - (u * n).sum(-1)
            own = self.users(user), self.items(liked), self.items(other)
            penalty = sum(one.norm(2).pow(2) for one in own) / len(user)
            return -F.logsigmoid(gap).mean() + 1e-2 * penalty

    batch = {
        "user": tokens(6, batch_size),
        "liked": tokens(8, batch_size),
        "other": tokens(8, batch_size).flip(0),
    }
    return Net(), batch


def invariant_points(batch_size: int = 2) -> Example:
    """Invariant point attention: frames from quaternions, points moved between them, three sorts of scores, frames updated."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, 2 * 4) for _ in range(3))
            self.qp, self.kp, self.vp = (nn.Linear(WIDTH, 2 * 2 * 3) for _ in range(3))
            self.pair, self.weight = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))
            self.out, self.move = nn.Linear(2 * (4 + 2 * 4 + 4), WIDTH), nn.Linear(WIDTH, 6)
            nn.init.normal_(self.move.weight, std=0.02)

        @staticmethod
        def matrix(q: Tensor) -> Tensor:
            w, x, y, z = F.normalize(q, dim=-1).unbind(-1)
            rows = (
                1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
            )  # fmt: skip
            return torch.stack(rows, -1).unflatten(-1, (3, 3))

        def forward(self, s: Tensor, z: Tensor, y: Tensor) -> Tensor:
            b, n, _ = s.shape
            turn = torch.eye(3, dtype=s.dtype).expand(b, n, 3, 3)
            shift = s.new_zeros(b, n, 3)
            for _ in range(2):
                q, k, v = (f(s).view(b, n, 2, 4) for f in (self.q, self.k, self.v))
                points = [f(s).view(b, n, 4, 3) for f in (self.qp, self.kp, self.vp)]
                qp, kp, vp = (
                    (torch.einsum("bnij,bnpj->bnpi", turn, p) + shift.unsqueeze(2)).view(
                        b, n, 2, 2, 3
                    )
                    for p in points
                )
                far = (qp.unsqueeze(2) - kp.unsqueeze(1)).square().sum((-1, -2))
                score = torch.einsum("bihc,bjhc->bijh", q, k) / 2 + self.pair(z)
                share = (score - 0.5 * F.softplus(self.weight) * far).softmax(2)
                o = torch.einsum("bijh,bjhc->bihc", share, v)
                op = torch.einsum("bijh,bjhpc->bihpc", share, vp).flatten(2, 3) - shift.unsqueeze(2)
                op = torch.einsum("bnji,bnpj->bnpi", turn, op)
                oz = torch.einsum("bijh,bijc->bihc", share, z)
                parts = [
                    o.flatten(2),
                    op.flatten(2),
                    (op.square().sum(-1) + 1e-8).sqrt(),
                    oz.flatten(2),
                ]
                s = s + self.out(torch.cat(parts, -1))
                step = self.move(s)
                one = torch.ones_like(step[..., :1])
                shift = shift + torch.einsum("bnij,bnj->bni", turn, step[..., 3:])
                turn = turn @ self.matrix(torch.cat([one, step[..., :3]], -1))
            return (shift - y).square().sum(-1).clamp(max=100).mean()

    return Net(), {
        "s": floats(batch_size, 5, WIDTH),
        "z": floats(batch_size, 5, 5, 4),
        "y": floats(batch_size, 5, 3),
    }


# -- tables and series -----------------------------------------------------------------------------------


def pieces_of_numbers(batch_size: int = 8) -> Example:
    """Tables: numbers encoded piecewise in quantile bins, periodic ones, a packed ensemble with rank-one scales (TabM)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            edges = floats(64, 4).quantile(torch.linspace(0, 1, 6), dim=0).T
            self.register_buffer("left", edges[:, :-1].contiguous())
            self.register_buffer("width", edges.diff(dim=1).clamp_min(1e-2))
            self.linear = nn.Parameter(floats(4, 5, 3) * 0.3)
            self.frequencies = nn.Parameter(floats(4, 3) * 0.5)
            self.kinds = nn.ModuleList(nn.Embedding(n, 3) for n in (3, 5))
            k, into = 4, 4 * 3 + 4 * 6 + 2 * 3
            self.shared = nn.Linear(into, 12)
            self.r, self.s = nn.Parameter(floats(k, into).sign()), nn.Parameter(torch.ones(k, 12))
            self.bias, self.heads = (
                nn.Parameter(floats(k, 12) * 0.1),
                nn.Parameter(floats(k, 12, 2) * 0.3),
            )

        def forward(self, numbers: Tensor, kinds: Tensor, y: Tensor) -> Tensor:
            part = (numbers.unsqueeze(-1) - self.left) / self.width
            first, middle, last = (
                part[..., :1].clamp(max=1),
                part[..., 1:-1].clamp(0, 1),
                part[..., -1:].clamp(min=0),
            )
            encoded = torch.einsum(
                "bfp,fpd->bfd", torch.cat([first, middle, last], -1), self.linear
            )
            wave = 2 * math.pi * self.frequencies * numbers.unsqueeze(-1)
            embedded = [table(kinds[:, i]) for i, table in enumerate(self.kinds)]
            x = torch.cat(
                [
                    F.relu(encoded).flatten(1),
                    wave.cos().flatten(1),
                    wave.sin().flatten(1),
                    *embedded,
                ],
                -1,
            )
            x = x.unsqueeze(1) * self.r
            h = F.relu(self.shared(x) * self.s + self.bias)
            scores = torch.einsum("bki,kio->bko", h, self.heads)
            return F.cross_entropy(scores.flatten(0, 1), y.repeat_interleave(4))

    kinds = torch.stack([tokens(3, batch_size), tokens(5, batch_size)], 1)
    return Net(), {"numbers": floats(batch_size, 4), "kinds": kinds, "y": tokens(2, batch_size)}


def hashed_words(batch_size: int = 4) -> Example:
    """Hash embeddings: several hashes of every id into one small table, weighed by importances of its own, text as a bag."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.importance = nn.Embedding(11, WIDTH), nn.Embedding(1000, 3)
            self.register_buffer("multipliers", torch.tensor([7919, 104729, 15485863]))
            self.head = nn.Linear(WIDTH + 3, 4)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            bucket = ((ids.unsqueeze(-1) * self.multipliers) ^ (ids.unsqueeze(-1) >> 3)) % 11
            weight = self.importance(ids % 1000)
            word = (self.table(bucket) * weight.unsqueeze(-1)).sum(-2)
            mask = (ids != 0).unsqueeze(-1)
            pooled = (torch.cat([word, weight], -1) * mask).sum(1) / mask.sum(1).clamp(min=1)
            return F.cross_entropy(self.head(pooled), labels)

    return Net(), {"ids": tokens(100_000, batch_size, 7), "labels": tokens(4, batch_size)}


def quantiles_of_series(batch_size: int = 4) -> Example:
    """N-HiTS: pooled at several rates, bases interpolated back, pinball losses whose quantiles must not cross."""

    class Stack(nn.Module):
        def __init__(self, pool: int, knots: int) -> None:
            super().__init__()
            self.pool, self.knots = pool, knots
            self.net = nn.Sequential(
                nn.Linear(12 // pool, 10), nn.ReLU(), nn.Linear(10, 12 + 3 * knots)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            small = F.max_pool1d(x.unsqueeze(1), self.pool, self.pool, ceil_mode=True).squeeze(1)
            theta = self.net(small)
            ahead = theta[:, 12:].view(-1, 3, self.knots)
            return theta[:, :12], F.interpolate(ahead, size=6, mode="linear", align_corners=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacks = nn.ModuleList([Stack(4, 2), Stack(2, 3), Stack(1, 6)])
            self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            rest, found = (x - mean) / spread, 0.0
            for stack in self.stacks:
                back, ahead = stack(rest)
                rest, found = rest - back, found + ahead
            found = found * spread.unsqueeze(-1) + mean.unsqueeze(-1)
            gap = y.unsqueeze(1) - found
            level = self.levels.view(1, 3, 1)
            pinball = torch.maximum(level * gap, (level - 1) * gap).mean()
            return pinball + F.relu(found[:, :-1] - found[:, 1:]).mean() + 0.1 * rest.abs().mean()

    x = floats(batch_size, 18).cumsum(1) * 0.3
    return Net(), {"x": x[:, :12].contiguous(), "y": x[:, 12:].contiguous()}


def liquid_cells(batch_size: int = 4) -> Example:
    """Liquid time constants: several implicit steps per reading with sparse wiring masks, times between readings given."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tau, self.a = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(floats(WIDTH) * 0.5)
            self.into, self.back = nn.Linear(3, WIDTH), nn.Parameter(floats(WIDTH, WIDTH) * 0.3)
            self.register_buffer("wired", (tokens(3, WIDTH, WIDTH) > 0).float())
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, times: Tensor, y: Tensor) -> Tensor:
            h, found = x.new_zeros(x.shape[0], WIDTH), []
            for t in range(x.shape[1]):
                drive = self.into(x[:, t])
                step = times[:, t, None].sigmoid() / 3
                for _ in range(3):
                    f = torch.sigmoid(drive + h @ (self.back * self.wired))
                    h = (h + step * f * self.a) / (1 + step * (1 / F.softplus(self.tau) + f))
                found.append(self.out(h))
            return F.huber_loss(torch.cat(found, 1), y, delta=0.5)

    return Net(), {
        "x": floats(batch_size, 5, 3),
        "times": floats(batch_size, 5),
        "y": floats(batch_size, 5),
    }


def heavy_tails(batch_size: int = 4) -> Example:
    """DeepAR: an LSTM over scaled readings and covariates, Student t by lgamma and negative binomial heads, missing ones masked."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3 + 2, WIDTH, num_layers=2, batch_first=True)
            self.series, self.head, self.counts = (
                nn.Embedding(5, 2),
                nn.Linear(WIDTH, 3),
                nn.Linear(WIDTH, 2),
            )

        def forward(self, x: Tensor, which: Tensor, seen: Tensor, y: Tensor, n: Tensor) -> Tensor:
            own = self.series(which).unsqueeze(1).expand(-1, x.shape[1], -1)
            scale = (x[..., 0].abs() * seen).sum(1) / seen.sum(1).clamp_min(1) + 1
            h, _ = self.lstm(torch.cat([x / scale[:, None, None], own], -1))
            mean, spread, free = self.head(h).unbind(-1)
            spread, free = F.softplus(spread) + 1e-3, 2 + F.softplus(free)
            z = (y / scale[:, None] - mean) / spread
            t = (
                torch.lgamma((free + 1) / 2) - torch.lgamma(free / 2) - 0.5 * torch.log(math.pi * free)
                - spread.log() - (free + 1) / 2 * torch.log1p(z * z / free)
            )  # fmt: skip
            rate, shape = F.softplus(self.counts(h)).unbind(-1)
            shape = shape + 0.1
            chance = torch.distributions.NegativeBinomial(
                shape, logits=(rate + 1e-3).log() - shape.log()
            )
            both = t + 0.1 * chance.log_prob(n)
            return -(both * seen).sum() / seen.sum()

    seen = (tokens(4, batch_size, 6) > 0).float()
    batch = {"x": floats(batch_size, 6, 3), "which": tokens(5, batch_size), "seen": seen,
             "y": floats(batch_size, 6), "n": tokens(6, batch_size, 6).float()}  # fmt: skip
    return Net(), batch


# -- pictures and sound ----------------------------------------------------------------------------------


def steered_diffusion(batch_size: int = 4) -> Example:
    """ControlNet: a frozen UNet with cross attention, a copy of its first half fed with hints through zero convolutions."""

    class Cross(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, width)
            self.q, self.kv, self.out = (
                nn.Linear(width, width),
                nn.Linear(6, 2 * width),
                nn.Linear(width, width),
            )

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            b, c, h, w = x.shape
            q = self.q(self.norm(x).flatten(2).mT)
            k, v = self.kv(text).chunk(2, -1)
            made = F.scaled_dot_product_attention(
                *(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
            )
            return x + self.out(made.transpose(1, 2).flatten(2)).mT.reshape(b, c, h, w)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.time = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(8, 8)
            self.down, self.cross = nn.Conv2d(4, 8, 3, 2, 1), Cross(8)

        def forward(
            self, x: Tensor, time: Tensor, text: Tensor, hint: Tensor | float = 0.0
        ) -> list[Tensor]:
            one = self.first(x) + hint
            two = self.cross(F.silu(self.down(one)) + self.time(time)[..., None, None], text)
            return [one, two]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.control = Half(), Half()
            self.up = nn.Sequential(
                nn.Conv2d(12, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1)
            )
            self.control.load_state_dict(self.encode.state_dict())
            for part in (self.encode, self.up):
                part.requires_grad_(False)
            self.hint = nn.Conv2d(1, 4, 1)
            self.zeros = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(8, 8, 1)])
            for one in self.zeros:
                nn.init.constant_(one.weight, 0.05)

        def forward(
            self, clean: Tensor, noise: Tensor, t: Tensor, text: Tensor, kept: Tensor, hint: Tensor
        ) -> Tensor:
            share = torch.cos(t * math.pi / 2).view(-1, 1, 1, 1)
            noisy = share * clean + (1 - share.square()).clamp_min(0).sqrt() * noise
            angles = t[:, None] * 2.0 ** torch.arange(4)
            time = torch.cat([angles.sin(), angles.cos()], -1)
            text = torch.where(kept[:, None, None] > 0, text, torch.zeros_like(text))
            with torch.no_grad():
                skips = self.encode(noisy, time, text)
            extra = self.control(noisy, time, text, self.hint(hint))
            one, two = (a + z(b) for a, b, z in zip(skips, extra, self.zeros, strict=True))
            found = self.up(torch.cat([one, F.interpolate(two, scale_factor=2.0)], 1))
            weight = torch.minimum(
                share.square() / (1 - share.square()).clamp_min(1e-3), torch.tensor(5.0)
            )
            return (weight * (found - noise).square()).mean()

    batch = {
        "clean": floats(batch_size, 2, 8, 8), "noise": floats(batch_size, 2, 8, 8).flip(0),
        "t": floats(batch_size).sigmoid(), "text": floats(batch_size, 3, 6),
        "kept": tokens(4, batch_size), "hint": floats(batch_size, 1, 8, 8),
    }  # fmt: skip
    return Net(), batch


def corner_pools(batch_size: int = 4) -> Example:
    """CornerNet: maxima accumulated from both sides, focal loss over heatmaps, pulled and pushed embeddings of corners."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
            self.vertical, self.horizontal = (
                nn.Conv2d(6, 6, 3, padding=1),
                nn.Conv2d(6, 6, 3, padding=1),
            )
            self.heat, self.tags = nn.Conv2d(6, 2, 1), nn.Conv2d(6, 1, 1)

        def forward(self, x: Tensor, heat: Tensor, corners: Tensor) -> Tensor:
            h = self.stem(x)
            top = self.vertical(h).flip(2).cummax(2).values.flip(2)
            left = self.horizontal(h).flip(3).cummax(3).values.flip(3)
            h = F.relu(top + left)
            p = torch.sigmoid(self.heat(h)).clamp(1e-4, 1 - 1e-4)
            hit = heat.eq(1)
            focal = torch.where(hit, (1 - p) ** 2 * p.log(), (1 - heat) ** 4 * p**2 * (1 - p).log())
            loss = -focal.sum() / hit.sum().clamp(min=1)
            tags = self.tags(h).flatten(1).gather(1, corners.flatten(1)).view(corners.shape)
            mean = tags.mean(-1)
            pull = (tags - mean.unsqueeze(-1)).square().sum(-1).mean()
            apart = F.relu(1 - (mean.unsqueeze(2) - mean.unsqueeze(1)).abs())
            push = (apart * (1 - torch.eye(mean.shape[1]))).sum((1, 2)) / 6
            return loss + 0.1 * pull + 0.1 * push.mean()

    heat = floats(batch_size, 2, 8, 8).sigmoid()
    heat[:, :, 3, 4] = 1
    return Net(), {
        "x": floats(batch_size, 1, 8, 8),
        "heat": heat,
        "corners": tokens(64, batch_size, 3, 2),
    }


def masks_by_instance(batch_size: int = 4) -> Example:
    """CondInst and Mask2Former: masks guide attention by their own thresholds, every query makes its convolutions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.queries = (
                nn.Conv2d(1, WIDTH, 3, padding=1),
                nn.Parameter(floats(3, WIDTH)),
            )
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norm, self.mask = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.maker = nn.Linear(WIDTH, (WIDTH + 2) * 4 + 4 + 4 + 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            f = self.stem(x)
            b, _, h, w = f.shape
            line = torch.linspace(-1, 1, h, dtype=x.dtype)
            place = torch.stack(torch.meshgrid(line, line, indexing="ij")).expand(b, -1, -1, -1)
            flat, q = f.flatten(2).mT, self.queries.expand(b, -1, -1)
            loss = 0.0
            for _ in range(2):
                logits = torch.einsum("bqc,bnc->bqn", self.mask(q), flat)
                blocked = (logits.sigmoid() < 0.5).detach()
                blocked = blocked & ~blocked.all(-1, keepdim=True)
                q = self.norm(
                    q + self.attend(q, flat, flat, attn_mask=blocked.repeat_interleave(2, 0))[0]
                )
                loss = loss + F.binary_cross_entropy_with_logits(logits.view(b, 3, h, w), y)
            w1, b1, w2, b2 = self.maker(q).split([(WIDTH + 2) * 4, 4, 4, 1], -1)
            seen = torch.cat([f, place], 1).repeat(1, 3, 1, 1).reshape(1, -1, h, w)
            made = F.relu(
                F.conv2d(seen, w1.reshape(-1, WIDTH + 2, 1, 1), b1.flatten(), groups=3 * b)
            )
            made = F.conv2d(made, w2.reshape(-1, 4, 1, 1), b2.flatten(), groups=3 * b).view(
                b, 3, h, w
            )
            p = made.sigmoid()
            dice = 1 - (2 * (p * y).sum((2, 3)) + 1) / ((p + y).sum((2, 3)) + 1)
            return loss + dice.mean()

    y = (floats(batch_size, 3, 6, 6) > 0).float()
    return Net(), {"x": floats(batch_size, 1, 6, 6), "y": y}


def separated_sources(batch_size: int = 4) -> Example:
    """Demucs: gated convolutions down and up, a bidirectional LSTM, skips cut to length, losses over resolutions of spectra."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(
                nn.Sequential(nn.Conv1d(i, o, 8, 4), nn.ReLU(), nn.Conv1d(o, 2 * o, 1), nn.GLU(1))
                for i, o in ((1, 4), (4, 8))
            )
            self.up = nn.ModuleList(
                nn.Sequential(nn.Conv1d(i, 2 * i, 1), nn.GLU(1), nn.ConvTranspose1d(i, o, 8, 4))
                for i, o in ((8, 4), (4, 2))
            )
            self.lstm, self.flat = (
                nn.LSTM(8, 8, bidirectional=True, batch_first=True),
                nn.Linear(16, 8),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mean, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
            h, skips = (x - mean) / spread, []
            for layer in self.down:
                h = layer(h)
                skips.append(h)
            h = self.flat(self.lstm(h.mT)[0]).mT + h
            for place, layer in enumerate(self.up):
                skip = skips.pop()
                over = skip.shape[-1] - h.shape[-1]
                skip = skip[..., over // 2 : over // 2 + h.shape[-1]] if over > 0 else skip
                h = layer(h[..., : skip.shape[-1]] + skip)
                h = F.relu(h) if place == 0 else h
            found = h * spread + mean
            y = y[..., : found.shape[-1]]
            loss = F.l1_loss(found, y)
            for n in (8, 16):
                window = torch.hann_window(n, dtype=x.dtype)
                one, two = (
                    torch.stft(s.flatten(0, 1), n, n // 4, window=window, return_complex=True).abs()
                    + 1e-6
                    for s in (found, y)
                )
                loss = loss + (one - two).norm() / two.norm() + (one.log() - two.log()).abs().mean()
            return loss

    return Net(), {"x": floats(batch_size, 1, 84), "y": floats(batch_size, 2, 84)}


def masked_speech(batch_size: int = 4) -> Example:
    """CTC and attention together: filter banks, SpecAugment by given masks, subsampling with lengths, a joint loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("banks", floats(9, 6).abs() / 9)
            self.sub = nn.Sequential(
                nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU()
            )
            self.join = nn.Linear(8, WIDTH)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.words, self.ctc, self.out = (
                nn.Embedding(7, WIDTH),
                nn.Linear(WIDTH, 7),
                nn.Linear(WIDTH, 7),
            )

        def forward(
            self, wave: Tensor, bands: Tensor, spans: Tensor, lengths: Tensor, text: Tensor
        ) -> Tensor:
            window = torch.hamming_window(16, dtype=wave.dtype)
            spectrum = torch.stft(wave, 16, 8, window=window, return_complex=True, center=False)
            power = spectrum.abs().square().mT @ self.banks
            x = (power + 1e-4).log()
            x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)
            t, f = torch.arange(x.shape[1]), torch.arange(x.shape[2])
            hidden = (t >= spans[:, :1]) & (t < spans[:, 1:])
            x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
            x = x.masked_fill(((f >= bands[:, :1]) & (f < bands[:, 1:])).unsqueeze(1), 0.0)
            h = self.sub(x.unsqueeze(1))
            h = self.join(h.transpose(1, 2).flatten(2))
            length = torch.div(lengths + 3, 4, rounding_mode="floor").clamp(max=h.shape[1])
            blank = torch.arange(h.shape[1]) >= length.unsqueeze(1)
            h = self.encoder(h, src_key_padding_mask=blank)
            odds = self.ctc(h).log_softmax(-1).transpose(0, 1)
            ctc = F.ctc_loss(odds, text, length, (text != 0).sum(1), zero_infinity=True)
            given = F.pad(text, (1, 0), value=6)[:, :-1]
            made = self.decoder(
                self.words(given),
                h,
                tgt_mask=~_causal(text.shape[1]),
                memory_key_padding_mask=blank,
            )
            heard = F.cross_entropy(self.out(made).mT, text, ignore_index=0, label_smoothing=0.1)
            return 0.3 * ctc + 0.7 * heard

    text = tokens(6, batch_size, 3, low=1)
    starts = tokens(6, batch_size, 1)
    batch = {
        "wave": floats(batch_size, 184), "bands": torch.cat([starts, starts + 2], 1),
        "spans": torch.cat([starts, starts + 3], 1), "lengths": 22 - tokens(4, batch_size), "text": text,
    }  # fmt: skip
    return Net(), batch


# -- losses over populations, and searches inside ---------------------------------------------------------


def groups_at_risk(batch_size: int = 8) -> Example:
    """Group DRO: weights of groups kept in a buffer and moved by exponentiated losses in forward, MMD between two halves."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()), nn.Linear(8, 3)
            self.register_buffer("weights", torch.full((4,), 0.25))

        def forward(self, x: Tensor, y: Tensor, group: Tensor, target: Tensor) -> Tensor:
            h, other = self.net(x), self.net(target)
            each = F.cross_entropy(self.head(h), y, reduction="none")
            member = F.one_hot(group, 4).to(each.dtype)
            losses = (member * each.unsqueeze(1)).sum(0) / member.sum(0).clamp_min(1)
            with torch.no_grad():
                moved = self.weights * torch.exp(0.5 * losses)
                self.weights.copy_(moved / moved.sum())
            both = torch.cat([h, other])
            far = torch.cdist(both, both).square()
            kernel = sum(torch.exp(-far / scale) for scale in (0.5, 1.0, 4.0))
            n = len(h)
            mmd = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
            c1, c2 = h.T.cov(), other.T.cov()
            return (
                (losses * self.weights.clone()).sum() + 0.1 * mmd + 0.1 * (c1 - c2).square().sum()
            )

    batch = {"x": floats(batch_size, WIDTH), "y": tokens(3, batch_size), "group": tokens(4, batch_size),
             "target": floats(batch_size, WIDTH).flip(1)}  # fmt: skip
    return Net(), batch


def bags_of_instances(batch_size: int = 4) -> Example:
    """Multiple instances: gated attention over masked bags, a hard top instance's pseudo label, prototypes by distance."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
            self.v, self.u, self.w = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6), nn.Linear(6, 1)
            self.prototypes, self.last = nn.Parameter(floats(4, WIDTH)), nn.Linear(4, 2, bias=False)
            self.instance = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            h = self.embed(x)
            score = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h))).squeeze(-1)
            score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
            share = score.softmax(1)
            bag = torch.bmm(share.unsqueeze(1), h).squeeze(1)
            far = (bag.unsqueeze(1) - self.prototypes).square().sum(-1)
            near = torch.log((far + 1) / (far + 1e-4))
            top = share.argmax(1)
            low = share.masked_fill(~mask, 2.0).argmin(1)
            rows = torch.arange(len(x))
            ends = torch.cat([h[rows, top], h[rows, low]])
            pseudo = torch.cat([y, torch.zeros_like(y)])
            loss = F.cross_entropy(self.last(near), y) + 0.3 * F.cross_entropy(
                self.instance(ends), pseudo
            )
            return loss + 0.01 * far.min(1).values.mean() + 0.01 * far.min(0).values.mean()

    mask = torch.arange(6) < tokens(7, batch_size, 1, low=2)
    return Net(), {"x": floats(batch_size, 6, WIDTH), "mask": mask, "y": tokens(2, batch_size)}


def boxes_as_concepts(batch_size: int = 4) -> Example:
    """Box embeddings: Gumbel boxes, soft volumes of intersections in log space, skip-gram with negatives drawn before."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.size = nn.Embedding(12, 4), nn.Embedding(12, 4)
            self.out = nn.Embedding(12, 4, max_norm=None)
            nn.init.uniform_(self.out.weight, -0.5, 0.5)

        def volume(self, low: Tensor, high: Tensor) -> Tensor:
            return torch.log(F.softplus(high - low - 2 * 0.5772 * 0.1, beta=5.0) + 1e-12).sum(-1)

        def forward(self, child: Tensor, parent: Tensor, other: Tensor) -> Tensor:
            def box(ids: Tensor) -> tuple[Tensor, Tensor]:
                low = self.low(ids)
                return low, low + F.softplus(self.size(ids), beta=10)

            c, p, o = box(child), box(parent), box(other)
            c = tuple(t.unsqueeze(1) for t in c)
            p = tuple(torch.cat([a.unsqueeze(1), b], 1) for a, b in zip(p, o, strict=True))
            low = 0.1 * torch.logaddexp(c[0] / 0.1, p[0] / 0.1)
            low = torch.maximum(low, torch.maximum(c[0], p[0]))
            high = -0.1 * torch.logaddexp(-c[1] / 0.1, -p[1] / 0.1)
            high = torch.minimum(high, torch.minimum(c[1], p[1]))
            log_p = (self.volume(low, high) - self.volume(*c)).clamp(max=-1e-6)
            yes, no = log_p[:, 0], torch.log(-torch.expm1(log_p[:, 1:]))
            words = self.low(child), self.out(parent), self.out(other)
            skip = F.logsigmoid((words[0] * words[1]).sum(-1)) + F.logsigmoid(
                -torch.bmm(words[2], words[0].unsqueeze(2)).squeeze(2)
            ).sum(1)
            return -(yes.mean() + no.mean()) - 0.1 * skip.mean()

    return Net(), {"child": tokens(12, batch_size), "parent": tokens(12, batch_size).flip(0),
                   "other": tokens(12, batch_size, 3)}  # fmt: skip


def energy_and_langevin(batch_size: int = 4) -> Example:
    """An energy-based model: chains of Langevin steps by the energy's own gradient inside forward, noise given, then detached."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, 1))

        def forward(self, x: Tensor, start: Tensor, noise: Tensor) -> Tensor:
            fake = start
            with torch.enable_grad():
                for step in range(3):
                    fake = fake.detach().requires_grad_()
                    slope = torch.autograd.grad(self.energy(fake).sum(), fake)[0]
                    fake = fake - 0.1 * slope.clamp(-1, 1) + 0.02 * noise[:, step]
            fake = fake.detach()
            real, made = self.energy(x), self.energy(fake)
            return (real - made).mean() + 0.1 * (real.square() + made.square()).mean()

    x = floats(batch_size, WIDTH)
    return Net(), {"x": x, "start": x.flip(0), "noise": floats(batch_size, 3, WIDTH)}


def residuals_of_fluids(batch_size: int = 4) -> Example:
    """A physics-informed net: Navier-Stokes residuals by ``jacrev`` and ``hessian`` of every point under ``vmap``, Fourier features."""
    from torch.func import functional_call, hessian, jacrev, vmap

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("features", floats(3, 4))
            self.net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3))
            self.viscosity = nn.Parameter(torch.tensor(-2.0))

        def forward(self, points: Tensor, edge: Tensor, y: Tensor) -> Tensor:
            weights = dict(self.net.named_parameters())

            def field(place: Tensor) -> Tensor:
                angle = place @ self.features
                return functional_call(self.net, weights, (torch.cat([angle.sin(), angle.cos()]),))

            value = vmap(field)(points)
            slope, bend = vmap(jacrev(field))(points), vmap(hessian(field))(points)
            u, v = value[:, 0], value[:, 1]
            flow = slope[:, :2, 2] + u[:, None] * slope[:, :2, 0] + v[:, None] * slope[:, :2, 1]
            viscous = bend[:, :2, 0, 0] + bend[:, :2, 1, 1]
            momentum = flow + slope[:, 2, :2] - self.viscosity.exp() * viscous
            return (
                momentum.square().mean() + (slope[:, 0, 0] + slope[:, 1, 1]).square().mean()
                + F.mse_loss(vmap(field)(edge), y)
            )  # fmt: skip

    return Net(), {
        "points": floats(batch_size, 3),
        "edge": floats(batch_size, 3).flip(0),
        "y": floats(batch_size, 3),
    }


def decisions_in_a_row(batch_size: int = 4) -> Example:
    """Decision Transformer and offline critics: three sorts of tokens interleaved, expectile values, conservative Q."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.returns, self.state, self.action = (
                nn.Linear(1, WIDTH),
                nn.Linear(4, WIDTH),
                nn.Embedding(3, WIDTH),
            )
            self.time = nn.Embedding(16, WIDTH)
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.pi, self.q = (
                nn.Linear(WIDTH, 3),
                nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2)),
            )
            self.value = nn.Linear(WIDTH, 1)

        def forward(
            self, goal: Tensor, state: Tensor, action: Tensor, time: Tensor, reward: Tensor
        ) -> Tensor:
            b, t, _ = state.shape
            at = self.time(time)
            tokens_ = (self.returns(goal) + at, self.state(state) + at, self.action(action) + at)
            h = torch.stack(tokens_, 2).reshape(b, 3 * t, WIDTH)
            h = self.block(h, src_mask=~_causal(3 * t)).reshape(b, t, 3, WIDTH)
            s = h[:, :, 1]
            clone = F.cross_entropy(self.pi(s).flatten(0, 1), action.flatten())
            q = torch.stack([f(s) for f in self.q])
            taken = q.gather(-1, action.expand(2, b, t).unsqueeze(-1)).squeeze(-1)
            value = self.value(s).squeeze(-1)
            gap = taken.min(0).values.detach() - value
            expectile = (torch.where(gap > 0, 0.7, 0.3) * gap.square()).mean()
            target = reward[:, :-1] + 0.9 * value[:, 1:].detach()
            bellman = F.mse_loss(taken[..., :-1], target.expand(2, -1, -1))
            careful = (q.logsumexp(-1) - taken).mean()
            return clone + expectile + bellman + 0.1 * careful

    batch = {"goal": floats(batch_size, 4, 1), "state": floats(batch_size, 4, 4), "action": tokens(3, batch_size, 4),
             "time": tokens(16, batch_size, 4), "reward": floats(batch_size, 4)}  # fmt: skip
    return Net(), batch


def scaled_unrolling(batch_size: int = 4) -> Example:
    """MuZero: states unrolled by a learned model, gradients halved by hooks at every step, supports of two-hot values."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.see, self.step = nn.Linear(6, WIDTH), nn.Linear(WIDTH + 3, WIDTH)
            self.policy, self.value, self.reward = (
                nn.Linear(WIDTH, 3),
                nn.Linear(WIDTH, 7),
                nn.Linear(WIDTH, 7),
            )

        @staticmethod
        def two_hot(x: Tensor) -> Tensor:
            x = (torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + 0.001 * x).clamp(-3, 3) + 3
            low = x.floor().clamp(max=5)
            high = x - low
            made = torch.zeros(*x.shape, 7, dtype=x.dtype)
            made.scatter_(-1, low.long().unsqueeze(-1), (1 - high).unsqueeze(-1))
            return made.scatter_add(-1, low.long().unsqueeze(-1) + 1, high.unsqueeze(-1))

        def forward(
            self, x: Tensor, actions: Tensor, values: Tensor, rewards: Tensor, visits: Tensor
        ) -> Tensor:
            s = torch.tanh(self.see(x))
            values, rewards, visits = (
                self.two_hot(values),
                self.two_hot(rewards),
                visits.softmax(-1),
            )
            loss = 0.0
            for k in range(actions.shape[1]):
                scale = 1.0 if k == 0 else 1.0 / actions.shape[1]
                here = F.cross_entropy(self.policy(s), visits[:, k]) + 0.25 * F.cross_entropy(
                    self.value(s), values[:, k]
                )
                if here.requires_grad and k:
                    here.register_hook(lambda g, scale=scale: g * scale)
                s = torch.tanh(
                    self.step(torch.cat([s, F.one_hot(actions[:, k], 3).to(s.dtype)], -1))
                )
                s = s * 0.5 + s.detach() * 0.5
                low, high = s.amin(1, keepdim=True), s.amax(1, keepdim=True)
                s = (s - low) / (high - low + 1e-5)
                loss = loss + here + F.cross_entropy(self.reward(s), rewards[:, k])
            return loss

    batch = {"x": floats(batch_size, 6), "actions": tokens(3, batch_size, 3), "values": floats(batch_size, 3) * 3,
             "rewards": floats(batch_size, 3), "visits": floats(batch_size, 3, 3)}  # fmt: skip
    return Net(), batch


def matched_by_numpy(batch_size: int = 6) -> Example:
    """Flows between matched pairs: noise and data of a batch are paired outside of torch, by NumPy, in forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH + 1, 12), nn.SELU(), nn.Linear(12, WIDTH))

        @staticmethod
        def paired(cost: Tensor) -> Tensor:
            left = cost.detach().cpu().numpy().copy()
            chosen = np.zeros(len(left), dtype=np.int64)
            for _ in range(len(left)):
                row, column = np.unravel_index(np.argmin(left), left.shape)
                chosen[row] = column
                left[row, :], left[:, column] = np.inf, np.inf
            return torch.from_numpy(chosen)

        def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
            x = x[self.paired(torch.cdist(noise, x))]
            place = torch.lerp(noise, x, t.unsqueeze(1))
            found = self.net(torch.cat([place, t.unsqueeze(1)], 1))
            return F.mse_loss(found, x - noise)

    return Net(), {
        "x": floats(batch_size, WIDTH),
        "noise": floats(batch_size, WIDTH).flip(1),
        "t": floats(batch_size).sigmoid(),
    }


def predicted_futures(batch_size: int = 4) -> Example:
    """Contrastive predictive coding: strided convolutions, a GRU, a map for every step ahead, negatives of the whole batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Sequential(
                nn.Conv1d(1, WIDTH, 4, 2, 1),
                nn.BatchNorm1d(WIDTH),
                nn.ReLU(),
                nn.Conv1d(WIDTH, WIDTH, 4, 2, 1),
            )
            self.gru = nn.GRU(WIDTH, 6, batch_first=True)
            self.ahead = nn.ModuleList(nn.Linear(6, WIDTH, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x).mT
            c, _ = self.gru(z)
            loss = z.new_zeros(())
            for k, one in enumerate(self.ahead, 1):
                guess, true = one(c[:, :-k]), z[:, k:]
                scores = torch.einsum("btc,stc->tbs", guess, true)
                loss = loss - torch.diagonal(scores.log_softmax(-1), dim1=1, dim2=2).mean()
            return loss / len(self.ahead)

    return Net(), {"x": floats(batch_size, 1, 24)}


def radial_splines(batch_size: int = 6) -> Example:
    """FastKAN and ChebyKAN: Gaussian bases, Chebyshev ones by recurrence, a rational activation, spectral norms, weight norms."""
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    class Cheby(nn.Module):
        def __init__(self, into: int, out: int, degree: int = 4) -> None:
            super().__init__()
            self.degree = degree
            self.weight = nn.Parameter(floats(into, out, degree + 1) / (into * (degree + 1)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            terms = [torch.ones_like(x), x]
            for _ in range(2, self.degree + 1):
                terms.append(2 * x * terms[-1] - terms[-2])
            return torch.einsum("bid,iod->bo", torch.stack(terms, -1), self.weight)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.register_buffer("grid", torch.linspace(-2, 2, 5))
            self.spline = weight_norm(nn.Linear(WIDTH * 5, 10, bias=False))
            self.base, self.cheby = spectral_norm(nn.Linear(WIDTH, 10)), Cheby(10, 6)
            self.p, self.q = nn.Parameter(floats(4) * 0.3), nn.Parameter(floats(3) * 0.3)
            self.head = nn.Linear(6, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            basis = torch.exp(-(((self.norm(x).unsqueeze(-1) - self.grid) / 1.0) ** 2))
            h = self.spline(basis.flatten(1)) + self.base(F.silu(x))
            h = self.cheby(h)
            top = sum(p * h**n for n, p in enumerate(self.p))
            low = 1 + sum(q.abs() * h.abs() ** (n + 1) for n, q in enumerate(self.q))
            return F.mse_loss(self.head(top / low), y)

    return Net(), _rows(batch_size)
