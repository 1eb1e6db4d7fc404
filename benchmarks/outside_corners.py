"""Corners of PyTorch, many in each model, for ``outside.py``: forms of losses, shapes that samples are folded into,
indices of every kind, products of matrices, convolutions, recurrences, dtypes, names, views of parameters.

Written before any of them was run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, row_batch, tokens, two_layers
from torch import Tensor, nn

# -- losses -------------------------------------------------------------------------------------------


def forms_of_cross_entropy(batch_size: int = 8) -> Example:
    """Probabilities as targets, weights with smoothing and ignored classes, two dims, sums, binary with positive
    weights, all at once."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 5)
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5, 1.5, 0.1]))

        def forward(self, x: Tensor, labels: Tensor, soft: Tensor, grid: Tensor) -> Tensor:
            z = self.net(x)
            first = z[:, 0]
            planes = z.transpose(1, 2).unsqueeze(-1) * torch.ones(2, dtype=z.dtype)
            return (
                F.cross_entropy(first, soft.softmax(-1), self.weight, label_smoothing=0.2)
                + F.cross_entropy(first, labels, self.weight, ignore_index=2, label_smoothing=0.1)
                + F.nll_loss(planes.log_softmax(1), grid, self.weight, ignore_index=-1)
                + F.cross_entropy(first, labels, reduction="sum") / len(x)
                + F.binary_cross_entropy_with_logits(
                    first, soft.sigmoid(), self.weight, pos_weight=self.weight + 1
                )
                + F.multilabel_margin_loss(
                    first,
                    torch.where(labels[:, None] > 2, labels[:, None], -1)
                    .expand(-1, 5)
                    .contiguous(),
                )
                + F.kl_div(
                    first.log_softmax(-1),
                    soft.log_softmax(-1),
                    log_target=True,
                    reduction="batchmean",
                )
            )

    grid = tokens(6, batch_size, 3, 2) - 1
    return Net(), {
        "x": floats(batch_size, 3, WIDTH), "labels": tokens(5, batch_size), "soft": floats(batch_size, 5), "grid": grid,
    }  # fmt: skip


def sums_over_samples(batch_size: int = 8) -> Example:
    """A loss that is a sum over the batch and not its mean, with a penalty on weights beside it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            decay = sum(
                p.pow(2).sum() for name, p in self.net.named_parameters() if name.endswith("weight")
            )
            return 0.05 * F.mse_loss(self.net(x), y, reduction="sum") + 0.01 * decay

    return Net(), row_batch(batch_size)


def ratios_per_sample(batch_size: int = 8) -> Example:
    """Means of ratios, by masks of the sample; a mean over samples that have any; sums divided by len and by size."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            e = (self.net(x).squeeze(-1) - y) ** 2
            m = mask.to(e.dtype)
            per = (e * m).sum(1) / m.sum(1).clamp(min=1)
            some = m.any(1).to(e.dtype)
            return (
                per.mean()
                + (per * some).sum() / some.sum()
                + e.sum() / x.size(0) / x.shape[1]
                + (e.sum(1) / len(x)).sum()
            )

    mask = tokens(2, batch_size, 4).bool()
    mask[1] = False
    return Net(), {"x": floats(batch_size, 4, WIDTH), "mask": mask, "y": floats(batch_size, 4)}


def odd_results(batch_size: int = 8) -> Example:
    """A loss of one element, first of a tuple whose rest are numbers, texts, lists and modules' outputs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = (
                two_layers(),
                nn.ModuleDict({"main": nn.SmoothL1Loss(beta=0.5), "side": nn.L1Loss()}),
            )

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any], list[Tensor]]:
            out = self.net(x)
            losses = {name: criterion(out, y) for name, criterion in self.criterion.items()}
            logs = {
                "name": "train",
                "count": len(losses),
                "per": [loss.detach() for loss in losses.values()],
            }
            return sum(losses.values()).mean(dim=0, keepdim=True).sum(), logs, [out]

    return Net(), row_batch(batch_size)


def targets_are_inputs(batch_size: int = 8) -> Example:
    """One tensor under two names, one that is a view of it, one that is expanded, one that lies channels last."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(2, 4, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2)

        def forward(self, image: Tensor, target: Tensor, half: Tensor, scale: Tensor) -> Tensor:
            out = self.up(F.silu(self.down(image * scale)))
            return F.mse_loss(out, target) + F.l1_loss(out[..., :2], half)

    image = floats(batch_size, 2, 4, 4).to(memory_format=torch.channels_last)
    return Net(), {
        "image": image,
        "target": image,
        "half": image[..., :2],
        "scale": torch.ones(1, 1, 1, 1).expand(batch_size, 2, 4, 4),
    }


# -- shapes that samples are folded into ----------------------------------------------------------------


