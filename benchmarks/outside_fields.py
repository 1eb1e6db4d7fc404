"""Models of many fields as their practitioners write them, for ``outside.py``: scans in log space, fast weights,
graphs with memories, wave functions, charts, rigid frames, unrolled solvers, speech alignment, ranking.

Written before any of them was run.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import ROW_WIDTH as WIDTH
from outside_models import Example, floats, row_batch, tokens
from torch import Tensor, nn

# -- sequences ----------------------------------------------------------------------------------------


def min_gru(batch_size: int = 4) -> Example:
    """minGRU: gates of the input only, all states at once by Heinsen's scan in log space."""

    def log_g(x: Tensor) -> Tensor:
        return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))

    class MinGRU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_hidden_and_gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
            log_coeffs = -F.softplus(gate)
            log_values = -F.softplus(-gate) + log_g(hidden)
            a_star = F.pad(log_coeffs.cumsum(dim=1), (0, 0, 1, 0))
            start = torch.full_like(log_values[:, :1], -20.0)
            scanned = torch.cat((start, log_values), 1) - a_star
            return (a_star + scanned.logcumsumexp(dim=1)).exp()[:, 1:]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList(
                    (nn.RMSNorm(WIDTH), MinGRU(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
                )
                for _ in range(2)
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for norm1, rnn, norm2, ff in self.layers:
                x = rnn(norm1(x)) + x
                x = F.gelu(ff(norm2(x))) + x
            return F.smooth_l1_loss(x, y)

    return Net(), row_batch(batch_size, 6)


def s5(batch_size: int = 4) -> Example:
    """S5: complex diagonal states that all inputs share, scanned by doubling, both ways, real parts out."""

    class Layer(nn.Module):
        def __init__(self, states: int = 6) -> None:
            super().__init__()
            self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(states)))
            self.imaginary = nn.Parameter(math.pi * torch.arange(states).float())
            self.b = nn.Parameter(floats(states, WIDTH, 2) * 0.3)
            self.c = nn.Parameter(floats(WIDTH, 2 * states, 2) * 0.3)
            self.d = nn.Parameter(torch.ones(WIDTH))
            self.log_step = nn.Parameter(torch.full((states,), -2.0))

        def forward(self, u: Tensor) -> Tensor:
            step = self.log_step.exp()
            a = torch.complex(-self.log_real.exp(), self.imaginary)
            a_bar = torch.exp(a * step)
            b_bar = ((a_bar - 1) / a)[:, None] * torch.view_as_complex(self.b)
            driven = torch.einsum("ph,blh->blp", b_bar, u.to(b_bar.dtype))

            def scan(values: Tensor) -> Tensor:
                decay, shift = a_bar.expand_as(values), 1
                while shift < values.shape[1]:
                    before = F.pad(values[:, :-shift], (0, 0, shift, 0))
                    values = values + decay * before
                    decay = decay * F.pad(decay[:, :-shift], (0, 0, shift, 0), value=0.0)
                    shift *= 2
                return values

            xs = torch.cat((scan(driven), scan(driven.flip(1)).flip(1)), -1)
            y = torch.einsum("hp,blp->blh", torch.view_as_complex(self.c), xs).real
            return F.gelu(y + self.d * u)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(self.norm(x))
            return F.cross_entropy(self.head(x.mean(1)), labels, label_smoothing=0.1)

    return Net(), {"x": floats(batch_size, 7, WIDTH), "labels": tokens(5, batch_size)}


def matrix_lstm(batch_size: int = 4) -> Example:
    """xLSTM's mLSTM in its parallel form: cumulated log forget gates, a stabiliser by row, norms by head."""

    class Cell(nn.Module):
        def __init__(self, heads: int = 2) -> None:
            super().__init__()
            self.heads = heads
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.input_gate, self.forget_gate = (
                nn.Linear(3 * WIDTH, heads),
                nn.Linear(3 * WIDTH, heads),
            )
            self.norm = nn.GroupNorm(heads, WIDTH, affine=True)
            self.register_buffer(
                "causal", torch.tril(torch.ones(16, 16, dtype=torch.bool)), persistent=False
            )
            with torch.no_grad():
                self.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, heads))

        def forward(self, x: Tensor) -> Tensor:
            b, s, _ = x.shape
            gates_in = self.qkv(x)
            q, k, v = (
                one.view(b, s, self.heads, -1).transpose(1, 2) for one in gates_in.chunk(3, -1)
            )
            i = self.input_gate(gates_in).transpose(-1, -2).unsqueeze(-1)
            f = self.forget_gate(gates_in).transpose(-1, -2).unsqueeze(-1)
            log_f = F.logsigmoid(f)
            sums = torch.cat([torch.zeros_like(log_f[:, :, :1]), log_f.cumsum(-2)], -2)
            rep = sums.repeat(1, 1, 1, s + 1)
            matrix = (rep - rep.transpose(-2, -1))[:, :, 1:, 1:]
            ltr = self.causal[:s, :s]
            log_d = torch.where(ltr, matrix, -float("inf")) + i.transpose(-2, -1)
            most, _ = log_d.max(dim=-1, keepdim=True)
            d = torch.exp(log_d - most)
            c = (q @ (k / math.sqrt(k.shape[-1])).transpose(-2, -1)) * d
            norm = torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-most))
            h = (c / (norm + 1e-6)) @ v
            h = h.transpose(1, 2).reshape(b * s, -1)
            return self.norm(h).view(b, s, -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.up, self.cell, self.down = (
                nn.Linear(WIDTH, 2 * WIDTH),
                Cell(),
                nn.Linear(WIDTH, WIDTH),
            )
            self.head = nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            x = self.embed(ids)
            a, z = self.up(x).chunk(2, -1)
            x = x + self.down(self.cell(a) * F.silu(z))
            logits = self.head(x)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))
            return {"loss": loss, "logits": logits}

    return Net(), {"ids": tokens(11, batch_size, 9)}


def fast_weights_at_test_time(batch_size: int = 4) -> Example:
    """TTT-linear: the state is a linear model of its own, learnt by its own gradient in mini-batches of tokens."""

    class TTT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta_k, self.theta_v, self.theta_q = (
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
            )
            self.w0 = nn.Parameter(floats(WIDTH, WIDTH) * 0.1)
            self.rate = nn.Linear(WIDTH, 1)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            w = self.w0.expand(len(x), -1, -1)
            outs = []
            for chunk in x.split(3, dim=1):
                k, v, q = self.theta_k(chunk), self.theta_v(chunk), self.theta_q(chunk)
                eta = self.rate(chunk).sigmoid() / WIDTH
                error = k @ w - (v - k)
                attn = torch.tril(q @ k.mT)
                outs.append(q @ w - (eta.mT * attn) @ error)
                w = w - (eta * k).mT @ error
            out = x + self.norm(torch.cat(outs, 1))
            return F.mse_loss(out, y)

    return TTT(), row_batch(batch_size, 8)


def controlled_equation(batch_size: int = 4) -> Example:
    """A neural CDE: a Hermite spline through observations, its derivative at times found by bucketize, RK4 steps."""

    class CDE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.initial, self.readout = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
            self.func = nn.Sequential(
                nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH * 3), nn.Tanh()
            )
            self.register_buffer("knots", torch.linspace(0, 1, 6))

        def derivative(self, path: Tensor, t: Tensor) -> Tensor:
            h = self.knots[1] - self.knots[0]
            slopes = (path[:, 1:] - path[:, :-1]) / h
            slopes = torch.cat([slopes[:, :1], slopes], 1)
            index = (torch.bucketize(t, self.knots) - 1).clamp(0, len(self.knots) - 2)
            s = (t - self.knots[index]) / h
            p0, p1 = path[:, index], path[:, index + 1]
            m0, m1 = slopes[:, index], slopes[:, index + 1]
            return (
                (6 * s * s - 6 * s) / h * (p0 - p1)
                + (3 * s * s - 4 * s + 1) * m0
                + (3 * s * s - 2 * s) * m1
            )

        def field(self, t: Tensor, z: Tensor, path: Tensor) -> Tensor:
            return torch.einsum(
                "bhc,bc->bh", self.func(z).view(*z.shape, 3), self.derivative(path, t)
            )

        def forward(self, path: Tensor, target: Tensor) -> Tensor:
            z = self.initial(path[:, 0])
            ts = torch.linspace(0, 1, 5, dtype=z.dtype)
            for t0, t1 in itertools.pairwise(ts.unbind()):
                dt = t1 - t0
                k1 = self.field(t0, z, path)
                k2 = self.field(t0 + dt / 3, z + dt * k1 / 3, path)
                k3 = self.field(t0 + dt * 2 / 3, z + dt * (k2 - k1 / 3), path)
                k4 = self.field(t1, z + dt * (k1 - k2 + k3), path)
                z = z + dt * (k1 + 3 * (k2 + k3) + k4) / 8
            return F.binary_cross_entropy_with_logits(self.readout(z).squeeze(-1), target)

    path = floats(batch_size, 6, 3).cumsum(1)
    path[..., 0] = torch.linspace(0, 1, 6)
    return CDE(), {"path": path, "target": tokens(2, batch_size).float()}


def latent_sde(batch_size: int = 4) -> Example:
    """A latent SDE: Euler-Maruyama with given noise, Girsanov's divergence along the way, diagonal diffusion by
    a network per dim."""

    class SDE(nn.Module):
        def __init__(self, latent: int = 3) -> None:
            super().__init__()
            self.encoder = nn.GRU(2, WIDTH, batch_first=True)
            self.context = nn.Linear(WIDTH, 4)
            self.q_mean, self.q_logstd = nn.Linear(4, latent), nn.Linear(4, latent)
            self.drift = nn.Sequential(
                nn.Linear(latent + 4, 8), nn.Softplus(), nn.Linear(8, latent)
            )
            self.prior = nn.Sequential(nn.Linear(latent, 8), nn.Softplus(), nn.Linear(8, latent))
            self.diffusions = nn.ModuleList(
                nn.Sequential(nn.Linear(1, 4), nn.Softplus(), nn.Linear(4, 1), nn.Sigmoid())
                for _ in range(latent)
            )
            self.decoder = nn.Linear(latent, 2)
            self.pz0_mean = nn.Parameter(torch.zeros(1, latent))
            self.pz0_logstd = nn.Parameter(torch.zeros(1, latent))

        def forward(self, xs: Tensor, eps: Tensor, noise: Tensor) -> Tensor:
            ctx, _ = self.encoder(xs.flip(1))
            ctx = self.context(ctx).flip(1)
            mean, logstd = self.q_mean(ctx[:, 0]), self.q_logstd(ctx[:, 0]).clamp(-4, 2)
            z = mean + logstd.exp() * eps
            q0 = torch.distributions.Normal(mean, logstd.exp())
            p0 = torch.distributions.Normal(self.pz0_mean, self.pz0_logstd.exp())
            kl = torch.distributions.kl_divergence(q0, p0).sum(1).mean(0)
            dt, path_kl, zs = 0.1, xs.new_zeros(len(xs)), [z]
            for step in range(xs.shape[1] - 1):
                f = self.drift(torch.cat((z, ctx[:, step]), 1))
                h = self.prior(z)
                g = torch.cat(
                    [net(one) for net, one in zip(self.diffusions, z.split(1, 1), strict=True)], 1
                )
                u = (f - h) / g.clamp(min=1e-4)
                path_kl = path_kl + 0.5 * (u**2).sum(1) * dt
                z = z + f * dt + g * math.sqrt(dt) * noise[:, step]
                zs.append(z)
            out = self.decoder(torch.stack(zs, 1))
            nll = -torch.distributions.Normal(out, 1.0).log_prob(xs).sum((1, 2)).mean(0)
            return nll + kl + path_kl.mean(0)

    return SDE(), {
        "xs": floats(batch_size, 5, 2),
        "eps": floats(batch_size, 3),
        "noise": floats(batch_size, 4, 3),
    }


# -- densities ----------------------------------------------------------------------------------------


