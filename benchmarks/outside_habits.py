"""Habits of training code, for ``outside.py``: hash grids, hand-written scans, codebooks, memories across
batches, losses and norms of every kind, gradients of their own, packed rows, wrappers and hooks.

Written before any of them was run.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 16


class Regressor(nn.Module):
    """A body between two linear layers, under mean squared error."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(8, width), body, nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.body(self.first(x))), y)


def _rows(batch_size: int) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, 4).flip(0)}


def _sequences(batch_size: int, length: int = 12) -> dict[str, Tensor]:
    ids = tokens(30, batch_size, length, low=1)
    return {"ids": ids, "labels": ids.flip(1)}


class Language(nn.Module):
    """Embedding, a body over sequences, and cross entropy of every token."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(30, width), body, nn.Linear(width, 30)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.body(self.embed(ids)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


# -- fields -------------------------------------------------------------------------------------------


class TruncExp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        return g * torch.exp(ctx.saved_tensors[0].clamp(-15, 15))


class HashGrid(nn.Module):
    """Levels of hashed corners, read trilinearly."""

    def __init__(self, levels: int = 3, table: int = 64, features: int = 2) -> None:
        super().__init__()
        self.table = table
        self.embeddings = nn.ModuleList(nn.Embedding(table, features) for _ in range(levels))
        self.register_buffer(
            "box", torch.tensor([[[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)]])
        )
        self.growth = math.exp((math.log(32) - math.log(4)) / (levels - 1))

    def hash(self, coords: Tensor) -> Tensor:
        primes = [1, 2654435761, 805459861]
        result = torch.zeros_like(coords)[..., 0]
        for i in range(coords.shape[-1]):
            result ^= coords[..., i] * primes[i]
        return torch.tensor((1 << 6) - 1, device=result.device) & result

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for level, embedding in enumerate(self.embeddings):
            size = 1 / math.floor(4 * self.growth**level)
            low = torch.floor(x / size).int()
            corners = low.unsqueeze(1) + self.box
            values = embedding(self.hash(corners.long()))
            w = (x - low * size) / size
            c00 = values[:, 0] * (1 - w[:, 0:1]) + values[:, 4] * w[:, 0:1]
            c01 = values[:, 1] * (1 - w[:, 0:1]) + values[:, 5] * w[:, 0:1]
            c10 = values[:, 2] * (1 - w[:, 0:1]) + values[:, 6] * w[:, 0:1]
            c11 = values[:, 3] * (1 - w[:, 0:1]) + values[:, 7] * w[:, 0:1]
            c0 = c00 * (1 - w[:, 1:2]) + c10 * w[:, 1:2]
            c1 = c01 * (1 - w[:, 1:2]) + c11 * w[:, 1:2]
            found.append(c0 * (1 - w[:, 2:3]) + c1 * w[:, 2:3])
        return torch.cat(found, -1)


def hash_grid(batch_size: int = 4) -> Example:
    """A field of hashed features, rendered along rays."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = HashGrid()
            self.sigma = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 9))
            self.color = nn.Sequential(nn.Linear(8 + 3, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, origins: Tensor, directions: Tensor, rgb: Tensor) -> Tensor:
            t = torch.linspace(0.1, 1, 6, device=origins.device).to(origins.dtype)
            points = origins[:, None] + directions[:, None] * t[:, None]
            points = points.clamp(-1, 1) * 0.5 + 0.5
            h = self.sigma(self.grid(points.reshape(-1, 3)))
            sigma = TruncExp.apply(h[:, 0]).view(len(rgb), -1)
            views = directions[:, None].expand_as(points).reshape(-1, 3)
            color = self.color(torch.cat([h[:, 1:], views], -1)).sigmoid().view(len(rgb), -1, 3)
            deltas = torch.cat([t[1:] - t[:-1], t.new_full((1,), 1e2)])
            alpha = 1 - torch.exp(-sigma * deltas)
            ones = torch.ones_like(alpha[:, :1])
            weights = alpha * torch.cumprod(torch.cat([ones, 1 - alpha + 1e-10], -1), -1)[:, :-1]
            image = (weights[..., None] * color).sum(1) + (1 - weights.sum(-1, keepdim=True))
            return (
                F.mse_loss(image, rgb) + 1e-3 * (-weights * (weights + 1e-6).log()).sum(-1).mean()
            )

    batch = {
        "origins": floats(batch_size, 3) * 0.2,
        "directions": F.normalize(floats(batch_size, 3).flip(0), dim=-1),
        "rgb": floats(batch_size, 3).sigmoid(),
    }
    return Field(), batch


# -- scans with a gradient of their own ----------------------------------------------------------------


class SelectiveScan(torch.autograd.Function):
    """As repositories write it without kernels: backward runs the reference again and asks autograd."""

    @staticmethod
    def reference(u, delta, a, b, c):
        h, found = torch.zeros_like(a).expand(len(u), -1, -1), []
        for t in range(u.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * a)
            h = decay * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            found.append((h * c[:, t, None]).sum(-1))
        return torch.stack(found, 1)

    @staticmethod
    def forward(ctx, u, delta, a, b, c):
        ctx.save_for_backward(u, delta, a, b, c)
        return SelectiveScan.reference(u, delta, a, b, c)

    @staticmethod
    def backward(ctx, g):
        saved = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            out = SelectiveScan.reference(*saved)
        return torch.autograd.grad(out, saved, g)


def mamba_function(batch_size: int = 4) -> Example:
    class Mixer(nn.Module):
        def __init__(self, states: int = 4) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2 * WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
            self.params = nn.Linear(WIDTH, 2 * states + 1)
            self.step = nn.Linear(1, WIDTH)
            self.a_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(WIDTH, 1))
            self.skip, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            x, z = self.inner(h).chunk(2, -1)
            x = F.silu(self.conv(x.mT)[..., : h.shape[1]].mT)
            step, b, c = self.params(x).split([1, 4, 4], -1)
            delta = F.softplus(self.step(step))
            y = SelectiveScan.apply(x, delta, -self.a_log.exp(), b, c) + x * self.skip
            return h + self.out(y * F.silu(z))

    return Language(nn.Sequential(Mixer(), Mixer())), _sequences(batch_size)


