"""More models as others write them, for ``outside.py``: physics, graphs, densities, tables and decisions."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from outside_models import Example, floats, tokens
from torch import Tensor, nn

WIDTH = 16


def _net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in pairwise(sizes):
        layers += [nn.Linear(one, two), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _rows(batch_size: int, outputs: int = 1) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, outputs).flip(0)}


# -- physics and operators --------------------------------------------------------------------------


class Fourier(nn.Module):
    """A Fourier neural operator in two dims: low frequencies are mixed by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.lower = nn.Linear(3, 8), nn.Conv2d(8, 8, 1), nn.Linear(8, 1)
        self.low, self.high = (
            nn.Parameter(torch.randn(8, 8, 3, 3, dtype=torch.cfloat) / 8) for _ in range(2)
        )

    def forward(self, a: Tensor, y: Tensor) -> Tensor:
        b, h, w = a.shape
        gx = torch.linspace(0, 1, h, dtype=a.dtype).view(1, h, 1, 1).repeat(b, 1, w, 1)
        gy = torch.linspace(0, 1, w, dtype=a.dtype).view(1, 1, w, 1).repeat(b, h, 1, 1)
        v = self.lift(torch.cat((a.unsqueeze(-1), gx, gy), -1)).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(v)
        out = torch.zeros(b, 8, h, w // 2 + 1, dtype=spectrum.dtype, device=a.device)
        out[:, :, :3, :3] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, :3, :3], self.low.to(spectrum.dtype)
        )
        out[:, :, -3:, :3] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, -3:, :3], self.high.to(spectrum.dtype)
        )
        v = F.gelu(torch.fft.irfft2(out, s=(h, w)) + self.skip(v))
        made = self.lower(v.permute(0, 2, 3, 1)).squeeze(-1)
        return (
            torch.norm((made - y).reshape(b, -1), 2, 1) / torch.norm(y.reshape(b, -1), 2, 1)
        ).mean()


def fno(batch_size: int = 4) -> Example:
    return Fourier(), {"a": floats(batch_size, 8, 8), "y": floats(batch_size, 8, 8).flip(1)}


class DeepONet(nn.Module):
    """Branch and trunk, over points that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.bias = (
            _net(10, 32, WIDTH),
            _net(2, 32, WIDTH),
            nn.Parameter(torch.zeros(())),
        )
        self.register_buffer("points", torch.rand(12, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(
            torch.einsum("bi,ni->bn", self.branch(x), self.trunk(self.points)) + self.bias, y
        )


def deeponet(batch_size: int = 4) -> Example:
    return DeepONet(), {"x": floats(batch_size, 10), "y": floats(batch_size, 12)}


class Ode(nn.Module):
    """A neural differential equation by Runge and Kutta, with how the density changes (Hutchinson)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 8))

    def field(self, t: float, x: Tensor) -> Tensor:
        return self.net(torch.cat([x, torch.full_like(x[:, :1], t)], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        dt = 0.25
        for step in range(4):
            t = step * dt
            k1 = self.field(t, x)
            k2 = self.field(t + dt / 2, x + dt / 2 * k1)
            k3 = self.field(t + dt / 2, x + dt / 2 * k2)
            x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + self.field(t + dt, x + dt * k3))
        return (x - y).square().sum(dim=-1).mean(dim=0)


def neural_ode(batch_size: int = 4) -> Example:
    return Ode(), _rows(batch_size, 8)


class Physics(nn.Module):
    """A network that knows its differential equation, by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        def u(p: Tensor) -> Tensor:
            return self.net(p).squeeze(-1)

        first = torch.func.vmap(torch.func.jacrev(u))(x)
        second = torch.func.vmap(torch.func.hessian(u))(x)
        edge = torch.cat([x[:, :1], torch.zeros_like(x[:, 1:])], 1)
        return (first[:, 1] - 0.1 * second[:, 0, 0]).pow(2).mean() + (
            u(edge) - torch.sin(edge[:, 0])
        ).pow(2).mean()


def pinn_func(batch_size: int = 4) -> Example:
    return Physics(), {"x": floats(batch_size, 2)}


class Hamilton(nn.Module):
    """Motion from the gradient of a learnt energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(4, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1, bias=False)
        )

    def forward(self, state: Tensor, change: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.requires_grad_(True)
            dq, dp = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)[
                0
            ].chunk(2, 1)
        return F.mse_loss(torch.cat([dp, -dq], 1), change)