def folded_samples(batch_size: int = 8) -> Example:
    """Pairs by view, halves, evens and odds, tiles against repeats, stacks in front, time first and back, flattened
    tokens and back, groups that return."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.pair = two_layers(), nn.Bilinear(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, t, d = x.shape
            h = self.net(x.flatten(0, 1)).unflatten(0, (b, t))
            first = h.transpose(0, 1).reshape(t * b, d).view(t, b, d).permute(1, 0, 2)
            tiled = x.repeat(2, 1, 1).view(2, b, t, d).sum(0)
            repeated = x.repeat_interleave(3, 0).view(b, 3, t, d).mean(1)
            pairs = h.reshape(b // 2, 2, t, d)
            meet = self.pair(pairs[:, 0], pairs[:, 1]).square().mean()
            halves = (h[: b // 2] - h[b // 2 :]).abs().mean()
            odds = (h[::2] * h[1::2]).mean()
            stacked = torch.stack((h, first, tiled, repeated)).mean(0)
            both = torch.cat((stacked, stacked.flip(1)), 0).view(2, b, t, d).amax(0)
            return F.mse_loss(both, y) + 0.1 * (meet + halves + odds)

    return Net(), row_batch(batch_size, 3)


def folded_but_apart(batch_size: int = 8) -> Example:
    """The same without samples that meet: microbatches should be possible."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mix = two_layers(), nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, t, d = x.shape
            h = self.net(x.flatten(0, 1)).unflatten(0, (b, t))
            h = h.permute(1, 2, 0).reshape(t, d * b).view(t, d, b).permute(2, 0, 1)
            h = torch.stack((h, h * 2), 1).flatten(0, 1)
            h = self.mix(h.mT).mT.reshape(b, 2, t, d).mean(1)
            h = h.repeat_interleave(2, dim=0)[1::2]
            h = h.unsqueeze(0).expand(3, -1, -1, -1).reshape(3 * b, t, d).view(3, b, t, d)[1]
            windows = h.unfold(1, 2, 1).movedim(-1, 0).reshape(2 * b, t - 1, d).chunk(2, 0)
            return F.mse_loss(h, y) + (windows[0] - windows[1]).square().mean()

    return Net(), row_batch(batch_size, 3)


def siblings_of_a_batch(batch_size: int = 8) -> Example:
    """Two views of every sample in one batch, halves that are normed by statistics of their own, a swap."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm, self.predict = (
                nn.Linear(WIDTH, WIDTH),
                nn.BatchNorm1d(WIDTH),
                two_layers(),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.norm(self.net(torch.cat((x, y))))
            p1, p2 = self.predict(z).chunk(2)
            z1, z2 = z.detach().split(len(x))
            own = torch.cat([self.norm(part) for part in z.tensor_split(2)])
            return (
                -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
                + own.pow(4).mean() * 0.1
            )

    return Net(), row_batch(batch_size)


# -- indices ------------------------------------------------------------------------------------------


def indices_of_all_kinds(batch_size: int = 8) -> Example:
    """Indices apart, masks beside indices, negative steps by flip, take and put over everything, index_fill, index_add
    with alpha, scatter with products, gather of gathers, take_along_dim, inverse permutations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.table = two_layers(), nn.Parameter(floats(5, WIDTH))

        def forward(self, x: Tensor, at: Tensor, y: Tensor) -> Tensor:
            b, t, d = x.shape
            h = self.net(x)
            rows = torch.arange(b)
            apart = h[rows[:, None], :, at[:, :2]]
            crossed = h[:, [0, 2], 1:3].sum(-1)
            order = h[..., 0].argsort(1)
            back = torch.empty_like(order).scatter_(1, order, torch.arange(t).expand(b, t))
            sorted_ = h.gather(1, order.unsqueeze(-1).expand(-1, -1, d))
            again = torch.take_along_dim(sorted_, back.unsqueeze(-1), 1)
            filled = h.index_fill(1, torch.tensor([1]), 0.5).index_add(
                2, torch.tensor([0, 3]), h[..., :2], alpha=-0.5
            )
            taken = torch.take(self.table, at.clamp(max=39))
            scattered = torch.ones(b, d, dtype=h.dtype).scatter_reduce(
                1, at, h[:, 0, : at.shape[1]], "prod", include_self=True
            )
            spread = torch.zeros(b, 5, dtype=h.dtype).scatter_add(
                1, at.clamp(max=4), h[:, 1, : at.shape[1]]
            )
            named = self.table[at[:, 0].clamp(max=4)] + F.embedding(
                at[:, 1].clamp(max=4), self.table
            )
            total = again + filled
            total[:, -1] = named
            return (
                F.mse_loss(total, y) + apart.square().mean() + crossed.mean() + taken.mean()
                + scattered.tanh().mean() + (spread @ self.table).mean()
            )  # fmt: skip

    return Net(), {
        "x": floats(batch_size, 4, WIDTH),
        "at": tokens(8, batch_size, 3),
        "y": floats(batch_size, 4, WIDTH),
    }