def masked_autoregressive_flow(batch_size: int = 8) -> Example:
    """MAF with batch norm as a bijector: its log-determinant is of the batch's variance, running values by momentum."""

    class MaskedLinear(nn.Linear):
        def __init__(self, mask: Tensor) -> None:
            super().__init__(mask.shape[1], mask.shape[0])
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.mask, self.bias)

    class MADE(nn.Module):
        def __init__(self, size: int, hidden: int) -> None:
            super().__init__()
            into, mid = torch.arange(size), torch.arange(hidden) % (size - 1)
            self.first = MaskedLinear((mid[:, None] >= into).float())
            self.last = MaskedLinear((into.repeat(2)[:, None] > mid).float())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            m, log_a = self.last(torch.relu(self.first(x))).chunk(2, 1)
            return (x - m) * torch.exp(-log_a), -log_a.sum(-1, keepdim=True)

    class BatchNormFlow(nn.Module):
        def __init__(self, size: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
            super().__init__()
            self.log_gamma, self.beta = (
                nn.Parameter(torch.zeros(size)),
                nn.Parameter(torch.zeros(size)),
            )
            self.momentum, self.eps = momentum, eps
            self.register_buffer("running_mean", torch.zeros(size))
            self.register_buffer("running_var", torch.ones(size))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.training:
                self.batch_mean = x.mean(0)
                self.batch_var = (x - self.batch_mean).pow(2).mean(0) + self.eps
                self.running_mean.mul_(1 - self.momentum)
                self.running_var.mul_(1 - self.momentum)
                self.running_mean.add_(self.batch_mean.data * self.momentum)
                self.running_var.add_(self.batch_var.data * self.momentum)
                mean, var = self.batch_mean, self.batch_var
            else:
                mean, var = self.running_mean, self.running_var
            y = torch.exp(self.log_gamma) * (x - mean) / var.sqrt() + self.beta
            return y, (self.log_gamma - 0.5 * torch.log(var)).sum(-1, keepdim=True)

    class Flow(nn.Module):
        def __init__(self, size: int = 6) -> None:
            super().__init__()
            self.steps = nn.ModuleList()
            for _ in range(2):
                self.steps += [MADE(size, 12), BatchNormFlow(size)]
            self.register_buffer("order", torch.arange(size - 1, -1, -1))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(x.size(0), 1, dtype=x.dtype, device=x.device)
            for step in self.steps:
                x, logdet = step(x)
                x, total = x[:, self.order], total + logdet
            log_p = (-0.5 * x.pow(2) - 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)
            return -(log_p + total).sum() / x.size(0)

    return Flow(), {"x": floats(batch_size, 6)}


def magnitude_preserving(batch_size: int = 4) -> Example:
    """EDM2: forced weight norms (weights written in forward without gradients), preconditioning, learned
    uncertainty by noise level."""

    def normalize(x: Tensor, dim: list[int] | None = None, eps: float = 1e-4) -> Tensor:
        dim = dim or list(range(1, x.ndim))
        norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float64).to(x.dtype)
        return x / torch.add(eps, norm, alpha=math.sqrt(norm.numel() / x.numel()))

    class MPConv(nn.Module):
        def __init__(self, into: int, out: int, kernel: list[int]) -> None:
            super().__init__()
            self.weight = nn.Parameter(floats(out, into, *kernel))

        def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
            w = normalize(self.weight) * (gain / math.sqrt(self.weight[0].numel()))
            return x @ w.t() if w.ndim == 2 else F.conv2d(x, w, padding=w.shape[-1] // 2)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("freqs", 2 * math.pi * floats(8))
            self.register_buffer("phases", 2 * math.pi * floats(8).abs())
            self.emb = MPConv(8, 16, [])
            self.conv_in, self.conv_mid, self.conv_out = (
                MPConv(4, 16, [3, 3]), MPConv(16, 16, [3, 3]), MPConv(16, 3, [3, 3])
            )  # fmt: skip
            self.emb_gain, self.out_gain = (
                nn.Parameter(torch.zeros(())),
                nn.Parameter(torch.ones(())),
            )
            self.logvar = MPConv(8, 1, [])

        def fourier(self, x: Tensor) -> Tensor:
            y = x.to(torch.float32).ger(self.freqs.to(torch.float32)) + self.phases.to(
                torch.float32
            )
            return (y.cos() * math.sqrt(2)).to(x.dtype)

        def forward(self, images: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
            s = sigma.reshape(-1, 1, 1, 1)
            noised = images + noise * s
            c_skip, c_out, c_in = (
                0.25 / (s**2 + 0.25),
                s * 0.5 / (s**2 + 0.25).sqrt(),
                1 / (0.25 + s**2).sqrt(),
            )
            code = self.fourier(s.flatten().log() / 4)
            x = torch.cat([c_in * noised, torch.ones_like(noised[:, :1])], dim=1)
            x = self.conv_in(x)
            c = self.emb(code, gain=self.emb_gain) + 1
            y = self.conv_mid(F.silu(x) / 0.596)
            y = F.silu(y * c[:, :, None, None].to(y.dtype)) / 0.596
            x = torch.lerp(x, y, 0.3) / math.sqrt(0.7**2 + 0.3**2)
            d = c_skip * noised + c_out * self.conv_out(x, gain=self.out_gain)
            logvar = self.logvar(code).reshape(-1, 1, 1, 1)
            weight = (s**2 + 0.25) / (s * 0.5) ** 2
            return ((weight / logvar.exp()) * (d - images) ** 2 + logvar).mean()

    return Denoiser(), {
        "images": floats(batch_size, 3, 6, 6), "sigma": floats(batch_size).exp(), "noise": floats(batch_size, 3, 6, 6).flip(0),
    }  # fmt: skip


def consistency(batch_size: int = 8) -> Example:
    """Consistency training: neighbouring times by index from a schedule, a target without gradients, pseudo-Huber."""

    class Model(nn.Module):
        def __init__(self, count: int = 10) -> None:
            super().__init__()
            ramp = torch.linspace(0, 1, count)
            sigmas = (0.002 ** (1 / 7) + ramp * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7
            self.register_buffer("sigmas", sigmas)
            self.net = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.SiLU(), nn.Linear(32, WIDTH))

        def f(self, x: Tensor, sigma: Tensor) -> Tensor:
            s = sigma.unsqueeze(-1)
            skip = 0.25 / ((s - 0.002) ** 2 + 0.25)
            out = (s - 0.002) * 0.5 / (s**2 + 0.25) ** 0.5
            return skip * x + out * self.net(torch.cat([x / (s**2 + 0.25).sqrt(), s.log() / 4], -1))

        def forward(self, x: Tensor, step: Tensor, noise: Tensor) -> Tensor:
            low, high = self.sigmas[step], self.sigmas[step + 1]
            later = self.f(x + noise * high[:, None], high)
            with torch.no_grad():
                sooner = self.f(x + noise * low[:, None], low)
            c = 0.00054 * math.sqrt(WIDTH)
            huber = ((later - sooner).pow(2).sum(-1) + c**2).sqrt() - c
            return (huber / (high - low)).mean()

    return Model(), {
        "x": floats(batch_size, WIDTH),
        "step": tokens(9, batch_size),
        "noise": floats(batch_size, WIDTH).flip(0),
    }


def wave_function(batch_size: int = 4) -> Example:
    """FermiNet in small: determinants by slogdet, the local energy by a Laplacian of second gradients, an energy
    clipped around the batch's mean, and a loss whose gradient is a covariance."""

    class Psi(nn.Module):
        def __init__(self, electrons: int = 3, determinants: int = 2) -> None:
            super().__init__()
            self.n, self.k = electrons, determinants
            self.one = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
            self.mix = nn.Linear(24, 12)
            self.orbitals = nn.Linear(12, electrons * determinants)
            self.envelope = nn.Parameter(torch.ones(electrons * determinants))

        def log_psi(self, r: Tensor) -> Tensor:
            distance = r.norm(dim=-1, keepdim=True)
            h = self.one(torch.cat((r, distance), -1))
            h = torch.tanh(self.mix(torch.cat((h, h.mean(1, keepdim=True).expand_as(h)), -1)))
            phi = self.orbitals(h) * torch.exp(-self.envelope.abs() * distance)
            phi = phi.view(-1, self.n, self.k, self.n).transpose(1, 2)
            sign, logdet = torch.linalg.slogdet(phi)
            most = logdet.max(-1, keepdim=True).values.detach()
            total = (sign * (logdet - most).exp()).sum(-1)
            return total.abs().clamp(min=1e-12).log() + most.squeeze(-1)

        def forward(self, r: Tensor) -> Tensor:
            x = r.detach().reshape(len(r), -1).requires_grad_(True)
            with torch.enable_grad():
                psi = self.log_psi(x.view_as(r))
                grad = torch.autograd.grad(psi.sum(), x, create_graph=True)[0]
                laplacian = sum(
                    torch.autograd.grad(grad[:, i].sum(), x, retain_graph=True)[0][:, i]
                    for i in range(x.shape[1])
                )
            kinetic = -0.5 * (laplacian + grad.square().sum(1))
            potential = -(self.n / r.norm(dim=-1)).sum(1)
            pairs = torch.triu_indices(self.n, self.n, 1)
            potential = potential + (1 / (r[:, pairs[0]] - r[:, pairs[1]]).norm(dim=-1)).sum(1)
            local = (kinetic + potential).detach()
            centre = local.mean()
            spread = (local - centre).abs().mean()
            clipped = local.clamp(centre - 5 * spread, centre + 5 * spread)
            return 2 * ((clipped - clipped.mean()) * self.log_psi(r)).mean()

    return Psi(), {"r": floats(batch_size, 3, 3)}


def counts_of_cells(batch_size: int = 8) -> Example:
    """scVI: a negative binomial with zero inflation, by lgamma, library sizes, batches of the laboratory as one-hot,
    divergences by torch.distributions, dispersion per gene."""

    class SCVI(nn.Module):
        def __init__(self, genes: int = 12, latent: int = 3, labs: int = 2) -> None:
            super().__init__()
            self.labs = labs
            self.encoder = nn.Sequential(
                nn.Linear(genes + labs, 16), nn.BatchNorm1d(16, momentum=0.01, eps=0.001), nn.ReLU()
            )
            self.mean, self.var = nn.Linear(16, latent), nn.Linear(16, latent)
            self.decoder = nn.Sequential(
                nn.Linear(latent + labs, 16), nn.LayerNorm(16, elementwise_affine=False), nn.ReLU()
            )
            self.scale, self.dropout = (
                nn.Sequential(nn.Linear(16, genes), nn.Softmax(-1)),
                nn.Linear(16, genes),
            )
            self.px_r = nn.Parameter(floats(genes))

        def forward(self, x: Tensor, lab: Tensor, eps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            library = x.sum(1, keepdim=True).log()
            one_hot = F.one_hot(lab, self.labs).to(x.dtype)
            h = self.encoder(torch.cat((torch.log1p(x), one_hot), 1))
            qz = torch.distributions.Normal(self.mean(h), (self.var(h).exp() + 1e-4).sqrt())
            z = qz.loc + qz.scale * eps
            p = self.decoder(torch.cat((z, one_hot), -1))
            mu, theta, pi = self.scale(p) * library.exp(), self.px_r.exp(), self.dropout(p)
            eps_ = 1e-8
            softplus_pi = F.softplus(-pi)
            log_theta_eps, log_theta_mu = (theta + eps_).log(), (theta + mu + eps_).log()
            pi_theta = -pi + theta * (log_theta_eps - log_theta_mu)
            case_zero = (x < eps_).to(x.dtype) * (F.softplus(pi_theta) - softplus_pi)
            nonzero = -softplus_pi + pi_theta + x * ((mu + eps_).log() - log_theta_mu)
            nonzero = nonzero + torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
            ll = (case_zero + (x > eps_).to(x.dtype) * nonzero).sum(-1)
            kl = torch.distributions.kl_divergence(
                qz, torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
            ).sum(1)
            loss = torch.mean(-ll + 0.5 * kl)
            return loss, {"reconstruction": -ll.detach(), "kl": kl.detach()}

    return SCVI(), {
        "x": tokens(6, batch_size, 12).float(),
        "lab": tokens(2, batch_size),
        "eps": floats(batch_size, 3),
    }


# -- graphs, molecules, proteins ------------------------------------------------------------------------


def set_to_set(batch_size: int = 4) -> Example:
    """Gilmer's network: matrices from edges, a GRU cell per node, Set2Set over dense graphs with masks."""

    class MPNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, WIDTH * WIDTH))
            self.gru = nn.GRUCell(WIDTH, WIDTH)
            self.lstm = nn.LSTMCell(2 * WIDTH, WIDTH)
            self.out = nn.Linear(2 * WIDTH, 1)

        def forward(
            self, nodes: Tensor, edges: Tensor, adjacency: Tensor, sizes: Tensor, y: Tensor
        ) -> Tensor:
            b, n, d = nodes.shape
            mask = torch.arange(n, device=nodes.device).unsqueeze(0) < sizes.unsqueeze(1)
            both = adjacency.bool() & mask.unsqueeze(1) & mask.unsqueeze(2)
            matrices = self.edge(edges).view(b, n, n, d, d)
            h = nodes * mask.unsqueeze(-1)
            for _ in range(2):
                m = (
                    torch.einsum("bijde,bje->bijd", matrices, h)
                    .masked_fill(~both.unsqueeze(-1), 0)
                    .sum(2)
                )
                h = self.gru(m.reshape(-1, d), h.reshape(-1, d)).view(b, n, d)
            q_star, hx, cx = h.new_zeros(b, 2 * d), h.new_zeros(b, d), h.new_zeros(b, d)
            for _ in range(3):
                hx, cx = self.lstm(q_star, (hx, cx))
                e = (h * hx.unsqueeze(1)).sum(-1).masked_fill(~mask, float("-inf"))
                r = (e.softmax(-1).unsqueeze(-1) * h).sum(1)
                q_star = torch.cat([hx, r], dim=-1)
            return F.l1_loss(self.out(q_star).squeeze(-1), y)

    return MPNN(), {
        "nodes": floats(batch_size, 5, WIDTH), "edges": floats(batch_size, 5, 5, 3),
        "adjacency": tokens(2, batch_size, 5, 5), "sizes": tokens(6, batch_size, low=2), "y": floats(batch_size),
    }  # fmt: skip


def relational_graph(batch_size: int = 4) -> Example:
    """R-GCN with bases on one fixed graph kept in buffers, degrees by relation, link scores by DistMult for a batch
    of triples with corrupted tails."""

    class RGCN(nn.Module):
        def __init__(self, nodes: int = 10, relations: int = 3, bases: int = 2) -> None:
            super().__init__()
            self.embed = nn.Parameter(floats(nodes, WIDTH))
            self.bases = nn.ParameterList(
                [nn.Parameter(floats(bases, WIDTH, WIDTH) * 0.3) for _ in range(2)]
            )
            self.comps = nn.ParameterList(
                [nn.Parameter(floats(relations, bases)) for _ in range(2)]
            )
            self.loops = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.relations = nn.Embedding(relations, WIDTH)
            edges = torch.stack((tokens(nodes, 24), tokens(nodes, 24).flip(0)))
            kinds = tokens(relations, 24)
            self.register_buffer("edges", edges)
            self.register_buffer("kinds", kinds)
            counts = torch.zeros(nodes, relations).index_put_(
                (edges[1], kinds), torch.ones(24), accumulate=True
            )
            self.register_buffer("norm", 1 / counts[edges[1], kinds])

        def encode(self) -> Tensor:
            h = self.embed
            for basis, comp, loop in zip(self.bases, self.comps, self.loops, strict=True):
                weight = torch.einsum("rb,bio->rio", comp, basis)
                messages = torch.bmm(h[self.edges[0]].unsqueeze(1), weight[self.kinds]).squeeze(1)
                out = torch.zeros_like(h).index_add_(
                    0, self.edges[1], messages * self.norm[:, None]
                )
                h = F.relu(out + loop(h))
            return h

        def forward(self, triples: Tensor, tails: Tensor) -> Tensor:
            h = self.encode()
            s, r, o = h[triples[:, 0]], self.relations(triples[:, 1]), h[triples[:, 2]]
            positive = (s * r * o).sum(-1)
            negative = ((s * r).unsqueeze(1) * h[tails]).sum(-1)
            scores = torch.cat((positive[:, None], negative), 1)
            labels = torch.zeros_like(scores)
            labels[:, 0] = 1
            penalty = h.pow(2).mean() + self.relations.weight.pow(2).mean()
            return F.binary_cross_entropy_with_logits(scores, labels) + 0.01 * penalty

    triples = torch.stack(
        (tokens(10, batch_size), tokens(3, batch_size), tokens(10, batch_size).flip(0)), 1
    )
    return RGCN(), {"triples": triples, "tails": tokens(10, batch_size, 4)}


def temporal_graph(batch_size: int = 4) -> Example:
    """TGN: a memory per node in a buffer, read and written by the nodes of each batch, last message wins."""

    class TGN(nn.Module):
        def __init__(self, nodes: int = 32) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(nodes, WIDTH))
            self.register_buffer("last_update", torch.zeros(nodes))
            self.time = nn.Linear(1, 4)
            self.cell = nn.GRUCell(2 * WIDTH + 4, WIDTH)
            self.affinity = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, source: Tensor, target: Tensor, negative: Tensor, t: Tensor) -> Tensor:
            nodes = torch.cat((source, target))
            other = torch.cat((target, source))
            delta = (torch.cat((t, t)) - self.last_update[nodes]).unsqueeze(1)
            message = torch.cat(
                (self.memory[nodes], self.memory[other], torch.cos(self.time(delta))), 1
            )
            updated = self.cell(message, self.memory[nodes])
            s, d = updated.chunk(2)
            n = self.memory[negative]
            positive = self.affinity(torch.cat((s, d), 1))
            wrong = self.affinity(torch.cat((s, n), 1))
            with torch.no_grad():
                self.memory[nodes] = updated.detach()
                self.last_update[nodes] = torch.cat((t, t))
            return (
                F.binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
                + F.binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
            )  # fmt: skip

    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    return TGN(), {
        "source": order[:batch_size].clone(), "target": order[batch_size : 2 * batch_size].clone(),
        "negative": tokens(32, batch_size), "t": torch.arange(batch_size).float() + 1,
    }  # fmt: skip


