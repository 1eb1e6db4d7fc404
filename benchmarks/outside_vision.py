"""More models as others write them, for ``outside.py``: images, video, points and what is learnt of pairs."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from outside_models import Classifier, Example, WithLoss, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 16


def _images(batch_size: int, size: int = 16) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 3, size, size), "y": tokens(8, batch_size)}


class DropPath(nn.Module):
    """Drops whole samples of a branch, as timm has it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class ConvNextBlock(nn.Module):
    """Depthwise, global response normalisation, layer scale, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.norm = (
            nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.one, self.two = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gamma, self.beta = (nn.Parameter(torch.ones(1, 1, 1, 32)) for _ in range(2))
        self.scale, self.drop = nn.Parameter(1e-1 * torch.ones(WIDTH)), DropPath(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.one(self.norm(self.depth(x).permute(0, 2, 3, 1))))
        norm = h.norm(p=2, dim=(1, 2), keepdim=True)
        h = self.gamma * (h * norm / (norm.mean(-1, keepdim=True) + 1e-6)) + self.beta + h
        return x + self.drop((self.scale * self.two(h)).permute(0, 3, 1, 2))


def convnext_grn(batch_size: int = 4) -> Example:
    trunk = [nn.Conv2d(3, WIDTH, 4, stride=4), ConvNextBlock(), ConvNextBlock()]
    return Classifier(
        nn.Sequential(*trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 8))
    ), _images(batch_size)


class Windows(nn.Module):
    """Shifted windows with a table of relative positions and a mask kept as a buffer."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.qkv, self.out = shift, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(9, 2))
        place = torch.stack(
            torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
        ).flatten(1)
        apart = (place[:, :, None] - place[:, None]) + 1
        self.register_buffer("places", apart[0] * 3 + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = x.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(y).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.places.view(-1)].view(4, 4, 2).permute(2, 0, 1)
        y = ((q @ k.transpose(-2, -1)) / math.sqrt(c // 2) + bias[None]).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, 4, c))
        y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + (y.roll((self.shift, self.shift), (1, 2)) if self.shift else y)


def windows(batch_size: int = 4) -> Example:
    return WithLoss(nn.Sequential(Windows(0), Windows(1))), {
        "x": floats(batch_size, 4, 4, WIDTH),
        "y": floats(batch_size, 4, 4, WIDTH),
    }


def super_resolution(batch_size: int = 4) -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, WIDTH, 5, padding=2),
        nn.PReLU(WIDTH),
        nn.Conv2d(WIDTH, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )
    return WithLoss(net), {"x": floats(batch_size, 3, 8, 8), "y": floats(batch_size, 3, 16, 16)}


class Dense(nn.Module):
    """DenseNet's block: every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(3 + 4 * i),
                nn.ReLU(inplace=True),
                nn.Conv2d(3 + 4 * i, 4, 3, padding=1),
            )
            for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1).mean((2, 3))


def densenet(batch_size: int = 4) -> Example:
    return Classifier(nn.Sequential(Dense(), nn.Linear(15, 8))), _images(batch_size)


class YoloHead(nn.Module):
    """Two scales, anchors, cells that hold an object, as one loss of four parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = (
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
        )
        self.heads = nn.ModuleList([nn.Conv2d(8, 3 * 7, 1), nn.Conv2d(16, 3 * 7, 1)])
        self.register_buffer("anchors", torch.rand(2, 3, 2) + 0.5)

    def forward(self, x: Tensor, cells: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        one = F.leaky_relu(self.stem(x), 0.1)
        two = F.leaky_relu(self.down(one), 0.1)
        total = x.new_zeros(1)
        for i, features in enumerate((one, two)):
            b, _, h, w = features.shape
            out = self.heads[i](features).view(b, 3, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
            gx, gy = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy")
            grid = torch.stack((gx, gy), -1).to(out.dtype)
            xy = (out[..., :2].sigmoid() * 2 - 0.5 + grid) / w
            wh = (out[..., 2:4].sigmoid() * 2) ** 2 * self.anchors[i].view(1, 3, 1, 1, 2) / w
            flat = torch.cat([xy, wh, out[..., 4:]], -1).view(b, -1, 7)
            taken = cells % flat.shape[1]
            chosen = flat.gather(1, taken[..., None].expand(-1, -1, 7))
            found = torch.zeros_like(flat[..., 4]).scatter(1, taken, 1.0)
            total = (
                total
                + F.smooth_l1_loss(chosen[..., :4], boxes)
                + F.binary_cross_entropy_with_logits(flat[..., 4], found)
            )
            total = total + F.binary_cross_entropy_with_logits(
                chosen[..., 5:], F.one_hot(labels, 2).to(flat.dtype)
            )
        return total.sum()


def yolo(batch_size: int = 4) -> Example:
    batch = {"x": floats(batch_size, 3, 16, 16), "cells": tokens(190, batch_size, 3)}
    return YoloHead(), batch | {
        "boxes": floats(batch_size, 3, 4).sigmoid(),
        "labels": tokens(2, batch_size, 3),
    }


class Pyramid(nn.Module):
    """DeepLab: dilated branches, one of the whole image, and a mask enlarged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.branches = nn.ModuleList(
            nn.Conv2d(WIDTH, 8, 3, padding=d, dilation=d) for d in (1, 2, 3)
        )
        self.whole, self.head = nn.Conv2d(WIDTH, 8, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        pooled = F.interpolate(
            self.whole(F.adaptive_avg_pool2d(h, 1)),
            size=h.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
        scores = self.head(torch.cat([*(branch(h) for branch in self.branches), pooled], 1))
        scores = F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=True)
        dice = 1 - 2 * (scores.softmax(1)[:, 1] * (y == 1)).sum() / (
            scores.softmax(1)[:, 1].sum() + (y == 1).sum() + 1
        )
        return F.cross_entropy(scores, y, ignore_index=3) + dice


def deeplab(batch_size: int = 4) -> Example:
    return Pyramid(), {"x": floats(batch_size, 3, 16, 16), "y": tokens(4, batch_size, 16, 16)}


class Modulated(nn.Module):
    """StyleGAN2: a convolution whose weights differ by sample, run as groups of one large image."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(8, 4), nn.Parameter(torch.randn(6, 4, 3, 3))
        self.constant = nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        b = z.shape[0]
        weight = self.weight[None] * (self.style(z) + 1)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        x = self.constant.repeat(b, 1, 1, 1).view(1, b * 4, 8, 8)
        x = F.conv2d(x, weight.view(b * 6, 4, 3, 3), padding=1, groups=b).view(b, 6, 8, 8)
        return F.mse_loss(F.leaky_relu(x, 0.2), y)


def stylegan(batch_size: int = 4) -> Example:
    return Modulated(), {"z": floats(batch_size, 8), "y": floats(batch_size, 6, 8, 8)}


class Gan(nn.Module):
    """Both players in one forward: the sum of two losses, with spectral norm on the critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(128, 1)),
        )

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        made = self.maker(z[:, :, None, None])
        critic = F.relu(1 - self.critic(x)).mean() + F.relu(1 + self.critic(made.detach())).mean()
        return {"loss": critic - self.critic(made).mean(), "critic": critic}


def gan(batch_size: int = 4) -> Example:
    return Gan(), {"x": floats(batch_size, 3, 8, 8), "z": floats(batch_size, 8)}


class Denoiser(nn.Module):
    """A diffusion U-Net: sinusoids of time, group norm, attention in the middle, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.enter, self.down = (
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(3))
        self.qkv, self.proj = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.up, self.out = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 100).cumprod(0))

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a = self.alphas[t][:, None, None, None]
        freq = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2, dtype=x.dtype) / (WIDTH // 2))
        angle = t[:, None].to(x.dtype) * freq[None]
        emb = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        one = self.enter(a.sqrt() * x + (1 - a).sqrt() * noise)
        h = self.down(F.silu(self.norms[0](one)) + emb)
        b, c, height, width = h.shape
        q, k, v = self.qkv(self.norms[1](h).view(b, c, -1)).chunk(3, 1)
        weights = torch.einsum("bct,bcs->bts", q, k).div(c**0.5).softmax(-1)
        h = h + self.proj(torch.einsum("bts,bcs->bct", weights, v)).reshape(b, c, height, width)
        h = self.up(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), one], 1))
        return F.mse_loss(self.out(F.silu(self.norms[2](h))), noise)


