"""Kinds that none of the other files has, for ``outside.py``: layers of structured matrices, features hashed and sketched,
learning without one backward pass through all, statistics of matrices, and tokens that are merged.

Written before any of them was run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, row_batch, tokens, two_layers
from torch import Tensor, nn
from torch.autograd import Function

# -- structured layers -------------------------------------------------------------------------------


def monarch_layers(batch_size: int = 8) -> Example:
    """Monarch matrices: two block-diagonal products with a transposition between them, in a mixer."""

    class Monarch(nn.Module):
        def __init__(self, blocks: int, size: int) -> None:
            super().__init__()
            self.left = nn.Parameter(floats(blocks, size, size) / math.sqrt(size))
            self.right = nn.Parameter(floats(size, blocks, blocks) / math.sqrt(blocks))

        def forward(self, x: Tensor) -> Tensor:
            blocks, size = self.left.shape[:2]
            h = torch.einsum("...ki,kij->...kj", x.unflatten(-1, (blocks, size)), self.left)
            h = torch.einsum("...jk,jkl->...jl", h.transpose(-1, -2), self.right)
            return h.transpose(-1, -2).flatten(-2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.features, self.places = (
                nn.LayerNorm(WIDTH),
                Monarch(2, 4),
                Monarch(3, 2),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x + self.features(F.gelu(self.features(self.norm(x))))
            h = h + self.places(self.norm(h).mT).mT
            return F.mse_loss(h, y)

    return Net(), row_batch(batch_size, 6)


def circulant_layers(batch_size: int = 8) -> Example:
    """Circulant and Toeplitz products by real transforms, with signs that are fixed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Parameter(floats(WIDTH)),
                nn.Parameter(floats(2 * WIDTH - 1)),
            )
            self.register_buffer("signs", torch.tensor([1.0, -1.0] * (WIDTH // 2)))
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = torch.fft.irfft(
                torch.fft.rfft(x * self.signs) * torch.fft.rfft(self.first), n=WIDTH
            )
            h = F.relu(h + self.bias)
            wide = 2 * WIDTH
            column = torch.cat((self.second[WIDTH - 1 :], x.new_zeros(1), self.second[: WIDTH - 1]))
            h = torch.fft.irfft(torch.fft.rfft(h, n=wide) * torch.fft.rfft(column), n=wide)
            return F.mse_loss(h[..., :WIDTH], y)

    return Net(), row_batch(batch_size)


def tensor_trains(batch_size: int = 8) -> Example:
    """An embedding and a linear layer whose weights are trains of small tensors."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = ((1, 3, 2, 3), (3, 3, 2, 3), (3, 3, 2, 1))
            self.words = nn.ParameterList(nn.Parameter(floats(*shape) * 0.5) for shape in shapes)
            cores = ((1, 2, 2, 3), (3, 2, 2, 3), (3, 2, 2, 1))
            self.linear = nn.ParameterList(nn.Parameter(floats(*shape) * 0.5) for shape in cores)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            digits = torch.stack([ids // 9, ids // 3 % 3, ids % 3], -1)
            h = ids.new_ones(*ids.shape, 1, 1, dtype=y.dtype)
            for core, digit in zip(self.words, digits.unbind(-1)):
                own = core.permute(1, 0, 2, 3)[digit]
                h = torch.einsum("...ar,...rbs->...abs", h, own).flatten(-3, -2)
            h = h.squeeze(-1)
            weight = self.linear[0]
            for core in list(self.linear)[1:]:
                weight = torch.tensordot(weight, core, dims=([-1], [0]))
            weight = weight.squeeze(0).squeeze(-1).permute(0, 2, 4, 1, 3, 5).reshape(WIDTH, WIDTH)
            return F.mse_loss(torch.tanh(h @ weight), y)

    ids = tokens(27, batch_size, 5)
    return Net(), {"ids": ids, "y": floats(batch_size, 5, WIDTH)}


def rotations_by_exponentials(batch_size: int = 8) -> Example:
    """Rotations as exponentials of skew matrices, of samples and of weights, and a loss of the angle between two."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.skew = two_layers(WIDTH, 3), nn.Parameter(floats(WIDTH, WIDTH) * 0.2)

        def forward(self, x: Tensor, turns: Tensor) -> Tensor:
            x = x @ torch.linalg.matrix_exp(self.skew - self.skew.mT)
            a, b, c = self.net(x).unbind(-1)
            nothing = torch.zeros_like(a)
            skew = torch.stack((nothing, -c, b, c, nothing, -a, -b, a, nothing), -1)
            turned = torch.linalg.matrix_exp(skew.view(-1, 3, 3))
            between = turned.mT @ turns
            trace = torch.diagonal(between, dim1=-2, dim2=-1).sum(-1)
            return torch.acos(((trace - 1) / 2).clamp(-0.999, 0.999)).mean()

    turns = torch.linalg.qr(floats(batch_size, 3, 3))[0]
    return Net(), {"x": floats(batch_size, WIDTH), "turns": turns}


# -- features hashed, crossed and pooled -------------------------------------------------------------


def field_aware_machine(batch_size: int = 8) -> Example:
    """Field-aware factorisation: for every pair of fields each side has vectors of its own."""

    class Net(nn.Module):
        def __init__(self, fields: int = 4, words: int = 12, rank: int = 3) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(fields * words, rank) for _ in range(fields))
            self.line = nn.Embedding(fields * words, 1)
            self.register_buffer("ahead", torch.arange(fields) * words)
            self.fields = fields

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            ids = ids + self.ahead
            seen = [table(ids) for table in self.tables]
            pairs = []
            for i in range(self.fields - 1):
                for j in range(i + 1, self.fields):
                    pairs.append(seen[j][:, i] * seen[i][:, j])
            score = torch.stack(pairs, 1).sum((1, 2)) + self.line(ids).sum((1, 2))
            return F.binary_cross_entropy_with_logits(score, y)

    return Net(), {
        "ids": tokens(12, batch_size, 4),
        "y": (floats(batch_size) > 0).to(floats(1).dtype),
    }


def quotients_and_remainders(batch_size: int = 8) -> Example:
    """Compositional embeddings: a word is what its quotient and its remainder say together."""

    class Net(nn.Module):
        def __init__(self, words: int = 60, collisions: int = 8) -> None:
            super().__init__()
            self.collisions = collisions
            self.quotient = nn.Embedding(-(-words // collisions), WIDTH)
            self.remainder = nn.EmbeddingBag(collisions, WIDTH, mode="sum")
            self.top = two_layers(WIDTH, 1)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            whole = self.quotient(torch.div(ids, self.collisions, rounding_mode="floor")).mean(1)
            rest = self.remainder(torch.remainder(ids, self.collisions))
            return F.binary_cross_entropy_with_logits(self.top(whole * rest).squeeze(-1), y)

    return Net(), {
        "ids": tokens(60, batch_size, 3),
        "y": (floats(batch_size) > 0).to(floats(1).dtype),
    }


def bilinear_sketch(batch_size: int = 8) -> Example:
    """Compact bilinear pooling: two count sketches are convolved by transforms, roots keep their signs."""

    class Net(nn.Module):
        def __init__(self, into: int = 6, out: int = 16) -> None:
            super().__init__()
            self.out, self.images, self.words = (
                out,
                nn.Conv2d(3, into, 3, padding=1),
                nn.Linear(WIDTH, into),
            )
            for side in ("a", "b"):
                sketch = torch.zeros(into, out)
                sketch[torch.arange(into), torch.randint(0, out, (into,))] = torch.sign(
                    torch.randn(into)
                )
                self.register_buffer(f"sketch_{side}", sketch)
            self.head = nn.Linear(out, 5)

        def forward(self, image: Tensor, x: Tensor, labels: Tensor) -> Tensor:
            seen = self.images(image).permute(0, 2, 3, 1) @ self.sketch_a
            said = (self.words(x) @ self.sketch_b)[:, None, None]
            both = torch.fft.ifft(torch.fft.fft(seen) * torch.fft.fft(said)).real
            pooled = both.sum((1, 2))
            pooled = pooled.sign() * (pooled.abs() + 1e-6).sqrt()
            return F.cross_entropy(self.head(F.normalize(pooled)), labels)

    return Net(), {
        "image": floats(batch_size, 3, 5, 5),
        "x": floats(batch_size, WIDTH),
        "labels": tokens(5, batch_size),
    }


def net_vlad(batch_size: int = 8) -> Example:
    """NetVLAD: residuals to learnt centres, weighed softly, normed within and over all; a triplet of places."""

    class Net(nn.Module):
        def __init__(self, centres: int = 4, width: int = 6) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
            self.soft, self.centres = (
                nn.Conv2d(width, centres, 1),
                nn.Parameter(floats(centres, width)),
            )

        def place(self, image: Tensor) -> Tensor:
            x = F.normalize(self.trunk(image), dim=1)
            count, width = x.shape[:2]
            weights = self.soft(x).view(count, len(self.centres), -1).softmax(1)
            rows = x.view(count, width, -1)
            apart = rows.expand(len(self.centres), -1, -1, -1).permute(1, 0, 2, 3)
            apart = apart - self.centres.expand(rows.size(-1), -1, -1).permute(1, 2, 0).unsqueeze(0)
            found = F.normalize((apart * weights.unsqueeze(2)).sum(-1), dim=2)
            return F.normalize(found.view(count, -1))

        def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
            places = self.place(torch.cat((anchor, near, far))).chunk(3)
            return F.triplet_margin_loss(*places, margin=0.3)

    shape = (batch_size, 3, 4, 4)
    anchor = floats(*shape)
    return Net(), {"anchor": anchor, "near": anchor.roll(1, 3), "far": anchor.flip(0)}


def additive_features(batch_size: int = 8) -> Example:
    """A neural additive model: a small net per feature as grouped convolutions, some left out, outputs penalised."""

    class Net(nn.Module):
        def __init__(self, features: int = 5, hidden: int = 4) -> None:
            super().__init__()
            self.bend = nn.Parameter(floats(features, hidden) * 0.5)
            self.shift = nn.Parameter(torch.zeros(features, hidden))
            wide = features * hidden
            self.inner = nn.Conv1d(wide, wide, 1, groups=features)
            self.outer = nn.Conv1d(wide, features, 1, groups=features, bias=False)
            self.bias = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = (x.unsqueeze(-1) - self.shift) * torch.exp(self.bend)
            h = h.clamp(0, 1).flatten(1).unsqueeze(-1)
            terms = self.outer(F.relu(self.inner(h))).squeeze(-1)
            kept = F.dropout(terms, 0.1, self.training)
            penalty = terms.square().mean()
            return F.mse_loss(kept.sum(-1) + self.bias, y) + 1e-2 * penalty

    return Net(), {"x": floats(batch_size, 5), "y": floats(batch_size)}


def set_by_lstm(batch_size: int = 8) -> Example:
    """Set2Set: a cell asks a padded set again and again, what it reads is its next input."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

        def forward(self, x: Tensor, sizes: Tensor, y: Tensor) -> Tensor:
            batch, length = x.shape[:2]
            absent = torch.arange(length, device=x.device) >= sizes.unsqueeze(1)
            asked = x.new_zeros(batch, 2 * WIDTH)
            state = (x.new_zeros(batch, WIDTH), x.new_zeros(batch, WIDTH))
            for _ in range(3):
                state = self.cell(asked, state)
                scores = torch.bmm(x, state[0].unsqueeze(-1)).squeeze(-1)
                weights = scores.masked_fill(absent, -torch.inf).softmax(1)
                read = (weights.unsqueeze(-1) * x).sum(1)
                asked = torch.cat((state[0], read), -1)
            return F.smooth_l1_loss(self.head(asked).squeeze(-1), y)

    sizes = tokens(6, batch_size, low=1)
    return Net(), {"x": floats(batch_size, 6, WIDTH), "sizes": sizes, "y": floats(batch_size)}


def clockwork(batch_size: int = 8) -> Example:
    """A clockwork recurrence: groups of units move at periods of their own, slower ones feed the faster."""

    class Net(nn.Module):
        def __init__(self, groups: int = 3, each: int = 4) -> None:
            super().__init__()
            self.groups, self.each, wide = groups, each, groups * each
            self.see, self.turn, self.head = (
                nn.Linear(WIDTH, wide),
                nn.Linear(wide, wide),
                nn.Linear(wide, WIDTH),
            )
            number = torch.arange(wide) // each
            self.register_buffer("feeds", (number[:, None] <= number[None, :]).float())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], self.groups * self.each)
            found = []
            for step in range(x.shape[1]):
                moves = self.each * sum(step % 2**group == 0 for group in range(self.groups))
                new = torch.tanh(
                    self.see(x[:, step])[:, :moves]
                    + F.linear(h, (self.turn.weight * self.feeds)[:moves], self.turn.bias[:moves])
                )
                h = torch.cat((new, h[:, moves:]), 1)
                found.append(self.head(h))
            return F.mse_loss(torch.stack(found, 1), y)

    return Net(), row_batch(batch_size, 6)


# -- learning without one backward pass --------------------------------------------------------------


def forward_forward(batch_size: int = 8) -> Example:
    """Every layer has a loss of its own, of how much it likes true and false samples, and hands on no gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, true: Tensor, false: Tensor) -> Tensor:
            total = true.new_zeros(())
            for layer in self.layers:
                liked = []
                for side, x in (("true", true), ("false", false)):
                    direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
                    h = F.relu(layer(direction))
                    liked.append(h.pow(2).mean(1) - 0.3)
                    if side == "true":
                        true = h.detach()
                    else:
                        false = h.detach()
                total = total + F.softplus(torch.cat([-liked[0], liked[1]])).mean()
            return total

    return Net(), {"true": floats(batch_size, WIDTH), "false": floats(batch_size, WIDTH) + 0.5}


def feedback_alignment(batch_size: int = 8) -> Example:
    """Errors travel back through fixed matrices of their own instead of the transposed weights."""

    class Aligned(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, back: Tensor) -> Tensor:
            ctx.save_for_backward(x, back)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, back = ctx.saved_tensors
            return gradient @ back, gradient.mT @ x, gradient.sum(0), None

    class Layer(nn.Linear):
        def __init__(self, into: int, out: int) -> None:
            super().__init__(into, out)
            self.register_buffer("back", torch.randn(out, into) / math.sqrt(out))

        def forward(self, x: Tensor) -> Tensor:
            return Aligned.apply(x, self.weight, self.bias, self.back)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                Layer(WIDTH, 12), nn.Tanh(), Layer(12, 12), nn.Tanh(), Layer(12, WIDTH)
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.net(x), y)

    return Net(), row_batch(batch_size)


def predictive_coding(batch_size: int = 8) -> Example:
    """States relax on the energy of all predictions by gradients taken inside, then weights learn from it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def energy(self, states: list[Tensor]) -> Tensor:
            pairs = zip(self.layers, states, states[1:])
            return sum(
                ((after - layer(torch.tanh(before))) ** 2).sum() for layer, before, after in pairs
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            states = [x]
            for layer in self.layers[:-1]:
                states.append(layer(torch.tanh(states[-1])).detach())
            for _ in range(3):
                free = [one.detach().requires_grad_() for one in states[1:]]
                with torch.enable_grad():
                    slopes = torch.autograd.grad(self.energy([x, *free, y]), free)
                states = [x, *(one - 0.1 * slope for one, slope in zip(free, slopes))]
            return self.energy([x, *(one.detach() for one in states[1:]), y]) / len(x)

    return Net(), row_batch(batch_size)


def sobolev(batch_size: int = 8) -> Example:
    """Sobolev training: values and slopes of a net follow given ones, slopes along random directions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Softplus(), nn.Linear(12, 1))

        def forward(self, x: Tensor, y: Tensor, slopes: Tensor, along: Tensor) -> Tensor:
            x = x.requires_grad_(True)
            found = self.net(x)
            (own,) = torch.autograd.grad(found.sum(), x, create_graph=True)
            told = ((own - slopes) * along).sum(-1)
            return F.mse_loss(found.squeeze(-1), y) + told.square().mean()

    return Net(), {
        "x": floats(batch_size, WIDTH),
        "y": floats(batch_size),
        "slopes": floats(batch_size, WIDTH),
        "along": F.normalize(floats(batch_size, WIDTH)),
    }


def bayes_by_backprop(batch_size: int = 8) -> Example:
    """Weights are normal, drawn from given noise, activations by their own; a divergence to a mixture prior."""

    class Layer(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.mean, self.spread = (
                nn.Parameter(floats(out, into) * 0.3),
                nn.Parameter(torch.full((out, into), -3.0)),
            )
            self.register_buffer("noise", torch.randn(out, into))

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            sigma = F.softplus(self.spread)
            made = F.linear(x, self.mean) + (F.linear(x**2, sigma**2) + 1e-8).sqrt() * noise
            weight = self.mean + sigma * self.noise
            own = torch.distributions.Normal(self.mean, sigma).log_prob(weight).sum()
            wide = torch.distributions.Normal(0.0, 1.0).log_prob(weight)
            narrow = torch.distributions.Normal(0.0, 0.1).log_prob(weight)
            return made, own - (torch.logaddexp(wide, narrow) - math.log(2)).sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(WIDTH, 10), Layer(10, WIDTH)

        def forward(self, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            h, one = self.first(x, a)
            h, other = self.second(F.relu(h), b)
            return F.gaussian_nll_loss(h, y, torch.full_like(h, 0.1)) + 1e-3 * (one + other)

    return Net(), {
        **row_batch(batch_size),
        "a": floats(batch_size, 10),
        "b": floats(batch_size, WIDTH),
    }


# -- statistics of matrices --------------------------------------------------------------------------


def canonical_correlation(batch_size: int = 8) -> Example:
    """Deep canonical correlation: both views are whitened by eigenvectors, singular values of what is shared add up."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = two_layers(WIDTH, 3), two_layers(WIDTH, 3)

        @staticmethod
        def whiten(spread: Tensor) -> Tensor:
            values, vectors = torch.linalg.eigh(spread)
            return vectors @ torch.diag(values.clamp_min(1e-6).rsqrt()) @ vectors.T

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.left(x), self.right(y)
            a, b = a - a.mean(0), b - b.mean(0)
            eye = torch.eye(3, dtype=x.dtype) * 0.1
            count = len(x) - 1
            left, right = self.whiten(a.T @ a / count + eye), self.whiten(b.T @ b / count + eye)
            shared = left @ (a.T @ b / count) @ right
            return -torch.linalg.matrix_norm(shared, "nuc")

    return Net(), row_batch(batch_size)


def traces_and_norms(batch_size: int = 8) -> Example:
    """Regularised by traces, norms and pseudo-inverses of weights; elements taken by number from a grid of pairs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.square = (
                two_layers(),
                nn.Parameter(torch.eye(WIDTH) + 0.1 * floats(WIDTH, WIDTH)),
            )
            self.register_buffer("places", torch.tensor([0, 9, 18, 27, 36, 45, 54, 63]))

        def forward(self, x: Tensor, seen: Tensor, y: Tensor) -> Tensor:
            factors, pivots = torch.linalg.lu_factor(self.square)
            h = torch.linalg.lu_solve(factors, pivots, self.net(x).T).T
            h = h.masked_scatter(seen, x)
            inverse = torch.linalg.pinv(self.net[0].weight)
            pairs = torch.cartesian_prod(torch.arange(2), torch.arange(3)).to(x.dtype)
            grid = (pairs @ self.square[:2, :3]).square().sum()
            straight = torch.take(self.square, self.places).sum() - torch.trace(self.square)
            norms = torch.linalg.matrix_norm(self.square) + torch.linalg.matrix_norm(
                self.net[2].weight, 1
            )
            return F.mse_loss(h, y) + 1e-2 * (
                inverse.square().sum() + grid + norms + straight.square()
            )

    x = row_batch(batch_size)
    return Net(), {**x, "seen": x["x"] > 1.0}


# -- tokens and graphs -------------------------------------------------------------------------------


def token_merging(batch_size: int = 8) -> Example:
    """ToMe: between blocks of attention the tokens most alike are merged by a bipartite matching, sizes kept."""

    class Net(nn.Module):
        def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

        def attend(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
            batch, count, width = x.shape
            q, k, v = (
                self.qkv(self.norm(x)).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            )
            scores = q @ k.mT / math.sqrt(q.shape[-1]) + size.log()[:, None, None, :, 0]
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, count, width)
            return x + self.out(mixed), k.mean(1)

        def merge(
            self, x: Tensor, size: Tensor, metric: Tensor, away: int
        ) -> tuple[Tensor, Tensor]:
            metric = F.normalize(metric.detach(), dim=-1)
            a, b = metric[:, ::2], metric[:, 1::2]
            best, to = (a @ b.mT).max(-1)
            order = best.argsort(-1, descending=True)
            gone, kept = order[:, :away, None], order[:, away:, None]
            to = to.unsqueeze(-1).gather(1, gone)

            def pooled(one: Tensor) -> Tensor:
                even, odd = one[:, ::2], one[:, 1::2]
                width = one.shape[-1]
                source = even.gather(1, gone.expand(-1, -1, width))
                odd = odd.scatter_reduce(1, to.expand(-1, -1, width), source, "sum")
                return torch.cat((even.gather(1, kept.expand(-1, -1, width)), odd), 1)

            total = pooled(size)
            return pooled(x * size) / total, total

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            size = torch.ones_like(x[..., :1])
            for _ in range(2):
                x, metric = self.attend(x, size)
                x, size = self.merge(x, size, metric, 2)
            return F.cross_entropy(self.head((x * size).sum(1) / size.sum(1)), labels)

    return Net(), {"x": floats(batch_size, 10, WIDTH), "labels": tokens(5, batch_size)}


def hypergraph(batch_size: int = 8) -> Example:
    """Nodes to edges of many nodes and back, by degrees, over one graph that all samples share."""

    class Net(nn.Module):
        def __init__(self, nodes: int = 7, edges: int = 4) -> None:
            super().__init__()
            meets = (torch.arange(nodes)[:, None] * 3 + torch.arange(edges)) % 4 < 2
            self.register_buffer("meets", meets.float())
            self.weigh = nn.Parameter(torch.zeros(edges))
            self.first, self.second = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def spread(self, x: Tensor) -> Tensor:
            weight = F.softplus(self.weigh)
            nodes = ((self.meets * weight).sum(1) + 1e-6).rsqrt()
            edges = weight / self.meets.sum(0)
            x = nodes[:, None] * x
            gathered = torch.einsum("ne,bnd->bed", self.meets, x) * edges[:, None]
            return nodes[:, None] * torch.einsum("ne,bed->bnd", self.meets, gathered)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.spread(self.second(F.elu(self.spread(self.first(x))))), y)

    return Net(), row_batch(batch_size, 7)


def oscillators(batch_size: int = 8) -> Example:
    """Artificial Kuramoto oscillators: vectors on spheres that couple, are projected on tangents and normed."""

    class Net(nn.Module):
        def __init__(self, each: int = 2) -> None:
            super().__init__()
            self.each = each
            self.stimulus, self.couple = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH, bias=False),
            )
            self.turn = nn.Parameter(floats(WIDTH // each, each, each) * 0.1)
            self.read = nn.Linear(WIDTH // each, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            c = self.stimulus(x).unflatten(-1, (-1, self.each))
            state = F.normalize(c, dim=-1)
            for _ in range(3):
                pull = self.couple(state.flatten(-2)).unflatten(-1, (-1, self.each)) + c
                tangent = pull - (state * pull).sum(-1, keepdim=True) * state
                spin = torch.einsum("...ki,kij->...kj", state, self.turn - self.turn.mT)
                state = F.normalize(state + 0.5 * (tangent + spin), dim=-1)
            grouped = (state + c).square().sum(-1).sqrt()
            return F.mse_loss(self.read(grouped), y)

    return Net(), row_batch(batch_size, 4)