def mesh_graph(batch_size: int = 4) -> Example:
    """MeshGraphNets: normalisers that accumulate sums and counts in buffers up to a limit, one mesh for all."""

    class Normaliser(nn.Module):
        def __init__(self, size: int, limit: float = 100.0) -> None:
            super().__init__()
            self.limit = limit
            self.register_buffer("count", torch.tensor(0.0))
            self.register_buffer("times", torch.tensor(0.0))
            self.register_buffer("total", torch.zeros(1, size))
            self.register_buffer("squares", torch.zeros(1, size))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                flat = x.detach().reshape(-1, x.shape[-1])
                self.total += flat.sum(0, keepdim=True)
                self.squares += flat.square().sum(0, keepdim=True)
                self.count += flat.shape[0]
                self.times += 1
            safe = torch.maximum(self.count, torch.tensor(1.0, dtype=self.count.dtype))
            mean = self.total / safe
            std = torch.sqrt((self.squares / safe - mean**2).clamp(min=0)).clamp(min=1e-2)
            return (x - mean) / std

    def mlp(into: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(into, 16), nn.ReLU(), nn.Linear(16, out), nn.LayerNorm(out))

    class Mesh(nn.Module):
        def __init__(self, nodes: int = 6) -> None:
            super().__init__()
            senders = torch.arange(nodes).repeat(2)
            receivers = torch.cat((torch.arange(nodes).roll(1), torch.arange(nodes).roll(-1)))
            self.register_buffer("senders", senders)
            self.register_buffer("receivers", receivers)
            self.register_buffer("places", floats(nodes, 2))
            self.node_norm, self.out_norm = Normaliser(3), Normaliser(3)
            self.node_in, self.edge_in = mlp(3, WIDTH), mlp(3, WIDTH)
            self.edge_steps = nn.ModuleList(mlp(3 * WIDTH, WIDTH) for _ in range(2))
            self.node_steps = nn.ModuleList(mlp(2 * WIDTH, WIDTH) for _ in range(2))
            self.decoder = nn.Linear(WIDTH, 3)

        def forward(self, state: Tensor, change: Tensor) -> Tensor:
            v = self.node_in(self.node_norm(state))
            offsets = self.places[self.senders] - self.places[self.receivers]
            e = self.edge_in(torch.cat((offsets, offsets.norm(dim=-1, keepdim=True)), -1)).expand(
                len(state), -1, -1
            )
            for edge, node in zip(self.edge_steps, self.node_steps, strict=True):
                e = e + edge(torch.cat((v[:, self.senders], v[:, self.receivers], e), -1))
                gathered = torch.zeros_like(v).index_add(1, self.receivers, e)
                v = v + node(torch.cat((v, gathered), -1))
            return F.mse_loss(self.decoder(v), self.out_norm(change))

    return Mesh(), {
        "state": floats(batch_size, 6, 3),
        "change": floats(batch_size, 6, 3).flip(0) * 3,
    }


def evoformer(batch_size: int = 2) -> Example:
    """AlphaFold 2 in small: row attention with pair bias, outer product mean, triangle updates, invariant points
    over frames built from quaternions, and the frame-aligned point error."""

    def rotations(q: Tensor) -> Tensor:
        q = F.normalize(torch.cat((torch.ones_like(q[..., :1]), q), -1), dim=-1)
        a, b, c, d = q.unbind(-1)
        rows = [
            a * a + b * b - c * c - d * d, 2 * b * c - 2 * a * d, 2 * b * d + 2 * a * c,
            2 * b * c + 2 * a * d, a * a - b * b + c * c - d * d, 2 * c * d - 2 * a * b,
            2 * b * d - 2 * a * c, 2 * c * d + 2 * a * b, a * a - b * b - c * c + d * d,
        ]  # fmt: skip
        return torch.stack(rows, -1).unflatten(-1, (3, 3))

    class Triangle(nn.Module):
        def __init__(self, pair: int, outgoing: bool) -> None:
            super().__init__()
            self.norm, self.outgoing = nn.LayerNorm(pair), outgoing
            self.project, self.gate = nn.Linear(pair, 2 * pair), nn.Linear(pair, 2 * pair)
            self.out_norm, self.out, self.out_gate = (
                nn.LayerNorm(pair),
                nn.Linear(pair, pair),
                nn.Linear(pair, pair),
            )

        def forward(self, z: Tensor, mask: Tensor) -> Tensor:
            z = self.norm(z)
            a, b = (self.project(z) * self.gate(z).sigmoid() * mask[..., None]).chunk(2, -1)
            x = torch.einsum("bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc", a, b)
            return self.out(self.out_norm(x)) * self.out_gate(z).sigmoid()

    class Fold(nn.Module):
        def __init__(self, msa: int = 8, pair: int = 4, heads: int = 2) -> None:
            super().__init__()
            self.heads = heads
            self.msa_embed, self.left, self.right = (
                nn.Embedding(21, msa),
                nn.Linear(21, pair),
                nn.Linear(21, pair),
            )
            self.relpos = nn.Linear(9, pair)
            self.norm, self.qkv, self.bias = (
                nn.LayerNorm(msa),
                nn.Linear(msa, 3 * msa, bias=False),
                nn.Linear(pair, heads, bias=False),
            )
            self.out = nn.Linear(msa, msa)
            self.opm_a, self.opm_b, self.opm = (
                nn.Linear(msa, 3),
                nn.Linear(msa, 3),
                nn.Linear(9, pair),
            )
            self.outgoing, self.incoming = Triangle(pair, True), Triangle(pair, False)
            self.points, self.head_weights = (
                nn.Linear(msa, heads * 4 * 3),
                nn.Parameter(torch.zeros(heads)),
            )
            self.ipa_bias, self.ipa_out = (
                nn.Linear(pair, heads),
                nn.Linear(heads * (2 * 3 + 2 + pair), msa),
            )
            self.frames = nn.Linear(msa, 6)

        def forward(self, msa: Tensor, mask: Tensor, places: Tensor) -> Tensor:
            b, s, n = msa.shape
            target = F.one_hot(msa[:, 0], 21).to(self.left.weight.dtype)
            z = self.left(target)[:, :, None] + self.right(target)[:, None]
            index = torch.arange(n, device=msa.device)
            offset = (index[:, None] - index).clamp(-4, 4) + 4
            z = z + self.relpos(F.one_hot(offset, 9).to(z.dtype))
            m = self.msa_embed(msa)
            pairs = mask[:, :, None] * mask[:, None]
            q, k, v = (
                one.view(b, s, n, self.heads, -1) for one in self.qkv(self.norm(m)).chunk(3, -1)
            )
            scores = torch.einsum("bsihd,bsjhd->bshij", q, k) / q.shape[-1] ** 0.5
            scores = (
                scores
                + self.bias(z).permute(0, 3, 1, 2)[:, None]
                + 1e9 * (mask[:, None, None, None] - 1)
            )
            m = m + self.out(torch.einsum("bshij,bsjhd->bsihd", scores.softmax(-1), v).flatten(-2))
            outer = torch.einsum("bsic,bsjd->bijcd", self.opm_a(m), self.opm_b(m)) / s
            z = z + self.opm(outer.flatten(-2))
            z = z + self.outgoing(z, pairs)
            z = z + self.incoming(z, pairs)
            single = m[:, 0]
            turn, move = torch.eye(3, dtype=z.dtype).expand(b, n, 3, 3), z.new_zeros(b, n, 3)
            loss = z.new_zeros(())
            for _ in range(2):
                p = self.points(single).view(b, n, self.heads * 4, 3)
                p = torch.einsum("bnij,bnpj->bnpi", turn, p) + move[:, :, None]
                pq, pk, pv = p.view(b, n, self.heads, 4, 3).split([1, 1, 2], 3)
                distance = (pq[:, :, None] - pk[:, None]).square().sum((-1, -2))
                logits = self.ipa_bias(z) - 0.5 * F.softplus(self.head_weights) * distance
                logits = logits.masked_fill(pairs[..., None] == 0, -1e9)
                attn = logits.softmax(2)
                o = torch.einsum("bijh,bjhpc->bihpc", attn, pv) - move[:, :, None, None]
                o = torch.einsum("bnji,bnhpj->bnhpi", turn, o)
                o_pair = torch.einsum("bijh,bijc->bihc", attn, z)
                feats = torch.cat(
                    (o.flatten(-2), o.square().sum(-1).add(1e-8).sqrt(), o_pair), -1
                ).flatten(-2)
                single = single + self.ipa_out(feats)
                update = self.frames(single)
                move = move + torch.einsum("bnij,bnj->bni", turn, update[..., 3:])
                turn = turn @ rotations(update[..., :3])
                local = torch.einsum("bnji,bnmj->bnmi", turn, move[:, None] - move[:, :, None])
                truth = places[:, None] - places[:, :, None]
                error = ((local - truth).square().sum(-1) + 1e-4).sqrt().clamp(max=10)
                loss = (
                    loss + (error * pairs).sum((-1, -2)).div(pairs.sum((-1, -2)) + 1e-8).mean() / 2
                )
                turn = turn.detach()
            return loss

    mask = torch.ones(batch_size, 5)
    mask[::2, 4:] = 0
    return Fold(), {
        "msa": tokens(21, batch_size, 3, 5),
        "mask": mask,
        "places": floats(batch_size, 5, 3),
    }


def protein_mpnn(batch_size: int = 2) -> Example:
    """ProteinMPNN: nearest neighbours by distance, edges gathered, a decoder masked by a given random order."""

    def gather_nodes(nodes: Tensor, index: Tensor) -> Tensor:
        flat = index.view((index.shape[0], -1)).unsqueeze(-1).expand(-1, -1, nodes.size(2))
        return torch.gather(nodes, 1, flat).view([*index.shape[:3], -1])

    class Layer(nn.Module):
        def __init__(self, into: int) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Linear(WIDTH + into, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor, e: Tensor, mask: Tensor) -> Tensor:
            x = torch.cat([h.unsqueeze(-2).expand(-1, -1, e.size(-2), -1), e], -1)
            message = mask.unsqueeze(-1) * self.w2(F.gelu(self.w1(x)))
            h = self.norm(h + message.sum(-2) / 30)
            return h + self.dense(h)

    class MPNN(nn.Module):
        def __init__(self, neighbours: int = 3) -> None:
            super().__init__()
            self.k = neighbours
            self.register_buffer("centres", torch.linspace(0.0, 4.0, 4))
            self.edge, self.node = nn.Linear(4, WIDTH), nn.Parameter(torch.zeros(WIDTH))
            self.encoder, self.decoder = Layer(2 * WIDTH), Layer(3 * WIDTH)
            self.words, self.out = nn.Embedding(21, WIDTH), nn.Linear(WIDTH, 21)

        def forward(self, x: Tensor, s: Tensor, mask: Tensor, order: Tensor) -> Tensor:
            both = mask.unsqueeze(1) * mask.unsqueeze(2)
            d = both * torch.sqrt(((x.unsqueeze(1) - x.unsqueeze(2)) ** 2).sum(3) + 1e-6)
            d = d + (1.0 - both) * d.max(-1, keepdim=True)[0]
            near, index = torch.topk(d, self.k, dim=-1, largest=False)
            e = self.edge(torch.exp(-((near.unsqueeze(-1) - self.centres) ** 2)))
            h = self.node.expand(*s.shape, -1)
            valid = mask.unsqueeze(-1) * gather_nodes(mask.unsqueeze(-1), index).squeeze(-1)
            h = self.encoder(h, torch.cat((e, gather_nodes(h, index)), -1), valid)
            ranks = torch.argsort(order, dim=-1)
            permute = F.one_hot(ranks, num_classes=s.shape[1]).to(h.dtype)
            upper = 1 - torch.triu(torch.ones(s.shape[1], s.shape[1], dtype=h.dtype))
            before = torch.einsum("ij,biq,bjp->bqp", upper, permute, permute)
            seen = torch.gather(before, 2, index).unsqueeze(-1)
            words = gather_nodes(self.words(s), index) * seen
            h = self.decoder(h, torch.cat((e, gather_nodes(h, index), words), -1), valid)
            log_probs = F.log_softmax(self.out(h), dim=-1)
            loss = F.nll_loss(log_probs.flatten(0, 1), s.flatten(), reduction="none").view_as(mask)
            return (loss * mask).sum() / mask.sum()

    mask = torch.ones(batch_size, 6)
    mask[1::2, 5:] = 0
    order = floats(batch_size, 6).abs()
    return MPNN(), {
        "x": floats(batch_size, 6, 3),
        "s": tokens(21, batch_size, 6),
        "mask": mask,
        "order": order,
    }


