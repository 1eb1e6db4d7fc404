"""Recipes of training code that people copy, for ``outside.py``: losses across the batch, codebooks and
averages kept in buffers, transforms of functions, spectra, views written in place, routes by name, results
of many forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from outside_models import Classifier, Example, WithLoss, floats, tokens
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH, VOCABULARY, LENGTH = 16, 32, 8


def _rows(batch_size: int, width: int = 8, out: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, width), "y": floats(batch_size, out).flip(0)}


def _labelled(batch_size: int, width: int = 8, classes: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, width), "y": tokens(classes, batch_size)}


def _images(batch_size: int, channels: int = 3, size: int = 8) -> dict[str, Tensor]:
    return {"x": floats(batch_size, channels, size, size), "y": tokens(4, batch_size)}


def _text(batch_size: int) -> dict[str, Tensor]:
    return {
        "x": tokens(VOCABULARY, batch_size, LENGTH),
        "y": tokens(VOCABULARY, batch_size, LENGTH),
    }


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in pairwise(sizes):
        layers += [nn.Linear(one, two), nn.GELU()]
    return nn.Sequential(*layers[:-1])


# -- transforms of functions ---------------------------------------------------------------------------


class PerSample(nn.Module):
    """Features of each sample by ``vmap`` of a function of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(floats(WIDTH, 8) / 3), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return torch.tanh(self.weight @ row) * row.norm()

        return self.head(vmap(one)(x))


def vmapped_samples(batch_size: int = 4) -> Example:
    return WithLoss(PerSample()), _rows(batch_size)


class Ensemble(nn.Module):
    """Members of an ensemble whose weights are stacked, by ``vmap`` over ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = [_mlp(8, WIDTH, 4).to("meta")]
        made = [_mlp(8, WIDTH, 4) for _ in range(3)]
        names = [name for name, _ in made[0].named_parameters()]
        self.names = names
        self.stacked = nn.ParameterList(
            torch.stack([dict(one.named_parameters())[name].detach() for one in made])
            for name in names
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(zip(self.names, self.stacked, strict=True))
        return vmap(lambda w: functional_call(self.base[0], w, (x,)))(weights).mean(0)


def stacked_ensemble(batch_size: int = 4) -> Example:
    return WithLoss(Ensemble()), _rows(batch_size)


class Forces(nn.Module):
    """Energies and their gradients by ``torch.func.grad`` of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return self.net(row).squeeze(-1)

        return F.mse_loss(vmap(grad(energy))(x)[:, :4], y) + vmap(energy)(x).mean()


def functional_forces(batch_size: int = 4) -> Example:
    return Forces(), _rows(batch_size)


class Contractive(nn.Module):
    """An autoencoder with a penalty on its Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.sigmoid(self.down(x))
        jacobian = vmap(jacrev(lambda row: torch.sigmoid(self.down(row))))(x)
        return F.mse_loss(self.up(code), x) + 0.1 * jacobian.square().sum((1, 2)).mean()


def contractive(batch_size: int = 4) -> Example:
    return Contractive(), {"x": floats(batch_size, 8)}


class Directional(nn.Module):
    """A derivative along a direction in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, tangent = jvp(self.net, (x,), (torch.ones_like(x),))
        return F.mse_loss(out, y) + tangent.square().mean()


def forward_mode(batch_size: int = 4) -> Example:
    return Directional(), _rows(batch_size)


# -- functions with a gradient of their own ------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, mode: str) -> Tensor:  # type: ignore[override]
        ctx.factor, ctx.mode, ctx.shape = factor, mode, x.shape
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        inside = (x.abs() <= 1).to(g) if ctx.mode == "hard" else torch.ones_like(g)
        return (g * inside * ctx.factor).view(ctx.shape), None, None