def diffusion(batch_size: int = 4) -> Example:
    x = floats(batch_size, 3, 8, 8)
    return Denoiser(), {"x": x, "t": tokens(100, batch_size), "noise": x.flip(-1)}


class Capsules(nn.Module):
    """Routing by agreement, three times, the first two without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.primary, self.weight = (
            nn.Conv2d(3, 16, 8, stride=4),
            nn.Parameter(torch.randn(36, 5, 6, 4) / 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def squash(s: Tensor) -> Tensor:
            n = (s**2).sum(-1, keepdim=True)
            return n / (1 + n) * s / (n + 1e-8).sqrt()

        u = squash(self.primary(x).view(x.shape[0], -1, 4))
        votes = torch.einsum("iocd,bid->bioc", self.weight, u)
        logits = votes.new_zeros(votes.shape[:3])
        for turn in range(3):
            from_ = votes if turn == 2 else votes.detach()
            v = squash((logits.softmax(2)[..., None] * from_).sum(1))
            if turn < 2:
                logits = logits + (from_ * v[:, None]).sum(-1)
        length, wanted = v.norm(dim=-1), F.one_hot(y, 5).to(v.dtype)
        return (
            (wanted * F.relu(0.9 - length) ** 2 + 0.5 * (1 - wanted) * F.relu(length - 0.1) ** 2)
            .sum(1)
            .mean()
        )


def capsules(batch_size: int = 4) -> Example:
    return Capsules(), {"x": floats(batch_size, 3, 16, 16), "y": tokens(5, batch_size)}


class Follower(nn.Module):
    """BYOL and MoCo: a teacher in buffers that follows the student, and a queue written in forward."""

    def __init__(self, queues: bool) -> None:
        super().__init__()
        self.net, self.head = (
            nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)),
            nn.Linear(8, 8),
        )
        for name, tensor in self.net.state_dict().items():
            self.register_buffer("slow_" + name.replace(".", "_"), tensor.clone())
        self.register_buffer("queue", F.normalize(floats(16, 8), dim=1))
        self.queues = queues

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            slow = {}
            for name, parameter in self.net.named_parameters():
                kept = getattr(self, "slow_" + name.replace(".", "_"))
                kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)
                slow[name] = kept.clone()
            key = F.normalize(torch.func.functional_call(self.net, slow, (z,)), dim=-1)
        query = F.normalize(self.head(self.net(x)), dim=-1)
        if not self.queues:
            return (2 - 2 * (query * key).sum(-1)).mean()
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], 1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([key, self.queue[: -key.shape[0]]]))
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


def byol(batch_size: int = 4) -> Example:
    return Follower(False), {"x": floats(batch_size, 12), "z": floats(batch_size, 12).flip(0)}


def moco(batch_size: int = 4) -> Example:
    return Follower(True), {"x": floats(batch_size, 12), "z": floats(batch_size, 12).flip(0)}


class Dino(nn.Module):
    """Self-distillation with a centre that follows the teacher's mean, and a frozen copy as teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            said = self.teacher(z)
            wanted = ((said - self.center) / 0.04).softmax(-1)
            self.center = self.center * 0.9 + said.mean(0, keepdim=True) * 0.1
        return -(wanted * (self.student(x) / 0.1).log_softmax(-1)).sum(-1).mean()