def tables_by_search(batch_size: int = 8) -> Example:
    """Bins by bucketize over learned edges that are sorted, searchsorted per row, one-hot counts, bincount with weights,
    histograms made smooth, isotonic sums."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges, self.values = nn.Parameter(floats(6)), nn.Embedding(7, WIDTH)
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            edges = self.edges.sort().values
            where = torch.bucketize(x.detach(), edges.detach(), right=True)
            h = self.values(where).mean(1)
            rank = torch.searchsorted(y.sort(1).values.contiguous(), x.contiguous()).to(x.dtype)
            soft = torch.sigmoid((x.unsqueeze(-1) - edges) * 4).diff(dim=-1).sum(1)
            counts = F.one_hot(where, 7).sum(1).to(x.dtype)
            weights = torch.bincount(where[:, 0], weights=x[:, 0].detach().float(), minlength=7).to(
                x.dtype
            )
            return (
                (self.head(h).squeeze(-1) - rank.mean(1)).square().mean() + soft.square().mean()
                + (counts @ self.values.weight).square().mean() * 0.01 + (weights @ self.values.weight).square().mean() * 0.01
            )  # fmt: skip

    return Net(), row_batch(batch_size)


def sparse_choices(batch_size: int = 8) -> Example:
    """Sparsemax and entmax by sorting, straight-through one-hots, top-k masks by thresholds, Gumbel noise of the batch,
    soft ranks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.values = nn.Linear(WIDTH, 6), nn.Parameter(floats(6, WIDTH))

        def sparsemax(self, z: Tensor) -> Tensor:
            s = z.sort(-1, descending=True).values
            k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
            cumulated = s.cumsum(-1) - 1
            support = (k * s > cumulated).sum(-1, keepdim=True)
            tau = cumulated.gather(-1, support - 1) / support.to(z.dtype)
            return (z - tau).clamp(min=0)

        def forward(self, x: Tensor, noise: Tensor, y: Tensor) -> Tensor:
            z = self.score(x)
            soft = ((z - torch.log(-torch.log(noise))) / 0.7).softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
            straight = hard - soft.detach() + soft
            kth = z.topk(2, -1).values[..., -1:]
            masked = z.masked_fill(z < kth, -torch.inf).softmax(-1)
            ranks = torch.sigmoid((z.unsqueeze(-1) - z.unsqueeze(-2)) / 0.1).sum(-1)
            mix = self.sparsemax(z) + straight + masked + 0.01 * ranks
            return F.mse_loss(mix @ self.values, y)

    return Net(), {
        "x": floats(batch_size, WIDTH),
        "noise": floats(batch_size, 6).sigmoid(),
        "y": floats(batch_size, WIDTH).flip(0),
    }


# -- products and matrices ------------------------------------------------------------------------------


def products_of_all_kinds(batch_size: int = 8) -> Example:
    """Einsums with repeated letters and dots, sums over the batch (addbmm), outer products, tensordot over two dims,
    multi_dot, inner, baddbmm with factors, traces, Kronecker products, vector forms of matmul."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(floats(WIDTH, WIDTH) * 0.3) for _ in range(3))
            self.v = nn.Parameter(floats(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            m = x @ self.a
            square = torch.einsum("...ij,...kj->...ik", m, x)
            trace = torch.einsum("bii->b", square)
            chain = torch.einsum("bti,ij,kj,k->bt", x, self.b, self.c, self.v)
            gram = torch.addbmm(self.c, m.mT, x, beta=0.5, alpha=1 / (len(x) * x.shape[1]))
            batched = torch.baddbmm(x, m @ m.mT, x, beta=0.3, alpha=0.1)
            inner = torch.inner(m, self.v) + m @ self.v
            dotted = torch.tensordot(m, self.b, dims=([2], [0]))
            multi = torch.linalg.multi_dot((self.a, self.b, self.c, self.v))
            outer = torch.outer(self.v, multi)
            plain = torch.addmm(outer, self.a, self.b, alpha=0.2) + torch.addr(
                self.a, self.v, self.v, beta=2
            )
            out = dotted @ plain + batched
            return (
                F.mse_loss(out, y) + trace.square().mean() * 0.01 + (chain * inner).mean()
                + gram.square().sum() * 0.01 + torch.trace(plain).square() * 0.01 + torch.vdot(self.v, multi)
            )  # fmt: skip

    return Net(), row_batch(batch_size, 4)


def factors_of_matrices(batch_size: int = 8) -> Example:
    """QR and eigenvectors made unique, polar factors by Newton's steps, log-determinants of two kinds, solves from
    triangles, pseudo-inverses by iteration, covariances per sample, a matrix exponential."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lower = nn.Linear(WIDTH, WIDTH), nn.Parameter(floats(4, 4) * 0.2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            m = torch.einsum("bti,btj->bij", h[..., :4], h[..., :4]) / x.shape[1] + torch.eye(
                4, dtype=h.dtype
            )
            q, r = torch.linalg.qr(m)
            r = r * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-1)
            values = torch.linalg.eigvalsh(m)
            factor = self.lower.tril(-1) + torch.diag_embed(F.softplus(self.lower.diagonal()))
            white = torch.linalg.solve_triangular(factor, h[..., :4].mT, upper=False)
            inverse = m / m.abs().sum((1, 2), keepdim=True)
            for _ in range(4):
                inverse = 2 * inverse - inverse @ m @ inverse
            turn = torch.linalg.matrix_exp(self.lower - self.lower.T)
            det = torch.logdet(m) + torch.linalg.slogdet(m @ turn)[1]
            return (
                (r.square().mean() + values.log().mean() + white.square().mean() + inverse.mean() + det.mean()) * 0.1
                + F.mse_loss(h[..., 4:] @ turn, y[..., 4:]) + (q.abs().sum() * 0)
            )  # fmt: skip

    return Net(), row_batch(batch_size, 6)