class Saving(nn.Module):
    """A straight-through clamp that saves floats, words and shapes besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(_Scaled.apply(_Scaled.apply(self.one(x), 0.5, "hard"), 2.0, "soft"))


def saved_settings(batch_size: int = 4) -> Example:
    return WithLoss(Saving()), _rows(batch_size)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g.neg() * ctx.scale, None


class Adversarial(nn.Module):
    """Domain adaptation by gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.label, self.domain = _mlp(8, WIDTH), nn.Linear(WIDTH, 4), _mlp(WIDTH, 8, 1)

    def forward(self, x: Tensor, y: Tensor, source: Tensor) -> Tensor:
        h = self.trunk(x)
        domain = self.domain(_Reversed.apply(h, 0.3)).squeeze(-1)
        said = F.cross_entropy(self.label(h), y, reduction="none")
        known = (said * source).sum() / source.sum().clamp_min(1)
        return known + F.binary_cross_entropy_with_logits(domain, source)


def gradient_reversal(batch_size: int = 4) -> Example:
    batch = _labelled(batch_size)
    return Adversarial(), {**batch, "source": (torch.arange(batch_size) % 3 > 0).to(batch["x"])}


class _Packed(torch.autograd.Function):
    """Backward reads what forward kept as attributes of the context (tensors, unsaved)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.inside = x.detach() @ w.detach().t()
        ctx.x, ctx.w = x, w
        scale = ctx.inside.abs().amax(-1, keepdim=True)
        ctx.mark_non_differentiable(scale)
        return torch.relu(ctx.inside), scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        g = g * (ctx.inside > 0)
        return g @ ctx.w, g.t() @ ctx.x


class KeptOnContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(floats(WIDTH, 8) / 3), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, scale = _Packed.apply(x, self.weight)
        return self.head(h / (scale + 1))


def kept_on_context(batch_size: int = 4) -> Example:
    return WithLoss(KeptOnContext()), _rows(batch_size)


# -- spectra -------------------------------------------------------------------------------------------


class FourierMixer(nn.Module):
    """FNet's mixing and a learned complex filter over positions (GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.filter = nn.Parameter(floats(LENGTH // 2 + 1, WIDTH, 2) * 0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.norm(h + torch.fft.fft2(h, dim=(-2, -1)).real / WIDTH)
        spectrum = torch.fft.rfft(h, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        h = h + torch.fft.irfft(spectrum, n=LENGTH, dim=1, norm="ortho")
        return F.cross_entropy(self.head(h).transpose(1, 2), y)


def fourier_mixer(batch_size: int = 4) -> Example:
    return FourierMixer(), _text(batch_size)


class ComplexNet(nn.Module):
    """Complex weights, phases and magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(floats(WIDTH, 8), floats(WIDTH, 8).flip(0)) / 4)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.polar(x.abs() + 0.1, x) @ self.weight.t()
        return self.head(torch.cat([z.abs(), z.angle().sin()], -1))


def complex_net(batch_size: int = 4) -> Example:
    return WithLoss(ComplexNet()), _rows(batch_size)


class SpectralLoss(nn.Module):
    """A multi-resolution STFT loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 1, 9, padding=4)
        for size in (8, 16):
            self.register_buffer(f"window{size}", torch.hann_window(size), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x.unsqueeze(1)).squeeze(1)
        loss = F.l1_loss(out, y)
        for size in (8, 16):
            window = getattr(self, f"window{size}")
            one, two = (
                torch.stft(wave, size, size // 2, window=window, return_complex=True).abs() + 1e-5
                for wave in (out, y)
            )
            loss = loss + (one - two).norm() / two.norm() + F.l1_loss(one.log(), two.log())
        return loss


def spectral_loss(batch_size: int = 4) -> Example:
    return SpectralLoss(), {"x": floats(batch_size, 64), "y": floats(batch_size, 64).flip(0)}


# -- weights that are computed -------------------------------------------------------------------------


class Normed(nn.Module):
    """Weight norm old and new, spectral norm, orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(8, WIDTH))
        self.two = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.three = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.four = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            torch.tanh(self.four(torch.tanh(self.three(torch.tanh(self.two(self.one(x)))))))
        )


def normed_weights(batch_size: int = 4) -> Example:
    return WithLoss(Normed()), _rows(batch_size)


class OldSpectral(nn.Module):
    """The older spectral norm, a discriminator's hinge loss."""

    def __init__(self) -> None:
        super().__init__()
        spectral = torch.nn.utils.spectral_norm
        self.net = nn.Sequential(
            spectral(nn.Conv2d(3, 8, 3, padding=1)), nn.LeakyReLU(0.2), spectral(nn.Conv2d(8, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2), nn.Flatten(), spectral(nn.Linear(128, 1)),
        )  # fmt: skip

    def forward(self, x: Tensor, fake: Tensor) -> Tensor:
        return F.relu(1 - self.net(x)).mean() + F.relu(1 + self.net(fake)).mean()


def hinge_discriminator(batch_size: int = 4) -> Example:
    x = floats(batch_size, 3, 8, 8)
    return OldSpectral(), {"x": x, "fake": x.flip(0)}


class TiedTwice(nn.Module):
    """An autoencoder whose decoder is its encoder's weight transposed, biases apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.back = nn.ParameterList(
            [nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(8))]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.two(torch.tanh(self.one(x))))
        h = torch.tanh(F.linear(h, self.two.weight.t(), self.back[0]))
        return F.mse_loss(F.linear(h, self.one.weight.t(), self.back[1]), x)


def tied_autoencoder(batch_size: int = 4) -> Example:
    return TiedTwice(), {"x": floats(batch_size, 8)}


# -- buffers that forward writes -----------------------------------------------------------------------


class Codebook(nn.Module):
    """VQ-VAE's codebook as an exponential average (its counts and sums run over the whole batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", floats(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", floats(6, WIDTH))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            chosen = torch.cdist(h, self.codes).argmin(-1)
            hot = F.one_hot(chosen, 6).to(h)
        code = F.embedding(chosen, self.codes)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ h, alpha=0.1)
                smooth = (self.counts + 1e-5) / (self.counts.sum() + 6e-5) * self.counts.sum()
                self.codes.copy_(self.sums / smooth.unsqueeze(1))
        return h + (code - h).detach(), F.mse_loss(h, code.detach())


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.book, self.up = nn.Linear(8, WIDTH), Codebook(), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, commitment = self.book(self.down(x))
        return F.mse_loss(self.up(h), x) + 0.25 * commitment


def averaged_codebook(batch_size: int = 4) -> Example:
    return Quantised(), {"x": floats(batch_size, 8)}


class Momentum(nn.Module):
    """MoCo: a key encoder that follows, and a queue of keys of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = _mlp(8, WIDTH, 8), _mlp(8, WIDTH, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(floats(16, 8), dim=-1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            k = F.normalize(self.key(other), dim=-1)
        near = (q * k).sum(-1, keepdim=True)
        scores = torch.cat([near, q @ self.queue.clone().detach().t()], 1) / 0.2
        with torch.no_grad():
            at = (self.place + torch.arange(len(k))) % 16
            self.queue.index_copy_(0, at, k)
            self.place.add_(len(k)).remainder_(16)
        return F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))


def momentum_queue(batch_size: int = 4) -> Example:
    x = floats(batch_size, 8)
    return Momentum(), {"x": x, "other": x + 0.1 * x.flip(0)}


class RunningNorm(nn.Module):
    """Running mean and deviation of observations (reinforcement learning), used at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.net = _mlp(8, WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                mean, var, n = x.mean(0), x.var(0, unbiased=False), x.shape[0]
                delta, total = mean - self.mean, self.count + n
                second = self.var * self.count + var * n + delta**2 * self.count * n / total
                self.mean += delta * n / total
                self.var = second / total
                self.count = total
        return self.net((x - self.mean) / (self.var + 1e-8).sqrt())


def running_observations(batch_size: int = 4) -> Example:
    return WithLoss(RunningNorm()), _rows(batch_size)


class Centred(nn.Module):
    """DINO's centre of the teacher's outputs, and a loss between two views."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = _mlp(8, WIDTH, 8), _mlp(8, WIDTH, 8)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False
        self.register_buffer("centre", torch.zeros(1, 8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        views = self.student(torch.cat([x, other])).chunk(2)
        with torch.no_grad():
            out = self.teacher(torch.cat([x, other]))
            aims = ((out - self.centre) / 0.04).softmax(-1).chunk(2)
        terms = [-(aims[i] * (views[1 - i] / 0.1).log_softmax(-1)).sum(-1).mean() for i in (0, 1)]
        self.centre = self.centre * 0.9 + out.mean(0, keepdim=True) * 0.1
        return sum(terms) / 2


def self_distillation(batch_size: int = 4) -> Example:
    x = floats(batch_size, 8)
    return Centred(), {"x": x, "other": x + 0.1 * x.flip(0)}


# -- losses across the batch ---------------------------------------------------------------------------


class Contrastive(nn.Module):
    """SimCLR's loss over both views of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        z = F.normalize(self.net(torch.cat([x, other], 0)), dim=1)
        scores = z @ z.t() / 0.5
        scores.fill_diagonal_(-torch.inf)
        n = x.shape[0]
        aims = torch.arange(2 * n).roll(n)
        return F.cross_entropy(scores, aims)


def contrastive_views(batch_size: int = 4) -> Example:
    x = floats(batch_size, 8)
    return Contrastive(), {"x": x, "other": x + 0.1 * x.flip(0)}


class HardTriplets(nn.Module):
    """Triplets of the hardest positive and negative in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        square = z.square().sum(1)
        far = (square[:, None] + square[None] - 2 * z @ z.t()).clamp_min(1e-12).sqrt()
        same = y[:, None] == y[None]
        positive = (far * same).max(1).values
        negative = far.masked_fill(same, torch.inf).min(1).values
        return F.relu(positive - negative.clamp_max(10.0) + 0.3).mean()


def hard_triplets(batch_size: int = 4) -> Example:
    return HardTriplets(), _labelled(batch_size)


class Redundancy(nn.Module):
    """Barlow Twins' and VICReg's terms: statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        one, two = self.net(x), self.net(other)
        c = ((one - one.mean(0)) / (one.std(0) + 1e-3)).t() @ (
            (two - two.mean(0)) / (two.std(0) + 1e-3)
        )
        c = c / len(x)
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(7, 9)[:, 1:].pow(2).sum()
        spread = F.relu(1 - (one.var(0) + 1e-4).sqrt()).mean()
        return on + 0.005 * off + spread


def redundancy_reduction(batch_size: int = 4) -> Example:
    x = floats(batch_size, 8)
    return Redundancy(), {"x": x, "other": x + 0.1 * x.flip(0)}


class Mixed(nn.Module):
    """Mixup within the batch: every sample is mixed with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(0.7 * x + 0.3 * x.flip(0))
        return 0.7 * F.cross_entropy(out, y, label_smoothing=0.1) + 0.3 * F.cross_entropy(
            out, y.flip(0), label_smoothing=0.1
        )


def mixup(batch_size: int = 4) -> Example:
    return Mixed(), _labelled(batch_size)


class Summed(nn.Module):
    """A sum over all tokens divided by how many of them count, and one that is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), _mlp(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(self.net(x)).flatten(0, 1)
        aims = y.flatten().masked_fill(y.flatten() < 4, -100)
        total = F.cross_entropy(scores, aims, reduction="sum", label_smoothing=0.1)
        return total / (aims != -100).sum() + 1e-3 * scores.square().sum()


def summed_tokens(batch_size: int = 4) -> Example:
    return Summed(), _text(batch_size)


class Weighed(nn.Module):
    """Class weights, focal terms, a positive weight: means that are not over samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, WIDTH, 4)
        self.register_buffer("weights", torch.tensor([0.2, 1.0, 3.0, 0.5]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        plain = F.cross_entropy(out, y, weight=self.weights)
        p = out.log_softmax(-1).gather(1, y[:, None]).exp().squeeze(1)
        focal = (-((1 - p) ** 2) * p.log()).mean()
        hot = F.one_hot(y, 4).to(out)
        dice = 1 - (2 * (out.sigmoid() * hot).sum(0) + 1) / (out.sigmoid().sum(0) + hot.sum(0) + 1)
        return plain + focal + dice.mean()


def weighed_losses(batch_size: int = 4) -> Example:
    return Weighed(), _labelled(batch_size)


# -- gathers, scatters, samplers -----------------------------------------------------------------------


class Deformable(nn.Module):
    """Deformable sampling: offsets from the input, ``grid_sample`` at each tap."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.value = nn.Conv2d(3, 2 * 4, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.mix, self.head = nn.Conv2d(4 * 8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        value = self.value(x)
        at = torch.stack(
            torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="xy"), -1
        )
        moved = self.offset(x).tanh().view(b, 4, 2, h, w).permute(0, 1, 3, 4, 2) * 0.2 + at.to(x)
        taken = F.grid_sample(
            value.repeat_interleave(4, 0),
            moved.flatten(0, 1),
            align_corners=True,
            padding_mode="border",
        )
        return self.head(self.mix(taken.view(b, 32, h, w)).relu().mean((2, 3)))


def deformable(batch_size: int = 4) -> Example:
    return Classifier(Deformable()), _images(batch_size)


class Scattered(nn.Module):
    """Segments by ``scatter_reduce``, running sums, an ordered gather, ``take_along_dim``."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.net, self.head = nn.Linear(4, 1), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, group: Tensor, y: Tensor) -> Tensor:
        order = self.score(x).squeeze(-1).argsort(1)
        h = torch.take_along_dim(self.net(x), order.unsqueeze(-1), 1).cumsum(1) / LENGTH
        at = group.unsqueeze(-1).expand_as(h)
        out = h.new_zeros(len(x), 3, 8)
        most = out.scatter_reduce(1, at, h, "amax", include_self=False)
        mean = out.scatter_reduce(1, at, h, "mean", include_self=False)
        return F.cross_entropy(self.head((most + mean).sum(1)), y)


def scattered(batch_size: int = 4) -> Example:
    batch = {"x": floats(batch_size, LENGTH, 4), "group": tokens(3, batch_size, LENGTH)}
    return Scattered(), {**batch, "y": tokens(4, batch_size)}


class WrittenViews(nn.Module):
    """In-place arithmetic on views of an activation, and a slice that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h[:, :8].mul_(2).add_(h[:, 8:].detach())
        h[:, ::3] = h[:, 1:2].tanh()
        h.view(-1, 4, 4)[:, 0].clamp_(-1, 1)
        h.t()[5].zero_()
        h[:, -1] += h[:, 0] * 0.5
        return self.two(h)


def written_views(batch_size: int = 4) -> Example:
    return WithLoss(WrittenViews()), _rows(batch_size)


class Ellipsis_(nn.Module):
    """Attention by ``einsum`` with an ellipsis, scores at minus infinity, a mask of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Parameter(floats(3, 2, WIDTH, 8) / 4)
        self.out = nn.Parameter(floats(2, 8, WIDTH) / 4)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = torch.einsum("...ld,thde->t...hle", h, self.qkv)
        scores = torch.einsum("...qe,...ke->...qk", q, k) / math.sqrt(8)
        seen = torch.arange(LENGTH) < lengths[:, None]
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        mixed = torch.einsum("...hle,hed->...ld", scores.softmax(-1) @ v, self.out)
        loss = F.cross_entropy(self.head(h + mixed).transpose(1, 2), y, reduction="none")
        return (loss * seen).sum() / seen.sum()


def einsum_attention(batch_size: int = 4) -> Example:
    lengths = torch.arange(batch_size) % LENGTH + 1
    return Ellipsis_(), {**_text(batch_size), "lengths": lengths}


# -- sequences -----------------------------------------------------------------------------------------


class FieldOfTags(nn.Module):
    """A linear-chain conditional random field with masks (the recursion in a loop)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.score, self.step = nn.Linear(16, 5), nn.Parameter(floats(5, 5) * 0.1)

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(self.net(x)[0])
        hold, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, scores.shape[1]):
            moved = torch.logsumexp(hold.unsqueeze(2) + self.step, 1) + scores[:, t]
            hold = torch.where(mask[:, t, None], moved, hold)
            gain = self.step[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(
                1, tags[:, t, None]
            ).squeeze(1)
            path = path + gain * mask[:, t]
        return (hold.logsumexp(1) - path).mean()


def chain_field(batch_size: int = 4) -> Example:
    mask = torch.arange(6) < (torch.arange(batch_size) % 5 + 2)[:, None]
    return FieldOfTags(), {
        "x": floats(batch_size, 6, 8),
        "tags": tokens(5, batch_size, 6),
        "mask": mask,
    }


class PackedList(nn.Module):
    """Sequences of Python lengths packed from a list, the last state read by length."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]
        out, _ = self.net(pack_sequence(pieces, enforce_sorted=False))
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        return self.head(padded[torch.arange(len(x)), sizes - 1])


class PackedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = PackedList()

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x, lengths), y)


def packed_list(batch_size: int = 4) -> Example:
    lengths = torch.arange(batch_size) % 5 + 2
    return PackedLoss(), {
        "x": floats(batch_size, 6, 8),
        "lengths": lengths,
        "y": tokens(4, batch_size),
    }


class Nested(nn.Module):
    """A nested tensor of rows of unlike lengths, padded again after a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pieces = [row[: 2 + i % 3] for i, row in enumerate(x.unbind(0))]
        nested = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
        h = torch.nested.to_padded_tensor(self.net(nested).relu(), 0.0)
        return F.cross_entropy(self.head(h.sum(1)), y)


def nested_rows(batch_size: int = 4) -> Example:
    return Nested(), {"x": floats(batch_size, 6, 8), "y": tokens(4, batch_size)}


# -- how forward is arranged ---------------------------------------------------------------------------


class Routed(nn.Module):
    """Heads and activations in a ``ModuleDict``, chosen by names in the settings."""

    def __init__(self, task: str = "rank") -> None:
        super().__init__()
        self.task = task
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "gelu": nn.GELU(), "prelu": nn.PReLU()})
        self.trunks = nn.ModuleDict(
            {name: nn.Linear(8, WIDTH) for name in ("left", "right", "idle")}
        )
        self.heads = nn.ModuleDict({"rank": nn.Linear(WIDTH, 4), "class": nn.Linear(WIDTH, 9)})

    def forward(self, x: Tensor) -> Tensor:
        h = sum(
            self.acts[act](self.trunks[side](x))
            for side, act in (("left", "gelu"), ("right", "prelu"))
        )
        return self.heads[self.task](h)