def dino(batch_size: int = 4) -> Example:
    return Dino(), {"x": floats(batch_size, 12), "z": floats(batch_size, 12).flip(0)}


class Pairs(nn.Module):
    """Losses of two views: Barlow Twins, VICReg, CLIP with a learnt temperature, triplets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = (
            nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)),
            kind,
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        a, b = self.net(x), self.net(z)
        n, d = a.shape
        if self.kind == "triplet":
            apart = torch.cdist(a, b)
            same = torch.eye(n, dtype=torch.bool)
            return (
                F.relu(apart.diagonal() - apart.masked_fill(same, math.inf).amin(1) + 0.5).mean()
                + self.scale**2
            )
        if self.kind == "clip":
            scores = self.scale.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
            return (
                F.cross_entropy(scores, torch.arange(n))
                + F.cross_entropy(scores.t(), torch.arange(n))
            ) / 2
        if self.kind == "barlow":
            c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / n
            off = c.flatten()[:-1].view(d - 1, d + 1)[:, 1:].flatten()
            return (torch.diagonal(c) - 1).pow(2).sum() + 0.01 * off.pow(2).sum() + self.scale**2
        spread = sum(F.relu(1 - torch.sqrt(one.var(dim=0) + 1e-4)).mean() for one in (a, b))
        a, b = a - a.mean(0), b - b.mean(0)
        off = sum(((one.T @ one / (n - 1)).fill_diagonal_(0).pow(2).sum() / d) for one in (a, b))
        return F.mse_loss(a, b) + spread + off + self.scale**2


def _pairs(kind: str, batch_size: int) -> Example:
    return Pairs(kind), {"x": floats(batch_size, 12), "z": floats(batch_size, 12).flip(0) * 1.1}


def triplet(batch_size: int = 4) -> Example:
    return _pairs("triplet", batch_size)


def clip_pairs(batch_size: int = 4) -> Example:
    return _pairs("clip", batch_size)


def barlow(batch_size: int = 4) -> Example:
    return _pairs("barlow", batch_size)


def vicreg(batch_size: int = 4) -> Example:
    return _pairs("vicreg", batch_size)


class Masked(nn.Module):
    """A masked autoencoder whose noise comes with the batch: shuffled by argsort, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = (
            nn.Conv2d(3, WIDTH, 4, stride=4),
            nn.Parameter(torch.randn(1, 16, WIDTH)),
        )
        self.encode = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, 0.0, batch_first=True, norm_first=True
        )
        self.token, self.decode = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.place
        shuffle = noise.argsort(dim=1)
        back, kept = shuffle.argsort(dim=1), shuffle[:, :4]
        seen = self.encode(h.gather(1, kept.unsqueeze(-1).repeat(1, 1, WIDTH)))
        every = torch.cat([seen, self.token.repeat(len(x), 12, 1)], 1)
        every = every.gather(1, back.unsqueeze(-1).repeat(1, 1, WIDTH)) + self.place
        mask = torch.ones(len(x), 16, dtype=x.dtype)
        mask[:, :4] = 0
        mask = mask.gather(1, back)
        target = x.reshape(len(x), 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(len(x), 16, 48)
        return (((self.decode(every) - target) ** 2).mean(-1) * mask).sum() / mask.sum()


def masked_images(batch_size: int = 4) -> Example:
    return Masked(), {"x": floats(batch_size, 3, 16, 16), "noise": floats(batch_size, 16)}


class Flow(nn.Module):
    """RAFT: a correlation volume looked up by a field that a recurrence refines."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.context = (
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
        )
        self.gate, self.new, self.flow = (nn.Conv2d(8 + 1 + 2, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        one, two, h = self.features(x), self.features(z), torch.tanh(self.context(x))
        b, c, height, width = one.shape
        volume = (
            torch.einsum("bchw,bcij->bhwij", one, two).reshape(b * height * width, 1, height, width)
            / c**0.5
        )
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        base = torch.stack([xs, ys]).to(x.dtype)[None].repeat(b, 1, 1, 1)
        place, loss = base, 0.0
        for turn in range(3):
            place = place.detach()
            grid = 2 * place.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2) / (width - 1) - 1
            found = F.grid_sample(volume, grid, align_corners=True).view(b, 1, height, width)
            seen = torch.cat([h, found, place - base], 1)
            gate = self.gate(seen).sigmoid()
            h = (1 - gate) * h + gate * self.new(
                torch.cat([h * self.flow(seen).sigmoid(), found, place - base], 1)
            ).tanh()
            place = place + self.head(h)
            loss = loss + 0.8 ** (2 - turn) * (place - base - y).abs().mean()
        return loss


def optical_flow(batch_size: int = 4) -> Example:
    x = floats(batch_size, 3, 12, 12)
    return Flow(), {"x": x, "z": x.roll(1, -1), "y": floats(batch_size, 2, 6, 6)}


class Nerf(nn.Module):
    """Rays sampled at depths, densities composed by a running product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        )

    def forward(self, origins: Tensor, directions: Tensor, y: Tensor) -> Tensor:
        depths = torch.linspace(0.5, 2.0, 6, dtype=y.dtype)
        points = origins[:, None] + directions[:, None] * depths[None, :, None]
        parts = [points] + [f(points * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos)]
        colour, density = self.net(torch.cat(parts, -1)).split([3, 1], -1)
        gaps = torch.cat([depths[1:] - depths[:-1], torch.full_like(depths[:1], 1e10)])
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]) * gaps)
        passed = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1
        )[:, :-1]
        return F.mse_loss(((alpha * passed)[..., None] * colour.sigmoid()).sum(1), y)