class Wkv(torch.autograd.Function):
    """Forward and backward by hand, with sizes and buffers kept on the context."""

    @staticmethod
    def forward(ctx, B, T, C, w, u, k, v):
        assert w.numel() == C
        ctx.B, ctx.T, ctx.C = B, T, C
        w = -torch.exp(w)
        a = torch.zeros(B, C, dtype=k.dtype, device=k.device)
        b, y = torch.zeros_like(a), torch.empty_like(k)
        for t in range(T):
            e = torch.exp(u + k[:, t])
            y[:, t] = (a + e * v[:, t]) / (b + e)
            a = torch.exp(w) * a + torch.exp(k[:, t]) * v[:, t]
            b = torch.exp(w) * b + torch.exp(k[:, t])
        ctx.save_for_backward(w, u, k, v)
        return y

    @staticmethod
    def backward(ctx, gy):
        w, u, k, v = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            a = torch.zeros(ctx.B, ctx.C, dtype=k.dtype, device=k.device)
            b, found = torch.zeros_like(a), []
            for t in range(ctx.T):
                e = torch.exp(u + k[:, t])
                found.append((a + e * v[:, t]) / (b + e))
                a = torch.exp(w) * a + torch.exp(k[:, t]) * v[:, t]
                b = torch.exp(w) * b + torch.exp(k[:, t])
            gw, gu, gk, gv = torch.autograd.grad(torch.stack(found, 1), (w, u, k, v), gy)
        return None, None, None, gw * w.detach(), gu, gk, gv


def rwkv_function(batch_size: int = 4) -> Example:
    class TimeMix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.linspace(-2, 1, WIDTH))
            self.bonus = nn.Parameter(torch.full((WIDTH,), 0.3))
            self.mix = nn.Parameter(torch.linspace(0, 1, WIDTH)[None, None])
            self.shift = nn.ZeroPad2d((0, 0, 1, -1))
            self.k, self.v, self.r, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.size()
            mixed = x * self.mix + self.shift(x) * (1 - self.mix)
            y = Wkv.apply(B, T, C, self.decay, self.bonus, self.k(mixed), self.v(mixed))
            return x + self.o(torch.sigmoid(self.r(mixed)) * y)

    return Language(nn.Sequential(TimeMix(), TimeMix())), _sequences(batch_size)


# -- custom gradients of every make ---------------------------------------------------------------------


class GradByRows(torch.autograd.Function):
    """A gradient divided by the number of rows at hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * (4.0 / ctx.rows)


class Lsq(torch.autograd.Function):
    """Learned step size quantisation: the step's gradient is scaled by the number of elements."""

    @staticmethod
    def forward(ctx, x, step, low, high):
        ctx.save_for_backward(x, step)
        ctx.other = low, high, 1 / math.sqrt(x.numel() * high)
        return (x / step).clamp(low, high).round() * step

    @staticmethod
    def backward(ctx, g):
        (x, step), (low, high, scale) = ctx.saved_tensors, ctx.other
        q = x / step
        small, large = (q < low).to(g.dtype), (q > high).to(g.dtype)
        middle = 1 - small - large
        gs = ((small * low + large * high + middle * (-q + q.round())) * g * scale).sum()
        return middle * g, gs.view(1), None, None


class Split(torch.autograd.Function):
    """Two results, one without gradient; unused gradients are None; asks what is needed."""

    @staticmethod
    def forward(ctx, x, w):
        y, sign = x @ w, (x > 0)
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return y, y.abs(), sign

    @staticmethod
    def backward(ctx, g1, g2, _):
        x, w = ctx.saved_tensors
        g = torch.zeros_like(x @ w)
        if g1 is not None:
            g = g + g1
        if g2 is not None:
            g = g + g2 * (x @ w).sign()
        return (
            g @ w.T if ctx.needs_input_grad[0] else None,
            x.T @ g if ctx.needs_input_grad[1] else None,
        )


class InPlaceRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