# -- language -----------------------------------------------------------------------------------------


def inside_parser(batch_size: int = 4) -> Example:
    """A neural PCFG: the inside algorithm over a chart that is filled in place, span by span, in log space."""

    class PCFG(nn.Module):
        def __init__(self, nt: int = 3, t: int = 4, words: int = 12) -> None:
            super().__init__()
            self.nt, self.t = nt, t
            self.root_emb, self.nt_emb, self.t_emb = (
                nn.Parameter(floats(k, WIDTH)) for k in (1, nt, t)
            )
            self.root, self.rule, self.vocab = (
                nn.Linear(WIDTH, nt),
                nn.Linear(WIDTH, (nt + t) ** 2),
                nn.Linear(WIDTH, words),
            )

        def forward(self, x: Tensor) -> Tensor:
            b, n = x.shape
            unary = self.vocab(self.t_emb).log_softmax(-1).t()[x]
            rules = (
                self.rule(self.nt_emb)
                .log_softmax(-1)
                .view(self.nt, self.nt + self.t, self.nt + self.t)
            )
            root = self.root(self.root_emb).log_softmax(-1).squeeze(0)
            beta = unary.new_full((b, n, n, self.nt + self.t), -1e5)
            for k in range(n):
                beta[:, k, k, self.nt :] = unary[:, k]
            for w in range(1, n):
                for s in range(n - w):
                    t = s + w
                    left, right = beta[:, s, s:t].clone(), beta[:, s + 1 : t + 1, t].clone()
                    pairs = torch.logsumexp(left[:, :, :, None] + right[:, :, None], 1)
                    beta[:, s, t, : self.nt] = torch.logsumexp(
                        (pairs[:, None] + rules).flatten(2), -1
                    )
            return -torch.logsumexp(beta[:, 0, n - 1, : self.nt] + root, 1).mean()

    return PCFG(), {"x": tokens(12, batch_size, 5)}


def biaffine_trees(batch_size: int = 4) -> Example:
    """A dependency parser: biaffine scores, the matrix-tree theorem by a log-determinant, masked by lengths."""

    class Parser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
            self.lstm = nn.LSTM(
                WIDTH, WIDTH // 2, batch_first=True, bidirectional=True, num_layers=2
            )
            self.dep, self.head = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
            self.weight = nn.Parameter(floats(7, 6) * 0.3)

        def forward(self, words: Tensor, heads: Tensor) -> Tensor:
            mask = words.ne(0)
            mask[:, 0] = False
            h, _ = self.lstm(self.embed(words))
            dep, head = F.leaky_relu(self.dep(h), 0.1), F.leaky_relu(self.head(h), 0.1)
            dep = torch.cat((dep, torch.ones_like(dep[..., :1])), -1)
            scores = dep @ self.weight @ head.mT
            n = words.shape[1]
            valid = mask.unsqueeze(2) & (mask.unsqueeze(1) | (torch.arange(n) == 0))
            valid = valid & ~torch.eye(n, dtype=torch.bool)
            a = scores.exp().masked_fill(~valid, 0.0)
            laplacian = -a[:, 1:, 1:] + torch.diag_embed(a[:, 1:].sum(-1))
            identity = torch.diag_embed((~mask[:, 1:]).to(a.dtype))
            log_z = torch.linalg.slogdet(laplacian + identity).logabsdet
            gold = scores.gather(-1, heads.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0).sum(-1)
            return (log_z - gold).sum() / mask.sum()

    words = tokens(20, batch_size, 6, low=1)
    words[1::2, 4:] = 0
    heads = torch.tensor([0, 0, 1, 1, 3, 3]).expand(batch_size, 6).contiguous()
    return Parser(), {"words": words, "heads": heads}


def pointer_generator(batch_size: int = 4) -> Example:
    """See's summariser: coverage, a copy distribution scattered into an extended vocabulary, teacher forcing by
    coins that come with the batch, its own argmax otherwise."""

    class Pointer(nn.Module):
        def __init__(self, words: int = 14) -> None:
            super().__init__()
            self.words = words
            self.embed = nn.Embedding(words, WIDTH)
            self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
            self.wh, self.ws, self.wc, self.v = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(1, WIDTH),
                nn.Linear(WIDTH, 1),
            )
            self.out, self.gen = nn.Linear(2 * WIDTH, words), nn.Linear(3 * WIDTH, 1)

        def forward(
            self, source: Tensor, extended: Tensor, target: Tensor, coins: Tensor
        ) -> Tensor:
            keys, state = self.encoder(self.embed(source))
            state = state.squeeze(0)
            coverage, context = keys.new_zeros(source.shape), keys.new_zeros(state.shape)
            word, losses = torch.zeros_like(source[:, 0]), []
            for t in range(target.shape[1]):
                embedded = self.embed(word)
                state = self.cell(torch.cat((embedded, context), -1), state)
                energy = self.v(
                    torch.tanh(
                        self.wh(keys)
                        + self.ws(state).unsqueeze(1)
                        + self.wc(coverage.unsqueeze(-1))
                    )
                )
                attn = energy.squeeze(-1).softmax(-1)
                context = (attn.unsqueeze(1) @ keys).squeeze(1)
                vocab = self.out(torch.cat((state, context), -1)).softmax(-1)
                p = self.gen(torch.cat((state, context, embedded), -1)).sigmoid()
                final = torch.cat((p * vocab, vocab.new_zeros(len(vocab), 3)), 1)
                final = final.scatter_add(1, extended, (1 - p) * attn)
                gold = final.gather(1, target[:, t : t + 1]).squeeze(1)
                losses.append(-(gold + 1e-10).log() + torch.min(attn, coverage).sum(-1))
                coverage = coverage + attn
                guess = final[:, : self.words].argmax(-1)
                word = torch.where(coins[:, t] < 0.5, target[:, t].clamp(max=self.words - 1), guess)
            return torch.stack(losses, 1).mean(1).mean()

    return Pointer(), {
        "source": tokens(14, batch_size, 6), "extended": tokens(17, batch_size, 6),
        "target": tokens(17, batch_size, 4), "coins": floats(batch_size, 4).abs(),
    }  # fmt: skip


def sparse_retriever(batch_size: int = 8) -> Example:
    """SPLADE: max over tokens of log-saturated logits, in-batch negatives beside hard ones, FLOPS regulariser
    (squares of means over the batch), distilled margins."""

    class Splade(nn.Module):
        def __init__(self, words: int = 24) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.bias = nn.Parameter(torch.zeros(words))

        def encode(self, ids: Tensor) -> Tensor:
            mask = ids.ne(0)
            h = self.encoder(self.embed(ids), src_key_padding_mask=~mask)
            logits = F.linear(h, self.embed.weight, self.bias)
            return torch.max(torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1), dim=1).values

        def forward(
            self, query: Tensor, positive: Tensor, negative: Tensor, margin: Tensor
        ) -> Tensor:
            q, p, n = self.encode(query), self.encode(positive), self.encode(negative)
            scores = torch.cat([q @ p.t(), (q * n).sum(-1, keepdim=True)], 1)
            nll = F.nll_loss(scores.log_softmax(1), torch.arange(len(q), device=q.device))
            flops = (q.abs().mean(0) ** 2).sum() + (p.abs().mean(0) ** 2).sum()
            distilled = F.mse_loss((q * p).sum(-1) - (q * n).sum(-1), margin)
            return nll + 0.01 * flops + 0.1 * distilled

    q, p = tokens(24, batch_size, 4, low=1), tokens(24, batch_size, 6, low=1)
    p[::3, 4:] = 0
    return Splade(), {
        "query": q,
        "positive": p,
        "negative": p.flip(0),
        "margin": floats(batch_size),
    }


def late_interaction(batch_size: int = 6) -> Example:
    """ColBERT: every query token meets its best document token, all documents of the batch against all queries."""

    class ColBERT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.project = (
                nn.Embedding(30, WIDTH),
                nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
                nn.Linear(WIDTH, 4, bias=False),
            )
            self.skip = {0, 7}

        def encode(self, ids: Tensor) -> Tensor:
            h = self.embed(ids)
            h = h + F.gelu(self.mix(h.transpose(1, 2))).transpose(1, 2)
            return F.normalize(self.project(h), p=2, dim=2)

        def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
            q, d = self.encode(queries), self.encode(documents)
            keep = torch.ones_like(documents, dtype=torch.bool)
            for word in self.skip:
                keep &= documents != word
            scores = torch.einsum("qih,djh->qdij", q, d).masked_fill(~keep[None, :, None], -9999.0)
            scores = scores.max(-1).values.sum(-1) * 20
            return F.cross_entropy(scores, torch.arange(scores.size(0)))

    return ColBERT(), {"queries": tokens(30, batch_size, 4), "documents": tokens(30, batch_size, 7)}


def ranked_lists(batch_size: int = 4) -> Example:
    """LambdaRank and ListNet over lists: discounts from sorted scores, pairs by broadcasting, ideal gains per query."""

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1)
            )

        def forward(self, x: Tensor, relevance: Tensor) -> Tensor:
            b, n, d = x.shape
            s = self.net(x.view(b * n, d)).view(b, n)
            order = s.detach().argsort(1, descending=True)
            ranks = torch.empty_like(order).scatter_(1, order, torch.arange(n).expand(b, n))
            gains = 2.0**relevance - 1
            discount = 1 / torch.log2(ranks + 2.0).to(s.dtype)
            ideal = (
                gains.sort(1, descending=True).values
                / torch.log2(torch.arange(n, dtype=s.dtype) + 2)
            ).sum(1)
            delta = (gains[:, :, None] - gains[:, None]).abs() * (
                discount[:, :, None] - discount[:, None]
            ).abs()
            delta = delta / ideal.clamp(min=1e-3)[:, None, None]
            better = relevance[:, :, None] > relevance[:, None]
            pairs = F.softplus(-(s[:, :, None] - s[:, None])) * delta
            lambda_loss = pairs[better].sum() / b
            list_net = -(relevance.to(s.dtype).softmax(1) * s.log_softmax(1)).sum(1).mean()
            return lambda_loss + list_net

    return Ranker(), {"x": floats(batch_size, 5, WIDTH), "relevance": tokens(4, batch_size, 5)}