def forces_through_convolutions(batch_size: int = 4) -> Example:
    """A penalty on the gradient of a convolutional critic, with group norm, pooling and an upsampling branch."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 4, 2, 1, groups=2)
            self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(6 * 9, 1)

        def score(self, x: Tensor) -> Tensor:
            return self.head(F.softplus(self.two(F.silu(self.norm(self.one(x))))).flatten(1))

        def forward(self, real: Tensor, fake: Tensor, alpha: Tensor) -> Tensor:
            x = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
            grad = torch.autograd.grad(self.score(x).sum(), x, create_graph=True)[0]
            penalty = (grad.flatten(1).norm(dim=1) - 1).square().mean()
            return self.score(fake).mean() - self.score(real).mean() + 10 * penalty

    return Critic(), {
        "real": floats(batch_size, 2, 6, 6), "fake": floats(batch_size, 2, 6, 6).flip(0), "alpha": floats(batch_size, 1, 1, 1).sigmoid(),
    }  # fmt: skip


# -- layers -------------------------------------------------------------------------------------------


def convolutions_of_all_kinds(batch_size: int = 4) -> Example:
    """Same and circular padding, dilations, groups, transposed with output padding, three dims, depthwise, shuffles,
    unpooling, adaptive pools of odd sizes, resizing with and without corners, folds."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Conv2d(4, 8, 3, padding="same", dilation=2, bias=False)
            self.circular = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", groups=4)
            self.down = nn.Conv2d(8, 8, (3, 1), stride=(2, 1), padding=(1, 0))
            self.up = nn.ConvTranspose2d(
                8, 4, 3, stride=(2, 1), padding=1, output_padding=(1, 0), groups=2
            )
            self.deep, self.line = (
                nn.Conv3d(2, 2, 2, stride=(1, 2, 2), groups=2),
                nn.ConvTranspose1d(4, 4, 3, dilation=2),
            )
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.hardswish(self.same(x))
            h = F.glu(self.circular(h), dim=1)
            h = torch.cat((h, h.roll((1, 1), (2, 3))), 1)
            small, where = self.pool(h)
            h = self.unpool(small, where) + h
            h = self.up(F.selu(self.down(h)))
            volume = self.deep(h.view(len(h), 2, 2, *h.shape[2:])).flatten(1, 2)
            line = self.line(h.flatten(2)).mean(-1)
            odd = F.adaptive_avg_pool2d(h, (3, 4)).sum((2, 3)) + F.adaptive_max_pool2d(
                h, (2, 3)
            ).sum((2, 3))
            resized = F.interpolate(h, size=(5, 7), mode="bicubic", align_corners=True).mean((2, 3))
            resized = resized + F.interpolate(h, scale_factor=1.5, mode="bilinear").mean((2, 3))
            shuffled = F.pixel_unshuffle(h, 2).mean((2, 3)).view(len(h), 4, 4).sum(2)
            folded = F.fold(F.unfold(h, 3, padding=1, stride=2), (6, 6), 3, padding=1, stride=2)
            channels = F.channel_shuffle(folded, 2)
            pooled = F.lp_pool2d(channels.abs() + 0.1, 2.0, 3).mean((2, 3)) + F.avg_pool2d(
                h, 3, 2, 1, count_include_pad=False
            ).mean((2, 3))
            parts = line + odd + resized + shuffled + pooled
            return (
                F.mse_loss(h, x)
                + volume.square().mean()
                + parts.square().mean() * 0.1
                + F.local_response_norm(h, 2).mean()
            )

    return Net(), {"x": floats(batch_size, 4, 6, 6)}