def hamiltonian(batch_size: int = 4) -> Example:
    return Hamilton(), {"state": floats(batch_size, 4), "change": floats(batch_size, 4).flip(0)}


class Wave(nn.Module):
    """A wave on a grid, step by step, whose medium is learnt: slices written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Parameter(torch.full((12,), 0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before, now = torch.zeros_like(x), x.clone()
        for _ in range(4):
            bend = torch.zeros_like(now)
            bend[:, 1:-1] = now[:, 2:] - 2 * now[:, 1:-1] + now[:, :-2]
            before, now = now, 2 * now - before + self.speed.sigmoid() ** 2 * bend
        return ((now[..., ::3] - y) ** 2).mean()


def wave(batch_size: int = 4) -> Example:
    return Wave(), {"x": floats(batch_size, 12), "y": floats(batch_size, 4)}


# -- densities --------------------------------------------------------------------------------------


class Coupling(nn.Module):
    """RealNVP and Glow: affine couplings, invertible mixing with its determinant, learnt normal base."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_net(4, WIDTH, 8) for _ in range(3))
        self.turns = nn.ParameterList(
            nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0]) for _ in range(3)
        )
        self.mean, self.spread = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(x.shape[0])
        for net, turn in zip(self.nets, self.turns, strict=True):
            x = x @ turn
            logdet = logdet + torch.slogdet(turn)[1]
            a, b = x[:, :4], x[:, 4:]
            s, t = net(a).chunk(2, dim=1)
            s = 2 * torch.tanh(s / 2)
            x = torch.cat([a, b * torch.exp(s) + t], dim=1).flip(1)
            logdet += s.sum(1)
        base = torch.distributions.Independent(
            torch.distributions.Normal(self.mean, self.spread.exp()), 1
        )
        return -(base.log_prob(x) + logdet).mean()


def real_nvp(batch_size: int = 4) -> Example:
    return Coupling(), {"x": floats(batch_size, 8)}


class Spline(nn.Module):
    """A neural spline: each element finds its bin among cumulated widths."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(2, WIDTH, 2 * 9)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, :2], x[:, 2:].sigmoid()
        w, h = self.net(a).view(-1, 2, 9).split([4, 5], -1)
        edges = F.pad(w.softmax(-1).cumsum(-1), (1, 0))
        heights = F.softplus(h) + 1e-3
        total = ((heights[..., 1:] + heights[..., :-1]) / 2 * w.softmax(-1)).sum(-1, keepdim=True)
        heights = heights / total
        place = (torch.searchsorted(edges.contiguous(), b.unsqueeze(-1), right=True) - 1).clamp(
            0, 3
        )
        left, width = edges.gather(-1, place), w.softmax(-1).gather(-1, place)
        low, high = heights.gather(-1, place), heights.gather(-1, place + 1)
        alpha = (b.unsqueeze(-1) - left) / width
        return -(torch.lerp(low, high, alpha).log().squeeze(-1).sum(-1)).mean()


def spline_flow(batch_size: int = 4) -> Example:
    return Spline(), {"x": floats(batch_size, 4)}


class Autoregressive(nn.Module):
    """MADE: linear layers whose weights are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 20), nn.Linear(20, 12)
        degree = torch.arange(20) % 5 + 1
        self.register_buffer("mask1", (degree[:, None] >= torch.arange(1, 7)[None]).float())
        self.register_buffer(
            "mask2", (torch.arange(1, 7).repeat(2)[:, None] > degree[None]).float()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self.one.weight * self.mask1, self.one.bias))
        mean, log_std = F.linear(h, self.two.weight * self.mask2, self.two.bias).chunk(2, -1)
        return (
            (0.5 * ((x - mean) * (-log_std).exp()) ** 2 + log_std + 0.5 * math.log(2 * math.pi))
            .sum(-1)
            .mean()
        )


def made(batch_size: int = 4) -> Example:
    return Autoregressive(), {"x": floats(batch_size, 6)}