def rotated_relations(batch_size: int = 8) -> Example:
    """RotatE: entities as complex numbers, relations as phases, self-adversarial negatives, subsampling weights."""

    class RotatE(nn.Module):
        def __init__(self, entities: int = 15, relations: int = 4, gamma: float = 6.0) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.Tensor([gamma]), requires_grad=False)
            self.range = nn.Parameter(torch.Tensor([(gamma + 2.0) / WIDTH]), requires_grad=False)
            self.entity = nn.Parameter(torch.zeros(entities, 2 * WIDTH))
            self.relation = nn.Parameter(torch.zeros(relations, WIDTH))
            for one in (self.entity, self.relation):
                nn.init.uniform_(one, -self.range.item(), self.range.item())

        def score(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
            re_head, im_head = torch.chunk(head, 2, dim=2)
            re_tail, im_tail = torch.chunk(tail, 2, dim=2)
            phase = relation / (self.range.item() / math.pi)
            re, im = torch.cos(phase), torch.sin(phase)
            re_score = re_head * re - im_head * im - re_tail
            im_score = re_head * im + im_head * re - im_tail
            return self.gamma.item() - torch.stack([re_score, im_score]).norm(dim=0).sum(dim=2)

        def forward(self, sample: Tensor, negative: Tensor, weight: Tensor) -> Tensor:
            head = torch.index_select(self.entity, 0, sample[:, 0]).unsqueeze(1)
            relation = torch.index_select(self.relation, 0, sample[:, 1]).unsqueeze(1)
            tail = torch.index_select(self.entity, 0, sample[:, 2]).unsqueeze(1)
            tails = torch.index_select(self.entity, 0, negative.view(-1)).view(*negative.shape, -1)
            wrong = self.score(head, relation, tails)
            wrong = (F.softmax(wrong * 1.0, dim=1).detach() * F.logsigmoid(-wrong)).sum(dim=1)
            right = F.logsigmoid(self.score(head, relation, tail)).squeeze(dim=1)
            total = weight.sum()
            return (-(weight * right).sum() / total - (weight * wrong).sum() / total) / 2

    sample = torch.stack(
        (tokens(15, batch_size), tokens(4, batch_size), tokens(15, batch_size).flip(0)), 1
    )
    return RotatE(), {
        "sample": sample,
        "negative": tokens(15, batch_size, 5),
        "weight": floats(batch_size).abs() + 0.1,
    }


# -- speech -------------------------------------------------------------------------------------------


def location_sensitive(batch_size: int = 4) -> Example:
    """Tacotron 2's decoder: location-sensitive attention, two LSTM cells, stop tokens, a postnet with batch norm."""

    class Tacotron(nn.Module):
        def __init__(self, mel: int = 5) -> None:
            super().__init__()
            self.mel = mel
            self.embed = nn.Embedding(12, WIDTH)
            self.prenet = nn.Sequential(
                nn.Linear(mel, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 6), nn.ReLU()
            )
            self.attention_rnn, self.decoder_rnn = (
                nn.LSTMCell(6 + WIDTH, WIDTH),
                nn.LSTMCell(2 * WIDTH, WIDTH),
            )
            self.query, self.memory, self.v = (
                nn.Linear(WIDTH, 6, bias=False),
                nn.Linear(WIDTH, 6, bias=False),
                nn.Linear(6, 1),
            )
            self.location, self.location_dense = (
                nn.Conv1d(2, 4, 5, padding=2, bias=False),
                nn.Linear(4, 6, bias=False),
            )
            self.project, self.gate = nn.Linear(2 * WIDTH, mel), nn.Linear(2 * WIDTH, 1)
            self.postnet = nn.Sequential(
                nn.Conv1d(mel, 8, 3, padding=1),
                nn.BatchNorm1d(8),
                nn.Tanh(),
                nn.Conv1d(8, mel, 3, padding=1),
            )

        def forward(self, text: Tensor, lengths: Tensor, mels: Tensor, stops: Tensor) -> Tensor:
            memory = self.embed(text)
            processed = self.memory(memory)
            mask = torch.arange(text.size(1)) >= lengths[:, None]
            frames = torch.cat((mels.new_zeros(len(mels), 1, self.mel), mels[:, :-1]), 1)
            frames = self.prenet(frames)
            b = len(text)
            ah, ac, dh, dc, context = (memory.new_zeros(b, WIDTH) for _ in range(5))
            weights, cumulated = (memory.new_zeros(text.shape) for _ in range(2))
            outs, gates = [], []
            for t in range(frames.size(1)):
                ah, ac = self.attention_rnn(torch.cat((frames[:, t], context), -1), (ah, ac))
                both = torch.cat((weights.unsqueeze(1), cumulated.unsqueeze(1)), 1)
                located = self.location_dense(self.location(both).transpose(1, 2))
                energies = self.v(
                    torch.tanh(self.query(ah.unsqueeze(1)) + located + processed)
                ).squeeze(-1)
                weights = F.softmax(energies.masked_fill(mask, -float("inf")), dim=1)
                context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
                cumulated = cumulated + weights
                dh, dc = self.decoder_rnn(torch.cat((ah, context), -1), (dh, dc))
                last = torch.cat((dh, context), 1)
                outs.append(self.project(last))
                gates.append(self.gate(last).squeeze(1))
            mel = torch.stack(outs, 1).transpose(1, 2)
            post = mel + self.postnet(mel)
            truth = mels.transpose(1, 2)
            gate = F.binary_cross_entropy_with_logits(torch.stack(gates, 1), stops)
            return F.mse_loss(mel, truth) + F.mse_loss(post, truth) + gate

    return Tacotron(), {
        "text": tokens(12, batch_size, 6), "lengths": tokens(7, batch_size, low=3),
        "mels": floats(batch_size, 4, 5), "stops": tokens(2, batch_size, 4).float(),
    }  # fmt: skip


def monotonic_alignment(batch_size: int = 3) -> Example:
    """Glow-TTS: the best monotonic path by dynamic programming without gradients, filled in place, then followed
    backwards; durations learnt from it."""

    class Aligned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mean = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 4)
            self.duration = nn.Linear(WIDTH, 1)
            self.flow = nn.Conv1d(4, 4, 3, padding=1)

        @torch.no_grad()
        def path(self, value: Tensor, mask: Tensor) -> Tensor:
            value = value * mask
            b, t_x, t_y = value.shape
            direction = torch.zeros(value.shape, dtype=torch.int64)
            v = torch.zeros((b, t_x), dtype=value.dtype)
            x_range = torch.arange(t_x, dtype=torch.int64).unsqueeze(0)
            for j in range(t_y):
                v0 = F.pad(v, (1, 0), value=-1e9)[:, :-1]
                max_mask = v >= v0
                v_max = torch.where(max_mask, v, v0)
                direction[:, :, j] = max_mask.long()
                index_mask = x_range <= j
                v = torch.where(index_mask, v_max + value[:, :, j], -1e9)
            direction = torch.where(mask.bool(), direction, 1)
            path = torch.zeros_like(value)
            index = mask[:, :, 0].sum(1).long() - 1
            index_range = torch.arange(b)
            for j in reversed(range(t_y)):
                path[index_range, index, j] = 1
                index = (index + direction[index_range, index, j] - 1).clamp(min=0)
            return path * mask

        def forward(
            self, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor
        ) -> Tensor:
            x = self.embed(text)
            x_mask = (torch.arange(text.shape[1]) < text_lengths[:, None]).to(x.dtype)
            y_mask = (torch.arange(mel.shape[2]) < mel_lengths[:, None]).to(x.dtype)
            mean = self.mean(x).transpose(1, 2)
            z = self.flow(mel) * y_mask[:, None]
            log_p = (
                -0.5 * (z.square().sum(1)[:, None] + mean.square().sum(1)[..., None]) + mean.mT @ z
            )
            attn = self.path(log_p.detach(), x_mask[:, :, None] * y_mask[:, None])
            aligned = mean @ attn
            log_d = torch.log(attn.sum(-1) + 1e-8) * x_mask
            guess = self.duration(x.detach()).squeeze(-1) * x_mask
            mle = ((z - aligned).square() * y_mask[:, None]).sum() / (y_mask.sum() * 4)
            return mle + (guess - log_d).square().sum() / x_mask.sum()

    return Aligned(), {
        "text": tokens(12, batch_size, 4), "text_lengths": tokens(5, batch_size, low=2),
        "mel": floats(batch_size, 4, 7), "mel_lengths": tokens(8, batch_size, low=5),
    }  # fmt: skip


def sinc_filters(batch_size: int = 4) -> Example:
    """SincNet: band-pass filters built from learned cut-offs, layer norm over time, a max-pooled stack."""

    class Sinc(nn.Module):
        def __init__(self, out: int = 6, kernel: int = 11, rate: int = 1000) -> None:
            super().__init__()
            self.kernel, self.rate = kernel, rate
            mel = torch.linspace(30, 450, out + 1)
            self.low_hz, self.band_hz = (
                nn.Parameter(mel[:-1].view(-1, 1)),
                nn.Parameter(torch.diff(mel).view(-1, 1)),
            )
            n = torch.linspace(0, kernel / 2 - 1, steps=kernel // 2)
            self.window = 0.54 - 0.46 * torch.cos(2 * math.pi * n / kernel)
            self.n = 2 * math.pi * torch.arange(-(kernel - 1) / 2.0, 0).view(1, -1) / rate

        def forward(self, x: Tensor) -> Tensor:
            self.n, self.window = self.n.to(x), self.window.to(x)
            low = 5 + self.low_hz.abs()
            high = torch.clamp(low + 5 + self.band_hz.abs(), 5, self.rate / 2)
            band = (high - low)[:, 0]
            left = (torch.sin(high @ self.n) - torch.sin(low @ self.n)) / (self.n / 2) * self.window
            centre = 2 * band.view(-1, 1)
            filters = torch.cat([left, centre, left.flip(1)], 1) / (2 * band[:, None])
            return F.conv1d(x, filters.unsqueeze(1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinc, self.norm = Sinc(), nn.LayerNorm([6, 10])
            self.conv, self.head = nn.Conv1d(6, 8, 3), nn.Linear(8, 4)

        def forward(self, wave: Tensor, speaker: Tensor) -> Tensor:
            x = F.leaky_relu(self.norm(F.max_pool1d(self.sinc(wave.unsqueeze(1)).abs(), 3)), 0.2)
            x = F.dropout(F.relu(self.conv(x)), 0.1, self.training).mean(-1)
            return F.nll_loss(self.head(x).log_softmax(1), speaker)

    return Net(), {"wave": floats(batch_size, 42), "speaker": tokens(4, batch_size)}


def permutation_invariant(batch_size: int = 3) -> Example:
    """DPRNN with permutation-invariant SI-SNR: overlapped chunks, two LSTMs, the best of all orders of sources."""

    class Separator(nn.Module):
        def __init__(self, sources: int = 3, chunk: int = 4) -> None:
            super().__init__()
            self.sources, self.chunk = sources, chunk
            self.encoder, self.decoder = (
                nn.Conv1d(1, 6, 4, stride=2, bias=False),
                nn.ConvTranspose1d(6, 1, 4, stride=2, bias=False),
            )
            self.intra, self.inter = (
                nn.LSTM(6, 3, batch_first=True, bidirectional=True),
                nn.LSTM(6, 6, batch_first=True),
            )
            self.intra_out, self.norm = nn.Linear(6, 6), nn.GroupNorm(1, 6)
            self.mask = nn.Conv2d(6, 6 * sources, 1)

        def forward(self, mixture: Tensor, truth: Tensor) -> Tensor:
            w = F.relu(self.encoder(mixture.unsqueeze(1)))
            b, f, length = w.shape
            half = self.chunk // 2
            padded = F.pad(w, (half, half + (-length) % half))
            x = padded.unfold(2, self.chunk, half).permute(0, 1, 3, 2)
            _, _, k, s = x.shape
            y = self.intra(x.permute(0, 3, 2, 1).reshape(b * s, k, f))[0]
            y = self.intra_out(y).view(b, s, k, f).permute(0, 3, 2, 1)
            x = x + self.norm(y)
            y = (
                self.inter(x.permute(0, 2, 3, 1).reshape(b * k, s, f))[0]
                .view(b, k, s, f)
                .permute(0, 3, 1, 2)
            )
            m = self.mask(x + y).view(b * self.sources, f, k, s)
            total = padded.shape[2]
            m = F.fold(
                m.reshape(-1, f * k, s), (1, total), (1, self.chunk), stride=(1, half)
            ).squeeze(2)
            m = torch.sigmoid(m[:, :, half : half + length]).view(b, self.sources, f, length)
            out = self.decoder((m * w.unsqueeze(1)).flatten(0, 1)).view(b, self.sources, -1)
            out, goal = out - out.mean(-1, keepdim=True), truth - truth.mean(-1, keepdim=True)
            dot = (out.unsqueeze(2) * goal.unsqueeze(1)).sum(-1, keepdim=True)
            target = (
                dot * goal.unsqueeze(1) / (goal.square().sum(-1, keepdim=True).unsqueeze(1) + 1e-8)
            )
            noise = out.unsqueeze(2) - target
            snr = 10 * torch.log10(target.square().sum(-1) / (noise.square().sum(-1) + 1e-8) + 1e-8)
            orders = torch.tensor(list(itertools.permutations(range(self.sources))))
            each = torch.stack(
                [snr[:, torch.arange(self.sources), order].mean(-1) for order in orders], 1
            )
            return -each.max(1).values.mean()

    return Separator(), {"mixture": floats(batch_size, 22), "truth": floats(batch_size, 3, 22)}


# -- pictures and places --------------------------------------------------------------------------------


def raft(batch_size: int = 2) -> Example:
    """RAFT: all pairs of pixels, a pyramid looked up around moving centres, a convolutional GRU, convex upsampling."""

    class Raft(nn.Module):
        def __init__(self, radius: int = 1, levels: int = 2) -> None:
            super().__init__()
            self.radius, self.levels = radius, levels
            self.features = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
            )
            self.context = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
            planes = levels * (2 * radius + 1) ** 2
            self.motion = nn.Conv2d(planes + 2, 6, 3, padding=1)
            self.z, self.r, self.q = (nn.Conv2d(8 + 8 + 8, 8, 3, padding=1) for _ in range(3))
            self.head, self.mask = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(8, 4 * 9, 1)

        def grid(self, x: Tensor) -> Tensor:
            b, _, h, w = x.shape
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            return torch.stack((xs, ys)).to(x.dtype)[None].repeat(b, 1, 1, 1)

        def lookup(self, pyramid: list[Tensor], coords: Tensor) -> Tensor:
            coords = coords.permute(0, 2, 3, 1)
            b, h, w, _ = coords.shape
            d = torch.linspace(-self.radius, self.radius, 2 * self.radius + 1, dtype=coords.dtype)
            delta = torch.stack(torch.meshgrid(d, d, indexing="ij"), dim=-1)
            found = []
            for level, corr in enumerate(pyramid):
                where = coords.reshape(b * h * w, 1, 1, 2) / 2**level + delta[None]
                height, width = corr.shape[-2:]
                xs, ys = where.split([1, 1], dim=-1)
                where = torch.cat([2 * xs / (width - 1) - 1, 2 * ys / (height - 1) - 1], -1)
                found.append(F.grid_sample(corr, where, align_corners=True).view(b, h, w, -1))
            return torch.cat(found, -1).permute(0, 3, 1, 2).contiguous()

        def upsample(self, flow: Tensor, mask: Tensor) -> Tensor:
            b, _, h, w = flow.shape
            mask = torch.softmax(mask.view(b, 1, 9, 2, 2, h, w), dim=2)
            up = F.unfold(2 * flow, [3, 3], padding=1).view(b, 2, 9, 1, 1, h, w)
            return (mask * up).sum(2).permute(0, 1, 4, 2, 5, 3).reshape(b, 2, 2 * h, 2 * w)

        def forward(self, first: Tensor, second: Tensor, flow: Tensor, valid: Tensor) -> Tensor:
            f1, f2 = self.features(torch.cat((first, second), 0)).chunk(2, 0)
            b, c, h, w = f1.shape
            corr = (f1.flatten(2).transpose(1, 2) @ f2.flatten(2) / c**0.5).reshape(
                b * h * w, 1, h, w
            )
            pyramid = [corr]
            for _ in range(self.levels - 1):
                pyramid.append(F.avg_pool2d(pyramid[-1], 2, stride=2))
            net, inp = self.context(first).split([8, 8], 1)
            net, inp = torch.tanh(net), torch.relu(inp)
            start = self.grid(f1)
            coords, loss = start.clone(), flow.new_zeros(())
            for i in range(3):
                coords = coords.detach()
                moved = coords - start
                motion = torch.cat(
                    (
                        F.relu(self.motion(torch.cat((self.lookup(pyramid, coords), moved), 1))),
                        moved,
                    ),
                    1,
                )
                x = torch.cat((inp, motion), 1)
                z, r = (
                    torch.sigmoid(self.z(torch.cat((net, x), 1))),
                    torch.sigmoid(self.r(torch.cat((net, x), 1))),
                )
                net = (1 - z) * net + z * torch.tanh(self.q(torch.cat((r * net, x), 1)))
                coords = coords + self.head(net)
                up = self.upsample(coords - start, 0.25 * self.mask(net))
                ok = (valid >= 0.5) & (flow.square().sum(1).sqrt() < 400)
                loss = loss + 0.8 ** (2 - i) * (ok[:, None] * (up - flow).abs()).mean()
            return loss

    return Raft(), {
        "first": floats(batch_size, 3, 8, 8), "second": floats(batch_size, 3, 8, 8).roll(1, -1),
        "flow": floats(batch_size, 2, 8, 8), "valid": tokens(2, batch_size, 8, 8).float(),
    }  # fmt: skip


def aligned_regions(batch_size: int = 2) -> Example:
    """A two-stage detector's head: regions cut by grid_sample, levels by area, masks of the true class, boxes encoded."""

    class Heads(nn.Module):
        def __init__(self, classes: int = 4) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 2, 1)])
            self.lateral, self.smooth = (
                nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2)),
                nn.Conv2d(6, 6, 3, padding=1),
            )
            self.fc, self.cls, self.box = (
                nn.Linear(6 * 4, 16),
                nn.Linear(16, classes),
                nn.Linear(16, classes * 4),
            )
            self.mask = nn.Sequential(
                nn.ConvTranspose2d(6, 6, 2, 2), nn.ReLU(), nn.Conv2d(6, classes, 1)
            )
            self.register_buffer("weights", torch.tensor([10.0, 10.0, 5.0, 5.0]))

        def align(self, features: Tensor, rois: Tensor, size: int = 2) -> Tensor:
            b, n, _ = rois.shape
            steps = (torch.arange(size, dtype=rois.dtype) + 0.5) / size
            xs = rois[..., 0:1] + (rois[..., 2:3] - rois[..., 0:1]) * steps
            ys = rois[..., 1:2] + (rois[..., 3:4] - rois[..., 1:2]) * steps
            grid = torch.stack(
                (xs[:, :, None].expand(b, n, size, size), ys[..., None].expand(b, n, size, size)),
                -1,
            )
            flat = F.grid_sample(
                features, grid.reshape(b, n * size, size, 2) * 2 - 1, align_corners=False
            )
            return flat.view(b, -1, n, size, size).transpose(1, 2)

        def forward(
            self, image: Tensor, rois: Tensor, labels: Tensor, boxes: Tensor, masks: Tensor
        ) -> dict[str, Tensor]:
            c1 = F.relu(self.body[0](image))
            c2 = F.relu(self.body[1](c1))
            p2 = self.lateral[1](c2)
            p1 = self.smooth(
                self.lateral[0](c1) + F.interpolate(p2, scale_factor=2, mode="nearest")
            )
            area = (rois[..., 2] - rois[..., 0]) * (rois[..., 3] - rois[..., 1])
            level = torch.floor(2 + torch.log2(area.sqrt() + 1e-6)).clamp(0, 1)[
                ..., None, None, None
            ]
            pooled = torch.where(level == 0, self.align(p1, rois), self.align(p2, rois))
            b, n = labels.shape
            h = F.relu(self.fc(pooled.flatten(2)))
            logits, deltas = self.cls(h).flatten(0, 1), self.box(h).view(b * n, -1, 4)
            labels = labels.flatten()
            wide, tall = rois[..., 2] - rois[..., 0], rois[..., 3] - rois[..., 1]
            encoded = torch.stack((
                (boxes[..., 0] - rois[..., 0]) / wide, (boxes[..., 1] - rois[..., 1]) / tall,
                torch.log((boxes[..., 2] - boxes[..., 0]) / wide), torch.log((boxes[..., 3] - boxes[..., 1]) / tall),
            ), -1) * self.weights  # fmt: skip
            positive = torch.where(labels > 0)[0]
            box_loss = (
                F.smooth_l1_loss(
                    deltas[positive, labels[positive]],
                    encoded.flatten(0, 1)[positive],
                    beta=1 / 9,
                    reduction="sum",
                )
                / labels.numel()
            )
            m = self.mask(pooled.flatten(0, 1))
            own = m[torch.arange(len(labels)), labels]
            mask_loss = F.binary_cross_entropy_with_logits(
                own[positive], masks.flatten(0, 1)[positive]
            )
            return {"loss": F.cross_entropy(logits, labels) + box_loss + mask_loss}

    corners = floats(batch_size, 3, 2).sigmoid() * 0.5
    rois = torch.cat(
        (corners, corners + 0.2 + 0.2 * floats(batch_size, 3, 2).flip(1).sigmoid()), -1
    )
    labels = tokens(4, batch_size, 3)
    labels[:, 0] = 1
    return Heads(), {
        "image": floats(batch_size, 3, 8, 8), "rois": rois, "labels": labels, "boxes": rois + 0.03,
        "masks": tokens(2, batch_size, 3, 4, 4).float(),
    }  # fmt: skip