def routed_by_name(batch_size: int = 4) -> Example:
    return WithLoss(Routed()), _rows(batch_size)


class Checkpointed(nn.Module):
    """Both kinds of activation checkpointing, a sequence of them, dropout inside at rate 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.many = (
            _mlp(8, WIDTH, 8),
            nn.Sequential(*(_mlp(8, WIDTH, 8) for _ in range(4))),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.one, x, use_reentrant=True) if x.requires_grad else x + self.one(x)
        x = x + checkpoint(lambda h: self.one(h) * 0.5, x, use_reentrant=False)
        return self.head(checkpoint_sequential(self.many, 2, x, use_reentrant=False))


def checkpointed_blocks(batch_size: int = 4) -> Example:
    return WithLoss(Checkpointed()), _rows(batch_size)


@dataclass
class Output:
    """What a forward returns; the loss is not first."""

    scores: Tensor
    states: tuple[Tensor, ...]
    loss: Tensor | None = None
    note: str = "ok"


class Described(nn.Module):
    """A dataclass with the loss by name, states in a tuple, a word besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Output:
        states = [x]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])) + states[-1])
        scores = self.head(states[-1])
        output = Output(scores, tuple(states))
        if y is not None:
            output.loss = F.cross_entropy(scores, y)
        return output