def nerf(batch_size: int = 4) -> Example:
    n = 2 * batch_size
    return Nerf(), {
        "origins": floats(n, 3),
        "directions": F.normalize(floats(n, 3), dim=-1),
        "y": floats(n, 3).sigmoid(),
    }


class Hierarchy(nn.Module):
    """PointNet++: centres, their nearest neighbours, a maximum over each neighbourhood."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        centres = x[:, ::4]
        near = torch.cdist(centres, x).topk(5, dim=-1, largest=False)[1]
        rows = torch.arange(x.shape[0])[:, None, None].expand_as(near)
        around = x[rows, near]
        h = F.relu(self.one(torch.cat([around - centres[:, :, None], around], -1))).max(2)[0]
        return F.cross_entropy(self.head(self.two(h).amax(1)), y)


def pointnet_hierarchy(batch_size: int = 4) -> Example:
    return Hierarchy(), {"x": floats(batch_size, 16, 3), "y": tokens(8, batch_size)}


def video(batch_size: int = 4) -> Example:
    net = nn.Sequential(
        nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)),
        nn.MaxPool3d((1, 2, 2)), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    return Classifier(net), {"x": floats(batch_size, 3, 4, 8, 8), "y": tokens(8, batch_size)}


class Involution(nn.Module):
    """Kernels made of each place's own features, by ``unfold``; a margin on angles (ArcFace) at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.weight = nn.Conv2d(8, 9, 1), nn.Parameter(torch.randn(8, 8))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
        x = (self.make(x).view(b, 1, 9, h, w) * patches).sum(2)
        cosine = F.linear(F.normalize(x.mean((2, 3))), F.normalize(self.weight)).clamp(
            -1 + 1e-7, 1 - 1e-7
        )
        angle = torch.acos(cosine) + 0.3 * F.one_hot(y, 8)
        return F.cross_entropy(8 * torch.cos(angle), y, label_smoothing=0.1)