def pillars(batch_size: int = 2) -> Example:
    """PointPillars: points scattered to pillars by maximum, pillars to a picture by index, and a dense head."""

    class Pillars(nn.Module):
        def __init__(self, grid: int = 4) -> None:
            super().__init__()
            self.grid = grid
            self.net, self.norm = (
                nn.Linear(5, 8, bias=False),
                nn.BatchNorm1d(8, eps=1e-3, momentum=0.01),
            )
            self.head = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 2, 2, 2)
            )

        def forward(self, points: Tensor, heat: Tensor) -> Tensor:
            b, n, _ = points.shape
            cell = (points[..., :2].sigmoid() * self.grid).long().clamp(max=self.grid - 1)
            index = (
                cell[..., 0] * self.grid + cell[..., 1] + torch.arange(b)[:, None] * self.grid**2
            )
            flat, index = points.reshape(b * n, 3), index.reshape(-1)
            cells = b * self.grid**2
            sums = flat.new_zeros(cells, 3).index_add_(0, index, flat)
            counts = torch.bincount(index, minlength=cells).clamp(min=1).to(flat.dtype)
            offset = flat - (sums / counts[:, None])[index]
            h = F.relu(self.norm(self.net(torch.cat((flat, offset[:, :2]), 1))))
            canvas = h.new_zeros(cells, 8).scatter_reduce_(
                0, index[:, None].expand(-1, 8), h, reduce="amax", include_self=False
            )
            picture = canvas.view(b, self.grid, self.grid, 8).permute(0, 3, 1, 2)
            return F.binary_cross_entropy_with_logits(self.head(picture), heat)

    return Pillars(), {
        "points": floats(batch_size, 12, 3),
        "heat": tokens(2, batch_size, 2, 8, 8).float(),
    }


def softmax_splatting(batch_size: int = 2) -> Example:
    """Frame interpolation: pixels are thrown forward along a flow onto four neighbours, weighed by importance."""

    class Splat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow, self.metric, self.synth = (
                nn.Conv2d(6, 2, 3, padding=1),
                nn.Conv2d(3, 1, 1),
                nn.Conv2d(6, 3, 3, padding=1),
            )

        def splat(self, x: Tensor, flow: Tensor) -> Tensor:
            b, c, h, w = x.shape
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            px, py = xs + flow[:, 0], ys + flow[:, 1]
            x0, y0 = px.floor(), py.floor()
            out = x.new_zeros(b, c, h * w)
            for dx, dy in ((0, 0), (0, 1), (1, 0), (1, 1)):
                cx, cy = x0 + dx, y0 + dy
                weight = (1 - (px - cx).abs()) * (1 - (py - cy).abs())
                inside = (cx >= 0) & (cx < w) & (cy >= 0) & (cy < h)
                index = (
                    (cy.clamp(0, h - 1) * w + cx.clamp(0, w - 1))
                    .long()
                    .view(b, 1, -1)
                    .expand(-1, c, -1)
                )
                out.scatter_add_(2, index, (x * (weight * inside)[:, None]).flatten(2))
            return out.view(b, c, h, w)

        def forward(self, first: Tensor, last: Tensor, middle: Tensor) -> Tensor:
            flow = self.flow(torch.cat((first, last), 1))
            z = self.metric(first).exp()
            both = self.splat(torch.cat((first * z, z), 1), 0.5 * flow)
            warped = both[:, :-1] / (both[:, -1:] + 1e-7)
            out = self.synth(torch.cat((warped, last), 1))
            return torch.sqrt((out - middle) ** 2 + 1e-6).mean()

    return Splat(), {
        name: floats(batch_size, 3, 6, 6).roll(i, -1)
        for i, name in enumerate(("first", "last", "middle"))
    }


def mip_rays(batch_size: int = 4) -> Example:
    """mip-NeRF 360: a proposal network, resampling by inverse CDF without gradients, integrated encodings, the
    interlevel and the distortion loss."""

    class Field(nn.Module):
        def __init__(self, width: int, colours: bool) -> None:
            super().__init__()
            self.register_buffer("scales", 2.0 ** torch.arange(4))
            self.net, self.sigma = (
                nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
                nn.Linear(width, 1),
            )
            self.rgb = nn.Sequential(nn.Linear(width + 3, 3), nn.Sigmoid()) if colours else None

        def forward(self, mean: Tensor, var: Tensor, d: Tensor) -> tuple[Tensor, Tensor | None]:
            y = (mean[..., None, :] * self.scales[:, None]).flatten(-2)
            v = (var[..., None, :] * self.scales[:, None] ** 2).flatten(-2)
            h = self.net(
                torch.cat(
                    (torch.exp(-0.5 * v) * torch.sin(y), torch.exp(-0.5 * v) * torch.cos(y)), -1
                )
            )
            rgb = (
                None
                if self.rgb is None
                else self.rgb(torch.cat((h, d[:, None].expand(-1, h.shape[1], -1)), -1))
            )
            return F.softplus(self.sigma(h).squeeze(-1) - 1), rgb

    def weigh(sigma: Tensor, t: Tensor) -> Tensor:
        delta = sigma * t.diff(dim=-1)
        alpha = 1 - torch.exp(-delta)
        trans = torch.exp(
            -torch.cat((torch.zeros_like(delta[:, :1]), delta[:, :-1].cumsum(-1)), -1)
        )
        return alpha * trans

    def resample(t: Tensor, w: Tensor, count: int) -> Tensor:
        pdf = (w + 0.01) / (w + 0.01).sum(-1, keepdim=True)
        cdf = torch.cat((torch.zeros_like(pdf[:, :1]), pdf.cumsum(-1).clamp(max=1)), -1)
        u = torch.linspace(0.01, 0.99, count, dtype=t.dtype).expand(len(t), count).contiguous()
        above = torch.searchsorted(cdf.contiguous(), u, right=True).clamp(1, cdf.shape[-1] - 1)
        c0, c1, b0, b1 = (
            one.gather(1, index)
            for one, index in ((cdf, above - 1), (cdf, above), (t, above - 1), (t, above))
        )
        return b0 + (u - c0) / (c1 - c0).clamp(min=1e-6) * (b1 - b0)

    class Mip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proposal, self.field = Field(8, False), Field(16, True)

        def cast(self, o: Tensor, d: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            middle, half = (t[:, 1:] + t[:, :-1]) / 2, t.diff(dim=-1) / 2
            mean = o[:, None] + d[:, None] * middle[..., None]
            return mean, (half**2 / 3)[..., None] * d[:, None] ** 2 + 1e-3

        def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
            d = F.normalize(directions, dim=-1)
            t = torch.linspace(0.5, 3, 7, dtype=d.dtype).expand(len(d), -1)
            coarse = weigh(self.proposal(*self.cast(origins, d, t), d)[0], t)
            fine_t = resample(t, coarse.detach(), 6)
            sigma, rgb = self.field(*self.cast(origins, d, fine_t), d)
            w = weigh(sigma, fine_t)
            colour = (w[..., None] * rgb).sum(1) + (1 - w.sum(-1, keepdim=True))
            sums = torch.cat((torch.zeros_like(coarse[:, :1]), coarse.cumsum(-1)), -1)
            low = (
                torch.searchsorted(t.contiguous(), fine_t[:, :-1].contiguous(), right=True)
                .sub(1)
                .clamp(0, 6)
            )
            high = torch.searchsorted(
                t.contiguous(), fine_t[:, 1:].contiguous(), right=False
            ).clamp(0, 6)
            outer = sums.gather(1, high) - sums.gather(1, low)
            inter = ((w.detach() - outer).clamp(min=0) ** 2 / (w.detach() + 1e-5)).sum(-1).mean()
            middle = (fine_t[:, 1:] + fine_t[:, :-1]) / 2
            pairs = (middle[:, :, None] - middle[:, None]).abs()
            distort = (w[:, :, None] * w[:, None] * pairs).sum((1, 2)) + (
                w**2 * fine_t.diff(dim=-1)
            ).sum(-1) / 3
            return ((colour - colours) ** 2).mean() + inter + 0.01 * distort.mean()

    return Mip(), {
        "origins": floats(batch_size, 3) * 0.1,
        "directions": floats(batch_size, 3),
        "colours": floats(batch_size, 3).sigmoid(),
    }


def surface_field(batch_size: int = 8) -> Example:
    """NeuS and IGR: a signed distance with geometric initialisation and weight norm, its normal by a gradient inside,
    an eikonal term, a learned sharpness."""

    class SDF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.utils.parametrizations.weight_norm(nn.Linear(i, o))
                for i, o in ((3, 16), (16, 13), (16, 16), (16, 5))
            )
            self.colour, self.variance = nn.Linear(3 + 3 + 4, 3), nn.Parameter(torch.tensor(0.3))

        def sdf(self, x: Tensor) -> Tensor:
            h = x
            for i, layer in enumerate(self.layers):
                if i == 2:
                    h = torch.cat([h, x], -1) / math.sqrt(2)
                h = layer(h)
                if i < 3:
                    h = F.softplus(h, beta=100)
            return h

        def gradient(self, x: Tensor) -> Tensor:
            x.requires_grad_(True)
            with torch.enable_grad():
                y = self.sdf(x)[:, :1]
            return torch.autograd.grad(
                y,
                x,
                torch.ones_like(y, requires_grad=False),
                create_graph=True,
                retain_graph=True,
                only_inputs=True,
            )[0]

        def forward(self, points: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
            out = self.sdf(points)
            sdf, features = out[:, :1], out[:, 1:]
            normals = self.gradient(points)
            s = torch.exp(self.variance * 10.0).clip(1e-6, 1e6)
            cosine = -F.relu(-(directions * normals).sum(-1, keepdim=True))
            alpha = ((torch.sigmoid((sdf - cosine * 0.05) * s) - torch.sigmoid((sdf + cosine * 0.05) * s) + 1e-5)
                     / (torch.sigmoid((sdf - cosine * 0.05) * s) + 1e-5)).clip(0.0, 1.0)  # fmt: skip
            rgb = torch.sigmoid(self.colour(torch.cat((points, normals, features), -1)))
            eikonal = ((torch.linalg.norm(normals, ord=2, dim=-1) - 1.0) ** 2).mean()
            return (alpha * (rgb - colours).abs()).mean() + 0.1 * eikonal

    return SDF(), {
        "points": floats(batch_size, 3),
        "directions": F.normalize(floats(batch_size, 3).flip(0), dim=-1),
        "colours": floats(batch_size, 3).sigmoid(),
    }


def skinned_bodies(batch_size: int = 4) -> Example:
    """SMPL: Rodrigues' formula, a kinematic chain multiplied joint by joint, linear blend skinning, Procrustes by SVD."""

    class Body(nn.Module):
        def __init__(self, vertices: int = 12, joints: int = 4, shapes: int = 3) -> None:
            super().__init__()
            self.regress = nn.Sequential(
                nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, joints * 6 + shapes)
            )
            self.parents = [-1, 0, 1, 1]
            self.register_buffer("template", floats(vertices, 3))
            self.register_buffer("shape_dirs", floats(vertices, 3, shapes) * 0.1)
            self.register_buffer("joint_regressor", floats(joints, vertices).softmax(-1))
            self.register_buffer("weights", floats(vertices, joints).softmax(-1))
            self.log_scale = nn.Parameter(torch.zeros(1))

        def rotations(self, six: Tensor) -> Tensor:
            a1, a2 = six.reshape(-1, 2, 3).unbind(1)
            b1 = F.normalize(a1)
            b2 = F.normalize(a2 - torch.einsum("bi,bi->b", b1, a2).unsqueeze(-1) * b1)
            return torch.stack((b1, b2, torch.cross(b1, b2, dim=1)), dim=-1)

        def forward(self, x: Tensor, points: Tensor, keypoints: Tensor) -> Tensor:
            out = self.regress(x)
            b, j = len(x), len(self.parents)
            turns = self.rotations(out[:, : j * 6]).view(b, j, 3, 3)
            shaped = self.template + torch.einsum("bl,vkl->bvk", out[:, j * 6 :], self.shape_dirs)
            joints = torch.einsum("bik,ji->bjk", shaped, self.joint_regressor)
            relative = joints.clone()
            relative[:, 1:] -= joints[:, self.parents[1:]]
            transforms = torch.cat(
                [
                    F.pad(turns, (0, 0, 0, 1)),
                    F.pad(relative.unsqueeze(-1), (0, 0, 0, 1), value=1.0),
                ],
                -1,
            )
            chain = [transforms[:, 0]]
            for i in range(1, j):
                chain.append(chain[self.parents[i]] @ transforms[:, i])
            chain = torch.stack(chain, 1)
            posed = chain[:, :, :3, 3]
            rest = F.pad(joints, (0, 1)).unsqueeze(-1)
            chain = chain - F.pad(chain @ rest, (3, 0))
            t = torch.einsum("vj,bjkl->bvkl", self.weights, chain)
            verts = (t @ F.pad(shaped, (0, 1), value=1.0).unsqueeze(-1))[
                ..., :3, 0
            ] * self.log_scale.exp()
            centred = verts - verts.mean(1, keepdim=True)
            goal = points - points.mean(1, keepdim=True)
            u, _, vh = torch.linalg.svd(centred.detach().mT @ goal)
            sign = torch.linalg.det(u @ vh).sign()
            fix = torch.diag_embed(
                torch.stack((torch.ones_like(sign), torch.ones_like(sign), sign), -1)
            )
            aligned = centred @ (u @ fix @ vh)
            return (aligned - goal).abs().mean() + F.mse_loss(posed[..., :2], keypoints)

    return Body(), {
        "x": floats(batch_size, WIDTH),
        "points": floats(batch_size, 12, 3).flip(0),
        "keypoints": floats(batch_size, 4, 2),
    }