class Mixture(nn.Module):
    """A mixture density network, and quantiles of the same trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads, self.quantiles = (
            _net(8, 32),
            nn.ModuleDict({k: nn.Linear(32, 3) for k in ("pi", "mu", "sigma")}),
            nn.Linear(32, 3),
        )
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.trunk(x)
        mixing, parts = (
            torch.distributions.Categorical(logits=self.heads["pi"](h)),
            torch.distributions.Normal(
                self.heads["mu"](h), F.softplus(self.heads["sigma"](h)) + 1e-3
            ),
        )
        mixed = torch.distributions.MixtureSameFamily(mixing, parts)
        error = y - self.quantiles(h)
        return (
            -mixed.log_prob(y.squeeze(-1)).mean()
            + torch.max(self.levels * error, (self.levels - 1) * error).mean()
        )


def mixture_density(batch_size: int = 4) -> Example:
    return Mixture(), _rows(batch_size)


class Process(nn.Module):
    """Deep kernel learning: the likelihood of a Gaussian process over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.noise, self.scale = (
            _net(8, WIDTH, 4),
            nn.Parameter(torch.tensor(0.0)),
            nn.Parameter(torch.tensor(0.0)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        n = z.shape[0]
        k = self.scale.exp() * torch.exp(-0.5 * torch.cdist(z, z).pow(2)) + (
            self.noise.exp() + 1e-4
        ) * torch.eye(n, dtype=z.dtype)
        factor = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y, factor)
        return (0.5 * (y * alpha).sum() + factor.diagonal().log().sum()) / n


def gaussian_process(batch_size: int = 4) -> Example:
    return Process(), _rows(batch_size)


class Transport(nn.Module):
    """Sinkhorn's distance of two clouds per sample, its loop without gradients at first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(3, WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x), y, p=2) ** 2 / 2
        f, g = torch.zeros_like(cost[:, :, 0]), torch.zeros_like(cost[:, 0])
        with torch.no_grad():
            for _ in range(5):
                f = -0.5 * torch.logsumexp((g[:, None] - cost) / 0.5, dim=2)
                g = -0.5 * torch.logsumexp((f[:, :, None] - cost) / 0.5, dim=1)
        plan = ((f[:, :, None] + g[:, None] - cost) / 0.5).exp()
        return (plan.detach() * cost).sum((1, 2)).mean()


def sinkhorn(batch_size: int = 4) -> Example:
    return Transport(), {"x": floats(batch_size, 5, 3), "y": floats(batch_size, 5, 3).flip(0)}


# -- graphs -----------------------------------------------------------------------------------------


class Messages(nn.Module):
    """Message passing with edge features: sums, means, maxima by ``scatter_reduce``, a soft maximum by target."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.edge, self.update, self.head = (
            nn.Linear(8, WIDTH),
            _net(2 * WIDTH + 3, WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )
        self.eps, self.kind = nn.Parameter(torch.zeros(1)), kind

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, y: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        h = self.enter(x)
        for _ in range(2):
            m = self.edge(torch.cat([h[source], h.index_select(0, target), edge_attr], -1))
            place = target.unsqueeze(-1).expand_as(m)
            if self.kind == "soft":
                top = torch.full_like(h, -1e9).scatter_reduce(0, place, m.detach(), "amax")
                e = (m - top[target]).exp()
                m = m * e / torch.zeros_like(h).scatter_add_(0, place, e)[target]
            how = {"mean": "mean", "max": "amax"}.get(self.kind, "sum")
            seen = torch.zeros_like(h).scatter_reduce(0, place, m, how, include_self=False)
            h = self.update(seen + (1 + self.eps) * h, h)
        return F.cross_entropy(self.head(h), y)


def _graph(kind: str, batch_size: int) -> Example:
    n = 4 * batch_size
    batch = {
        "x": floats(n, 8),
        "edge_index": tokens(n, 2, 10 * batch_size),
        "edge_attr": floats(10 * batch_size, 3),
    }
    return Messages(kind), batch | {"y": tokens(4, n)}


def graph_sum(batch_size: int = 4) -> Example:
    return _graph("sum", batch_size)


def graph_mean(batch_size: int = 4) -> Example:
    return _graph("mean", batch_size)


def graph_max(batch_size: int = 4) -> Example:
    return _graph("max", batch_size)


def graph_soft(batch_size: int = 4) -> Example:
    return _graph("soft", batch_size)


class Molecule(nn.Module):
    """SchNet and EGNN on padded molecules: distances as radial functions, places that move."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.filter, self.phi, self.move, self.out = (
            nn.Embedding(6, WIDTH, padding_idx=0),
            _net(8, WIDTH, WIDTH),
            _net(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, 1, bias=False),
            _net(WIDTH, WIDTH, 1),
        )

    def forward(self, z: Tensor, places: Tensor, energy: Tensor) -> Tensor:
        mask = (z > 0).unsqueeze(-1)
        pair = (mask & mask.transpose(1, 2)) & ~torch.eye(z.shape[1], dtype=torch.bool)
        h = self.embed(z)
        for _ in range(2):
            apart = places[:, :, None] - places[:, None]
            far = (apart.pow(2).sum(-1) + 1e-6).sqrt()
            radial = torch.exp(-((far[..., None] - torch.linspace(0, 4, 8, dtype=far.dtype)) ** 2))
            w = self.filter(radial) * pair[..., None]
            m = (h[:, None] * w).sum(2)
            places = places + (apart * self.move(w)).mean(2)
            h = h + self.phi(torch.cat([h, m], -1))
        return F.l1_loss((self.out(h) * mask).sum((1, 2)), energy)


def molecules(batch_size: int = 4) -> Example:
    return Molecule(), {
        "z": tokens(6, batch_size, 5),
        "places": floats(batch_size, 5, 3),
        "energy": floats(batch_size),
    }


# -- series, tables, decisions ------------------------------------------------------------------------


class Autoformer(nn.Module):
    """Delays found by Fourier transforms: the best are rolled and summed; a moving average taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        trend = F.avg_pool1d(
            F.pad(x.transpose(1, 2), (2, 2), mode="replicate"), 5, stride=1
        ).transpose(1, 2)
        season = x - trend
        q, k, v = self.q(season), self.k(season), self.v(season)
        t = x.shape[1]
        c = torch.fft.irfft(
            torch.fft.rfft(q, dim=1) * torch.fft.rfft(k, dim=1).conj(), n=t, dim=1
        ).mean(-1)
        weights, delays = c.topk(3, dim=1)
        steps = (torch.arange(t)[None, None] + delays[..., None]) % t
        rolled = (
            v.unsqueeze(1).expand(-1, 3, -1, -1).gather(2, steps[..., None].expand(-1, -1, -1, 4))
        )
        return F.smooth_l1_loss(
            self.out((weights.softmax(1)[..., None, None] * rolled).sum(1)) + trend, y
        )


def autoformer(batch_size: int = 4) -> Example:
    return Autoformer(), {"x": floats(batch_size, 12, 4), "y": floats(batch_size, 12, 4).flip(0)}


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: B-splines by recursion on a grid kept as a buffer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.coefficients = (
            nn.Parameter(torch.randn(outputs, inputs) / 4),
            nn.Parameter(torch.randn(outputs, inputs, 8) / 4),
        )
        self.register_buffer(
            "grid", (torch.arange(-3, 9) * 0.4 - 1).expand(inputs, -1).contiguous()
        )

    def forward(self, x: Tensor) -> Tensor:
        grid, u = self.grid, x.unsqueeze(-1)
        b = ((u >= grid[:, :-1]) & (u < grid[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            b = (u - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * b[..., :-1] + (
                grid[:, k + 1 :] - u
            ) / (grid[:, k + 1 :] - grid[:, 1:-k]) * b[..., 1:]
        return F.linear(F.silu(x), self.base) + F.linear(
            b.view(x.size(0), -1), self.coefficients.view(self.coefficients.size(0), -1)
        )


class Kan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Splines(8, 5), Splines(5, 1)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y) + 1e-3 * sum(
            layer.coefficients.abs().mean() for layer in self.layers
        )


def kan(batch_size: int = 4) -> Example:
    return Kan(), _rows(batch_size)


class Hyper(nn.Module):
    """A network that makes another's weights, for every sample its own, and one for all by ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.shared = nn.Linear(8, 8 * 4 + 4), nn.Parameter(torch.randn(4 * 1 + 1) / 2)
        self.body = nn.Linear(4, 1)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        w, b = self.make(x).split([32, 4], -1)
        h = torch.tanh(torch.baddbmm(b.unsqueeze(1), x.unsqueeze(1), w.view(-1, 8, 4))).squeeze(1)
        weights = {"weight": self.shared[:4].view(1, 4), "bias": self.shared[4:]}
        return F.mse_loss(torch.func.functional_call(self.body, weights, (h,)), y)


def hypernetwork(batch_size: int = 4) -> Example:
    return Hyper(), _rows(batch_size)


class Survival(nn.Module):
    """Cox's partial likelihood: risks sorted by time, a running log-sum over who is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(WIDTH, 1)
        )

    def forward(self, x: Tensor, time: Tensor, died: Tensor) -> Tensor:
        risk, order = self.net(x).squeeze(-1), torch.argsort(time, descending=True)
        risk, died = risk[order], died[order]
        return -((risk - torch.logcumsumexp(risk, 0)) * died).sum() / died.sum().clamp(min=1)


def survival(batch_size: int = 4) -> Example:
    return Survival(), {
        "x": floats(batch_size, 8),
        "time": floats(batch_size).exp(),
        "died": torch.ones(batch_size),
    }


class Tables(nn.Module):
    """DIN and cross networks: attention over what was clicked, tables by name, features crossed."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"item": nn.Embedding(50, 8, padding_idx=0), "user": nn.Embedding(20, 8, sparse=True)}
        )
        self.score, self.dice = (
            nn.Sequential(nn.Linear(32, 8), nn.PReLU(), nn.Linear(8, 1)),
            nn.BatchNorm1d(24, momentum=None),
        )
        self.cross, self.bias, self.out = (
            nn.ParameterList(torch.randn(24, 24) / 5 for _ in range(2)),
            nn.ParameterList(torch.zeros(24) for _ in range(2)),
            nn.Linear(24, 1),
        )

    def forward(self, *, history: Tensor, item: Tensor, user: Tensor, click: Tensor) -> Tensor:
        past, now = self.tables["item"](history), self.tables["item"](item)
        many = now.unsqueeze(1).expand_as(past)
        weight = self.score(torch.cat([past, many, past - many, past * many], -1)).masked_fill(
            (history == 0).unsqueeze(-1), 0
        )
        x0 = x = self.dice(torch.cat([(weight * past).sum(1), now, self.tables["user"](user)], -1))
        for w, b in zip(self.cross, self.bias):
            x = x0 * (x @ w + b) + x
        return nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(self.out(x).squeeze(-1), click)


def din(batch_size: int = 4) -> Example:
    batch = {
        "history": tokens(50, batch_size, 6),
        "item": tokens(50, batch_size, low=1),
        "user": tokens(20, batch_size),
    }
    return Tables(), batch | {"click": tokens(2, batch_size).float()}


class ActorCritic(nn.Module):
    """Clipped policy gradients with normalised advantages, a value loss and entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh()),
            nn.Linear(32, 4),
            nn.Linear(32, 1),
        )

    def forward(
        self, x: Tensor, action: Tensor, old: Tensor, advantage: Tensor, returned: Tensor
    ) -> Tensor:
        h = self.trunk(x)
        policy, value = (
            torch.distributions.Categorical(logits=self.policy(h)),
            self.value(h).squeeze(-1),
        )
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(action) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return -gain + 0.5 * F.mse_loss(value, returned) - 0.01 * policy.entropy().mean()


def ppo(batch_size: int = 4) -> Example:
    one = floats(3, batch_size)
    return ActorCritic(), {
        "x": floats(batch_size, 8),
        "action": tokens(4, batch_size),
        "old": -one[0].abs(),
        "advantage": one[1],
        "returned": one[2],
    }


class DeepQ(nn.Module):
    """A duelling network and its target, of which the better action is taken (double Q)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain, self.value = _net(8, 32), nn.Linear(32, 4), nn.Linear(32, 1)
        self.target = nn.ModuleList(
            [copy.deepcopy(one) for one in (self.net, self.gain, self.value)]
        ).requires_grad_(False)

    def forward(
        self, x: Tensor, action: Tensor, reward: Tensor, after: Tensor, done: Tensor
    ) -> Tensor:
        def q(net: nn.Module, gain: nn.Module, value: nn.Module, s: Tensor) -> Tensor:
            h = net(s)
            a = gain(h)
            return value(h) + a - a.mean(1, keepdim=True)

        now = q(self.net, self.gain, self.value, x).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = q(self.net, self.gain, self.value, after).argmax(1, keepdim=True)
            aim = reward + 0.9 * (~done) * q(*self.target, after).gather(1, best)[:, 0]
        return F.smooth_l1_loss(now, aim)


def double_q(batch_size: int = 4) -> Example:
    batch = {
        "x": floats(batch_size, 8),
        "action": tokens(4, batch_size),
        "reward": floats(batch_size),
    }
    return DeepQ(), batch | {
        "after": floats(batch_size, 8).flip(0),
        "done": tokens(2, batch_size).bool(),
    }