def involution(batch_size: int = 4) -> Example:
    return Involution(), _images(batch_size, 8)


class Distilled(nn.Module):
    """A student that learns from a frozen teacher in evaluation mode, mixed images and mixed labels."""

    def __init__(self) -> None:
        super().__init__()

        def make(width: int) -> nn.Sequential:
            stem = [nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.Hardswish()]
            return nn.Sequential(
                *stem, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * width, 8)
            )

        self.student, self.teacher = make(8), make(16).requires_grad_(False)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        mixed = share[:, None, None, None] * x + (1 - share[:, None, None, None]) * x.flip(1)
        with torch.no_grad():
            said = self.teacher(mixed)
        scores = self.student(mixed)
        far = F.kl_div(
            F.log_softmax(scores / 2, 1),
            F.log_softmax(said / 2, 1),
            reduction="batchmean",
            log_target=True,
        )
        hard = share * F.cross_entropy(scores, y, reduction="none") + (1 - share) * F.cross_entropy(
            scores, (y + 1) % 8, reduction="none"
        )
        return far * 4 + hard.mean()


def distilled(batch_size: int = 4) -> Example:
    return Distilled(), _images(batch_size) | {"share": floats(batch_size).sigmoid()}


def pooling_zoo(batch_size: int = 4) -> Example:
    """Layers that few networks have: unpooling, response norm, folds, softmax over channels."""

    class Zoo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.unpool = (
                nn.Conv2d(3, 8, 3, padding=1),
                nn.MaxPool2d(2, return_indices=True),
                nn.MaxUnpool2d(2),
            )
            self.norm, self.power, self.out = (
                nn.LocalResponseNorm(3),
                nn.LPPool2d(2, 2),
                nn.Conv2d(8, 3, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")))
            pooled, places = self.pool(h)
            h = F.softmax(self.unpool(pooled, places), 1) + h
            h = F.interpolate(self.power(h), scale_factor=2, mode="bicubic", align_corners=False)
            h = F.fold(F.unfold(h, 2, stride=2), h.shape[-2:], 2, stride=2)
            return self.out(F.channel_shuffle(h, 2))[:, :, 1:-1, 1:-1]

    return WithLoss(Zoo()), {"x": floats(batch_size, 3, 8, 8), "y": floats(batch_size, 3, 8, 8)}