def unrolled_reconstruction(batch_size: int = 3) -> Example:
    """Variational networks for MRI: complex data in k-space, coil sensitivities, data consistency, Fourier transforms
    with shifts, a U-Net's place taken by convolutions, SSIM by hand."""

    def fft2c(x: Tensor) -> Tensor:
        return torch.fft.fftshift(
            torch.fft.fft2(torch.fft.ifftshift(x, dim=(-2, -1)), norm="ortho"), dim=(-2, -1)
        )

    def ifft2c(x: Tensor) -> Tensor:
        return torch.fft.fftshift(
            torch.fft.ifft2(torch.fft.ifftshift(x, dim=(-2, -1)), norm="ortho"), dim=(-2, -1)
        )

    class VarNet(nn.Module):
        def __init__(self, cascades: int = 2) -> None:
            super().__init__()
            self.nets = nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(2, 8, 3, padding=1),
                    nn.InstanceNorm2d(8),
                    nn.LeakyReLU(0.2),
                    nn.Conv2d(8, 2, 1),
                )
                for _ in range(cascades)
            )
            self.dc = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(cascades))
            self.register_buffer("window", torch.ones(1, 1, 3, 3) / 9)

        def ssim(self, x: Tensor, y: Tensor) -> Tensor:
            r = y.amax((1, 2, 3))[:, None, None, None]
            c1, c2 = (0.01 * r) ** 2, (0.03 * r) ** 2
            ux, uy = F.conv2d(x, self.window), F.conv2d(y, self.window)
            vx = F.conv2d(x * x, self.window) - ux * ux
            vy = F.conv2d(y * y, self.window) - uy * uy
            vxy = F.conv2d(x * y, self.window) - ux * uy
            s = (2 * ux * uy + c1) * (2 * vxy + c2) / ((ux**2 + uy**2 + c1) * (vx + vy + c2))
            return 1 - s.mean()

        def forward(self, kspace: Tensor, maps: Tensor, mask: Tensor, target: Tensor) -> Tensor:
            reference, sens = torch.view_as_complex(kspace), torch.view_as_complex(maps)
            reference = reference * mask
            current = reference
            for net, dc in zip(self.nets, self.dc, strict=True):
                image = (ifft2c(current) * sens.conj()).sum(1, keepdim=True)
                real = torch.view_as_real(image.squeeze(1)).permute(0, 3, 1, 2).contiguous()
                mean, std = real.mean((2, 3), keepdim=True), real.std((2, 3), keepdim=True)
                real = net((real - mean) / std) * std + mean
                image = torch.view_as_complex(real.permute(0, 2, 3, 1).contiguous()).unsqueeze(1)
                soft = torch.where(mask.bool(), current - reference, torch.zeros_like(current)) * dc
                current = current - soft - fft2c(image * sens)
            out = ifft2c(current).abs().square().sum(1, keepdim=True).sqrt()
            return self.ssim(out, target)

    mask = torch.zeros(batch_size, 1, 1, 6)
    mask[..., ::2] = 1
    return VarNet(), {
        "kspace": floats(batch_size, 2, 6, 6, 2), "maps": floats(batch_size, 2, 6, 6, 2).flip(1),
        "mask": mask, "target": floats(batch_size, 1, 6, 6).abs(),
    }  # fmt: skip


# -- decisions ----------------------------------------------------------------------------------------


def monotonic_mixer(batch_size: int = 4) -> Example:
    """QMIX: recurrent agents with shared weights over time, a mixing network with absolute weights made of states,
    a target copy, masked temporal differences."""

    class Agent(nn.Module):
        def __init__(self, actions: int) -> None:
            super().__init__()
            self.fc1, self.rnn, self.fc2 = (
                nn.Linear(WIDTH, 8),
                nn.GRUCell(8, 8),
                nn.Linear(8, actions),
            )

        def forward(self, obs: Tensor) -> Tensor:
            b, t, n, _ = obs.shape
            h, outs = obs.new_zeros(b * n, 8), []
            for step in range(t):
                h = self.rnn(F.relu(self.fc1(obs[:, step].reshape(b * n, -1))), h)
                outs.append(self.fc2(h).view(b, n, -1))
            return torch.stack(outs, 1)

    class Mixer(nn.Module):
        def __init__(self, agents: int, state: int) -> None:
            super().__init__()
            self.agents = agents
            self.w1, self.b1, self.w2 = (
                nn.Linear(state, agents * 4),
                nn.Linear(state, 4),
                nn.Linear(state, 4),
            )
            self.v = nn.Sequential(nn.Linear(state, 4), nn.ReLU(), nn.Linear(4, 1))

        def forward(self, qs: Tensor, states: Tensor) -> Tensor:
            b = qs.size(0)
            states, qs = states.reshape(-1, states.shape[-1]), qs.reshape(-1, 1, self.agents)
            w1, b1 = self.w1(states).abs().view(-1, self.agents, 4), self.b1(states).view(-1, 1, 4)
            hidden = F.elu(torch.bmm(qs, w1) + b1)
            out = torch.bmm(hidden, self.w2(states).abs().view(-1, 4, 1)) + self.v(states).view(
                -1, 1, 1
            )
            return out.view(b, -1, 1)

    class QMix(nn.Module):
        def __init__(self, agents: int = 2, actions: int = 3) -> None:
            super().__init__()
            self.agent, self.mixer = Agent(actions), Mixer(agents, 5)
            self.target_agent, self.target_mixer = Agent(actions), Mixer(agents, 5)
            self.target_agent.load_state_dict(self.agent.state_dict())
            self.target_agent.requires_grad_(False)
            self.target_mixer.requires_grad_(False)

        def forward(
            self,
            obs: Tensor,
            state: Tensor,
            actions: Tensor,
            legal: Tensor,
            reward: Tensor,
            done: Tensor,
            filled: Tensor,
        ) -> Tensor:
            q = self.agent(obs)
            chosen = torch.gather(q[:, :-1], 3, actions[:, :-1].unsqueeze(3)).squeeze(3)
            target = self.target_agent(obs)[:, 1:].masked_fill(legal[:, 1:] == 0, -9999999)
            mine = q.clone().detach()
            mine[legal == 0] = -9999999
            best = mine[:, 1:].max(dim=3, keepdim=True)[1]
            target = torch.gather(target, 3, best).squeeze(3)
            total = self.mixer(chosen, state[:, :-1])
            future = self.target_mixer(target, state[:, 1:])
            error = total - (reward + 0.99 * (1 - done) * future).detach()
            mask = filled.expand_as(error)
            return ((error * mask) ** 2).sum() / mask.sum()

    legal = tokens(2, batch_size, 4, 2, 3)
    legal[..., 0] = 1
    filled = torch.ones(batch_size, 3, 1)
    filled[::2, 2:] = 0
    return QMix(), {
        "obs": floats(batch_size, 4, 2, WIDTH), "state": floats(batch_size, 4, 5), "actions": tokens(3, batch_size, 4, 2),
        "legal": legal, "reward": floats(batch_size, 3, 1), "done": tokens(2, batch_size, 3, 1).float(), "filled": filled,
    }  # fmt: skip


def unrolled_planner(batch_size: int = 4) -> Example:
    """MuZero: dynamics unrolled over actions with states scaled to their range, gradients halved by a hook at each
    step, categorical values by two-hot targets."""

    def scale(state: Tensor) -> Tensor:
        low, high = state.min(1, keepdim=True)[0], state.max(1, keepdim=True)[0]
        return (state - low) / (high - low + 1e-5)

    class MuZero(nn.Module):
        def __init__(self, actions: int = 3, support: int = 3) -> None:
            super().__init__()
            self.actions, self.support = actions, support
            self.represent = nn.Sequential(nn.Linear(WIDTH, 16), nn.ELU(), nn.Linear(16, 6))
            self.dynamics, self.reward = nn.Linear(6 + actions, 6), nn.Linear(6, 2 * support + 1)
            self.policy, self.value = nn.Linear(6, actions), nn.Linear(6, 2 * support + 1)

        def two_hot(self, x: Tensor) -> Tensor:
            x = torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 0.001 * x
            x = torch.clamp(x, -self.support, self.support)
            floor = x.floor()
            prob = x - floor
            logits = torch.zeros(*x.shape, 2 * self.support + 1, dtype=x.dtype)
            logits.scatter_(
                2, (floor + self.support).long().unsqueeze(-1), (1 - prob).unsqueeze(-1)
            )
            index = floor + self.support + 1
            prob = prob.masked_fill_(2 * self.support < index, 0.0)
            index = index.masked_fill_(2 * self.support < index, 0.0)
            return logits.scatter_add_(2, index.long().unsqueeze(-1), prob.unsqueeze(-1))

        def forward(
            self,
            obs: Tensor,
            actions: Tensor,
            values: Tensor,
            rewards: Tensor,
            policies: Tensor,
            weight: Tensor,
        ) -> Tensor:
            state = scale(self.represent(obs))
            v, r = self.two_hot(values), self.two_hot(rewards)
            total = -(v[:, 0] * self.value(state).log_softmax(1)).sum(1)
            total = total - (policies[:, 0] * self.policy(state).log_softmax(1)).sum(1)
            for i in range(actions.shape[1]):
                one = torch.zeros(len(obs), self.actions, dtype=state.dtype)
                one.scatter_(1, actions[:, i : i + 1], 1.0)
                state = scale(self.dynamics(torch.cat((state, one), 1)))
                if state.requires_grad:
                    state.register_hook(lambda grad: grad * 0.5)
                step = -(v[:, i + 1] * self.value(state).log_softmax(1)).sum(1)
                step = step - (r[:, i + 1] * self.reward(state).log_softmax(1)).sum(1)
                step = step - (policies[:, i + 1] * self.policy(state).log_softmax(1)).sum(1)
                total = total + step / actions.shape[1]
            return (total * weight).mean()

    return MuZero(), {
        "obs": floats(batch_size, WIDTH), "actions": tokens(3, batch_size, 2), "values": floats(batch_size, 3) * 4,
        "rewards": floats(batch_size, 3), "policies": floats(batch_size, 3, 3).softmax(-1), "weight": floats(batch_size).abs() + 0.1,
    }  # fmt: skip