class Powers(torch.autograd.Function):
    """The newer style: a context of its own, and vmap made by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, n):
        return x**n

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.n = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None


def gradients_of_rows(batch_size: int = 4) -> Example:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return torch.tanh(GradByRows.apply(self.inner(h)))

    return Regressor(Body()), _rows(batch_size)


def learned_steps(batch_size: int = 4) -> Example:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.of_weight, self.of_input = (nn.Parameter(torch.tensor([0.1])) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            weight = Lsq.apply(self.inner.weight, self.of_weight, -8, 7)
            return F.linear(Lsq.apply(h, self.of_input, -8, 7), weight, self.inner.bias)

    return Regressor(Body()), _rows(batch_size)


def functions_of_several(batch_size: int = 4) -> Example:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, h: Tensor) -> Tensor:
            _, large, sign = Split.apply(h, self.w)
            h = torch.where(sign, large, h)
            first, _, _ = Split.apply(h.detach(), self.w)
            return Powers.apply(h, 2) + first + InPlaceRelu.apply(h * 1.5)

    return Regressor(Body()), _rows(batch_size)


class SoftDtw(torch.autograd.Function):
    """A dynamic programme in NumPy."""

    @staticmethod
    def forward(ctx, d, gamma):
        found, tables = [], []
        for one in d.detach().cpu().numpy():
            n, m = one.shape
            r = np.full((n + 2, m + 2), np.inf)
            r[0, 0] = 0
            for i in range(1, n + 1):
                for j in range(1, m + 1):
                    near = -np.array([r[i - 1, j - 1], r[i - 1, j], r[i, j - 1]]) / gamma
                    top = near.max()
                    r[i, j] = one[i - 1, j - 1] - gamma * (np.log(np.exp(near - top).sum()) + top)
            found.append(r[n, m])
            tables.append(r)
        ctx.gamma = gamma
        ctx.save_for_backward(d, torch.tensor(np.array(tables)))
        return torch.tensor(np.array(found), dtype=d.dtype, device=d.device)

    @staticmethod
    def backward(ctx, g):
        d, tables = ctx.saved_tensors
        result = np.zeros_like(d.detach().cpu().numpy())
        for k, (one, r) in enumerate(zip(d.detach().cpu().numpy(), tables.numpy(), strict=True)):
            n, m = one.shape
            r, e = r.copy(), np.zeros((n + 2, m + 2))
            wide = np.zeros((n + 2, m + 2))
            wide[1 : n + 1, 1 : m + 1] = one
            r[1 : n + 1, m + 1] = r[n + 1, 1 : m + 1] = -np.inf
            r[n + 1, m + 1], e[n + 1, m + 1] = r[n, m], 1
            for j in range(m, 0, -1):
                for i in range(n, 0, -1):
                    for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)):
                        e[i, j] += e[a, b] * np.exp((r[a, b] - r[i, j] - wide[a, b]) / ctx.gamma)
            result[k] = e[1 : n + 1, 1 : m + 1]
        return torch.tensor(result, dtype=d.dtype, device=d.device) * g.view(-1, 1, 1), None


def soft_alignment(batch_size: int = 4) -> Example:
    class Aligned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.GRU(3, 8, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            d = torch.cdist(self.out(self.net(x)[0]), y).pow(2)
            return SoftDtw.apply(d, 1.0).mean()

    return Aligned(), {"x": floats(batch_size, 6, 3), "y": floats(batch_size, 5, 3).flip(0)}


# -- codebooks, queues, teachers, memories --------------------------------------------------------------


def restarted_codes(batch_size: int = 4) -> Example:
    """A codebook of running means, laid out by the first batch, whose unused codes start again."""

    class Codebook(nn.Module):
        def __init__(self, codes: int = 8, decay: float = 0.8) -> None:
            super().__init__()
            self.decay = decay
            self.register_buffer("inited", torch.tensor([False]))
            self.register_buffer("size", torch.zeros(codes))
            self.register_buffer("embed", torch.randn(codes, WIDTH))
            self.register_buffer("mean", torch.zeros(codes, WIDTH))

        @torch.jit.ignore
        def init_embed_(self, data: Tensor) -> None:
            if self.inited:
                return
            rows = data.repeat(len(self.embed) // len(data) + 1, 1)[: len(self.embed)]
            self.embed.data.copy_(rows)
            self.mean.data.copy_(rows)
            self.inited.data.copy_(torch.tensor([True]))

        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.init_embed_(h)
                index = (-torch.cdist(h, self.embed)).argmax(-1)
                hot = F.one_hot(index, len(self.embed)).type(h.dtype)
            quantised = F.embedding(index, self.embed)
            if self.training:
                with torch.no_grad():
                    self.size.data.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                    self.mean.data.mul_(self.decay).add_(hot.t() @ h, alpha=1 - self.decay)
                    smooth = (self.size + 1e-5) / (self.size.sum() + 8e-5) * self.size.sum()
                    self.embed.data.copy_(self.mean / smooth.unsqueeze(1))
                    dead = self.size < 0.05
                    spare = h[: len(dead)].mean(0, keepdim=True).expand_as(self.embed)
                    self.embed.data.copy_(torch.where(dead[:, None], spare, self.embed))
            return h + (quantised - h).detach() + 0.1 * (h - quantised.detach())

    return Regressor(Codebook()), _rows(batch_size)


def teacher_in_buffers(batch_size: int = 4) -> Example:
    """A teacher whose weights are buffers, followed in forward, called by ``functional_call``."""

    class Followed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            self.predictor = nn.Linear(WIDTH, WIDTH)
            for name, p in self.student.named_parameters():
                self.register_buffer("ema_" + name.replace(".", "_"), p.detach().clone() + 0.01)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            held = {
                name: getattr(self, "ema_" + name.replace(".", "_"))
                for name, _ in self.student.named_parameters()
            }
            with torch.no_grad():
                for name, p in self.student.named_parameters():
                    held[name].lerp_(p.detach(), 0.1)
                aim = torch.func.functional_call(self.student, held, (x.flip(1),))
            found = self.predictor(self.student(x))
            return 2 - 2 * F.cosine_similarity(found, aim, dim=-1).mean() + 0 * y.sum()

    return Followed(), _rows(batch_size)


def teacher_of_parameters(batch_size: int = 4) -> Example:
    """BYOL and DINO as they are written: a deep copy that needs no gradient follows in forward."""
    import copy

    class Followed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            self.target = copy.deepcopy(self.online)
            for p in self.target.parameters():
                p.requires_grad = False
            self.predictor = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("center", torch.zeros(1, WIDTH))

        @torch.no_grad()
        def _momentum_update(self) -> None:
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.data = q.data * 0.99 + p.data * 0.01

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found = self.predictor(self.online(x))
            with torch.no_grad():
                self._momentum_update()
                aim = self.target(x.flip(1))
                probs = ((aim - self.center) / 0.5).softmax(-1)
                self.center = self.center * 0.9 + aim.mean(0, keepdim=True) * 0.1
            return -(probs * F.log_softmax(found, -1)).sum(-1).mean() + 0 * y.sum()

    return Followed(), _rows(batch_size)


def segment_memory(batch_size: int = 8) -> Example:
    """Hidden states of the batch before, one row per sample, attended to by the next."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.register_buffer("memory", torch.zeros(batch_size, 12, WIDTH))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            seen = torch.cat([self.memory, h], 1)
            h = h + self.attend(h, seen, seen, need_weights=False)[0]
            self.memory.copy_(h.detach())
            return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

    return Recurrent(), _sequences(batch_size)


def carried_state(batch_size: int = 4) -> Example:
    """Truncated backpropagation: an LSTM's state goes on from batch to batch in an attribute."""

    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.hidden = None

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h, self.hidden = self.rnn(self.embed(ids), self.hidden)
            self.hidden = tuple(one.detach() for one in self.hidden)
            return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

    return Carried(), _sequences(batch_size)