def recurrences_of_all_kinds(batch_size: int = 4) -> Example:
    """Projected LSTMs, learned first states, both directions and many layers, cells in loops with zoneout by given
    coins, independent recurrences, truncated gradients, outputs of every layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(
                WIDTH,
                12,
                num_layers=2,
                proj_size=5,
                bidirectional=True,
                batch_first=True,
                dropout=0.1,
            )
            self.gru, self.h0 = nn.GRU(10, 6, num_layers=2), nn.Parameter(floats(2, 1, 6))
            self.rnn, self.cell = (
                nn.RNN(6, 6, nonlinearity="relu", batch_first=True, bias=False),
                nn.LSTMCell(6, 6),
            )
            self.u, self.out = nn.Parameter(torch.full((6,), 0.9)), nn.Linear(6, WIDTH)

        def forward(self, x: Tensor, coins: Tensor, y: Tensor) -> Tensor:
            b, t, _ = x.shape
            h, (hn, cn) = self.lstm(x)
            h, last = self.gru(h.transpose(0, 1), self.h0.expand(-1, b, -1).contiguous())
            h, _ = self.rnn(h.transpose(0, 1))
            state, memory, outs = last[-1], last[0].tanh(), []
            for step in range(t):
                new, memory = self.cell(h[:, step], (state, memory))
                keep = (coins[:, step] > 0.5).to(new.dtype).unsqueeze(1)
                state = keep * state + (1 - keep) * new
                state = F.relu(self.u * state + h[:, step])
                if step == t // 2:
                    state, memory = state.detach(), memory.detach()
                outs.append(state)
            return F.mse_loss(self.out(torch.stack(outs, 1)), y) + 0.01 * (
                hn.square().mean() + cn.square().mean()
            )

    return Net(), {**row_batch(batch_size, 4), "coins": floats(batch_size, 4).sigmoid()}


def attentions_by_hand(batch_size: int = 4) -> Example:
    """Relative shifts by padding and viewing, talking heads, memory slots, local windows by unfold, prefix sums of a
    kernel, ALiBi, gates, Nystrom landmarks, a key mask that hides whole rows."""

    class Net(nn.Module):
        def __init__(self, heads: int = 2, length: int = 6) -> None:
            super().__init__()
            self.h, self.d = heads, WIDTH // heads
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.rel = nn.Parameter(floats(heads, length, self.d))
            self.u, self.w = (
                nn.Parameter(torch.zeros(heads, 1, self.d)),
                nn.Parameter(torch.zeros(heads, 1, self.d)),
            )
            self.talk, self.memory = (
                nn.Parameter(torch.eye(heads)),
                nn.Parameter(floats(2, heads, 3, self.d) * 0.3),
            )
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).view(heads, 1, 1))

        def shift(self, x: Tensor) -> Tensor:
            b, h, n, m = x.shape
            return F.pad(x, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].view(b, h, n, m)

        def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
            b, n, _ = x.shape
            q, k, v = self.qkv(x).view(b, n, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
            content = (q + self.u) @ k.mT
            position = self.shift((q + self.w) @ self.rel.mT)
            place = torch.arange(n, dtype=x.dtype)
            scores = (content + position) / self.d**0.5 - self.slopes * (
                place[:, None] - place
            ).abs()
            visible = torch.arange(n) < lengths[:, None]
            scores = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min)
            extra = q @ self.memory[0].mT
            scores = torch.einsum("bhij,hg->bgij", torch.cat((scores, extra), -1), self.talk)
            attn = scores.softmax(-1) * visible[:, None, :, None]
            full = attn @ torch.cat((v, self.memory[1].expand(b, -1, -1, -1)), 2)
            windows = F.pad(k, (0, 0, 1, 1)).unfold(2, 3, 1)
            near = torch.einsum("bhnd,bhndw->bhnw", q, windows).softmax(-1)
            local = torch.einsum("bhnw,bhndw->bhnd", near, F.pad(v, (0, 0, 1, 1)).unfold(2, 3, 1))
            fq, fk = F.elu(q) + 1, F.elu(k) + 1
            sums = torch.einsum("bhnd,bhne->bhnde", fk, v).cumsum(2)
            linear = (
                torch.einsum("bhnd,bhnde->bhne", fq, sums)
                / torch.einsum("bhnd,bhnd->bhn", fq, fk.cumsum(2))[..., None]
            )
            marks = q.view(b, self.h, 3, n // 3, self.d).mean(3)
            nystrom = (q @ marks.mT).softmax(-1) @ (marks @ k.mT).softmax(-1) @ v
            o = (full + local + linear + nystrom).transpose(1, 2).reshape(b, n, -1)
            return F.mse_loss(self.out(o), y)

    return Net(), {**row_batch(batch_size, 6), "lengths": tokens(7, batch_size, low=1)}


def norms_by_hand(batch_size: int = 8) -> Example:
    """Batch renormalisation with its clamped corrections, switchable norms mixed by softmax, norms over the batch in
    training with momentum by count, weight standardisation, response norms over all places, conditional batch norm."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mix, self.table = (
                nn.Conv2d(3, 4, 3, padding=1),
                nn.Parameter(torch.zeros(3)),
                nn.Embedding(5, 8),
            )
            self.plain = nn.BatchNorm2d(4, affine=False)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("std", torch.ones(4))

        def renorm(self, x: Tensor) -> Tensor:
            mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3), unbiased=False) + 1e-3
            r = (std.detach() / self.std).clamp(1 / 3, 3)
            d = ((mean.detach() - self.mean) / self.std).clamp(-5, 5)
            view = (1, -1, 1, 1)
            out = (x - mean.view(view)) / std.view(view) * r.view(view) + d.view(view)
            with torch.no_grad():
                self.mean += 0.1 * (mean - self.mean)
                self.std += 0.1 * (std - self.std)
            return out

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            w = self.conv.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (
                w.var((1, 2, 3), keepdim=True) + 1e-5
            ).sqrt()
            h = F.conv2d(x, w, self.conv.bias, padding=1)
            share = self.mix.softmax(0)
            h = (
                share[0] * self.renorm(h)
                + share[1] * F.instance_norm(h)
                + share[2] * F.layer_norm(h, h.shape[1:])
            )
            gamma, beta = self.table(label).chunk(2, 1)
            h = self.plain(h) * (1 + gamma[..., None, None]) + beta[..., None, None]
            gx = h.norm(dim=(2, 3), keepdim=True)
            h = h + h * gx / (gx.mean(1, keepdim=True) + 1e-6)
            return F.mse_loss(h[:, :3], x)

    return Net(), {"x": floats(batch_size, 3, 4, 4), "label": tokens(5, batch_size)}


