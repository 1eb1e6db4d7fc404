"""Sixteen models that users write though few papers show them, for ``outside.py``: weights made by networks, fixed
points, losses over the batch that remember, layers held in unusual places.

Written before any of them was run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn
from torch.func import functional_call, vmap

WIDTH = 8


def _rows(batch_size: int, width: int = WIDTH) -> dict[str, Tensor]:
    return {"x": floats(batch_size, width), "y": floats(batch_size, width).flip(0)}


def convolutions_of_samples(batch_size: int = 4) -> Example:
    """Dynamic convolution: each sample's kernel is a mixture, and the batch is folded into the groups of one call."""

    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = nn.Parameter(floats(3, 6, 4, 3, 3) * 0.2)
            self.router, self.head = nn.Linear(4, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, c, h, w = x.shape
            share = self.router(x.mean((2, 3))).softmax(-1)
            kernels = torch.einsum("bk,kocij->bocij", share, self.kernels).reshape(b * 6, c, 3, 3)
            out = F.conv2d(x.reshape(1, b * c, h, w), kernels, padding=1, groups=b)
            return F.mse_loss(self.head(out.view(b, 6, h, w).mean((2, 3))), y)

    return Dynamic(), {"x": floats(batch_size, 4, 6, 6), "y": floats(batch_size, 1)}


def equilibrium_by_hook(batch_size: int = 4) -> Example:
    """A deep equilibrium model: the fixed point without gradients, one step with them, and a hook that solves for the
    gradient by iterating its transposed Jacobian."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            nn.init.orthogonal_(self.inner.weight, 0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(12):
                    z = torch.tanh(self.inner(z) + x)
            z = torch.tanh(self.inner(z) + x)
            if z.requires_grad:
                z0 = z.detach().requires_grad_()
                f0 = torch.tanh(self.inner(z0) + x)

                def solve(grad: Tensor) -> Tensor:
                    g = grad
                    for _ in range(12):
                        g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                    return g

                z.register_hook(solve)
            return F.mse_loss(self.outer(z), y)

    return Equilibrium(), _rows(batch_size)


def marginal_likelihood(batch_size: int = 8) -> Example:
    """Deep kernel learning: a Gaussian process over the batch, by its Cholesky factor."""

    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 2))
            self.log_scale, self.log_noise = (
                nn.Parameter(torch.zeros(())),
                nn.Parameter(torch.zeros(())),
            )

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            z = self.net(x)
            gram = torch.exp(-torch.cdist(z, z).square() * self.log_scale.exp())
            gram = gram + torch.eye(len(x), dtype=x.dtype) * (self.log_noise.exp() + 1e-3)
            factor = torch.linalg.cholesky(gram)
            solved = torch.cholesky_solve(t[:, None], factor).squeeze(-1)
            return 0.5 * (t @ solved) / len(x) + factor.diagonal().log().sum() / len(x)

    return Process(), {"x": floats(batch_size, WIDTH), "t": floats(batch_size)}


def transported(batch_size: int = 8) -> Example:
    """Sinkhorn: the cost of moving one batch of points onto another."""

    class Transport(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            cost = (self.net(x)[:, None] - y[None]).square().sum(-1)
            f, g = torch.zeros_like(cost[:, 0]), torch.zeros_like(cost[0])
            for _ in range(5):
                f = -torch.logsumexp(g[None] - cost / WIDTH, 1) - math.log(len(x))
                g = -torch.logsumexp(f[:, None] - cost / WIDTH, 0) - math.log(len(x))
            plan = torch.exp(f[:, None] + g[None] - cost / WIDTH)
            return (plan * cost).sum() / plan.sum().detach()

    return Transport(), _rows(batch_size)


def classes_weighed_by_the_batch(batch_size: int = 8) -> Example:
    """Cross entropy whose class weights are the inverse counts of the batch."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 5))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            counts = torch.bincount(labels, minlength=5).to(x.dtype)
            return F.cross_entropy(
                self.net(x), labels, weight=len(labels) / (5 * counts.clamp(min=1))
            )

    return Weighed(), {"x": floats(batch_size, WIDTH), "labels": tokens(5, batch_size)}


def loss_that_remembers(batch_size: int = 8) -> Example:
    """Two losses, each divided by a running mean of itself that forward keeps in a buffer."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("means", torch.ones(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.net(x)
            losses = torch.stack([F.mse_loss(out, y), F.l1_loss(out, y)])
            with torch.no_grad():
                self.means.lerp_(losses, 0.1)
            return (losses / self.means).sum()

    return Remembering(), _rows(batch_size)


def halves_of_a_batch(batch_size: int = 8) -> Example:
    """FixMatch: the first half has labels, the second gets those that the network is sure of."""

    class Match(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            known, unknown = x.chunk(2)
            supervised = F.cross_entropy(self.net(known), labels[: len(known)])
            weak = self.net(unknown).softmax(-1).detach()
            sure, guess = weak.max(-1)
            strong = F.cross_entropy(self.net(unknown.flip(-1)), guess, reduction="none")
            return supervised + (strong * (sure > 0.3)).mean()

    return Match(), {"x": floats(batch_size, WIDTH), "labels": tokens(4, batch_size)}


def hypernetwork_of_samples(batch_size: int = 4) -> Example:
    """A network that makes all weights of another, called through functional_call, per sample through vmap."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH))
            self.target.requires_grad_(False)
            self.sizes = {name: one.shape for name, one in self.target.named_parameters()}
            total = sum(math.prod(size) for size in self.sizes.values())
            self.maker = nn.Linear(WIDTH, total)

        def one(self, code: Tensor, x: Tensor) -> Tensor:
            parts = self.maker(code).split([math.prod(size) for size in self.sizes.values()])
            weights = {
                name: part.view(size) * 0.1
                for part, (name, size) in zip(parts, self.sizes.items(), strict=True)
            }
            return functional_call(self.target, weights, (x,))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(vmap(self.one)(y, x), y)

    return Hyper(), _rows(batch_size)


def ridge_heads(batch_size: int = 4) -> Example:
    """Meta-learning with a closed-form head: each sample is a task with a support and a query set."""

    class Ridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 6)
            self.log_lambda = nn.Parameter(torch.zeros(()))

        def forward(
            self, support: Tensor, targets: Tensor, query: Tensor, wanted: Tensor
        ) -> Tensor:
            s, q = self.net(support).tanh(), self.net(query).tanh()
            gram = s.mT @ s + torch.eye(6, dtype=s.dtype) * self.log_lambda.exp()
            head = torch.linalg.solve(gram, s.mT @ targets[..., None])
            return F.mse_loss((q @ head).squeeze(-1), wanted)

    return Ridge(), {
        "support": floats(batch_size, 5, WIDTH), "targets": floats(batch_size, 5),
        "query": floats(batch_size, 7, WIDTH), "wanted": floats(batch_size, 7),
    }  # fmt: skip