def whitened(batch_size: int = 4) -> Example:
    """Whitening by a batch's covariance, with running statistics and a Newton iteration."""

    class Whiten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("sigma", torch.eye(WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            mean = h.mean(0)
            c = h - mean
            sigma = c.T @ c / len(h) + 0.1 * torch.eye(h.shape[1], dtype=h.dtype)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.sigma = 0.9 * self.sigma + 0.1 * sigma.detach()
            n = sigma / sigma.diagonal().sum()
            p = torch.eye(h.shape[1], dtype=h.dtype, device=h.device)
            for _ in range(3):
                p = 1.5 * p - 0.5 * p @ p @ p @ n
            return c @ p / sigma.trace().sqrt() + 0.01 * self.mean

    return Regressor(Whiten()), _rows(batch_size)


# -- adapters, quantised weights ------------------------------------------------------------------------


def quantised_adapters(batch_size: int = 4) -> Example:
    """Frozen weights in four bits with a scale per block, unpacked in forward, and adapters beside."""

    class Linear4(nn.Module):
        def __init__(self, inner: int, outer: int, block: int = 16) -> None:
            super().__init__()
            weight = (torch.randn(outer, inner) * 0.3).view(-1, block)
            scale = weight.abs().amax(1, keepdim=True)
            self.register_buffer("table", torch.linspace(-1, 1, 16))
            codes = (weight / scale)[..., None].sub(self.table).abs().argmin(-1).flatten()
            self.register_buffer("packed", (codes[::2] << 4 | codes[1::2]).to(torch.uint8))
            self.register_buffer("scale", scale)
            self.shape, self.block = (outer, inner), block
            self.lora_a = nn.Parameter(torch.randn(2, inner) * 0.1)
            self.lora_b = nn.Parameter(torch.zeros(outer, 2))
            self.drop = nn.Dropout(0.1)

        def unpack(self) -> Tensor:
            high, low = (self.packed >> 4) & 0xF, self.packed & 0xF
            codes = torch.stack([high, low], -1).flatten().long()
            weight = self.table[codes].view(-1, self.block) * self.scale
            return weight.view(self.shape)

        def forward(self, h: Tensor) -> Tensor:
            adapted = self.drop(h) @ self.lora_a.T @ self.lora_b.T
            return F.linear(h, self.unpack()) + adapted * 2.0

    body = nn.Sequential(Linear4(WIDTH, 32), nn.GELU(), Linear4(32, WIDTH))
    return Regressor(body), _rows(batch_size)


def pruned(batch_size: int = 4) -> Example:
    """Weights masked by ``torch.nn.utils.prune``, some orthogonal, some pruned by hand."""
    body = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False)),
        nn.Linear(WIDTH, WIDTH),
    )
    prune.l1_unstructured(body[0], "weight", 0.4)
    prune.random_unstructured(body[0], "bias", 0.25)
    prune.ln_structured(body[3], "weight", 0.5, n=2, dim=0)
    return Regressor(body), _rows(batch_size)


# -- shapes that look like others -------------------------------------------------------------------------


def square_shapes(batch_size: int = 4) -> Example:
    """As many classes, tokens and channels as samples, and class weights that come with the batch."""
    n = 8

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(n, n), nn.Linear(n, n)
            self.over_tokens, self.head = nn.Linear(n, n), nn.Linear(n, n)

        def forward(self, ids: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
            h = self.mix(self.embed(ids)) + bias
            h = h + self.over_tokens(h.transpose(1, 2)).transpose(1, 2) * weights
            scores = self.head(h).flatten(0, 1)
            return F.cross_entropy(scores, labels.flatten(), weights.sigmoid())

    ids = tokens(n, batch_size, n)
    batch = {"ids": ids, "labels": ids.flip(0), "weights": floats(n), "bias": floats(n, n)}
    return Square(), batch


def sequence_first(batch_size: int = 4) -> Example:
    """Tokens along the first dim, samples along the second, as torch's own layers have it."""

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True)
            self.down = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            ids, labels = ids.t(), labels.t()
            padding = (ids == 3).t() & (torch.arange(len(ids), device=ids.device) > 0)
            mask = nn.Transformer.generate_square_subsequent_mask(len(ids), device=ids.device)
            h = self.encoder(self.embed(ids), mask.to(self.head.weight.dtype), padding)
            h = self.down(self.rnn(h)[0])
            loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="none")
            return loss.view_as(labels).sum(0).div((labels > 0).sum(0)).mean()

    return SequenceFirst(), _sequences(batch_size)


def batch_neighbours(batch_size: int = 4) -> Example:
    """Samples that meet: groups, halves, neighbours, softmax and sums along the batch."""

    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH + 1, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x).tanh()
            groups = h.view(2, -1, h.shape[1])
            spread = (groups.var(0, unbiased=False) + 1e-8).sqrt().mean(-1)
            h = torch.cat([h, spread.repeat(2).unsqueeze(1)], 1)
            scores = self.out(h)
            first, second = scores.chunk(2)
            near = (scores[1:] - scores[:-1]).pow(2).sum() * 0.01
            weights = scores.sum(1).softmax(0)
            summed = scores.cumsum(0).roll(1, 0).abs().mean() * 0.01
            loss = ((scores - y).pow(2).sum(1) * weights).sum()
            return loss + near + summed + 0.1 * F.relu(first[::2] - second[::2].flip(0)).mean()

    return Meeting(), _rows(batch_size)


# -- losses and norms of every kind ----------------------------------------------------------------------