# -- dtypes, names and parameters --------------------------------------------------------------------------


def numbers_of_all_dtypes(batch_size: int = 8) -> Example:
    """Integer divisions and remainders, bits, shifts, promotions with numbers and 0-dim tensors, booleans that count,
    rounding of all kinds, complex powers, casts and back, minima of dtypes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale, self.table = (
                nn.Linear(WIDTH, WIDTH),
                nn.Parameter(torch.tensor(2.0)),
                nn.Embedding(16, WIDTH),
            )
            self.register_buffer("flags", torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool))
            self.register_buffer("offset", torch.tensor(3))

        def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
            code = ((n // 3) ^ (n << 1)) & 15
            code = torch.where(n % 2 == 0, code, (n >> 1) | 1).remainder(16)
            code = (code + self.offset - 3).to(torch.int32)
            h = self.net(x) + self.table(code)
            h = h * self.flags + h.masked_fill(self.flags, 0) / 2
            h = h * self.scale + n.to(torch.float32).unsqueeze(1) / 7
            z = torch.polar(h.abs(), h) ** 2
            h = z.real + z.angle() * 0.1 + torch.view_as_real(z).sum(-1) * 0.01
            h = (
                h
                + (
                    torch.trunc(x)
                    + torch.frac(x)
                    + x.sign()
                    + torch.fmod(x, 1.3)
                    + torch.floor(x / 0.7)
                )
                * 0.01
            )
            count = (h > 0).sum(1) - (h < 0).sum(1)
            low = torch.where(h > torch.finfo(h.dtype).tiny, h, h.new_tensor(0.25))
            island = (low.float() * 1.5).to(h.dtype)
            return (
                F.mse_loss(island, y)
                + 0.01 * (count.to(h.dtype) * h.mean(1)).mean()
                + (torch.tensor(2) * self.scale - 1.5).square()
            )

    return Net(), {
        "x": floats(batch_size, WIDTH),
        "n": tokens(30, batch_size),
        "y": floats(batch_size, WIDTH).flip(0),
    }


def views_of_parameters(batch_size: int = 8) -> Example:
    """Parameters cut, turned, joined, expanded, folded, interpolated, normed, indexed by the batch, softmaxed, and one
    made of two by a product; a buffer that is a view of another."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Parameter(floats(3 * WIDTH, WIDTH) * 0.2)
            self.left, self.right = nn.Parameter(floats(WIDTH, 2)), nn.Parameter(floats(2, WIDTH))
            self.places = nn.Parameter(floats(1, WIDTH, 2, 2))
            self.start, self.many = (
                nn.Parameter(floats(1, 1, WIDTH)),
                nn.ParameterDict({"a-b": floats(4, WIDTH), "c.d".replace(".", "_"): floats(WIDTH)}),
            )
            base = torch.arange(10.0)
            self.register_buffer("base", base)
            self.register_buffer("part", base[2:6])

        def forward(self, x: Tensor, which: Tensor, y: Tensor) -> Tensor:
            q, k, v = self.big.chunk(3)
            joined = torch.cat((q[:4], k[4:])) + v.T
            low = self.left @ self.right
            grid = (
                F.interpolate(self.places, size=(2, 3), mode="bilinear").flatten(2).transpose(1, 2)
            )
            x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + grid[:, : x.shape[1] + 1]
            h = x @ F.normalize(joined, dim=1).T + x @ low
            h = h + self.many["a-b"][which].unsqueeze(1) * self.many["c_d"].softmax(0)
            h = h * self.big.view(3, WIDTH, WIDTH)[1].diagonal() + self.part.mean()
            tiled = self.right.repeat(4, 1).reshape(2, 4, WIDTH).mean(1)
            return (
                F.mse_loss(h[:, 1:], y)
                + (tiled.square().sum() + self.big.T.reshape(-1)[::5].square().sum()) * 0.01
            )

    return Net(), {**row_batch(batch_size, 3), "which": tokens(4, batch_size)}