def tied_by_a_property(batch_size: int = 4) -> Example:
    """A head whose weight is a property that gives another module's, scaled; a module made on the first call; a
    position table behind lru_cache."""

    @functools.lru_cache(maxsize=4)
    def positions(length: int) -> Tensor:
        return torch.arange(length)

    class Head(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.held = [table]
            self.scale = nn.Parameter(torch.ones(()))

        @property
        def weight(self) -> Tensor:
            return self.held[0].weight * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, WIDTH)
            self.places = nn.Embedding(6, WIDTH)
            self.head = Head(self.table)
            self.mixer: nn.Module | None = None

        def forward(self, ids: Tensor, **more: Any) -> Tensor:
            x = self.table(ids) + self.places(positions(ids.shape[1]))
            if self.mixer is None:
                self.mixer = nn.Softmax(-1)
            x = x + self.mixer(x @ x.mT) @ x
            return F.cross_entropy(self.head(x).flatten(0, 1), more["labels"].flatten())

    ids = tokens(12, batch_size, 6)
    return Tied(), {"ids": ids, "labels": ids.flip(1)}


def columns_of_a_slim_net(batch_size: int = 8) -> Example:
    """Slimmable layers: the same weights at three widths, self-distilled from the widest."""

    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def at(self, x: Tensor, width: int) -> Tensor:
            h = F.relu(F.linear(x, self.one.weight[:width], self.one.bias[:width]))
            return F.linear(h, self.two.weight[:, :width], self.two.bias)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            wide = self.at(x, 12)
            thin = sum(F.mse_loss(self.at(x, width), wide.detach()) for width in (3, 6))
            return F.mse_loss(wide, y) + thin

    return Slim(), _rows(batch_size)