def losses_zoo(batch_size: int = 4) -> Example:
    """Losses whose means are not means over samples."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))
            self.register_buffer("weight", torch.linspace(0.5, 2, 6))

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            s = self.net(x)
            labels = y.masked_fill(y == 2, -100)
            terms = [
                F.cross_entropy(s, labels, self.weight, label_smoothing=0.1),
                F.nll_loss(s.log_softmax(-1), y, self.weight, ignore_index=1),
                F.kl_div(s.log_softmax(-1), z.softmax(-1), reduction="batchmean"),
                F.kl_div(s.log_softmax(-1), z.log_softmax(-1), log_target=True, reduction="sum"),
                F.binary_cross_entropy_with_logits(s, z.sigmoid(), pos_weight=self.weight),
                F.gaussian_nll_loss(s, z, F.softplus(s.detach()) + 0.1, full=True),
                F.poisson_nll_loss(s, z.abs(), full=False),
                F.multilabel_soft_margin_loss(s, (z > 0).to(s.dtype), self.weight),
                F.multi_margin_loss(s, y, p=1, margin=0.5),
                F.smooth_l1_loss(s, z, beta=0.5, reduction="sum") / len(x),
                F.huber_loss(s, z, delta=0.3),
                F.cosine_embedding_loss(s, z, (y > 2).to(s.dtype) * 2 - 1, margin=0.1),
                F.triplet_margin_loss(s, z, z.flip(1), swap=True),
                F.margin_ranking_loss(s[:, 0], s[:, 1], (y > 2).to(s.dtype) * 2 - 1, margin=0.2),
                F.hinge_embedding_loss(s.abs(), (z > 0).to(s.dtype) * 2 - 1),
                F.soft_margin_loss(s, (z > 0).to(s.dtype) * 2 - 1),
            ]
            focal = (1 - s.softmax(-1).gather(1, y[:, None])).pow(2) * F.cross_entropy(
                s, y, reduction="none"
            ).unsqueeze(1)
            return sum(terms) / len(terms) + focal.mean()

    batch = {
        "x": floats(batch_size, 8),
        "y": tokens(6, batch_size),
        "z": floats(batch_size, 6).flip(0),
    }
    return Losses(), batch


def products_of_means(batch_size: int = 4) -> Example:
    """Losses that are not sums: roots, logs, products and maxima of means, ratios of counts."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
            self.register_buffer("usual", torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found = self.net(x)
            one, two = F.mse_loss(found, y), F.l1_loss(found, y)
            mask = (y > 0).to(found.dtype)
            masked = ((found - y).abs() * mask).sum() / mask.sum().clamp(min=1)
            with torch.no_grad():
                self.usual.mul_(0.9).add_(0.1 * one)
            dice = 1 - 2 * (found.sigmoid() * mask).sum() / (found.sigmoid().sum() + mask.sum())
            return (
                one.sqrt() + (1 + two).log() + one * two.detach() + torch.maximum(one, two) + masked
                + torch.stack([one, two]).softmax(0)[0] + one / self.usual + dice
            )  # fmt: skip

    return Products(), _rows(batch_size)


def norms_zoo(batch_size: int = 4) -> Example:
    """Batch norms with all options, one called twice, one frozen by ``train``, one in a teacher."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, WIDTH)
            self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)
            self.bare = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
            self.twice, self.frozen = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
            self.frozen.running_mean.add_(0.3)
            self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
            self.group, self.root = nn.GroupNorm(4, WIDTH), nn.RMSNorm(WIDTH)
            self.local = nn.LocalResponseNorm(3)
            self.out = nn.Linear(WIDTH, 4)

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.frozen.eval()
            return self

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            h = self.twice(self.cumulative(h)) + self.twice(self.bare(h) * 2)
            h = self.frozen(h) + self.instance(h.view(len(h), 4, -1)).flatten(1)
            h = self.root(self.group(h)) + self.local(h.unsqueeze(1).expand(-1, 4, -1)).mean(1)
            return F.mse_loss(self.out(h), y)

    return Norms(), _rows(batch_size)


def recurrent_zoo(batch_size: int = 4) -> Example:
    class Recurrences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(26, 30)
            self.lstm = nn.LSTM(WIDTH, 12, 2, batch_first=True, bidirectional=True, proj_size=5)
            self.gru = nn.GRU(10, 8, batch_first=True)
            self.rnn = nn.RNN(10, 8, nonlinearity="relu", batch_first=True, bias=False)
            self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
            self.cell, self.gate = nn.LSTMCell(10, 10), nn.GRUCell(10, 10)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h, (last, _) = self.lstm(self.embed(ids))
            one, _ = self.gru(h, self.h0.expand(-1, len(ids), -1).contiguous())
            two, _ = self.rnn(h, self.h0.repeat(1, len(ids), 1))
            state, found = None, []
            other = last[:2].transpose(0, 1).flatten(1)
            for t in range(h.shape[1]):
                state = self.cell(h[:, t], state)
                other = self.gate(state[0], other)
                found.append(other)
            h = torch.cat([one, two, torch.stack(found, 1)], -1)
            return F.cross_entropy(self.head(h).transpose(1, 2), labels)

    return Recurrences(), _sequences(batch_size)


def attention_zoo(batch_size: int = 4) -> Example:
    """Every option of torch's attention: masks of both kinds, bias rows, zero rows, weights in the loss."""

    class Attentions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            self.biased = nn.MultiheadAttention(
                WIDTH, 2, 0.1, add_bias_kv=True, add_zero_attn=True, batch_first=True
            )
            self.narrow = nn.MultiheadAttention(WIDTH, 4, kdim=6, vdim=5, batch_first=True)
            self.k, self.v = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 5)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            padding = ids == 3
            padding[:, 0] = False
            one, weights = self.biased(h, h, h, key_padding_mask=padding)
            slope = -torch.arange(ids.shape[1], device=h.device).to(h.dtype)
            bias = (slope[:, None] - slope).abs().neg()
            two, each = self.narrow(
                h, self.k(h), self.v(h), attn_mask=bias * 0.1, average_attn_weights=False
            )
            entropy = -(each * (each + 1e-9).log()).sum(-1).mean()
            q = (h + one + two).view(*h.shape[:2], 4, -1).transpose(1, 2)
            keep = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril()
            h = F.scaled_dot_product_attention(
                q, q[:, ::2], q[:, ::2], keep & ~padding[:, None, None], enable_gqa=True, scale=0.3
            )
            scores = self.head(h.transpose(1, 2).flatten(2))
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + 0.01 * (
                entropy + weights.pow(2).sum(-1).mean()
            )

    return Attentions(), _sequences(batch_size)


# -- packed rows ------------------------------------------------------------------------------------------


def packed_rows(batch_size: int = 4) -> Example:
    """All tokens in one row, with where each sequence ends, as kernels for packed rows want it."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            self.position = nn.Embedding(12, WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            ids, labels = ids.flatten(), labels.flatten()
            ends = F.pad(lengths.cumsum(0), (1, 0))
            place = torch.arange(len(ids), device=ids.device)
            owner = torch.searchsorted(ends[1:].contiguous(), place, right=True)
            h = self.embed(ids) + self.position((place - ends[owner]).clamp(max=11))
            q, k, v = self.qkv(h).view(len(ids), 3, 2, -1).permute(1, 2, 0, 3)
            same = (owner[:, None] == owner) & (place[:, None] >= place)
            h = h + self.out(
                F.scaled_dot_product_attention(q, k, v, same).transpose(0, 1).flatten(1)
            )
            each = F.cross_entropy(self.head(h), labels, reduction="none")
            total = torch.zeros(len(lengths), dtype=h.dtype).scatter_add_(0, owner, each)
            return (total / lengths).mean()

    batch = _sequences(batch_size)
    batch["lengths"] = torch.full((batch_size,), 12)
    batch["lengths"][0] -= 3
    batch["lengths"][1] += 3
    return Packed(), batch


def packed_in_a_loop(batch_size: int = 4) -> Example:
    """The same with lengths told to Python, and attention per sequence."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor, ends: Tensor) -> Tensor:
            qkv = self.qkv(h).view(len(h), 3, 2, -1)
            found = []
            for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                q, k, v = qkv[start:stop].permute(1, 2, 0, 3)
                found.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))
            return h + self.out(torch.cat(found).flatten(1))

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
            self.one, self.two = Attention(), Attention()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            ends = F.pad(lengths.cumsum(0), (1, 0))
            h = self.embed(ids.flatten())
            h = self.two(self.mlp(self.one(h, ends)), ends)
            return F.cross_entropy(self.head(h), labels.flatten())

    batch = _sequences(batch_size)
    batch["lengths"] = torch.full((batch_size,), 12)
    batch["lengths"][0] -= 3
    batch["lengths"][1] += 3
    return Packed(), batch


# -- routing --------------------------------------------------------------------------------------------------