def described_output(batch_size: int = 4) -> Example:
    return Described(), _labelled(batch_size)


class SwitchedOff(nn.Module):
    """A trunk frozen in forward, switched on again behind it, and a detached feature."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.probe, self.head = _mlp(8, WIDTH, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(False)
        frozen = self.trunk(x)
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(True)
        return self.head(self.trunk(x) + frozen) + self.probe(frozen.detach())


def switched_off(batch_size: int = 4) -> Example:
    return WithLoss(SwitchedOff()), _rows(batch_size)


class Actors(nn.Module):
    """Soft actor-critic: critics with gradients switched off while the policy is improved."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic, self.target = (
            _mlp(8, WIDTH, 4),
            _mlp(12, WIDTH, 1),
            _mlp(12, WIDTH, 1),
        )
        self.target.requires_grad_(False)
        self.heat = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
        with torch.no_grad():
            aim = gain + 0.9 * self.target(torch.cat([x, self.policy(x).tanh()], -1)).squeeze(-1)
        critic = F.smooth_l1_loss(self.critic(torch.cat([x, y], -1)).squeeze(-1), aim)
        action = self.policy(x).tanh()
        for parameter in self.critic.parameters():
            parameter.requires_grad = False
        actor = -self.critic(torch.cat([x, action], -1)).mean()
        for parameter in self.critic.parameters():
            parameter.requires_grad = True
        heat = (self.heat.exp() * (action.detach().square().mean() - 0.3)).sum()
        return critic + actor + heat