def strange_names(batch_size: int = 8) -> Example:
    """Modules called by numbers, words of Python and of torch, with dashes and spaces; a batch whose keys are no
    identifiers, taken as keywords."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict(
                {
                    "0": nn.Linear(WIDTH, WIDTH),
                    "class": nn.Linear(WIDTH, WIDTH),
                    "a b-c": nn.LayerNorm(WIDTH),
                }
            )
            self.add_module("lambda", nn.Linear(WIDTH, WIDTH))
            self.register_parameter("None", nn.Parameter(torch.ones(WIDTH)))
            self.register_buffer("return", torch.zeros(WIDTH))
            self.input, self.output, self.args = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )

        def forward(self, **batch: Tensor) -> Tensor:
            h = batch["pixel values"]
            for name, block in self.blocks.items():
                h = h + block(h) if name != "a b-c" else block(h)
            h = getattr(self, "lambda")(h) * getattr(self, "None")
            with torch.no_grad():
                getattr(self, "return").add_(h.mean(0))
            return (
                F.mse_loss(self.args(self.output(self.input(h))), batch["class"])
                * batch["self.weight"].mean()
            )

    return Net(), {
        "pixel values": floats(batch_size, WIDTH), "class": floats(batch_size, WIDTH).flip(0), "self.weight": torch.ones(batch_size),
    }  # fmt: skip


def switched_in_forward(batch_size: int = 8) -> Example:
    """Parts put into evaluation and back, gradients of parameters switched for a call, a frozen norm, symmetric stops,
    a probe on detached features, dropout that is off."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            self.frozen, self.probe, self.teacher = (
                nn.BatchNorm1d(WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.frozen.weight.requires_grad_(False)
            self.teacher.requires_grad_(False)

        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self.frozen.eval()
            return self

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.frozen(self.body(x))
            with torch.no_grad():
                goal = self.teacher(y).detach()
            probe = F.mse_loss(self.probe(h.detach()), y)
            other = self.body(y)
            return (
                F.mse_loss(h, goal)
                + probe
                + F.mse_loss(h, other.detach())
                + F.mse_loss(h.detach(), other)
            )

    return Net(), row_batch(batch_size)


def recursive(batch_size: int = 8) -> Example:
    """Recursion over halves of a sequence with one shared cell, results remembered in a dict of the call, depth by a
    parameter list."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.merge, self.leaf = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))

        def reduce(self, parts: tuple[Tensor, ...], depth: int, known: dict[Any, Tensor]) -> Tensor:
            key = tuple(map(id, parts))
            if key not in known:
                if len(parts) == 1:
                    known[key] = self.leaf(parts[0])
                else:
                    middle = len(parts) // 2
                    both = [
                        self.reduce(half, depth + 1, known)
                        for half in (parts[:middle], parts[middle:])
                    ]
                    known[key] = torch.tanh(self.merge(torch.cat(both, -1))) * self.gains[depth]
            return known[key]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            known: dict[Any, Tensor] = {}
            parts = x.unbind(1)
            whole = self.reduce(parts, 0, known)
            again = self.reduce(parts[:2], 1, known)
            return F.mse_loss(whole + again, y[:, 0])

    return Net(), row_batch(batch_size, 5)


def shared_across_scales(batch_size: int = 4) -> Example:
    """One head over all levels of a pyramid, levels joined as one list of places, matched by cost with argmin,
    losses normed by what was matched."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)
            self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(3))

        def forward(self, image: Tensor, boxes: Tensor) -> Tensor:
            h, levels = F.relu(self.stem(image)), []
            for scale in self.scales:
                out = self.head(h)
                levels.append(
                    torch.cat((out[:, :1], (out[:, 1:] * scale).sigmoid()), 1).flatten(2).mT
                )
                h = F.max_pool2d(h, 2)
            every = torch.cat(levels, 1)
            scores, found = every[..., 0], every[..., 1:]
            cost = torch.cdist(found, boxes, p=1) - scores.sigmoid().unsqueeze(-1)
            best = cost.argmin(1)
            picked = found.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
            target = torch.zeros_like(scores).scatter(1, best, 1.0)
            return F.l1_loss(
                picked, boxes, reduction="sum"
            ) / target.sum() + F.binary_cross_entropy_with_logits(scores, target)

    return Net(), {
        "image": floats(batch_size, 3, 8, 8),
        "boxes": floats(batch_size, 2, 4).sigmoid(),
    }