def depth_and_choice(batch_size: int = 4) -> Example:
    """Mixture of depths, then experts that choose their tokens."""

    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 1)
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)

        def forward(self, h: Tensor) -> Tensor:
            scores = self.router(h).squeeze(-1)
            weight, index = torch.topk(scores, h.shape[1] // 2, dim=1, sorted=False)
            index, order = index.sort(dim=1)
            weight = weight.gather(1, order)
            wide = index.unsqueeze(-1).expand(-1, -1, h.shape[-1])
            picked = self.block(torch.gather(h, 1, wide)) * weight.sigmoid().unsqueeze(-1)
            return torch.scatter_add(h, 1, wide, picked)

    class Choice(nn.Module):
        def __init__(self, experts: int = 4) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, experts, bias=False)
            self.w1 = nn.Parameter(torch.randn(experts, WIDTH, 24) * 0.2)
            self.w2 = nn.Parameter(torch.randn(experts, 24, WIDTH) * 0.2)

        def forward(self, h: Tensor) -> Tensor:
            flat = h.reshape(-1, h.shape[-1])
            scores = self.gate(flat).softmax(-1)
            weight, index = scores.t().topk(len(flat) // 2, dim=-1)
            chosen = F.one_hot(index, len(flat)).to(h.dtype)
            given = torch.einsum("ekt,td->ekd", chosen, flat)
            made = torch.bmm(F.gelu(torch.bmm(given, self.w1)), self.w2)
            return h + torch.einsum("ekt,ek,ekd->td", chosen, weight, made).view_as(h)

    return Language(nn.Sequential(Depth(), Choice())), _sequences(batch_size)


# -- linear algebra, images, sequences of operators ----------------------------------------------------------------


def matrices_zoo(batch_size: int = 4) -> Example:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.skew = nn.Linear(6, 9), nn.Parameter(torch.randn(3, 3) * 0.3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            eye = torch.eye(3, dtype=x.dtype, device=x.device)
            a = self.net(x).view(-1, 3, 3) * 0.3 + eye
            turn = torch.linalg.matrix_exp(self.skew - self.skew.T)
            s = a @ a.mT + eye
            values, vectors = torch.linalg.eigh(s)
            q, r = torch.linalg.qr(a)
            u, d, vh = torch.linalg.svd(a @ turn, full_matrices=False)
            sign = torch.det(u @ vh).detach().sign()
            fit = (
                u @ torch.diag_embed(torch.stack([d[:, 0] * 0 + 1, d[:, 1] * 0 + 1, sign], -1)) @ vh
            )
            low = torch.linalg.cholesky(s)
            b = y.unsqueeze(-1)
            solved = torch.linalg.solve(a, b) + torch.cholesky_solve(b, low)
            solved = solved + torch.linalg.solve_triangular(low, b, upper=False)
            solved = solved + torch.linalg.inv(s) @ b + torch.linalg.pinv(a) @ b
            logdet = (
                torch.linalg.slogdet(a).logabsdet
                + torch.logdet(s)
                + low.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            )
            terms = (
                values.log().sum(-1)
                + (vectors[..., 0] ** 2 * y).sum(-1)
                + r.diagonal(dim1=-2, dim2=-1).abs().sum(-1)
            )
            cross = torch.linalg.cross(fit[:, 0], y) + torch.einsum("bii->bi", q @ fit)
            kron = torch.kron(self.skew, eye).pow(2).sum() + torch.trace(turn)
            norm = torch.linalg.matrix_norm(a, "nuc") + torch.linalg.norm(a, dim=(1, 2))
            return (
                (logdet + terms + norm).mean()
                + F.mse_loss(solved.squeeze(-1) + cross, y)
                + kron * 0.01
            )

    return Matrices(), {"x": floats(batch_size, 6), "y": floats(batch_size, 3).flip(0)}


def images_zoo(batch_size: int = 4) -> Example:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
            self.up = nn.ConvTranspose2d(8, 6, 4, 2, 1, output_padding=1, groups=2)
            self.down = nn.Conv2d(6, 8, (3, 1), (2, 1), (1, 0), dilation=(1, 2), bias=False)
            self.theta = nn.Linear(8, 6)
            self.out = nn.Linear(8, 5)

        def forward(self, image: Tensor, labels: Tensor) -> Tensor:
            h = F.pad(self.conv(image), (1, 1, 0, 2), mode="circular")
            h, index = F.max_pool2d(h, 2, return_indices=True)
            h = F.max_unpool2d(h, index, 2)
            h = F.interpolate(h, size=(7, 9), mode="bicubic", align_corners=True, antialias=False)
            h = F.interpolate(h, scale_factor=1.5, mode="bilinear", recompute_scale_factor=True)
            h = self.down(self.up(h)[..., :-1, :-1])
            grid = F.affine_grid(
                self.theta(h.mean((2, 3))).view(-1, 2, 3), list(h.shape), align_corners=False
            )
            h = F.grid_sample(h, grid, padding_mode="border", align_corners=False)
            patches = F.unfold(h, 3, padding=1, stride=2)
            h = h + F.fold(patches, h.shape[-2:], 3, padding=1, stride=2)
            h = F.pixel_unshuffle(F.pixel_shuffle(h[..., :4, :4], 2), 2)
            h = F.lp_pool2d(h, 2, 2) + F.adaptive_max_pool2d(h, 2) + F.adaptive_avg_pool2d(h, 2)
            h = F.channel_shuffle(h, 2) + F.avg_pool2d(F.pad(h, (1, 1, 1, 1), value=0.5), 3, 1, 0)
            return F.cross_entropy(self.out(h.flatten(2).amax(-1)), labels)

    return Images(), {"image": floats(batch_size, 3, 8, 8), "labels": tokens(5, batch_size)}


def operators_zoo(batch_size: int = 4) -> Example:
    """Scans, sorts, picks and places along dims that are not the batch's."""

    class Operators(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(8, 12), nn.Linear(12, 4)
            self.register_buffer("edges", torch.linspace(-2, 2, 7))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.net(x)
            s, order = h.sort(dim=1, descending=True)
            back = torch.empty_like(order).scatter_(1, order, torch.arange(12).expand_as(order))
            h = h + s.gather(1, back) * 0.1 + h.cummax(1).values + h.logcumsumexp(1) * 0.1
            h = h + (1 + h.abs() * 0.1).cumprod(1) + h.flip(1).cumsum(1).flip(1) * 0.1
            h = h - h.median(1, keepdim=True).values - h.kthvalue(3, 1, keepdim=True).values
            h = h + torch.quantile(h, 0.3, 1, keepdim=True) + h.mode(1, keepdim=True).values * 0.1
            bins = torch.bucketize(h.detach(), self.edges) + torch.searchsorted(
                self.edges, h.detach()
            )
            h = h + F.one_hot(bins.clamp(max=11), 12).to(h.dtype).mean(1)
            h = h + h.unfold(1, 3, 1).mean(-1).repeat_interleave(2, 1)[:, :12]
            place = torch.arange(12, device=h.device) % 5
            sums = h.new_zeros(len(h), 5).index_add(1, place, h)
            peaks = h.new_zeros(len(h), 5).scatter_reduce(1, place.expand_as(h), h, "amax")
            means = h.new_zeros(len(h), 5).scatter_reduce(
                1, place.expand_as(h), h, "mean", include_self=False
            )
            h = h + (sums + peaks + means)[:, place]
            h = (
                torch.take_along_dim(h, order, 1)
                + torch.roll(h, (2,), (1,))
                + h.tile(1, 2)[:, 5:17]
            )
            m = h.view(-1, 3, 4) @ h.view(-1, 4, 3)
            m = m.tril(-1) + m.triu(1) + torch.diag_embed(m.diagonal(dim1=-2, dim2=-1) * 2)
            h = h + torch.cat([m.flatten(1), m.amax(1)], 1) * 0.01
            h = torch.where(h > 3, h.new_tensor(3.0), h).index_fill(1, torch.tensor([1]), 0.5)
            h = h.masked_fill(h < -5, -5).clamp(min=h.detach().amin(1, keepdim=True))
            h = (
                torch.block_diag(torch.eye(5, dtype=h.dtype), torch.eye(7, dtype=h.dtype))
                .matmul(h.T)
                .T
            )
            h = (
                torch.addcmul(h, h, h, value=0.01)
                + torch.lerp(h, h.sin(), 0.3)
                + torch.outer(h[:, 0], h[0].detach() * 0 + 1)
            )
            return F.mse_loss(self.out(F.normalize(h, dim=1, p=3)), y)

    return Operators(), _rows(batch_size)


def transducer(batch_size: int = 4) -> Example:
    """Joint network and the sum over all alignments, in loops over the lattice."""

    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.LSTM(5, 8, batch_first=True)
            self.embed, self.predictor = (
                nn.Embedding(7, 8, padding_idx=0),
                nn.GRU(8, 8, batch_first=True),
            )
            self.joint = nn.Sequential(nn.Tanh(), nn.Linear(8, 7))

        def forward(self, sound: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
            f = self.encoder(sound)[0]
            g = self.predictor(self.embed(F.pad(labels, (1, 0))))[0]
            logp = self.joint(f[:, :, None] + g[:, None]).log_softmax(-1)
            blank = logp[..., 0]
            emit = (
                logp[:, :, :-1]
                .gather(-1, labels[:, None, :, None].expand(-1, f.shape[1], -1, 1))
                .squeeze(-1)
            )
            T, U = blank.shape[1:]
            alpha = [[None] * U for _ in range(T)]
            for t in range(T):
                for u in range(U):
                    ways = []
                    if t == u == 0:
                        ways.append(torch.zeros_like(blank[:, 0, 0]))
                    if t:
                        ways.append(alpha[t - 1][u] + blank[:, t - 1, u])
                    if u:
                        ways.append(alpha[t][u - 1] + emit[:, t, u - 1])
                    alpha[t][u] = torch.logsumexp(torch.stack(ways), 0)
            grid = torch.stack([torch.stack(row, 1) for row in alpha], 1) + blank
            last = grid[torch.arange(len(sound)), lengths - 1, -1]
            return -last.mean()

    batch = {
        "sound": floats(batch_size, 6, 5), "labels": tokens(7, batch_size, 3, low=1),
        "lengths": tokens(3, batch_size) + 4,
    }  # fmt: skip
    return Transducer(), batch


# -- wrappers, hooks, ways of holding things -----------------------------------------------------------------------

TABLE = torch.linspace(0, 1, WIDTH)


def wrapped_twice(batch_size: int = 4) -> Example:
    """DataParallel around a compiled model."""
    module = torch.compile(
        Regressor(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())), backend="eager"
    )
    return nn.DataParallel(module), _rows(batch_size)


def hooked_gradients(batch_size: int = 4) -> Example:
    """A full backward hook that halves what goes back, and a pre-hook that changes what goes in."""
    model = Regressor(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model.body[0].register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 0.5,))
    model.last.register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))
    return model, _rows(batch_size)