def implicit_quantiles(batch_size: int = 4) -> Example:
    """IQN with given quantiles: a cosine embedding, quantile Huber losses over all pairs, a dueling head, double
    choice, a random network that is distilled for curiosity with running values in buffers."""

    class IQN(nn.Module):
        def __init__(self, actions: int = 3) -> None:
            super().__init__()
            self.body, self.cosine = (
                nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU()),
                nn.Linear(6, 12),
            )
            self.advantage, self.value = nn.Linear(12, actions), nn.Linear(12, 1)
            self.register_buffer("pis", math.pi * torch.arange(1, 7).view(1, 1, 6))
            self.fixed, self.guess = (
                nn.Linear(WIDTH, 4),
                nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)),
            )
            for p in self.fixed.parameters():
                p.requires_grad = False
            self.register_buffer("mean", torch.zeros(()))
            self.register_buffer("var", torch.ones(()))
            self.register_buffer("count", torch.tensor(1e-4))

        def q(self, x: Tensor, taus: Tensor) -> Tensor:
            h = self.body(x).unsqueeze(1) * F.relu(
                self.cosine(torch.cos(taus.unsqueeze(-1) * self.pis))
            )
            a = self.advantage(h)
            return self.value(h) + a - a.mean(2, keepdim=True)

        @torch.no_grad()
        def update(self, x: Tensor) -> None:
            m, v, n = x.mean(), x.var(unbiased=False), x.numel()
            delta, total = m - self.mean, self.count + n
            self.mean.add_(delta * n / total)
            m2 = self.var * self.count + v * n + delta**2 * self.count * n / total
            self.var.copy_(m2 / total)
            self.count.copy_(total)

        def forward(
            self, x: Tensor, action: Tensor, reward: Tensor, after: Tensor, taus: Tensor
        ) -> Tensor:
            novelty = (self.guess(after) - self.fixed(after)).square().mean(-1)
            self.update(novelty)
            bonus = novelty.detach() / (self.var.sqrt() + 1e-8)
            index = action.view(-1, 1, 1).expand(-1, taus.shape[1], 1)
            mine = self.q(x, taus).gather(2, index)
            with torch.no_grad():
                later = self.q(after, taus.flip(1))
                best = later.mean(1).argmax(1).view(-1, 1, 1).expand(-1, taus.shape[1], 1)
                target = (reward + 0.1 * bonus)[:, None, None] + 0.9 * later.gather(
                    2, best
                ).transpose(1, 2)
            error = target - mine
            huber = torch.where(error.abs() <= 1.0, 0.5 * error.pow(2), error.abs() - 0.5)
            loss = (taus.unsqueeze(-1) - (error.detach() < 0).to(x.dtype)).abs() * huber
            return loss.sum(dim=1).mean(dim=1).mean() + novelty.mean()

    return IQN(), {
        "x": floats(batch_size, WIDTH), "action": tokens(3, batch_size), "reward": floats(batch_size),
        "after": floats(batch_size, WIDTH).flip(0), "taus": floats(batch_size, 4).sigmoid(),
    }  # fmt: skip


# -- memories, spikes, curved spaces --------------------------------------------------------------------


def product_keys(batch_size: int = 4) -> Example:
    """A product-key memory: the best of two halves, the best of their sums, values read by a weighed bag, a batch
    norm on queries, a gate."""

    class Memory(nn.Module):
        def __init__(self, keys: int = 5, heads: int = 2, k: int = 3) -> None:
            super().__init__()
            self.n, self.heads, self.k = keys, heads, k
            self.keys = nn.Parameter(floats(heads, 2, keys, 4))
            self.values = nn.EmbeddingBag(keys**2, WIDTH, mode="sum")
            self.query, self.norm = nn.Linear(WIDTH, heads * 8), nn.BatchNorm1d(heads * 8)
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            b, t, _ = x.shape
            q = self.norm(self.query(x).view(b * t, -1)).view(b * t, self.heads, 2, 4)
            scores = torch.einsum("bhpd,hpnd->bhpn", q, self.keys)
            (s1, s2), (i1, i2) = (one.unbind(2) for one in scores.topk(self.k, dim=-1))
            both = (s1.unsqueeze(-1) + s2.unsqueeze(-2)).view(b * t, self.heads, -1)
            index = (i1.unsqueeze(-1) * self.n + i2.unsqueeze(-2)).view(b * t, self.heads, -1)
            best, at = both.topk(self.k, dim=-1)
            index = index.gather(-1, at)
            weight = F.softmax(best, dim=-1)
            out = self.values(
                index.view(b * t, -1), per_sample_weights=weight.view(b * t, -1)
            ).view(b, t, -1)
            return F.mse_loss(x + out * F.silu(self.gate(x)), y)

    return Memory(), row_batch(batch_size, 5)


def spikes(batch_size: int = 4) -> Example:
    """Leaky integrate-and-fire layers over time with a surrogate gradient of their own, learned decays, a penalty on
    firing, membranes kept in lists."""

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, slope: float = 25.0) -> Tensor:
            ctx.save_for_backward(x)
            ctx.slope = slope
            return (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            return grad / (ctx.slope * x.abs() + 1.0) ** 2, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList((nn.Linear(WIDTH, 12), nn.Linear(12, 12)))
            self.recurrent, self.out = nn.Linear(12, 12, bias=False), nn.Linear(12, 4)
            self.decay = nn.ParameterList(nn.Parameter(torch.full((12,), 2.0)) for _ in range(2))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            b = len(x)
            mem = [x.new_zeros(b, 12) for _ in self.layers]
            spk = [x.new_zeros(b, 12) for _ in self.layers]
            total, rate = x.new_zeros(b, 4), x.new_zeros(())
            readout = x.new_zeros(b, 4)
            for t in range(x.shape[1]):
                h = x[:, t]
                for i, layer in enumerate(self.layers):
                    current = layer(h) + (self.recurrent(spk[i]) if i else 0)
                    mem[i] = self.decay[i].sigmoid() * mem[i] * (1 - spk[i].detach()) + current
                    spk[i] = Spike.apply(mem[i] - 0.5)
                    h = spk[i]
                    rate = rate + h.mean()
                readout = 0.9 * readout + self.out(h)
                total = total + readout.softmax(-1)
            return (
                F.nll_loss((total / x.shape[1]).log(), labels)
                + 0.1 * (rate / x.shape[1] - 0.2) ** 2
            )

    return Net(), {"x": floats(batch_size, 5, WIDTH) * 2, "labels": tokens(4, batch_size)}


def poincare_ball(batch_size: int = 6) -> Example:
    """Hyperbolic layers: Möbius additions and products, exponential maps, clamped norms, distances as logits to
    learned gyroplanes, a learned curvature."""

    def norm(x: Tensor) -> Tensor:
        return x.norm(dim=-1, keepdim=True, p=2).clamp_min(1e-15)

    def project(x: Tensor, c: Tensor) -> Tensor:
        most = (1 - 4e-3) / c.sqrt()
        n = norm(x)
        return torch.where(n > most, x / n * most, x)

    def add(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        x2, y2, xy = (
            x.pow(2).sum(-1, keepdim=True),
            y.pow(2).sum(-1, keepdim=True),
            (x * y).sum(-1, keepdim=True),
        )
        return ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (
            1 + 2 * c * xy + c**2 * x2 * y2
        ).clamp_min(1e-15)

    def exp0(u: Tensor, c: Tensor) -> Tensor:
        n = norm(u)
        return torch.tanh(c.sqrt() * n) * u / (c.sqrt() * n)

    class Layer(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(floats(out, into) * 0.3),
                nn.Parameter(floats(out) * 0.1),
            )

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            n, mx = norm(x), x @ self.weight.t()
            m = norm(mx)
            res = (
                torch.tanh(m / n * torch.atanh((c.sqrt() * n).clamp(-1 + 1e-5, 1 - 1e-5)))
                * mx
                / (m * c.sqrt())
            )
            zero = (mx == 0).prod(-1, keepdim=True, dtype=torch.uint8).bool()
            res = project(torch.where(zero, torch.zeros(1, dtype=res.dtype), res), c)
            return project(add(res, exp0(self.bias, c), c), c)

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(WIDTH, 6), Layer(6, 4)
            self.planes, self.normals = nn.Parameter(floats(3, 4) * 0.1), nn.Parameter(floats(3, 4))
            self.c = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            c = F.softplus(self.c)
            h = self.two(self.one(project(exp0(x, c), c), c), c)
            p = exp0(self.planes, c)
            diff = add(-p[None], h[:, None], c)
            a = self.normals * (1 - c * p.pow(2).sum(-1, keepdim=True))
            sc = (diff * a).sum(-1)
            an = a.norm(dim=-1)
            factor = 2 / (1 - c * p.pow(2).sum(-1))
            up = 2 * c.sqrt() * sc / ((1 - c * diff.pow(2).sum(-1)).clamp_min(1e-15) * an)
            return F.cross_entropy(factor * an / c.sqrt() * torch.asinh(up), labels)

    return Hyper(), {"x": floats(batch_size, WIDTH) * 0.5, "labels": tokens(3, batch_size)}


def hypercomplex(batch_size: int = 4) -> Example:
    """PHM layers: weights as sums of Kronecker products, quaternion convolutions built by concatenation."""

    class PHM(nn.Module):
        def __init__(self, n: int, into: int, out: int) -> None:
            super().__init__()
            self.a, self.s = (
                nn.Parameter(floats(n, n, n) * 0.3),
                nn.Parameter(floats(n, out // n, into // n) * 0.3),
            )
            self.bias = nn.Parameter(torch.zeros(out))

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.sum(
                torch.stack([torch.kron(a, s) for a, s in zip(self.a, self.s, strict=True)]), dim=0
            )
            return F.linear(x, weight, self.bias)

    class Quaternion(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.r, self.i, self.j, self.k = (
                nn.Parameter(floats(out, into, 3) * 0.2) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            r, i, j, k = self.r, self.i, self.j, self.k
            rows = ((r, -i, -j, -k), (i, r, -k, j), (j, k, r, -i), (k, -j, i, r))
            return F.conv1d(x, torch.cat([torch.cat(row, 1) for row in rows], 0), padding=1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.phm, self.head = Quaternion(2, 2), PHM(4, WIDTH, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.relu(self.conv(x)).amax(-1)
            return F.multi_margin_loss(self.head(F.relu(self.phm(h))), y)

    return Net(), {"x": floats(batch_size, 8, 6), "y": tokens(3, batch_size)}


def pondering(batch_size: int = 4) -> Example:
    """PonderNet: halting probabilities by a running product, a geometric prior, losses of every step weighed."""

    class Ponder(nn.Module):
        def __init__(self, steps: int = 4) -> None:
            super().__init__()
            self.steps = steps
            self.cell, self.out, self.halt = (
                nn.GRUCell(WIDTH, WIDTH),
                nn.Linear(WIDTH, 1),
                nn.Linear(WIDTH, 1),
            )
            p = torch.zeros(steps)
            left = 1.0
            for k in range(steps):
                p[k] = left * 0.2
                left *= 0.8
            self.p_g = nn.Parameter(p, requires_grad=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.cell(x)
            left = h.new_ones(len(x))
            halted = h.new_zeros((len(x),))
            ps, ys, pick = [], [], []
            for n in range(1, self.steps + 1):
                lambda_n = (
                    h.new_ones(h.shape[0]) if n == self.steps else torch.sigmoid(self.halt(h))[:, 0]
                )
                ps.append(left * lambda_n)
                ys.append(self.out(h).squeeze(-1))
                stop = (lambda_n > 0.5).to(h.dtype) * (1 - halted)
                pick.append(stop.detach() * ys[-1].detach())
                halted = halted + stop
                left = left * (1 - lambda_n)
                h = self.cell(x, h)
            p = torch.stack(ps)
            losses = F.binary_cross_entropy_with_logits(
                torch.stack(ys), y.expand(self.steps, -1), reduction="none"
            )
            rec = (p * losses).mean(dim=1).sum()
            prior = self.p_g[: p.shape[0]].unsqueeze(0).expand_as(p.transpose(0, 1))
            kl = F.kl_div(p.transpose(0, 1).add(1e-9).log(), prior, reduction="batchmean")
            return rec + 0.01 * kl

    return Ponder(), {"x": floats(batch_size, WIDTH), "y": tokens(2, batch_size).float()}


def evidential(batch_size: int = 8) -> Example:
    """Evidential classification and regression: digamma and lgamma of Dirichlets, a coefficient annealed by a buffer
    that counts steps, normal-inverse-gamma terms."""

    class Evidence(nn.Module):
        def __init__(self, classes: int = 4) -> None:
            super().__init__()
            self.classes = classes
            self.body, self.evidence, self.nig = (
                nn.Linear(WIDTH, 12),
                nn.Linear(12, classes),
                nn.Linear(12, 4),
            )
            self.register_buffer("step", torch.tensor(0))

        def forward(self, x: Tensor, labels: Tensor, y: Tensor) -> Tensor:
            if self.training:
                self.step += 1
            h = torch.tanh(self.body(x))
            alpha = F.softplus(self.evidence(h)) + 1
            s = alpha.sum(1, keepdim=True)
            one = F.one_hot(labels, self.classes).to(x.dtype)
            fit = (one * (torch.digamma(s) - torch.digamma(alpha))).sum(1)
            wrong = (alpha - 1) * (1 - one) + 1
            sw = wrong.sum(1, keepdim=True)
            kl = (
                torch.lgamma(sw).squeeze(1) - torch.lgamma(wrong).sum(1) - math.lgamma(self.classes)
            )
            kl = kl + ((wrong - 1) * (torch.digamma(wrong) - torch.digamma(sw))).sum(1)
            anneal = torch.minimum(torch.ones((), dtype=x.dtype), self.step.to(x.dtype) / 10)
            mu, nu, a, b = self.nig(h).unbind(1)
            nu, a, b = F.softplus(nu), F.softplus(a) + 1, F.softplus(b)
            omega = 2 * b * (1 + nu)
            nll = (
                0.5 * torch.log(math.pi / nu)
                - a * torch.log(omega)
                + (a + 0.5) * torch.log((y - mu) ** 2 * nu + omega)
            )
            nll = nll + torch.lgamma(a) - torch.lgamma(a + 0.5)
            return (
                (fit + anneal * kl).mean()
                + nll.mean()
                + 0.1 * ((y - mu).abs() * (2 * nu + a)).mean()
            )

    return Evidence(), {
        "x": floats(batch_size, WIDTH),
        "labels": tokens(4, batch_size),
        "y": floats(batch_size),
    }


def early_learning(batch_size: int = 8) -> Example:
    """ELR: a target per sample of the data set in a buffer, averaged and written at the batch's indices, then read
    by the loss."""

    class ELR(nn.Module):
        def __init__(self, samples: int = 40, classes: int = 4) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, classes))
            self.register_buffer("target", torch.zeros(samples, classes))
            self.beta = 0.7

        def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            out = self.net(x)
            p = torch.clamp(F.softmax(out, dim=1), 1e-4, 1.0 - 1e-4)
            q = p.data.detach()
            self.target[index] = self.beta * self.target[index] + (1 - self.beta) * (
                q / q.sum(dim=1, keepdim=True)
            )
            regulariser = ((1 - (self.target[index] * p).sum(dim=1)).log()).mean()
            return F.cross_entropy(out, labels) + 3.0 * regulariser

    index = torch.randperm(40, generator=torch.Generator().manual_seed(4))[:batch_size].clone()
    return ELR(), {"x": floats(batch_size, WIDTH), "labels": tokens(4, batch_size), "index": index}