def actor_critic(batch_size: int = 4) -> Example:
    return Actors(), {**_rows(batch_size), "gain": floats(batch_size)}


class Refreshed(nn.Module):
    """A positional table that grows on demand, a mask kept in a dict by length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.table: Tensor | None = None
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[1]
        if self.table is None or len(self.table) < n:
            at = torch.arange(n)[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
            self.table = at.sin()
        if n not in self.masks:
            self.masks[n] = torch.full((n, n), -torch.inf).triu(1)
        h = self.embed(x) + self.table[:n].to(self.embed.weight)
        h = h + ((h @ h.transpose(1, 2)) / 4 + self.masks[n].to(h)).softmax(-1) @ h
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def grown_tables(batch_size: int = 4) -> Example:
    return Refreshed(), _text(batch_size)


class Detours(nn.Module):
    """``.data`` and ``detach`` on saved results: scores clipped beside the graph, a mean taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).relu()
        self.seen = h.data
        scale = h.data.abs().amax(-1, keepdim=True) + 1
        h = h / scale + h.data.clone() * 0.1
        return self.two(h - h.detach().mean(-1, keepdim=True))


def data_of_results(batch_size: int = 4) -> Example:
    return WithLoss(Detours()), _rows(batch_size)


class Unrolled(nn.Module):
    """A meta-learner's inner step by hand: fast weights from a gradient inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rate = _mlp(8, WIDTH, 4), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fast = dict(self.net.named_parameters())
        inner = F.mse_loss(functional_call(self.net, fast, (x[:, :8],)), y)
        steps = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: w - self.rate * g for (name, w), g in zip(fast.items(), steps, strict=True)}
        return F.mse_loss(functional_call(self.net, fast, (x.flip(1),)), y)


def inner_step(batch_size: int = 4) -> Example:
    return Unrolled(), _rows(batch_size)


class Budgeted(nn.Module):
    """A penalty on weights, an entropy of the batch's mean, a load-balancing term."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4), nn.Parameter(floats(4, 8, 8) / 4)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        h = torch.einsum("bd,edf,be->bf", x, self.up, shares)
        mean = shares.mean(0)
        hits = F.one_hot(shares.argmax(-1), 4).to(x).mean(0)
        penalty = sum(p.abs().sum() for p in self.parameters() if p.dim() > 1)
        balance = 4 * (mean * hits).sum() + (mean * mean.log()).sum()
        return F.cross_entropy(self.head(h), y) + 1e-3 * penalty + 0.1 * balance