def held_anywhere(batch_size: int = 4) -> Example:
    """Tensors in attributes, lists, dicts and globals; weights shared by assignment; unused parameters."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.three, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
            self.three.weight = self.two.weight
            self.out.weight = nn.Parameter(self.one.weight.data.t().clone())
            self.plain = torch.full((WIDTH,), 0.3, dtype=torch.float64)
            self.listed = [torch.ones(WIDTH) * i for i in range(2)]
            self.named = {"low": torch.tensor(-2.0), "high": 2.0}
            self.unused, self.looked_at = nn.Linear(3, 3), nn.Parameter(torch.ones(WIDTH))
            self.table = nn.ParameterDict({"a": torch.ones(WIDTH)})
            self.alias = self.table["a"]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.one(x) * self.plain.to(x.dtype) + sum(self.listed).to(x.dtype)
            h = self.three(self.two(h).tanh()) + TABLE.to(x.dtype) * self.looked_at.detach()
            h = (
                h.clamp(self.named["low"].to(x.dtype), None).clamp(max=self.named["high"])
                * self.alias
            )
            return F.mse_loss(self.out(h)[:, :4], y)

    return Held(), _rows(batch_size)


def without_tracking(batch_size: int = 4) -> Example:
    """Features under inference mode, a trunk put into evaluation mode, parts cut from the graph."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.ReLU()
            )
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.trunk.eval()
            with torch.inference_mode():
                features = self.trunk(x)
            features = features.clone()
            with torch.set_grad_enabled(False):
                scale = self.head(features).std().clamp(min=0.5)
            return F.mse_loss(self.head(features) / scale, y)

    return Frozen(), _rows(batch_size)


def checkpoint_zoo(batch_size: int = 4) -> Example:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
            )
            self.other = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            h = checkpoint_sequential(self.blocks, 2, h, use_reentrant=False)
            h = h + checkpoint(self.other, h, use_reentrant=True)
            run = partial(lambda scale, one: self.norm(one) * scale, 0.5)
            return h + checkpoint(run, h, use_reentrant=False, preserve_rng_state=False)

    return Regressor(Checkpointed()), _rows(batch_size)