def stacked_experts(batch_size: int = 8) -> Example:
    """An ensemble as a list, its disagreement in the loss."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, WIDTH)) for _ in range(3)
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            outs = torch.stack([member(x) for member in self.members])
            return F.mse_loss(outs.mean(0), y) - 0.1 * outs.var(0).mean()

    return Ensemble(), _rows(batch_size)


def moved_pictures(batch_size: int = 4) -> Example:
    """A spatial transformer with a total-variation penalty and instance norm, on bytes."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Linear(2 * 36, 6)
            nn.init.zeros_(self.where.weight)
            self.where.bias = nn.Parameter(torch.tensor([1.0, 0.1, 0, 0, 1.0, -0.1]))
            self.net = nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4),
                nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
            ).to(memory_format=torch.channels_last)  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.where.weight.dtype).div(255).contiguous(memory_format=torch.channels_last)
            theta = self.where(x.flatten(1)).view(-1, 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            out = self.net(F.grid_sample(x, grid, align_corners=False))
            rough = out.diff(dim=-1).abs().mean() + out.diff(dim=-2).abs().mean()
            return F.mse_loss(out, x) + 0.1 * rough

    return Transformer(), {"x": tokens(256, batch_size, 2, 6, 6).to(torch.uint8)}


def segments(batch_size: int = 4) -> Example:
    """Ragged rows by lengths: cumulative sums over a padded batch, the longest run picked per row."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
            valid = torch.arange(x.shape[1])[None] < lengths[:, None]
            h = self.net(x).masked_fill(~valid[..., None], 0.0)
            sums = h.cumsum(1)
            best = self.score(sums).squeeze(-1).masked_fill(~valid, -1e9).argmax(1)
            picked = sums.gather(1, best[:, None, None].expand(-1, 1, WIDTH)).squeeze(1)
            last = sums[torch.arange(len(x)), lengths - 1]
            return F.mse_loss(picked + last, y)

    lengths = tokens(6, batch_size, low=1)
    return Segments(), {
        "x": floats(batch_size, 6, WIDTH),
        "lengths": lengths,
        "y": floats(batch_size, WIDTH),
    }


def one_layer_many_times(batch_size: int = 4) -> Example:
    """A shared block applied with different norms, a frozen copy of its weights as an anchor, weight decay and an
    orthogonality penalty inside the loss."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.register_buffer("anchor", self.block[0].weight.detach().clone())
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for norm in self.norms:
                x = x + self.block(norm(x))
            w = self.block[0].weight
            near = (w - self.anchor).square().sum()
            straight = (w @ w.mT - torch.eye(WIDTH, dtype=w.dtype)).square().mean()
            decay = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
            return F.mse_loss(self.frozen(x), y) + 0.01 * near + 0.1 * straight + 1e-3 * decay

    return Shared(), _rows(batch_size)


def nested_transformer(batch_size: int = 4) -> Example:
    """nn.Transformer with all of its masks, a causal decoder, and a padded source."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 16, padding_idx=0)
            self.net = nn.Transformer(
                16, 2, 2, 2, 32, dropout=0.0, batch_first=True, norm_first=True
            )
            self.head = nn.Linear(16, 20)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            pad = source == 0
            causal = nn.Transformer.generate_square_subsequent_mask(
                target.shape[1] - 1, dtype=self.head.weight.dtype
            )
            out = self.net(
                self.table(source), self.table(target[:, :-1]), tgt_mask=causal, tgt_is_causal=True,
                src_key_padding_mask=pad, memory_key_padding_mask=pad,
            )  # fmt: skip
            return F.cross_entropy(
                self.head(out).flatten(0, 1), target[:, 1:].flatten(), ignore_index=0
            )

    source = tokens(20, batch_size, 7, low=1)
    source[:, 5:] = source[:, 5:] * (tokens(2, batch_size, 1))
    return Translator(), {"source": source, "target": tokens(20, batch_size, 6, low=1)}