def many_small_states(batch_size: int = 8) -> Example:
    """Buffers of every role: a running maximum, a reservoir, a histogram, a flag that flips, a generator's seed that is
    counted on, an integer vector, a mean that only evaluation reads."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()
            for name, value in (
                ("top", torch.zeros(WIDTH)),
                ("hist", torch.zeros(4)),
                ("unread", torch.zeros(WIDTH)),
            ):
                self.register_buffer(name, value)
            self.register_buffer("flag", torch.tensor(False))
            self.register_buffer("ages", torch.zeros(WIDTH, dtype=torch.long))
            self.register_buffer("absent", None)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            with torch.no_grad():
                self.top.copy_(torch.maximum(self.top * 0.9, h.abs().amax(0)))
                self.hist.mul_(0.5).add_(torch.histc(h.detach(), 4, -1, 1) / h.numel())
                self.flag.logical_not_()
                self.ages += (h.mean(0) > 0).long()
                self.unread.lerp_(h.mean(0), 0.1)
            h = h / (self.top + 1) + torch.where(self.flag, 0.1, 0.0) + self.ages * 0.01
            return F.mse_loss(h, y) + (self.hist * 0.1).sum() * h.square().mean()

    return Net(), row_batch(batch_size)


def mixed_experts_of_lists(batch_size: int = 8) -> Example:
    """Soft gates over experts of unlike shapes, a shared bottom, load losses by squared coefficients of variation, noise
    of the batch, top-1 weights straight through, a residual expert."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(
                [two_layers(hidden=k) for k in (4, 8, 16)] + [nn.Identity()]
            )
            self.gate, self.noise = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, 4, bias=False)

        def forward(self, x: Tensor, eps: Tensor, y: Tensor) -> Tensor:
            clean, scale = self.gate(x), F.softplus(self.noise(x)) + 1e-2
            logits = clean + eps * scale
            top, index = logits.topk(3, dim=1)
            gates = torch.zeros_like(logits).scatter(1, index[:, :2], top[:, :2].softmax(1))
            inside = logits > top[:, 2:3]
            normal = torch.distributions.Normal(0.0, 1.0)
            p_in, p_out = (
                normal.cdf((clean - top[:, 2:3]) / scale),
                normal.cdf((clean - top[:, 1:2]) / scale),
            )
            load, importance = torch.where(inside, p_in, p_out).sum(0), gates.sum(0)
            out = torch.stack([expert(x) for expert in self.experts], 1)
            mixed = torch.einsum("be,bed->bd", gates, out)
            uneven = sum(one.var() / (one.mean() ** 2 + 1e-10) for one in (load, importance))
            return F.mse_loss(mixed, y) + 0.01 * uneven

    return Net(), {**row_batch(batch_size), "eps": floats(batch_size, 4)}


def wrapped_forward(batch_size: int = 8) -> Example:
    """Forwards replaced on instances by partials and closures, a class made by type(), mixins whose super calls pass
    through, an abstract base, slots beside, a module that is a callable's attribute."""

    class Scales:
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.5  # type: ignore[misc]

    class Adds:
        shift = 0.25

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift  # type: ignore[misc]

    mixed: Any = type("MixedLinear", (Scales, Adds, nn.Linear), {"shift": 0.125})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (
                mixed(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.gain = nn.Parameter(torch.ones(WIDTH))
            plain = self.two.forward
            self.two.forward = lambda x: plain(x) * self.gain
            self.three.forward = partial(self.halved, self.three)

        @staticmethod
        def halved(layer: nn.Linear, x: Tensor) -> Tensor:
            return F.linear(x, layer.weight.detach() * 0.5, layer.bias)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.three(F.mish(self.two(F.gelu(self.one(x))))), y)

    return Net(), row_batch(batch_size)


def long_sums(batch_size: int = 8) -> Example:
    """Deep sums of many residuals of one layer, weights shared at every second layer, skips from everywhere, layers
    that are dropped by their number."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.mix = nn.Parameter(torch.eye(8))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            outs = [x]
            for depth in range(7):
                if depth == 4:
                    outs.append(outs[-1])
                    continue
                weights = self.mix[depth, : len(outs)].softmax(0)
                into = sum(w * o for w, o in zip(weights, outs, strict=True))
                outs.append(
                    into + F.silu(self.layers[depth % 3](self.norm(into))) / math.sqrt(depth + 1)
                )
            return F.mse_loss(torch.stack(outs[1:]).mean(0), y)

    return Net(), row_batch(batch_size)