def lazy_layers(batch_size: int = 4) -> Example:
    """Layers that take their width from the first batch, which their author has shown them."""
    body = nn.Sequential(
        nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(WIDTH)
    )
    model = Regressor(body)
    batch = _rows(batch_size)
    model(**batch)
    return model, batch


def lazy_still(batch_size: int = 4) -> Example:
    """Layers that take their width from the first batch, which nobody has shown them."""
    body = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(WIDTH))
    return Regressor(body), _rows(batch_size)


def writes_its_batch(batch_size: int = 4) -> Example:
    """A forward that cleans its own batch in place."""

    class Cleans(Regressor):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.clamp_(-1, 1)
            y[y.abs() > 1.5] = 0
            x[:, 0] *= 0.5
            return super().forward(x, y)

    return Cleans(nn.Linear(WIDTH, WIDTH)), _rows(batch_size)


def counted_lookups(batch_size: int = 4) -> Example:
    """Gradients of rows divided by how often each was read; a padding row; a fixed table."""

    class Lookups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, WIDTH, padding_idx=3, scale_grad_by_freq=True)
            self.fixed = nn.Embedding.from_pretrained(torch.randn(30, WIDTH), freeze=True)
            self.bag = nn.EmbeddingBag(30, WIDTH, mode="mean", padding_idx=2)
            self.peak = nn.EmbeddingBag(30, WIDTH, mode="max")
            self.out = nn.Linear(WIDTH, 30)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.words(ids) + self.fixed(ids)
            h = h + (self.bag(ids) + self.peak(ids)).unsqueeze(1)
            return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())

    return Lookups(), _sequences(batch_size)


def projected_gradients(batch_size: int = 4) -> Example:
    """Two losses whose gradients at the shared features are projected off each other."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, WIDTH))
            self.one, self.two = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.trunk(x)
            l1, l2 = F.mse_loss(self.one(z), y), F.l1_loss(self.two(z), y)
            (g1,) = torch.autograd.grad(l1, z, retain_graph=True)
            (g2,) = torch.autograd.grad(l2, z, retain_graph=True)
            dot = (g1 * g2).sum()
            g1 = g1 - torch.clamp(dot, max=0) / (g2.pow(2).sum() + 1e-8) * g2
            return (
                l1.detach() * 0
                + F.mse_loss(self.one(z.detach()), y)
                + F.l1_loss(self.two(z.detach()), y)
                + (z * (g1 + g2).detach()).sum()
            )

    return Projected(), _rows(batch_size)


def residual_flow(batch_size: int = 4) -> Example:
    """Invertible residual blocks with a power series for the log-determinant, probed by fixed vectors."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = parametrizations.spectral_norm
            self.net = nn.Sequential(norm(nn.Linear(6, 24)), nn.ELU(), norm(nn.Linear(24, 6)))
            self.register_buffer("probe", torch.tensor([1.0, -1, 1, 1, -1, 1]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not x.requires_grad:
                x = x.requires_grad_(True)
            g = 0.8 * self.net(x)
            v = self.probe.expand_as(x)
            w, logdet = v, 0
            for k in range(1, 4):
                (w,) = torch.autograd.grad(g, x, w, create_graph=True, retain_graph=True)
                logdet = logdet + (-1) ** (k + 1) * (w * v).sum(1) / k
            return x + g, logdet

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.context = nn.Sequential(
                nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)
            )

        def forward(self, x: Tensor) -> Tensor:
            z, total = x + self.context(x.detach()), 0
            for block in self.blocks:
                z, logdet = block(z)
                total = total + logdet
            return (0.5 * z.pow(2).sum(1) - total).mean()

    return Flow(), {"x": floats(batch_size, 6)}


def gathered_negatives(batch_size: int = 4) -> Example:
    """Contrastive loss that gathers from all ranks where there are any."""
    import torch.distributed as dist

    class GatherLayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(found, x)
            return tuple(found)

        @staticmethod
        def backward(ctx, *grads):
            return torch.stack(grads).sum(0)

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            self.temperature = nn.Parameter(torch.tensor(0.07).log())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = F.normalize(self.net(x), dim=1), F.normalize(self.net(x.flip(1)), dim=1)
            rank, world = 0, 1
            if dist.is_available() and dist.is_initialized():
                rank, world = dist.get_rank(), dist.get_world_size()
            every = torch.cat(GatherLayer.apply(b), 0) if world > 1 else b
            labels = torch.arange(len(a), device=a.device) + rank * len(a)
            return F.cross_entropy(a @ every.T / self.temperature.exp(), labels) + 0 * y.sum()

    return Contrast(), _rows(batch_size)


# -- what draws random numbers (its ranks are compared with each other) ----------------------------------------------


def noises_zoo(batch_size: int = 4) -> Example:
    """Dropouts of every kind, noise, gates, masks, permutations and steps of diffusion, in forward."""

    class Noises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
            self.drops = nn.ModuleList([nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.RReLU()])
            self.wide = nn.ModuleList([nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.2)])
            self.step = nn.Embedding(10, WIDTH)
            self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            t = torch.randint(0, 10, (len(x),), device=x.device)
            a = self.alphas[t].unsqueeze(1).to(x.dtype)
            noise = torch.randn_like(x)
            x = a.sqrt() * x + (1 - a).sqrt() * noise
            h = self.net(x) + self.step(t)
            for drop in self.drops:
                h = drop(h)
            h = h.view(len(h), 4, -1)
            for drop in self.wide:
                h = drop(h)
            h = F.dropout(h.flatten(1), 0.1, training=True)
            h = h + torch.normal(0.0, 0.1, h.shape, dtype=h.dtype)
            gate = F.gumbel_softmax(h[:, :4], hard=True, dim=-1)
            keep = torch.bernoulli(torch.full_like(h[:, :1], 0.8)) / 0.8
            h = h * keep + gate.repeat(1, 4)
            lam = torch.rand(len(h), 1, dtype=h.dtype)
            order = torch.randperm(len(h))
            h = lam * h + (1 - lam) * h[order]
            picked = torch.multinomial(h.detach().softmax(-1), 2)
            h = h + F.one_hot(picked, WIDTH).sum(1).to(h.dtype) * 0.1
            return F.mse_loss(self.out(h), y) + F.mse_loss(h[:, :8], noise) * 0.1

    return Noises(), _rows(batch_size)