def balanced_gates(batch_size: int = 4) -> Example:
    return Budgeted(), _labelled(batch_size)


class Ghost(nn.Module):
    """Group, instance and ghost batch norms, and a batch's standard deviation as a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self.instance = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8),
        )
        self.bn, self.head = nn.BatchNorm1d(8), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.instance(self.group(self.conv(x)).relu()).mean((2, 3)) + x.mean((1, 2, 3))[:, None]
        h = torch.cat([self.bn(piece) for piece in h.chunk(2)])
        spread = h.std(0, unbiased=False).mean().expand(len(h), 1)
        return self.head(torch.cat([h, spread], 1))


def ghost_norms(batch_size: int = 4) -> Example:
    return Classifier(Ghost()), _images(batch_size)


class Early(nn.Module):
    """Early exits with a loss at each, weights that depend on the depth; a skip by the data's sign."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        losses = {}
        for depth, (layer, leave) in enumerate(zip(self.layers, self.exits, strict=True)):
            x = torch.where((x.mean(-1, keepdim=True) > 0), torch.tanh(layer(x)), x)
            losses[f"exit{depth}"] = F.cross_entropy(leave(x), y) * (depth + 1) / 6
        return {"loss": sum(losses.values()), **losses, "depth": len(self.layers)}


def early_exits(batch_size: int = 4) -> Example:
    return Early(), _labelled(batch_size)
