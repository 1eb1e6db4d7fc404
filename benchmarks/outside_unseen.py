"""Forty-four more models as users of many libraries write them, for ``outside.py``: towers of images, flows, worlds,
routed layers, adapters, caches, loggers, detectors, and losses with gradients of their own.

Written before any of them was run.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
import logging
import math
import operator
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from outside_models import Example, WithLoss, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

WIDTH = 16
log = logging.getLogger(__name__)


def _rows(batch_size: int, width: int = 8, out: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, width), "y": floats(batch_size, out).flip(0)}


def _text(batch_size: int, length: int = 12, words: int = 30) -> dict[str, Tensor]:
    ids = tokens(words, batch_size, length, low=1)
    return {"input_ids": ids, "labels": ids.flip(1)}


# -- images -------------------------------------------------------------------------------------------


class CosineWindows(nn.Module):
    """Attention in shifted windows by cosine, with positions from a small network over log distances."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, size: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((heads, 1, 1))))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(inplace=True), nn.Linear(32, heads, bias=False)
        )
        steps = torch.arange(-(window - 1), window, dtype=torch.float32)
        table = (
            torch.stack(torch.meshgrid(steps, steps, indexing="ij")).permute(1, 2, 0)
            / (window - 1)
            * 8
        )
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / math.log2(8)
        self.register_buffer("table", table[None], persistent=False)
        at = torch.arange(window)
        coords = torch.stack(torch.meshgrid(at, at, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0) + window - 1
        self.register_buffer(
            "index", relative[..., 0] * (2 * window - 1) + relative[..., 1], persistent=False
        )
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("k_bias", torch.zeros(dim), persistent=False)
        self.proj = nn.Linear(dim, dim)
        mask = None
        if shift:
            image = torch.zeros((1, size, size, 1))
            count = 0
            for h in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                for w in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                    image[:, h, w, :] = count
                    count += 1
            parts = self.partition(image).view(-1, window * window)
            mask = parts.unsqueeze(1) - parts.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        self.register_buffer("mask", mask, persistent=False)

    def partition(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = self.partition(y)
        qkv = F.linear(y, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        q, k, v = (
            qkv.reshape(len(y), -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        bias = self.cpb_mlp(self.table).view(-1, self.heads)[self.index.view(-1)]
        bias = bias.view(self.window**2, self.window**2, -1).permute(2, 0, 1).contiguous()
        attn = attn + (16 * torch.sigmoid(bias)).unsqueeze(0)
        if self.mask is not None:
            count = self.mask.shape[0]
            attn = attn.view(-1, count, *attn.shape[1:]) + self.mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, *attn.shape[2:])
        y = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(len(y), -1, c))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y


def swin_v2(batch_size: int = 4) -> Example:
    """timm's Swin V2: post-norm, cosine attention, continuous positions, patches merged."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, WIDTH, 2, 2)
            self.blocks = nn.ModuleList(CosineWindows(WIDTH, 2, 4, shift, 8) for shift in (0, 2))
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.merge = nn.Linear(4 * WIDTH, 2 * WIDTH, bias=False)
            self.head = nn.Linear(2 * WIDTH, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.stem(x).permute(0, 2, 3, 1)
            for block, norm in zip(self.blocks, self.norms):
                x = x + norm(block(x))
            b, h, w, c = x.shape
            x = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
            return F.cross_entropy(self.head(self.merge(x).mean((1, 2))), y, label_smoothing=0.1)

    return Net(), {"x": floats(batch_size, 3, 16, 16), "y": tokens(5, batch_size)}


def neural_cells(batch_size: int = 4) -> Example:
    """A neural cellular automaton: fixed filters by depth, a living mask by pooling, updates at random places
    that the batch names, steps in a loop."""

    class Cells(nn.Module):
        def __init__(self, channels: int = 8) -> None:
            super().__init__()
            self.channels = channels
            sobel = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])) / 8.0
            identity = torch.zeros(3, 3)
            identity[1, 1] = 1.0
            kernel = torch.stack([identity, sobel, sobel.T])[:, None].repeat(channels, 1, 1, 1)
            self.register_buffer("kernel", kernel)
            self.w1 = nn.Conv2d(channels * 3, 24, 1)
            self.w2 = nn.Conv2d(24, channels, 1, bias=False)
            self.w2.weight.data.mul_(0.1)

        def alive(self, x: Tensor) -> Tensor:
            return F.max_pool2d(x[:, 3:4], 3, stride=1, padding=1) > 0.1

        def step(self, x: Tensor, fires: Tensor) -> Tensor:
            before = self.alive(x)
            y = F.conv2d(F.pad(x, [1, 1, 1, 1], "circular"), self.kernel, groups=self.channels)
            x = x + self.w2(torch.relu(self.w1(y))) * fires
            return x * (before & self.alive(x))

        def forward(self, seed: Tensor, fires: Tensor, target: Tensor) -> Tensor:
            x = seed
            for step in range(fires.size(1)):
                x = self.step(x, (fires[:, step : step + 1] < 0.5).to(x.dtype))
            return (x[:, :4] - target).square().mean((1, 2, 3)).mean()

    seed = torch.zeros(batch_size, 8, 8, 8)
    seed[:, 3:, 3:5, 3:5] = 1.0
    fires = floats(batch_size, 4, 8, 8).sigmoid()
    return Cells(), {"seed": seed, "fires": fires, "target": floats(batch_size, 4, 8, 8).sigmoid()}


def centre_net(batch_size: int = 4) -> Example:
    """Detection by heat maps: a focal loss over Gaussians, sizes and offsets read at the places of objects."""

    def neg_loss(pred: Tensor, gt: Tensor) -> Tensor:
        pos_inds, neg_inds = gt.eq(1).to(pred.dtype), gt.lt(1).to(pred.dtype)
        neg_weights = torch.pow(1 - gt, 4)
        pos_loss = (torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds).sum()
        neg_loss = (torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds).sum()
        num_pos = pos_inds.sum()
        return torch.where(num_pos == 0, -neg_loss, -(pos_loss + neg_loss) / num_pos.clamp(min=1))

    def read(feat: Tensor, ind: Tensor) -> Tensor:
        feat = feat.permute(0, 2, 3, 1).contiguous().view(feat.size(0), -1, feat.size(1))
        return feat.gather(1, ind.unsqueeze(2).expand(ind.size(0), ind.size(1), feat.size(2)))

    class Centre(nn.Module):
        def __init__(self, heads: dict[str, int]) -> None:
            super().__init__()
            self.heads = heads
            self.trunk = nn.Sequential(
                nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16, momentum=0.1), nn.ReLU(inplace=True),
                nn.ConvTranspose2d(16, 16, 4, 2, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(inplace=True),
            )  # fmt: skip
            for head, classes in self.heads.items():
                fc = nn.Sequential(
                    nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, classes, 1)
                )
                if "hm" in head:
                    fc[-1].bias.data.fill_(-2.19)
                self.__setattr__(head, fc)

        def forward(
            self, image: Tensor, hm: Tensor, ind: Tensor, reg_mask: Tensor, wh: Tensor, reg: Tensor
        ):
            h = self.trunk(image)
            z = {head: self.__getattr__(head)(h) for head in self.heads}
            heat = neg_loss(torch.clamp(z["hm"].sigmoid_(), min=1e-4, max=1 - 1e-4), hm)
            losses = [heat]
            for key, gt in (("wh", wh), ("reg", reg)):
                mask = reg_mask.unsqueeze(2).expand_as(gt).to(h.dtype)
                off = F.l1_loss(read(z[key], ind) * mask, gt * mask, reduction="sum")
                losses.append(off / (mask.sum() + 1e-4))
            return losses[0] + 0.1 * losses[1] + losses[2], dict(zip(("hm", "wh", "reg"), losses))

    hm = floats(batch_size, 2, 8, 8).sigmoid()
    hm[:, :, 2, 3] = 1.0
    return Centre({"hm": 2, "wh": 2, "reg": 2}), {
        "image": floats(batch_size, 3, 8, 8),
        "hm": hm,
        "ind": tokens(64, batch_size, 5),
        "reg_mask": tokens(2, batch_size, 5),
        "wh": floats(batch_size, 5, 2),
        "reg": floats(batch_size, 5, 2).sigmoid(),
    }


def anchors_by_overlap(batch_size: int = 4) -> Example:
    """RetinaNet: anchors that are matched to boxes by overlap in forward, focal loss and generalised overlap,
    of one image after the other as torchvision has it."""

    def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        area = [(o[:, 2] - o[:, 0]) * (o[:, 3] - o[:, 1]) for o in (a, b)]
        lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(2)
        return inter / (area[0][:, None] + area[1] - inter), inter

    class Matcher:
        def __init__(self, high: float, low: float) -> None:
            self.high, self.low = high, low

        def __call__(self, quality: Tensor) -> Tensor:
            values, matches = quality.max(dim=0)
            below = values < self.low
            between = (values >= self.low) & (values < self.high)
            matches[below], matches[between] = -1, -2
            return matches

    class Retina(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
            )
            self.cls_logits, self.bbox_reg = (
                nn.Conv2d(8, 2 * 3, 3, 1, 1),
                nn.Conv2d(8, 2 * 4, 3, 1, 1),
            )
            self.matcher = Matcher(0.4, 0.2)

        def anchors(self, size: int, like: Tensor) -> Tensor:
            at = (torch.arange(size, dtype=like.dtype) + 0.5) * 4
            y, x = torch.meshgrid(at, at, indexing="ij")
            centre = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4)
            shapes = torch.tensor([[-3.0, -3, 3, 3], [-5, -4, 5, 4]], dtype=like.dtype)
            return (centre + shapes).reshape(-1, 4)

        def forward(self, images: Tensor, boxes: Tensor, classes: Tensor) -> dict[str, Tensor]:
            h = self.body(images)
            n, _, hh, ww = h.shape
            logits = (
                self.cls_logits(h).view(n, -1, 3, hh, ww).permute(0, 3, 4, 1, 2).reshape(n, -1, 3)
            )
            deltas = (
                self.bbox_reg(h).view(n, -1, 4, hh, ww).permute(0, 3, 4, 1, 2).reshape(n, -1, 4)
            )
            anchors = self.anchors(hh, h)
            losses = defaultdict(list)
            for box, label, logit, delta in zip(boxes, classes, logits, deltas):
                matched = self.matcher(iou(box, anchors)[0])
                front = matched >= 0
                num = max(1, front.sum())
                target = torch.zeros_like(logit)
                target[front, label[matched[front]]] = 1.0
                valid = matched != -2
                p = torch.sigmoid(logit[valid])
                ce = F.binary_cross_entropy_with_logits(
                    logit[valid], target[valid], reduction="none"
                )
                p_t = p * target[valid] + (1 - p) * (1 - target[valid])
                losses["classification"].append((ce * (1 - p_t) ** 2).sum() / num)
                found = anchors[front] + delta[front]
                losses["regression"].append(
                    F.l1_loss(found, box[matched[front]], reduction="sum") / num
                )
            return {"loss": sum(sum(v) / max(1, n) for v in losses.values())}

    corner = floats(batch_size, 3, 2).sigmoid() * 8
    boxes = torch.cat([corner, corner + 4 + floats(batch_size, 3, 2).flip(0).sigmoid() * 4], -1)
    return Retina(), {
        "images": floats(batch_size, 3, 16, 16),
        "boxes": boxes,
        "classes": tokens(3, batch_size, 3),
    }


def splats(batch_size: int = 4) -> Example:
    """Gaussians drawn on a plane: covariances by rotation and scale, sorted by depth, blended front to back."""

    class Splats(nn.Module):
        def __init__(self, count: int = 12) -> None:
            super().__init__()
            g = torch.Generator().manual_seed(0)
            self._xyz = nn.Parameter(torch.randn(count, 3, generator=g) * 0.4)
            self._scaling = nn.Parameter(torch.full((count, 2), -1.0))
            self._rotation = nn.Parameter(torch.randn(count, generator=g))
            self._opacity = nn.Parameter(torch.zeros(count, 1))
            self._features = nn.Parameter(torch.rand(count, 3, generator=g))

        @property
        def get_scaling(self) -> Tensor:
            return torch.exp(self._scaling)

        @property
        def get_opacity(self) -> Tensor:
            return torch.sigmoid(self._opacity)

        def covariance(self) -> Tensor:
            c, s = self._rotation.cos(), self._rotation.sin()
            turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
            m = turn @ torch.diag_embed(self.get_scaling)
            return m @ m.transpose(1, 2) + 1e-3 * torch.eye(2, dtype=m.dtype)

        def forward(self, view: Tensor, image: Tensor) -> Tensor:
            xyz = torch.einsum("bij,nj->bni", view, self._xyz)
            order = xyz[..., 2].detach().argsort(dim=1)
            grid = torch.linspace(-1, 1, 6, dtype=xyz.dtype)
            pixels = torch.cartesian_prod(grid, grid)
            offset = pixels[None, :, None] - xyz[:, None, :, :2]
            inverse = torch.linalg.inv(self.covariance())
            power = -0.5 * torch.einsum("bpni,nij,bpnj->bpn", offset, inverse, offset)
            alpha = (self.get_opacity.T * power.exp()).clamp(max=0.99)
            alpha = alpha.gather(2, order[:, None].expand_as(alpha))
            through = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha], -1), -1)
            colour = self._features.sigmoid()[order]
            drawn = torch.einsum("bpn,bnc->bpc", alpha * through[..., :-1], colour)
            return 0.8 * F.l1_loss(drawn, image) + 0.2 * (drawn - image).square().mean()

    return Splats(), {
        "view": floats(batch_size, 3, 3),
        "image": floats(batch_size, 36, 3).sigmoid(),
    }


# -- vision and language ------------------------------------------------------------------------------


def flamingo(batch_size: int = 4) -> Example:
    """Frozen language layers with gated cross attention between them, images resampled by latents, and a mask by
    which image a word comes after."""

    class Resampler(nn.Module):
        def __init__(self, dim: int, latents: int) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(latents, dim) * 0.2)
            self.norm_media, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.to_q, self.to_kv = (
                nn.Linear(dim, dim, bias=False),
                nn.Linear(dim, 2 * dim, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            b, m = x.shape[:2]
            latents = self.latents[None, None].expand(b, m, -1, -1)
            x, latents = self.norm_media(x), self.norm_latents(latents)
            k, v = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
            sim = torch.einsum("bmid,bmjd->bmij", self.to_q(latents) * x.shape[-1] ** -0.5, k)
            sim = sim - sim.amax(dim=-1, keepdim=True).detach()
            return torch.einsum("bmij,bmjd->bmid", sim.softmax(dim=-1), v)

    class Gated(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.norm, self.to_q = nn.LayerNorm(dim), nn.Linear(dim, dim, bias=False)
            self.to_kv, self.out = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim)
            self.gate = nn.Parameter(torch.tensor([0.1]))

        def forward(self, x: Tensor, media: Tensor, places: Tensor) -> Tensor:
            count = media.shape[2]
            q, (k, v) = self.to_q(self.norm(x)), self.to_kv(media.flatten(1, 2)).chunk(2, -1)
            times = places.cumsum(dim=-1)
            media_time = torch.arange(media.shape[1]) + 1
            same = times[..., None] == media_time.repeat_interleave(count)
            sim = (q @ k.mT).masked_fill(~same, -torch.finfo(q.dtype).max).softmax(-1)
            sim = sim.masked_fill((times == 0)[..., None], 0.0)
            return x + self.gate.tanh() * self.out(sim @ v)

    class Flamingo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in "ab"
            )
            for frozen in (self.embed, self.layers):
                frozen.requires_grad_(False)
            self.resampler, self.see = Resampler(WIDTH, 3), nn.Linear(8, WIDTH)
            self.gates = nn.ModuleList(Gated(WIDTH) for _ in self.layers)

        def forward(self, input_ids: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            media = self.resampler(self.see(images))
            h, places = self.embed(input_ids), input_ids == 7
            causal = nn.Transformer.generate_square_subsequent_mask(h.shape[1]).to(h)
            for gate, layer in zip(self.gates, self.layers):
                h = layer(gate(h, media, places), src_mask=causal, is_causal=True)
            logits = F.linear(h, self.embed.weight)[:, :-1]
            return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)

    ids = tokens(30, batch_size, 10)
    ids[:, 2], ids[:, 6] = 7, 7
    return Flamingo(), {
        "input_ids": ids,
        "images": floats(batch_size, 2, 5, 8),
        "labels": ids.masked_fill(ids == 7, -100),
    }


def query_former(batch_size: int = 4) -> Example:
    """BLIP-2's first stage: learned queries, a contrastive, a matching and a captioning loss on shared layers with
    three masks, hard negatives by the largest weight."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=8, vdim=8)
            self.n1, self.n2, self.n3 = (nn.LayerNorm(WIDTH) for _ in range(3))
            self.ffn = nn.ModuleDict(
                {
                    k: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
                    for k in ("query", "text")
                }
            )

        def forward(
            self, h: Tensor, image: Tensor | None, mask: Tensor | None, queries: int
        ) -> Tensor:
            h = self.n1(h + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0])
            if queries:
                q = h[:, :queries]
                if image is not None:
                    q = self.n2(q + self.cross(q, image, image, need_weights=False)[0])
                h = torch.cat(
                    [q + self.ffn["query"](q), h[:, queries:] + self.ffn["text"](h[:, queries:])], 1
                )
            else:
                h = h + self.ffn["text"](h)
            return self.n3(h)

    class Former(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.zeros(1, 4, WIDTH).normal_(std=0.2))
            self.embed, self.layers = (
                nn.Embedding(30, WIDTH),
                nn.ModuleList(Layer() for _ in range(2)),
            )
            self.itm_head, self.temp = nn.Linear(WIDTH, 2), nn.Parameter(0.07 * torch.ones([]))

        def run(self, h: Tensor, image: Tensor | None, mask: Tensor | None, queries: int) -> Tensor:
            for layer in self.layers:
                h = layer(h, image, mask, queries)
            return h

        def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
            b, t, n = len(image), text.shape[1], self.queries.shape[1]
            query = self.queries.expand(b, -1, -1)
            seen = F.normalize(self.run(query, image, None, n), dim=-1)
            words = F.normalize(self.run(self.embed(text), None, None, 0)[:, 0], dim=-1)
            sim = torch.einsum("iqd,jd->ijq", seen, words).max(-1).values / self.temp
            goal = torch.arange(b)
            itc = (F.cross_entropy(sim, goal) + F.cross_entropy(sim.t(), goal)) / 2
            with torch.no_grad():
                weights = sim.softmax(1).clone().fill_diagonal_(0)
                negative = weights.argmax(1)
            both = torch.cat([image, image[negative]])
            pair = torch.cat([query.repeat(2, 1, 1), self.embed(text.repeat(2, 1))], 1)
            matched = self.itm_head(self.run(pair, both, None, n)[:, :n]).mean(1)
            itm = F.cross_entropy(matched, torch.cat([torch.ones(b), torch.zeros(b)]).long())
            causal = torch.zeros(n + t, n + t, dtype=torch.bool)
            causal[:n, n:] = True
            causal[n:, n:] = torch.ones(t, t, dtype=torch.bool).triu(1)
            said = self.run(torch.cat([query, self.embed(text)], 1), image, causal, n)[:, n:-1]
            lm = F.cross_entropy((said @ self.embed.weight.T).flatten(0, 1), text[:, 1:].flatten())
            return {"loss": itc + itm + lm, "loss_itc": itc, "loss_itm": itm, "loss_lm": lm}

    return Former(), {"image": floats(batch_size, 5, 8), "text": tokens(30, batch_size, 7)}


# -- language -----------------------------------------------------------------------------------------


class DynamicCache:
    """Keys and values of each layer, made anew by every call."""

    def __init__(self) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if len(self.key_cache) <= layer:
            self.key_cache.append(key)
            self.value_cache.append(value)
        else:
            self.key_cache[layer] = torch.cat([self.key_cache[layer], key], dim=-2)
            self.value_cache[layer] = torch.cat([self.value_cache[layer], value], dim=-2)
        return self.key_cache[layer], self.value_cache[layer]

    def get_seq_length(self) -> int:
        return self.key_cache[0].shape[-2] if self.key_cache else 0


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """An output as transformers had it: a dataclass and an ordered dict at once."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def prefix_tuned(batch_size: int = 4) -> Example:
    """A frozen decoder in the way of transformers, tuned by a prefix of keys and values that a small network makes,
    through a cache object and an output that is a dict and a dataclass."""

    class Attention(nn.Module):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__()
            self.config, self.layer_idx = config, layer_idx
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer(
                "bias", torch.ones(32, 32, dtype=torch.bool).tril()[None, None], persistent=False
            )

        def forward(self, hidden: Tensor, cache: DynamicCache, attention_mask: Tensor) -> Tensor:
            shape = (*hidden.shape[:-1], -1, WIDTH // self.config.heads)
            q, k, v = (
                t.view(shape).transpose(1, 2) for t in self.c_attn(hidden).split(WIDTH, dim=2)
            )
            k, v = cache.update(k, v, self.layer_idx)
            weights = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(v.size(-1))
            ql, kl = q.size(-2), k.size(-2)
            low = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
            weights = torch.where(self.bias[:, :, kl - ql : kl, :kl], weights, low)
            weights = (
                weights + (1.0 - attention_mask[:, None, None, :]) * torch.finfo(weights.dtype).min
            )
            out = torch.matmul(F.softmax(weights, dim=-1).type(v.dtype), v)
            return self.c_proj(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1).contiguous())

    Config = namedtuple("Config", "layers heads vocab prefix")

    class Decoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.wte, self.wpe = nn.Embedding(config.vocab, WIDTH), nn.Embedding(32, WIDTH)
            self.h = nn.ModuleList(Attention(config, n) for n in range(config.layers))
            self.ln_f, self.lm_head = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, config.vocab, bias=False),
            )
            self.apply(self._init_weights)
            self.lm_head.weight = self.wte.weight

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.2)

        def forward(
            self,
            input_ids: Tensor | None = None,
            past_key_values: Any = None,
            attention_mask: Tensor | None = None,
            labels: Tensor | None = None,
            **kwargs: Any,
        ) -> ModelOutput:
            cache = DynamicCache() if past_key_values is None else past_key_values
            past = cache.get_seq_length()
            position_ids = torch.arange(
                past, past + input_ids.size(-1), dtype=torch.long
            ).unsqueeze(0)
            hidden = self.wte(input_ids) + self.wpe(position_ids)
            mask = attention_mask.to(dtype=hidden.dtype)
            for block in self.h:
                hidden = hidden + block(hidden, cache, mask)
            logits = self.lm_head(self.ln_f(hidden))
            loss = None
            if labels is not None:
                shift_logits, shift_labels = (
                    logits[..., :-1, :].contiguous(),
                    labels[..., 1:].contiguous(),
                )
                loss = nn.CrossEntropyLoss()(
                    shift_logits.view(-1, self.config.vocab), shift_labels.view(-1)
                )
            return ModelOutput(loss=loss, logits=logits, past_key_values=cache)

    class Prefixed(nn.Module):
        def __init__(self, base: Decoder) -> None:
            super().__init__()
            self.base_model, config = base, base.config
            for parameter in base.parameters():
                parameter.requires_grad = False
            self.embedding = nn.Embedding(config.prefix, 8)
            self.transform = nn.Sequential(
                nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, config.layers * 2 * WIDTH)
            )

        def get_prompt(self, batch: int) -> DynamicCache:
            config = self.base_model.config
            places = torch.arange(config.prefix).unsqueeze(0).expand(batch, -1)
            past = self.transform(self.embedding(places))
            past = past.view(
                batch, config.prefix, config.layers * 2, config.heads, WIDTH // config.heads
            )
            cache = DynamicCache()
            for layer, pair in enumerate(past.permute([2, 0, 3, 1, 4]).split(2)):
                cache.update(pair[0], pair[1], layer)
            return cache

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.base_model, name)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> ModelOutput:
            ahead = torch.ones(
                len(input_ids), self.base_model.config.prefix, dtype=attention_mask.dtype
            )
            return self.base_model(
                input_ids=input_ids,
                attention_mask=torch.cat((ahead, attention_mask), dim=1),
                past_key_values=self.get_prompt(len(input_ids)),
                labels=labels,
            )

    ids = tokens(30, batch_size, 9, low=1)
    mask = (torch.arange(9)[None] < tokens(10, batch_size, 1, low=5)).long()
    labels = torch.where(mask.bool(), ids, -100)
    return Prefixed(Decoder(Config(2, 2, 30, 3))), {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }


class DoraLinear(nn.Module):
    """A low-rank update whose direction and magnitude are learned apart, merged on demand."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        base.weight.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict(
            {"default": nn.Dropout(dropout) if dropout else nn.Identity()}
        )
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base.out_features, bias=False)})
        self.magnitude = nn.Parameter(torch.linalg.norm(base.weight.detach(), dim=1))
        self.scaling = {"default": alpha / r}
        self.active_adapters, self.merged = ["default"], False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if self.merged:
            return result
        for active in self.active_adapters:
            if active not in self.lora_A:
                continue
            a, b, scaling = self.lora_A[active], self.lora_B[active], self.scaling[active]
            x = self.lora_dropout[active](x.to(a.weight.dtype))
            update = b.weight @ a.weight
            norm = torch.linalg.norm(self.base_layer.weight + scaling * update, dim=1).detach()
            scale = (self.magnitude / norm).view(1, -1)
            bias = self.base_layer.bias
            result = (
                result
                + (scale - 1) * (result - (0 if bias is None else bias))
                + scale * b(a(x)) * scaling
            )
        return result


def adapted_by_name(batch_size: int = 4) -> Example:
    """PEFT's way: layers found by their names and put in the place of others, everything else frozen, an adapter's
    own head saved beside them (DoRA)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(WIDTH, WIDTH) for _ in range(4)
            )
            self.gate_proj, self.up_proj, self.down_proj = (
                nn.Linear(WIDTH, 24),
                nn.Linear(WIDTH, 24),
                nn.Linear(24, WIDTH),
            )
            self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            x = self.norm1(h)
            q, k, v = (
                p(x).unflatten(-1, (2, -1)).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            h = h + self.o_proj(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            x = self.norm2(h)
            return h + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.layers = (
                nn.Embedding(30, WIDTH),
                nn.Sequential(Block(), Block()),
            )
            self.lm_head = nn.Linear(WIDTH, 30, bias=False)

        def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.lm_head(self.layers(self.embed_tokens(input_ids)))
            return F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), reduction="mean"
            ), logits

    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, child in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in {"q_proj", "v_proj", "up_proj"}:
            parent, _, target = name.rpartition(".")
            setattr(model.get_submodule(parent), target, DoraLinear(child))
    model.lm_head = copy.deepcopy(model.lm_head).requires_grad_(True)
    return model, _text(batch_size)


class BitLinear(nn.Linear):
    """Weights of three values and activations of eight bits, by the trick with detach."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        x = F.rms_norm(x, (x.shape[-1],))
        scale_x = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        x_quant = x + ((x * scale_x).round().clamp_(-128, 127) / scale_x - x).detach()
        scale_w = 1.0 / w.abs().mean().clamp_(min=1e-5)
        w_quant = w + ((w * scale_w).round().clamp_(-1, 1) / scale_w - w).detach()
        return F.linear(x_quant, w_quant, self.bias)


def bits_of_weights(batch_size: int = 4) -> Example:
    """BitNet b1.58, its last linear layer left in full precision by a list of names."""

    class Block(nn.Module):
        def __init__(self, dim: int = WIDTH) -> None:
            super().__init__()
            self.wqkv, self.wo = (
                BitLinear(dim, 3 * dim, bias=False),
                BitLinear(dim, dim, bias=False),
            )
            self.w13, self.w2 = (
                BitLinear(dim, 4 * dim, bias=False),
                BitLinear(2 * dim, dim, bias=False),
            )

        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            b, s, d = x.shape
            q, k, v = self.wqkv(x).view(b, s, 3, 2, d // 2).unbind(2)
            q, k = (
                torch.view_as_real(
                    torch.view_as_complex(t.reshape(b, s, 2, -1, 2)) * freqs
                ).flatten(3)
                for t in (q, k)
            )
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5
            scores += torch.full((s, s), float("-inf"), dtype=x.dtype).triu_(diagonal=1)
            x = x + self.wo(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, s, d))
            up, gate = self.w13(x).tensor_split(2, dim=-1)
            return x + self.w2(up * F.relu(gate).square())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.blocks = nn.Embedding(30, WIDTH), nn.ModuleList([Block(), Block()])
            self.output = nn.Linear(WIDTH, 30, bias=False)
            freqs = 1.0 / (10000.0 ** (torch.arange(0, WIDTH // 2, 2).float() / (WIDTH // 2)))
            angles = torch.outer(torch.arange(12), freqs)
            self.freqs_cis = torch.polar(torch.ones_like(angles), angles)[:, None]

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.tok(input_ids)
            for block in self.blocks:
                h = block(h, self.freqs_cis[: h.shape[1]])
            return F.nll_loss(self.output(h).log_softmax(-1).view(-1, 30), labels.view(-1))

    return Net(), _text(batch_size)


class ChunkedLoss(torch.autograd.Function):
    """A linear layer and its cross entropy, chunk by chunk, with the gradients made in forward (Liger's way)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, target: Tensor, chunks: int = 4) -> Tensor:
        grad_h, grad_w = torch.empty_like(h), torch.zeros_like(weight)
        loss = h.new_zeros(())
        for rows, labels, place in zip(h.chunk(chunks), target.chunk(chunks), grad_h.chunk(chunks)):
            logits = rows @ weight.t()
            loss += F.cross_entropy(logits, labels, reduction="sum")
            grad = logits.softmax(-1)
            grad[torch.arange(len(labels)), labels] -= 1
            grad /= len(target)
            place.copy_(grad @ weight)
            grad_w += grad.t() @ rows
        ctx.save_for_backward(grad_h, grad_w)
        return loss / len(target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_h, grad_w = ctx.saved_tensors
        return grad * grad_h, grad * grad_w, None, None


def fused_loss(batch_size: int = 4) -> Example:
    """A decoder under a fused loss with a gradient of its own, which sums over rows and takes the table of words."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, WIDTH)
            self.mix = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h, _ = self.mix(self.embed(input_ids))
            return ChunkedLoss.apply(h.reshape(-1, WIDTH), self.embed.weight, labels.reshape(-1))

    return Net(), _text(batch_size)


class FlashBlocks(torch.autograd.Function):
    """Attention by tiles with a running maximum, and the backward pass that makes them again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out = torch.zeros_like(q)
        high = q.new_full((*q.shape[:-1], 1), -float("inf"))
        total = q.new_zeros((*q.shape[:-1], 1))
        for kc, vc in zip(k.split(size, -2), v.split(size, -2)):
            scores = torch.einsum("...id,...jd->...ij", q, kc) * scale
            new = torch.maximum(high, scores.amax(-1, keepdim=True))
            weights = (scores - new).exp()
            old = (high - new).exp()
            total = total * old + weights.sum(-1, keepdim=True)
            out = out * old + weights @ vc
            high = new
        out = out / total
        ctx.save_for_backward(q, k, v, out, high + total.log())
        ctx.size, ctx.scale = size, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq = torch.zeros_like(q)
        dk, dv = [], []
        d = (do * o).sum(-1, keepdim=True)
        for kc, vc in zip(k.split(ctx.size, -2), v.split(ctx.size, -2)):
            p = (q @ kc.mT * ctx.scale - lse).exp()
            dv.append(p.mT @ do)
            ds = p * (do @ vc.mT - d) * ctx.scale
            dq += ds @ kc
            dk.append(ds.mT @ q)
        return dq, torch.cat(dk, -2), torch.cat(dv, -2), None


def tiled_attention(batch_size: int = 4) -> Example:
    """A vision transformer with registers whose attention is a function with a gradient of its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, WIDTH, 4, 4)
            self.cls, self.registers = (
                nn.Parameter(torch.zeros(1, 1, WIDTH)),
                nn.Parameter(torch.randn(1, 3, WIDTH)),
            )
            self.pos = nn.Parameter(torch.randn(1, 3, 3, WIDTH) * 0.02)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.gamma, self.head = nn.Parameter(1e-1 * torch.ones(WIDTH)), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).transpose(1, 2)
            pos = F.interpolate(
                self.pos.permute(0, 3, 1, 2), (4, 4), mode="bicubic", antialias=False
            )
            x = x + pos.permute(0, 2, 3, 1).flatten(1, 2)
            x = torch.cat(
                (self.cls.expand(len(x), -1, -1), self.registers.expand(len(x), -1, -1), x), 1
            )
            q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
            x = x + self.gamma * self.out(FlashBlocks.apply(q, k, v, 8).transpose(1, 2).flatten(2))
            return F.cross_entropy(self.head(x[:, 0]), y)

    return Net(), {"x": floats(batch_size, 3, 16, 16), "y": tokens(5, batch_size)}


def experts_choose(batch_size: int = 4) -> Example:
    """Experts that choose their tokens (expert choice), a router in float32, a z-loss left on the layer for its
    parent, and tokens that skip a layer (mixture of depths)."""

    class Chosen(nn.Module):
        def __init__(self, experts: int = 4) -> None:
            super().__init__()
            self.experts, self.z_loss = experts, 0.0
            self.router = nn.Linear(WIDTH, experts, bias=False)
            self.w1 = nn.Parameter(torch.empty(experts, WIDTH, 32).normal_(std=0.2))
            self.w2 = nn.Parameter(torch.empty(experts, 32, WIDTH).normal_(std=0.2))

        def forward(self, x: Tensor) -> Tensor:
            b, s, d = x.shape
            logits = self.router(x)
            self.z_loss = torch.logsumexp(logits, dim=-1).square().mean()
            weight, index = logits.softmax(-1).transpose(1, 2).topk(s // self.experts, dim=-1)
            picked = torch.take_along_dim(x.unsqueeze(1), index.unsqueeze(-1), dim=2)
            made = torch.einsum(
                "beks,esd->bekd", F.gelu(torch.einsum("bekd,edf->bekf", picked, self.w1)), self.w2
            )
            made = made * weight.unsqueeze(-1)
            return torch.zeros_like(x).scatter_add(
                1, index.reshape(b, -1, 1).expand(-1, -1, d), made.reshape(b, -1, d)
            )

    class Skipping(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.route = block, nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            score = self.route(x).squeeze(-1)
            top = score.topk(x.shape[1] // 2, dim=1, sorted=False)
            order = top.indices.sort(dim=1).values
            index = order.unsqueeze(-1).expand(-1, -1, x.shape[-1])
            made = self.block(x.gather(1, index)) * score.gather(1, order).sigmoid().unsqueeze(-1)
            return x.scatter_add(1, index, made)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, WIDTH)
            self.place = nn.Embedding(12, WIDTH)  # equal words would tie in the choice
            self.moe = nn.ModuleList([Chosen(), Chosen(2)])
            self.skip, self.head = Skipping(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 30)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
            for layer in self.moe:
                h = h + layer(h)
            loss = F.cross_entropy(self.head(self.skip(h)).movedim(-1, 1), labels)
            return loss + 1e-3 * sum(layer.z_loss for layer in self.moe)

    return Net(), _text(batch_size)


# -- recurrences and state spaces -----------------------------------------------------------------------


class LinearRecurrence(nn.Module):
    """LRU: complex diagonal states, run by a scan in log depth."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        u1, u2 = torch.rand(states, generator=g), torch.rand(states, generator=g)
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(u1 * 0.8 + 0.1)))
        self.theta_log = nn.Parameter(torch.log(6.28 * u2))
        self.gamma_log = nn.Parameter(torch.zeros(states))
        self.b_re, self.b_im = (
            nn.Parameter(torch.randn(states, width, generator=g) / 4) for _ in range(2)
        )
        self.c = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat, generator=g) / 4)
        self.d = nn.Parameter(torch.randn(width, generator=g))

    def scan(self, a: Tensor, x: Tensor) -> Tensor:
        length, step = x.shape[1], 1
        while step < length:
            before = F.pad(x, (0, 0, step, 0))[:, :length]
            x = x + a * before
            a = a * a
            step *= 2
        return x

    def forward(self, u: Tensor) -> Tensor:
        lam = torch.exp(torch.complex(-torch.exp(self.nu_log), torch.exp(self.theta_log)))
        b = torch.complex(self.b_re, self.b_im) * torch.exp(self.gamma_log).unsqueeze(-1)
        states = self.scan(lam, u.to(b.dtype) @ b.T)
        return (states @ self.c.T).real + self.d * u


def linear_recurrence(batch_size: int = 4) -> Example:
    """LRU blocks with gated linear units over sequences, classified by their mean."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lru = nn.LayerNorm(WIDTH), LinearRecurrence(WIDTH, 8)
            self.glu = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.glu(self.lru(self.norm(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.blocks = nn.Linear(3, WIDTH), nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.blocks(self.into(x)).mean(1)), y)

    return Net(), {"x": floats(batch_size, 12, 3), "y": tokens(5, batch_size)}


def griffin(batch_size: int = 4) -> Example:
    """RG-LRU: a gated real recurrence with a square root, a causal convolution, and local attention by turns."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.y, self.out = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
            self.gates = nn.Parameter(torch.randn(2, 4, 4, 4) * 0.3)
            self.a = nn.Parameter(torch.linspace(2.0, 5.0, WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            x = self.conv(F.pad(self.x(h).transpose(1, 2), (3, 0))).transpose(1, 2)
            i, r = (
                torch.einsum("bshi,ghij->gbshj", x.unflatten(-1, (4, 4)), self.gates)
                .flatten(-2)
                .sigmoid()
            )
            log_a = -8.0 * r * F.softplus(-self.a)
            a = log_a.exp()
            given = x * i * torch.sqrt(1 - torch.exp(2 * log_a) + 1e-6)
            state, states = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                state = a[:, t] * state + given[:, t]
                states += [state]
            return self.out(torch.stack(states, 1) * F.gelu(self.y(h), approximate="tanh"))

    class Local(nn.Module):
        def __init__(self, window: int = 4) -> None:
            super().__init__()
            self.q, self.kv, self.o, self.window = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, 16),
                nn.Linear(WIDTH, WIDTH),
                window,
            )

        def forward(self, h: Tensor) -> Tensor:
            at = torch.arange(h.shape[1])
            seen = (at[:, None] >= at) & (at[:, None] - at < self.window)
            q = self.q(h).unflatten(-1, (2, 8)).transpose(1, 2)
            k, v = (t.unsqueeze(1).expand(-1, 2, -1, -1) for t in self.kv(h).chunk(2, -1))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return self.o(out.transpose(1, 2).flatten(2))

    class Net(nn.Module):
        KINDS = {"r": Recurrent, "a": Local}  # noqa: RUF012 - as people write it

        def __init__(self, pattern: str = "rra") -> None:
            super().__init__()
            self.embed = nn.Embedding(30, WIDTH)
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in pattern)
            self.mixers = nn.ModuleList(self.KINDS[kind]() for kind in pattern)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(input_ids) * math.sqrt(WIDTH)
            for norm, mixer in zip(self.norms, self.mixers, strict=True):
                h = h + mixer(norm(h))
            logits = 30.0 * torch.tanh(h @ self.embed.weight.t() / 30.0)
            return F.cross_entropy(logits.view(-1, 30), labels.view(-1), ignore_index=0)

    return Net(), _text(batch_size)


def hidden_markov(batch_size: int = 4) -> Example:
    """A neural hidden Markov model: the forward algorithm in log space, masked by lengths of sequences."""

    class Markov(nn.Module):
        def __init__(self, states: int = 5, words: int = 30) -> None:
            super().__init__()
            self.start, self.move = (
                nn.Parameter(torch.randn(states)),
                nn.Parameter(torch.randn(states, states)),
            )
            self.states, self.emit = (
                nn.Embedding(states, WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, words)),
            )

        def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
            emissions = self.emit(self.states.weight).log_softmax(-1)
            moves = self.move.log_softmax(-1)
            seen = emissions.t()[input_ids]
            alphas = [self.start.log_softmax(-1) + seen[:, 0]]
            for t in range(1, input_ids.shape[1]):
                alphas.append(torch.logsumexp(alphas[-1].unsqueeze(-1) + moves, dim=1) + seen[:, t])
            alpha = torch.stack(alphas, dim=1)
            last = alpha.gather(
                1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, alpha.size(-1))
            ).squeeze(1)
            return -(last.logsumexp(-1) / lengths.to(last.dtype)).mean()

    return Markov(), {
        "input_ids": tokens(30, batch_size, 8),
        "lengths": tokens(9, batch_size, low=3),
    }


def tree_lstm(batch_size: int = 4) -> Example:
    """Child-sum LSTM over trees that are given as an order of nodes and their parents, level by level."""

    class Tree(nn.Module):
        def __init__(self, dim: int = 8) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, dim)
            self.w_iou, self.u_iou = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim, bias=False)
            self.w_f, self.u_f = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
            self.out = nn.Linear(dim, 3)

        def forward(self, words: Tensor, parent: Tensor, level: Tensor, y: Tensor) -> Tensor:
            _b, n = words.shape
            x = self.embed(words)
            h, c = torch.zeros_like(x), torch.zeros_like(x)
            onto = F.one_hot(parent, n).to(x.dtype) * (level > 0).unsqueeze(-1)
            for depth in reversed(range(3)):
                now = (level == depth).unsqueeze(-1)
                children = onto.transpose(1, 2) * (level == depth + 1).unsqueeze(1)
                h_sum = children @ h
                i, o, u = (self.w_iou(x) + self.u_iou(h_sum)).chunk(3, -1)
                f = torch.sigmoid(self.w_f(x).unsqueeze(2) + self.u_f(h).unsqueeze(1))
                kept = (f * c.unsqueeze(1) * children.unsqueeze(-1)).sum(2)
                new_c = torch.sigmoid(i) * torch.tanh(u) + kept
                new_h = torch.sigmoid(o) * torch.tanh(new_c)
                h, c = torch.where(now, new_h, h), torch.where(now, new_c, c)
            return F.cross_entropy(self.out(h[:, 0]), y)

    parent = torch.tensor([0, 0, 0, 1, 1, 2, 2]).expand(batch_size, -1).contiguous()
    level = torch.tensor([0, 1, 1, 2, 2, 2, 2]).expand(batch_size, -1).contiguous()
    return Tree(), {
        "words": tokens(20, batch_size, 7),
        "parent": parent,
        "level": level,
        "y": tokens(3, batch_size),
    }


# -- speech --------------------------------------------------------------------------------------------


def speaker_net(batch_size: int = 4) -> Example:
    """ECAPA-TDNN on log-mel features made in the model by a Fourier transform, with statistics by attention and
    masked lengths, and speakers told apart by angles."""

    class Mel(nn.Module):
        def __init__(self, size: int = 32, hop: int = 16, mels: int = 12) -> None:
            super().__init__()
            self.size, self.hop = size, hop
            self.register_buffer("window", torch.hann_window(size))
            points = torch.linspace(0, size // 2, mels + 2)
            at = torch.arange(size // 2 + 1)[:, None]
            up = (at - points[:-2]) / (points[1:-1] - points[:-2])
            down = (points[2:] - at) / (points[2:] - points[1:-1])
            self.register_buffer("banks", torch.minimum(up, down).clamp(min=0))

        def forward(self, wave: Tensor) -> Tensor:
            spec = torch.stft(
                wave,
                self.size,
                self.hop,
                window=self.window,
                center=True,
                pad_mode="reflect",
                return_complex=True,
            )
            mel = spec.abs().pow(2.0).transpose(1, 2) @ self.banks
            mel = (mel + 1e-6).log().transpose(1, 2)
            return mel - mel.mean(-1, keepdim=True)

    class Res2(nn.Module):
        def __init__(self, channels: int, scale: int = 4, dilation: int = 2) -> None:
            super().__init__()
            width = channels // scale
            self.convs = nn.ModuleList(
                nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation)
                for _ in range(scale - 1)
            )
            self.bns = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(scale - 1))
            self.se = nn.Sequential(
                nn.AdaptiveAvgPool1d(1),
                nn.Conv1d(channels, 8, 1),
                nn.ReLU(),
                nn.Conv1d(8, channels, 1),
                nn.Sigmoid(),
            )
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            pieces, made = torch.chunk(x, self.scale, dim=1), []
            for i, piece in enumerate(pieces):
                if i == 0:
                    y = piece
                else:
                    y = piece if i == 1 else piece + y
                    y = self.bns[i - 1](F.relu(self.convs[i - 1](y)))
                made.append(y)
            y = torch.cat(made, dim=1)
            return x + y * self.se(y)

    class Speaker(nn.Module):
        def __init__(self, channels: int = 16, speakers: int = 6) -> None:
            super().__init__()
            self.mel, self.first = Mel(), nn.Conv1d(12, channels, 5, padding=2)
            self.blocks = nn.ModuleList(Res2(channels, dilation=d) for d in (2, 3))
            self.mfa = nn.Conv1d(2 * channels, 24, 1)
            self.attend = nn.Sequential(
                nn.Conv1d(72, 8, 1), nn.ReLU(), nn.Tanh(), nn.Conv1d(8, 24, 1)
            )
            self.fc, self.weight = nn.Linear(48, 8), nn.Parameter(torch.randn(speakers, 8))

        def forward(self, wave: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
            h = self.first(self.mel(wave))
            kept = []
            for block in self.blocks:
                h = block(h)
                kept.append(h)
            h = F.relu(self.mfa(torch.cat(kept, 1)))
            frames = h.shape[-1]
            mask = (torch.arange(frames)[None, :] < (lengths[:, None] * frames)).unsqueeze(1)
            share = mask / mask.sum(2, keepdim=True)
            mean = (h * share).sum(2, keepdim=True)
            std = ((h - mean).pow(2) * share).sum(2, keepdim=True).clamp(1e-9).sqrt()
            score = self.attend(torch.cat([h, mean.expand_as(h), std.expand_as(h)], 1))
            score = score.masked_fill(mask == 0, float("-inf")).softmax(dim=2)
            mean = (score * h).sum(2)
            std = (score * h.pow(2)).sum(2).sub(mean.pow(2)).clamp(min=1e-9).sqrt()
            cosine = F.linear(
                F.normalize(self.fc(torch.cat([mean, std], 1))), F.normalize(self.weight)
            )
            sine = torch.sqrt((1.0 - cosine.square()).clamp(0, 1) + 1e-9)
            phi = torch.where(
                cosine > math.cos(math.pi - 0.2),
                cosine * math.cos(0.2) - sine * math.sin(0.2),
                cosine - 0.04,
            )
            one_hot = torch.zeros_like(cosine).scatter_(1, speaker.view(-1, 1), 1)
            return F.cross_entropy(30 * (one_hot * phi + (1.0 - one_hot) * cosine), speaker)

    return Speaker(), {
        "wave": floats(batch_size, 256),
        "lengths": floats(batch_size).sigmoid() * 0.5 + 0.5,
        "speaker": tokens(6, batch_size),
    }


# -- graphs --------------------------------------------------------------------------------------------


class MessagePassing(nn.Module, abc.ABC):
    """A base class in the way of PyTorch Geometric: arguments are collected by the names of ``message``."""

    def __init__(self, aggr: str = "add") -> None:
        super().__init__()
        self.aggr = aggr
        code = type(self).message.__code__
        self.wanted = code.co_varnames[1 : code.co_argcount]

    def propagate(self, edge_index: Tensor, **given: Tensor) -> Tensor:
        size = given["x"].size(0)
        collected = {}
        for name in self.wanted:
            if name.endswith(("_i", "_j")):
                collected[name] = given[name[:-2]].index_select(
                    0, edge_index[1 if name.endswith("_i") else 0]
                )
            elif name == "index":
                collected[name] = edge_index[1]
            elif name == "dim_size":
                collected[name] = size
            else:
                collected[name] = given[name]
        made = self.message(**collected)
        index = edge_index[1].view(-1, *[1] * (made.dim() - 1)).expand_as(made)
        zero = made.new_zeros(size, *made.shape[1:])
        if self.aggr == "add":
            return zero.scatter_add_(0, index, made)
        return zero.scatter_reduce_(0, index, made, reduce=self.aggr, include_self=False)

    @abc.abstractmethod
    def message(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Make the messages of all edges."""


class GraphAttention(MessagePassing):
    """GATv2 with features of edges and a softmax over the edges into a node."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_l, self.lin_r, self.lin_edge = (
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(4, dim),
        )
        self.att = nn.Parameter(torch.randn(1, heads, dim // heads))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        left, right = (lin(x).unflatten(-1, (self.heads, -1)) for lin in (self.lin_l, self.lin_r))
        edge = self.lin_edge(edge_attr).unflatten(-1, (self.heads, -1))
        return self.propagate(edge_index, x=left, r=right, edge=edge).flatten(1)

    def message(
        self, x_j: Tensor, r_i: Tensor, edge: Tensor, index: Tensor, dim_size: int
    ) -> Tensor:
        score = (F.leaky_relu(x_j + r_i + edge, 0.2) * self.att).sum(-1)
        at = index[:, None].expand_as(score)
        nodes = torch.full((dim_size, score.shape[1]), -torch.inf, dtype=score.dtype)
        high = nodes.scatter_reduce(0, at, score.detach(), reduce="amax").index_select(0, index)
        raised = (score - high).exp()
        total = torch.zeros_like(nodes).scatter_add_(0, at, raised).index_select(0, index) + 1e-16
        return x_j * (raised / total).unsqueeze(-1)


class Isomorphism(MessagePassing):
    """GINE, with the mean of messages."""

    def __init__(self, dim: int) -> None:
        super().__init__("mean")
        self.eps, self.edge = nn.Parameter(torch.zeros(1)), nn.Linear(4, dim)
        self.nn = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.nn(
            (1 + self.eps) * x + self.propagate(edge_index, x=x, attr=self.edge(edge_attr))
        )

    def message(self, x_j: Tensor, attr: Tensor) -> Tensor:
        return (x_j + attr).relu()


def graph_of_parts(batch_size: int = 16) -> Example:
    """A graph network by a base class that passes messages, with a virtual node and dense attention beside it (GPS):
    as many nodes as the batch has rows, 16 by default."""

    class Gps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.ModuleDict({"node": nn.Embedding(9, WIDTH), "edge": nn.Linear(3, 4)})
            self.convs = nn.ModuleList([Isomorphism(WIDTH), GraphAttention(WIDTH, 2)])
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.convs)
            self.virtual = nn.Parameter(torch.zeros(1, WIDTH))
            self.update = nn.GRUCell(WIDTH, WIDTH)
            self.attn, self.head = (
                nn.MultiheadAttention(WIDTH, 2, batch_first=True),
                nn.Linear(WIDTH, 3),
            )

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, y: Tensor) -> Tensor:
            h, e = self.encode["node"](x), self.encode["edge"](edge_attr)
            virtual = self.virtual
            for conv, norm in zip(self.convs, self.norms):
                h = h + virtual
                h = norm(h + conv(h, edge_index, e) + self.attn(h[None], h[None], h[None])[0][0])
                virtual = self.update(h.mean(0, keepdim=True), virtual)
            return F.cross_entropy(self.head(h), y)

    edges = 3 * batch_size
    pairs = torch.stack([tokens(batch_size, edges), tokens(batch_size, edges).flip(0)])
    return Gps(), {
        "x": tokens(9, batch_size),
        "edge_index": pairs,
        "edge_attr": floats(edges, 3),
        "y": tokens(3, batch_size),
    }


def schnet(batch_size: int = 4) -> Example:
    """Continuous filters over distances in a molecule (SchNet), energy and forces by the gradient, both in the loss,
    energies shifted by the element as buffers."""

    class Filters(nn.Module):
        def __init__(self, dim: int = 8) -> None:
            super().__init__()
            self.register_buffer("offset", torch.linspace(0, 5, 6))
            self.coeff = -0.5 / (5 / 5) ** 2
            self.mlp = nn.Sequential(nn.Linear(6, dim), nn.Softplus(), nn.Linear(dim, dim))
            self.lin1, self.lin2 = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

        def forward(self, h: Tensor, distance: Tensor, mask: Tensor) -> Tensor:
            rbf = torch.exp(self.coeff * (distance.unsqueeze(-1) - self.offset).square())
            cut = 0.5 * ((distance * math.pi / 5).cos() + 1) * (distance < 5) * mask
            w = self.mlp(rbf) * cut.unsqueeze(-1)
            return h + self.lin2(torch.einsum("bijd,bjd->bid", w, self.lin1(h))).tanh()

    class SchNet(nn.Module):
        def __init__(self, layers: int = 2) -> None:
            super().__init__()
            self.embedding, self.blocks = (
                nn.Embedding(10, 8, padding_idx=0),
                nn.ModuleList(Filters() for _ in range(layers)),
            )
            self.out = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
            self.register_buffer("shift", torch.linspace(-1, 1, 10)[:, None])

        @torch.enable_grad()
        def energy_and_forces(self, z: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
            pos = pos.clone().requires_grad_(True)
            distance = (pos[:, :, None] - pos[:, None]).square().sum(-1).add(1e-6).sqrt()
            mask = ~torch.eye(pos.shape[1], dtype=torch.bool)
            h = self.embedding(z)
            for block in self.blocks:
                h = block(h, distance, mask)
            energy = (self.out(h) + self.shift[z]).sum(1).squeeze(-1)
            grad = torch.autograd.grad(
                [energy.sum()], [pos], create_graph=self.training, retain_graph=True
            )[0]
            return energy, -grad

        def forward(self, z: Tensor, pos: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
            e, f = self.energy_and_forces(z, pos)
            return F.mse_loss(e, energy) + 10.0 * F.mse_loss(f, forces)

    return SchNet(), {
        "z": tokens(10, batch_size, 5, low=1),
        "pos": floats(batch_size, 5, 3) * 2,
        "energy": floats(batch_size),
        "forces": floats(batch_size, 5, 3).flip(0),
    }


# -- recommenders and tables ------------------------------------------------------------------------------


def towers_of_items(batch_size: int = 8) -> Example:
    """Two towers with sampled softmax over the batch: corrected by how often an item is seen, accidental hits
    masked, features from a schema of namedtuples."""

    Feature = namedtuple("Feature", ["name", "size", "dim", "pooling"], defaults=[8, None])

    class Tower(nn.Module):
        def __init__(self, schema: list[Any]) -> None:
            super().__init__()
            self.schema = schema
            self.tables = nn.ModuleDict(
                {f.name: nn.Embedding(f.size, f.dim, padding_idx=0) for f in schema}
            )
            self.net = nn.Sequential(
                nn.Linear(sum(f.dim for f in schema), WIDTH),
                nn.SELU(),
                nn.Linear(WIDTH, 8),
            )

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            found = []
            for f in self.schema:
                e = self.tables[f.name](features[f.name])
                if f.pooling == "mean":
                    there = (features[f.name] != 0).unsqueeze(-1)
                    e = (e * there).sum(1) / there.sum(1).clamp(min=1)
                found.append(e)
            return F.normalize(self.net(torch.cat(found, -1)), p=2.0, dim=-1)

    class Retrieval(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = Tower([Feature("user", 20), Feature("history", 30, pooling="mean")])
            self.item = Tower([Feature("item", 30), Feature("genre", 5, 4)])
            self.register_buffer("seen", torch.linspace(0.01, 0.2, 30))

        def forward(self, **features: Tensor) -> Tensor:
            scores = self.query(features) @ self.item(features).T / 0.1
            item = features["item"]
            scores = scores - self.seen[item].log()
            same = item.unsqueeze(0) == item.unsqueeze(1)
            same = same & ~torch.eye(len(item), dtype=torch.bool)
            scores = scores.masked_fill(same, torch.finfo(scores.dtype).min)
            return F.cross_entropy(scores, torch.arange(len(scores)))

    return Retrieval(), {
        "user": tokens(20, batch_size),
        "history": tokens(30, batch_size, 5),
        "item": tokens(30, batch_size, low=1),
        "genre": tokens(5, batch_size),
    }


def layered_experts_of_tasks(batch_size: int = 8) -> Example:
    """PLE: experts of tasks and shared ones with gates in layers, weights of losses by how fast they fall that are
    kept in buffers, click and conversion over the whole space (ESMM), compressed interactions (xDeepFM)."""

    class Cin(nn.Module):
        def __init__(self, fields: int, layers: tuple[int, ...] = (6, 4)) -> None:
            super().__init__()
            sizes = [fields, *layers]
            self.convs = nn.ModuleList(
                nn.Conv1d(fields * a, b, 1) for a, b in itertools.pairwise(sizes)
            )
            self.out = nn.Linear(sum(layers), 1)

        def forward(self, x: Tensor) -> Tensor:
            h, sums = x, []
            for conv in self.convs:
                outer = torch.einsum("bhd,bmd->bhmd", h, x)
                h = F.relu(conv(outer.flatten(1, 2)))
                sums.append(h.sum(-1))
            return self.out(torch.cat(sums, 1))

    class Ple(nn.Module):
        def __init__(self, tasks: tuple[str, ...] = ("click", "buy")) -> None:
            super().__init__()
            self.tasks = tasks
            self.register_buffer("offsets", torch.tensor([0, 10, 25, 30]))
            self.table = nn.Embedding(50, 8)
            nn.init.xavier_uniform_(self.table.weight)
            names = [*tasks, "shared"]
            self.levels = nn.ModuleList()
            for level in range(2):
                size = 32 if level == 0 else WIDTH
                self.levels.append(nn.ModuleDict({
                    "experts": nn.ModuleDict({n: nn.ModuleList(nn.Sequential(nn.Linear(size, WIDTH), nn.ReLU()) for _ in range(2)) for n in names}),
                    "gates": nn.ModuleDict({n: nn.Linear(size, 4 if n != "shared" else 6) for n in names}),
                }))  # fmt: skip
            self.heads = nn.ModuleDict({n: nn.Linear(WIDTH, 1) for n in tasks})
            self.cin = Cin(4)

        def forward(self, fields: Tensor, labels: Tensor) -> Tensor:
            e = self.table(fields + self.offsets)
            state = dict.fromkeys([*self.tasks, "shared"], e.flatten(1))
            for level in self.levels:
                made = {
                    n: [one(state[n]) for one in experts] for n, experts in level["experts"].items()
                }
                after = {}
                for n, gate in level["gates"].items():
                    own = (
                        made[n] + made["shared"]
                        if n != "shared"
                        else reduce(operator.iadd, made.values(), [])
                    )
                    after[n] = torch.einsum(
                        "be,bed->bd", gate(state[n]).softmax(-1), torch.stack(own, 1)
                    )
                state = after
            extra = self.cin(e)
            p = {
                n: torch.sigmoid(head(state[n]) + extra).squeeze(-1)
                for n, head in self.heads.items()
            }
            ctr, ctcvr = p["click"], p["click"] * p["buy"]
            return F.binary_cross_entropy(ctr, labels[:, 0]) + F.binary_cross_entropy(
                ctcvr, labels[:, 1]
            )

    return Ple(), {"fields": tokens(5, batch_size, 4), "labels": tokens(2, batch_size, 2).float()}


def tabular_transformer(batch_size: int = 8) -> Example:
    """FT-Transformer: a token for each column, periodic features of numbers, ReGLU, a loss function given at
    construction with weights in a buffer."""

    class Focal(nn.Module):
        def __init__(self, alpha: list[float], gamma: float = 2.0) -> None:
            super().__init__()
            self.register_buffer("alpha", torch.tensor(alpha))
            self.gamma = gamma

        def forward(self, logits: Tensor, target: Tensor) -> Tensor:
            ce = F.cross_entropy(logits, target, weight=self.alpha, reduction="none")
            return ((1 - torch.exp(-ce)) ** self.gamma * ce).mean()

    class Tokenizer(nn.Module):
        def __init__(self, numbers: int, cardinalities: list[int], dim: int) -> None:
            super().__init__()
            self.freq = nn.Parameter(torch.randn(numbers, 4))
            self.weight, self.bias = (
                nn.Parameter(torch.randn(numbers, 8, dim) * 0.3),
                nn.Parameter(torch.zeros(numbers + len(cardinalities), dim)),
            )
            offsets = torch.tensor([0, *cardinalities[:-1]]).cumsum(0)
            self.register_buffer("offsets", offsets)
            self.table = nn.Embedding(sum(cardinalities), dim)
            self.cls = nn.Parameter(torch.randn(dim))

        def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
            angle = 2 * math.pi * self.freq[None] * x_num[..., None]
            num = (
                torch.cat([angle.cos(), angle.sin()], -1)[..., None, :] @ self.weight[None]
            ).squeeze(-2)
            x = torch.cat([num, self.table(x_cat + self.offsets[None])], 1) + self.bias[None]
            return torch.cat([x, self.cls.view(1, 1, -1).repeat(len(x), 1, 1)], 1)

    class Net(nn.Module):
        def __init__(self, criterion: nn.Module) -> None:
            super().__init__()
            self.tokenizer, self.criterion = Tokenizer(3, [4, 6], WIDTH), criterion
            self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.first, self.second, self.head = (
                nn.Linear(WIDTH, 32),
                nn.Linear(16, WIDTH),
                nn.Linear(WIDTH, 3),
            )
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x_num: Tensor, x_cat: Tensor, y: Tensor) -> Tensor:
            x = self.tokenizer(x_num, x_cat)
            h = self.norm(x)
            x = x[:, -1:] + self.attn(h[:, -1:], h, h, need_weights=False)[0]
            a, b = self.first(x).chunk(2, dim=-1)
            return self.criterion(self.head(F.relu((x + self.second(a * F.relu(b)))[:, -1])), y)

    return Net(Focal([0.2, 0.5, 0.3])), {
        "x_num": floats(batch_size, 3),
        "x_cat": tokens(4, batch_size, 2),
        "y": tokens(3, batch_size),
    }


# -- agents --------------------------------------------------------------------------------------------


def soft_actor_critic(batch_size: int = 8) -> Example:
    """SAC in one loss: squashed normals with noise from the batch, twin critics and their slow copies, a learned
    temperature, gradients kept apart by detach and functional calls."""

    def mlp(sizes: list[int], act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
        pairs = list(itertools.pairwise(sizes))
        return nn.Sequential(
            *(
                m
                for n, (a, b) in enumerate(pairs)
                for m in ((nn.Linear(a, b), act()) if n < len(pairs) - 1 else (nn.Linear(a, b),))
            )
        )

    class Sac(nn.Module):
        def __init__(self, obs: int = 5, act: int = 2) -> None:
            super().__init__()
            self.pi = mlp([obs, 16, 2 * act])
            self.q1, self.q2 = mlp([obs + act, 16, 1]), mlp([obs + act, 16, 1])
            self.targets = nn.ModuleList(
                [copy.deepcopy(q) for q in (self.q1, self.q2)]
            ).requires_grad_(False)
            self.log_alpha = nn.Parameter(torch.zeros(1))

        def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            mu, log_std = self.pi(obs).chunk(2, -1)
            std = log_std.clamp(-5, 2).exp()
            normal = torch.distributions.Normal(mu, std)
            raw = mu + std * noise
            logp = normal.log_prob(raw).sum(-1) - (
                2 * (math.log(2) - raw - F.softplus(-2 * raw))
            ).sum(-1)
            return torch.tanh(raw), logp

        def forward(
            self,
            obs: Tensor,
            action: Tensor,
            reward: Tensor,
            after: Tensor,
            done: Tensor,
            noise: Tensor,
        ) -> dict[str, Tensor]:
            alpha = self.log_alpha.exp().detach()
            with torch.no_grad():
                next_action, next_logp = self.act(after, noise[:, 0])
                both = torch.cat([after, next_action], -1)
                q_next = torch.min(*(q(both) for q in self.targets)).squeeze(-1)
                backup = reward + 0.99 * (1 - done) * (q_next - alpha * next_logp)
            sa = torch.cat([obs, action], -1)
            critic = sum(F.mse_loss(q(sa).squeeze(-1), backup) for q in (self.q1, self.q2))
            new, logp = self.act(obs, noise[:, 1])
            both = torch.cat([obs, new], -1)
            fixed = [
                torch.func.functional_call(
                    q, {n: p.detach() for n, p in q.named_parameters()}, (both,)
                )
                for q in (self.q1, self.q2)
            ]
            actor = (alpha * logp - torch.min(*fixed).squeeze(-1)).mean()
            temperature = -(self.log_alpha * (logp - 2.0).detach()).mean()
            return {"loss": critic + actor + temperature, "critic": critic, "actor": actor}

    return Sac(), {
        "obs": floats(batch_size, 5),
        "action": floats(batch_size, 2).tanh(),
        "reward": floats(batch_size),
        "after": floats(batch_size, 5).flip(0),
        "done": tokens(2, batch_size).float(),
        "noise": floats(batch_size, 2, 2),
    }


def world_model(batch_size: int = 4) -> Example:
    """Dreamer's recurrent state: straight-through categories by given uniforms, balanced divergences with free bits,
    symmetric logs and two-hot rewards, sequences in the first dim after the batch."""

    def symlog(x: Tensor) -> Tensor:
        return torch.sign(x) * torch.log1p(torch.abs(x))

    class State(NamedTuple):
        deter: Tensor
        stoch: Tensor
        logits: Tensor

    class World(nn.Module):
        def __init__(self, classes: int = 4, groups: int = 3, deter: int = 12) -> None:
            super().__init__()
            self.classes, self.groups, self.deter = classes, groups, deter
            self.encoder = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12, eps=1e-3), nn.SiLU())
            self.cell = nn.GRUCell(groups * classes + 2, deter)
            self.prior, self.post = (
                nn.Linear(deter, groups * classes),
                nn.Linear(deter + 12, groups * classes),
            )
            self.decoder, self.reward = (
                nn.Linear(deter + groups * classes, 6),
                nn.Linear(deter + groups * classes, 9),
            )
            self.register_buffer("bins", torch.linspace(-4, 4, 9))

        def sample(self, logits: Tensor, u: Tensor) -> Tensor:
            probs = (
                0.99 * logits.view(-1, self.groups, self.classes).softmax(-1) + 0.01 / self.classes
            )
            drawn = (probs.cumsum(-1) < u[..., None]).sum(-1).clamp(max=self.classes - 1)
            hard = F.one_hot(drawn, self.classes).to(probs.dtype)
            return (hard + probs - probs.detach()).flatten(1)

        def two_hot(self, x: Tensor) -> Tensor:
            below = (self.bins <= x[..., None]).sum(-1).sub(1).clamp(0, len(self.bins) - 2)
            low, high = self.bins[below], self.bins[below + 1]
            w = ((x - low) / (high - low)).clamp(0, 1)[..., None]
            return (1 - w) * F.one_hot(below, len(self.bins)) + w * F.one_hot(
                below + 1, len(self.bins)
            )

        def kl(self, one: Tensor, two: Tensor) -> Tensor:
            a, b = (
                t.unflatten(-1, (self.groups, self.classes)).log_softmax(-1) for t in (one, two)
            )
            return (a.exp() * (a - b)).sum((-1, -2)).clamp(min=0.1).mean()

        def forward(
            self, obs: Tensor, action: Tensor, reward: Tensor, first: Tensor, u: Tensor
        ) -> Tensor:
            b, t = obs.shape[:2]
            embed = self.encoder(symlog(obs))
            state = State(
                obs.new_zeros(b, self.deter), obs.new_zeros(b, self.groups * self.classes), None
            )
            states, priors = [], []
            for i in range(t):
                keep = (1.0 - first[:, i]).unsqueeze(-1)
                state = State(*(s * keep for s in state[:2]), state.logits)
                deter = self.cell(torch.cat([state.stoch, action[:, i] * keep], -1), state.deter)
                logits = self.post(torch.cat([deter, embed[:, i]], -1))
                state = state._replace(
                    deter=deter, stoch=self.sample(logits, u[:, i]), logits=logits
                )
                states.append(state)
                priors.append(self.prior(deter))
            whole = State(*(torch.stack(part, 1) for part in zip(*states)))
            prior = torch.stack(priors, 1)
            feat = torch.cat(whole[:2], -1)
            recon = (self.decoder(feat) - symlog(obs)).square().sum(-1).mean()
            rew = -(self.two_hot(symlog(reward)) * self.reward(feat).log_softmax(-1)).sum(-1).mean()
            return (
                recon
                + rew
                + 0.5 * self.kl(whole.logits.detach(), prior)
                + 0.1 * self.kl(whole.logits, prior.detach())
            )

    return World(), {
        "obs": floats(batch_size, 5, 6),
        "action": floats(batch_size, 5, 2),
        "reward": floats(batch_size, 5),
        "first": (torch.arange(5) == 0).to(torch.float32).expand(batch_size, -1).contiguous(),
        "u": floats(batch_size, 5, 3).sigmoid(),
    }


def corrected_traces(batch_size: int = 4) -> Example:
    """IMPALA's V-trace from the end of the sequence to its start, with a decision transformer's trunk over returns,
    states and actions that are laid into each other."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rtg, self.state, self.action = (
                nn.Linear(1, WIDTH),
                nn.Linear(4, WIDTH),
                nn.Embedding(3, WIDTH),
            )
            self.time = nn.Embedding(16, WIDTH)
            self.trunk = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(
                    WIDTH, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
                ),
                2,
                enable_nested_tensor=False,
            )
            self.policy, self.value = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

        def forward(
            self, rtg: Tensor, states: Tensor, actions: Tensor, rewards: Tensor, behaviour: Tensor
        ) -> Tensor:
            b, t = actions.shape
            when = self.time(torch.arange(t))
            stacked = torch.stack(
                [
                    self.rtg(rtg[..., None]) + when,
                    self.state(states) + when,
                    self.action(actions) + when,
                ],
                1,
            )
            h = stacked.permute(0, 2, 1, 3).reshape(b, 3 * t, WIDTH)
            mask = torch.triu(torch.full((3 * t, 3 * t), float("-inf"), dtype=h.dtype), diagonal=1)
            h = self.trunk(h, mask=mask).reshape(b, t, 3, WIDTH)[:, :, 1]
            log_pi = self.policy(h).log_softmax(-1)
            chosen = log_pi.gather(-1, actions[..., None]).squeeze(-1)
            values = self.value(h).squeeze(-1)
            with torch.no_grad():
                rho = torch.exp(chosen - behaviour).clamp(max=1.0)
                following = torch.cat([values[:, 1:], values[:, -1:]], 1)
                deltas = rho * (rewards + 0.9 * following - values)
                acc, found = torch.zeros_like(values[:, 0]), []
                for i in reversed(range(t)):
                    acc = deltas[:, i] + 0.9 * rho[:, i] * acc
                    found.insert(0, acc)
                vs = torch.stack(found, 1) + values
                ahead = torch.cat([vs[:, 1:], values[:, -1:]], 1)
                advantage = rho * (rewards + 0.9 * ahead - values)
            entropy = -(log_pi.exp() * log_pi).sum(-1)
            return (
                -(chosen * advantage).mean()
                + 0.5 * (vs - values).pow(2).mean()
                - 0.01 * entropy.mean()
            )

    return Agent(), {
        "rtg": floats(batch_size, 5),
        "states": floats(batch_size, 5, 4),
        "actions": tokens(3, batch_size, 5),
        "rewards": floats(batch_size, 5).flip(0),
        "behaviour": -floats(batch_size, 5).abs() - 0.1,
    }


# -- physics and densities ----------------------------------------------------------------------------------


def heat_inverse(batch_size: int = 8) -> Example:
    """A PINN that finds a diffusivity: random Fourier features, a hard boundary, second derivatives by two gradients,
    weights of terms that adapt by their own parameters, collocation points and data in one batch."""

    class Heat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("B", torch.randn(2, 8, generator=torch.Generator().manual_seed(5)))
            layers = [
                nn.Linear(16, WIDTH),
                nn.Tanh(),
                nn.Linear(WIDTH, WIDTH),
                nn.Tanh(),
                nn.Linear(WIDTH, 1),
            ]
            self.net = nn.Sequential(
                OrderedDict((f"layer{n}", one) for n, one in enumerate(layers))
            )
            self.log_nu = nn.Parameter(torch.tensor(-1.0))
            self.s = nn.Parameter(torch.zeros(2))

        def u(self, x: Tensor, t: Tensor) -> Tensor:
            z = torch.hstack([x, t]) @ self.B
            return self.net(torch.hstack([z.sin(), z.cos()])) * x * (1 - x)

        def residual(self, x: Tensor, t: Tensor) -> Tensor:
            x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
            u = self.u(x, t)
            grad = partial(torch.autograd.grad, create_graph=True, grad_outputs=torch.ones_like(u))
            u_x, u_t = grad(u, (x, t))
            (u_xx,) = grad(u_x, x)
            return u_t - self.log_nu.exp() * u_xx

        def forward(self, points: Tensor, where: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
            r = self.residual(points[:, :1], points[:, 1:])
            d = self.u(where[:, :1], where[:, 1:]) - measured
            terms = torch.stack([r.square().mean(), d.square().mean()])
            return (terms * torch.exp(-self.s) + self.s).sum(), terms.detach()

    return Heat(), {
        "points": floats(batch_size, 2).sigmoid(),
        "where": floats(batch_size, 2).flip(0).sigmoid(),
        "measured": floats(batch_size, 1),
    }


def adjoint_ode(batch_size: int = 4) -> Example:
    """A neural ODE by the adjoint method as torchdiffeq has it: a gradient of its own that is given the function (a
    module) and its parameters, which is to be refused with what to do instead."""

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, func: nn.Module, y0: Tensor, steps: int, *params: Tensor) -> Tensor:
            y, dt = y0, 1.0 / steps
            with torch.no_grad():
                for n in range(steps):
                    y = y + dt * func(n * dt, y)
            ctx.func, ctx.steps = func, steps
            ctx.save_for_backward(y, *params)
            return y

        @staticmethod
        def backward(ctx: Any, a: Tensor) -> tuple[Any, ...]:
            y, *params = ctx.saved_tensors
            dt, total = 1.0 / ctx.steps, [torch.zeros_like(p) for p in params]
            for n in reversed(range(ctx.steps)):
                with torch.enable_grad():
                    at = y.detach().requires_grad_(True)
                    f = ctx.func(n * dt, at)
                    da, *dp = torch.autograd.grad(f, (at, *params), a, allow_unused=True)
                y = y - dt * f.detach()
                a = a + dt * da
                total = [t + dt * d for t, d in zip(total, dp)]
            return None, a, None, *total

    class Dynamics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(9, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))

        def forward(self, t: float, y: Tensor) -> Tensor:
            return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.func, self.head = Dynamics(), nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.head(Adjoint.apply(self.func, x, 4, *self.func.parameters())), y)

    return Ode(), _rows(batch_size)


def continuous_flow(batch_size: int = 6) -> Example:
    """FFJORD: a density by a trace estimated with given noise, gradients inside a loop of Runge-Kutta steps, a kinetic
    penalty carried along as one more state."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.gate = (
                nn.Linear(3, WIDTH),
                nn.Linear(WIDTH, 3),
                nn.Linear(1, WIDTH),
            )

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.b(F.softplus(self.a(z)) * torch.sigmoid(self.gate(t.view(1, 1))))

    class Flow(nn.Module):
        def __init__(self, steps: int = 3) -> None:
            super().__init__()
            self.field, self.steps = Field(), steps

        def dynamics(self, t: Tensor, state: tuple[Tensor, ...], e: Tensor) -> tuple[Tensor, ...]:
            z = state[0].requires_grad_(True)
            dz = self.field(t, z)
            e_dzdx = torch.autograd.grad(dz, z, e, create_graph=True)[0]
            return dz, -(e_dzdx * e).sum(-1), dz.square().mean(-1)

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            state = (x, x.new_zeros(len(x)), x.new_zeros(len(x)))
            dt = 1.0 / self.steps
            for n in range(self.steps):
                t = torch.tensor(n * dt, dtype=x.dtype)
                k1 = self.dynamics(t, state, noise)
                middle = tuple(s + 0.5 * dt * k for s, k in zip(state, k1))
                k2 = self.dynamics(t + 0.5 * dt, middle, noise)
                state = tuple(s + dt * k for s, k in zip(state, k2))
            z, logdet, kinetic = state
            prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
            return -(prior - logdet).mean() + 0.05 * kinetic.mean()

    return Flow(), {"x": floats(batch_size, 3), "noise": floats(batch_size, 3).flip(0).sign()}


def sliced_scores(batch_size: int = 6) -> Example:
    """Sliced score matching of an energy, with Langevin steps for negative samples and a penalty on both energies."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(4, WIDTH),
                nn.SiLU(),
                nn.Linear(WIDTH, WIDTH),
                nn.SiLU(),
                nn.Linear(WIDTH, 1),
            )

        def energy(self, x: Tensor) -> Tensor:
            return self.net(x).squeeze(-1)

        def langevin(self, x: Tensor, noise: Tensor) -> Tensor:
            for n in range(noise.shape[1]):
                x = x.detach().requires_grad_()
                g = torch.autograd.grad(self.energy(x).sum(), x)[0]
                x = x - 0.1 * g + 0.05 * noise[:, n]
            return x.detach()

        def forward(self, x: Tensor, vectors: Tensor, noise: Tensor) -> Tensor:
            at = x.detach().requires_grad_()
            score = -torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)[0]
            product = (score * vectors).sum()
            hessian = torch.autograd.grad(product, at, create_graph=True)[0]
            matching = (vectors * hessian).sum(-1) + 0.5 * (score * vectors).sum(-1).square()
            negative = self.langevin(x.flip(0), noise)
            up, down = self.energy(x), self.energy(negative)
            return matching.mean() + (up - down).mean() + 0.1 * (up.square() + down.square()).mean()

    return Energy(), {
        "x": floats(batch_size, 4),
        "vectors": floats(batch_size, 4).flip(0),
        "noise": floats(batch_size, 2, 4),
    }


def turned_tensors(batch_size: int = 4) -> Example:
    """Features that turn with a cloud of points (orders 0 and 1): products of tensors by einsum, gates from lengths,
    irreps in a dict of tensors."""

    class Product(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.radial = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 5 * channels))
            self.register_buffer("eps", torch.zeros(3, 3, 3))
            for i, j, k, s in (
                (0, 1, 2, 1),
                (1, 2, 0, 1),
                (2, 0, 1, 1),
                (0, 2, 1, -1),
                (2, 1, 0, -1),
                (1, 0, 2, -1),
            ):
                self.eps[i, j, k] = s
            self.mix = nn.ParameterDict(
                {
                    "0": nn.Parameter(torch.randn(channels, channels) / 3),
                    "1": nn.Parameter(torch.randn(channels, channels) / 3),
                }
            )
            self.gate = nn.Linear(channels, channels)

        def forward(
            self, feats: dict[int, Tensor], rbf: Tensor, direction: Tensor
        ) -> dict[int, Tensor]:
            w = self.radial(rbf).unflatten(-1, (5, -1)).unbind(-2)
            s, v = feats[0], feats[1]
            scalar = torch.einsum("bijc,bjc->bic", w[0], s) + torch.einsum(
                "bijc,bjcx,bijx->bic", w[1], v, direction
            )
            vector = torch.einsum("bijc,bjc,bijx->bicx", w[2], s, direction) + torch.einsum(
                "bijc,bjcx->bicx", w[3], v
            )
            vector = vector + torch.einsum("bijc,bjcx,bijy,xyz->bicz", w[4], v, direction, self.eps)
            scalar = scalar @ self.mix["0"]
            vector = torch.einsum("bicx,cd->bidx", vector, self.mix["1"])
            gate = torch.sigmoid(self.gate(vector.norm(dim=-1)))
            return {0: s + F.silu(scalar), 1: v + vector * gate.unsqueeze(-1)}

    class Net(nn.Module):
        def __init__(self, channels: int = 4) -> None:
            super().__init__()
            self.embed, self.layers = (
                nn.Embedding(5, channels),
                nn.ModuleList(Product(channels) for _ in range(2)),
            )
            self.out = nn.Linear(channels, 1, bias=False)

        def forward(self, kinds: Tensor, pos: Tensor, dipole: Tensor) -> Tensor:
            offset = pos.unsqueeze(2) - pos.unsqueeze(1)
            length = torch.linalg.vector_norm(offset + 1e-5, dim=-1, keepdim=True)
            rbf = torch.cat([torch.exp(-((length - c) ** 2)) for c in (0.5, 1.0, 1.5, 2.0)], -1)
            feats = {
                0: self.embed(kinds),
                1: pos.new_zeros(*kinds.shape, self.embed.embedding_dim, 3),
            }
            for layer in self.layers:
                feats = layer(feats, rbf, offset / length)
            return F.mse_loss(self.out(feats[1].transpose(-1, -2)).squeeze(-1).sum(1), dipole)

    return Net(), {
        "kinds": tokens(5, batch_size, 6),
        "pos": floats(batch_size, 6, 3),
        "dipole": floats(batch_size, 3),
    }


# -- series -------------------------------------------------------------------------------------------------


def temporal_fusion(batch_size: int = 4) -> Example:
    """A temporal fusion transformer: gated residual networks, variables chosen by softmax, an LSTM that begins with a
    context, quantile losses; and reversible instance norm around it."""

    class Grn(nn.Module):
        def __init__(
            self, size: int, hidden: int, out: int | None = None, context: int | None = None
        ) -> None:
            super().__init__()
            out = out or size
            self.skip = nn.Linear(size, out) if out != size else None
            self.fc1, self.fc2, self.gate = (
                nn.Linear(size, hidden),
                nn.Linear(hidden, hidden),
                nn.Linear(hidden, 2 * out),
            )
            self.context = nn.Linear(context, hidden, bias=False) if context is not None else None
            self.norm = nn.LayerNorm(out)

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            h = self.fc1(x)
            if context is not None:
                assert self.context is not None, "no context was announced"
                h = h + self.context(context)
            return self.norm(
                (x if self.skip is None else self.skip(x)) + F.glu(self.gate(self.fc2(F.elu(h))))
            )

    class Chooser(nn.Module):
        def __init__(self, names: list[str], hidden: int) -> None:
            super().__init__()
            self.names = names
            self.single = nn.ModuleDict(
                {n: nn.Sequential(nn.Linear(1, hidden), Grn(hidden, hidden)) for n in names}
            )
            self.weights = Grn(len(names) * hidden, hidden, len(names), hidden)

        def forward(self, x: dict[str, Tensor], context: Tensor) -> tuple[Tensor, Tensor]:
            made = [self.single[n](x[n].unsqueeze(-1)) for n in self.names]
            share = self.weights(torch.cat(made, -1), context).softmax(-1).unsqueeze(-2)
            return (torch.stack(made, -1) * share).sum(-1), share

    class Fusion(nn.Module):
        def __init__(self, hidden: int = 8, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> None:
            super().__init__()
            self.static, self.quantiles = nn.Embedding(4, hidden), quantiles
            self.past, self.future = Chooser(["value", "price"], hidden), Chooser(["price"], hidden)
            self.affine = nn.Parameter(torch.tensor([1.0, 0.0]))
            self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
            self.attn = nn.MultiheadAttention(hidden, 2, batch_first=True)
            self.post, self.out = Grn(hidden, hidden), nn.Linear(hidden, len(quantiles))

        def forward(self, value: Tensor, price: Tensor, store: Tensor, target: Tensor) -> Tensor:
            past = value.shape[1]
            mean = value.mean(1, keepdim=True).detach()
            std = torch.sqrt(value.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
            value = (value - mean) / std * self.affine[0] + self.affine[1]
            c = self.static(store).unsqueeze(1)
            before, _ = self.past(
                {"value": value, "price": price[:, :past]}, c.expand(-1, past, -1)
            )
            ahead, _ = self.future(
                {"price": price[:, past:]}, c.expand(-1, price.shape[1] - past, -1)
            )
            start = c.transpose(0, 1).contiguous()
            encoded, state = self.lstm(before, (start, torch.zeros_like(start)))
            decoded, _ = self.lstm(ahead, state)
            h = torch.cat([encoded, decoded], 1)
            mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)[past:]
            h = self.post(h[:, past:] + self.attn(h[:, past:], h, h, attn_mask=mask)[0])
            found = (self.out(h) - self.affine[1]) / (self.affine[0] + 1e-10) * std.unsqueeze(
                -1
            ) + mean.unsqueeze(-1)
            errors = target.unsqueeze(-1) - found
            losses = [
                torch.max((q - 1) * errors[..., i], q * errors[..., i]).unsqueeze(-1)
                for i, q in enumerate(self.quantiles)
            ]
            return torch.cat(losses, dim=2).sum(2).mean()

    return Fusion(), {
        "value": floats(batch_size, 8),
        "price": floats(batch_size, 12),
        "store": tokens(4, batch_size),
        "target": floats(batch_size, 4),
    }


def student_forecasts(batch_size: int = 4) -> Example:
    """DeepAR: an LSTM whose outputs are a Student's t distribution, scaled by the mean of its own series, lags picked
    by a list, the loss masked where nothing was observed."""

    class DeepAr(nn.Module):
        lags = [1, 2, 4]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(len(self.lags) + 1, 12, num_layers=2, batch_first=True, dropout=0.1)
            self.project = nn.ModuleDict({k: nn.Linear(12, 1) for k in ("df", "loc", "scale")})

        def forward(self, series: Tensor, observed: Tensor) -> Tensor:
            seen = observed.to(series.dtype)
            scale = (series.abs() * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp(
                min=1
            )
            scaled = series / scale.clamp(min=1e-3)
            most = max(self.lags)
            lagged = torch.stack(
                [scaled[:, most - lag : scaled.shape[1] - lag] for lag in self.lags], -1
            )
            static = scale.log1p().unsqueeze(1).expand(-1, lagged.shape[1], -1)
            h, _ = self.rnn(torch.cat([lagged, static], -1))
            raw = {k: layer(h).squeeze(-1) for k, layer in self.project.items()}
            t = torch.distributions.StudentT(
                2 + F.softplus(raw["df"]), raw["loc"], F.softplus(raw["scale"]) + 1e-3
            )
            nll = -t.log_prob(scaled[:, most:])
            mask = observed[:, most:]
            return torch.where(mask, nll, torch.zeros_like(nll)).sum() / mask.sum().clamp(min=1)

    return DeepAr(), {
        "series": floats(batch_size, 14) + 3,
        "observed": floats(batch_size, 14) > -1.5,
    }


# -- ways of training code --------------------------------------------------------------------------------


def lightning_module(batch_size: int = 6) -> Example:
    """A training module that logs numbers of Python as it goes (``.item()``), counts metrics in buffers, warns, and
    asserts that nothing is lost, around a network wrapped for several devices."""

    class Accuracy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.correct: Tensor
            self.total: Tensor
            self.register_buffer("correct", torch.tensor(0))
            self.register_buffer("total", torch.tensor(0))

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.correct += (preds.argmax(-1) == target).sum()
            self.total += target.numel()

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.DataParallel(
                nn.Sequential(
                    nn.Linear(8, WIDTH), nn.Mish(), nn.AlphaDropout(0.0), nn.Linear(WIDTH, 4)
                )
            )
            self.accuracy, self.logged = Accuracy(), {}

        def log(self, name: str, value: Tensor) -> None:
            self.logged[name] = value.item()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            logits = self.net(x)
            assert not torch.isnan(logits).any(), "the network is lost"
            loss = F.cross_entropy(logits, y)
            self.accuracy.update(logits.detach(), y)
            self.log("train/loss", loss)
            if batch_idx > 10_000:
                warnings.warn("a long epoch", stacklevel=2)
            return {"loss": loss, "logits": logits.detach()}

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return self.training_step((x, y), batch_idx=0)

    return Lit(), {"x": floats(batch_size, 8), "y": tokens(4, batch_size)}


def compiled_forward(batch_size: int = 4) -> Example:
    """A forward and a free function that are compiled by decorators, and a block compiled in place."""

    @torch.compile
    def swiglu(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(WIDTH, 8), nn.LayerNorm(8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Hardswish())
            self.block.compile(dynamic=False)
            self.head = nn.Linear(8, 4)

        @torch.compile(fullgraph=True)
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.norm(x + self.down(swiglu(self.up(x))))
            return F.huber_loss(self.head(self.block(h)), y, delta=0.5)

    return Net(), _rows(batch_size)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model is given, as its own code likes it."""

    image: Tensor
    labels: Tensor
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to(self, **kwargs: Any) -> Sample:
        return dataclasses.replace(self, image=self.image.to(**kwargs))

    def __len__(self) -> int:
        return len(self.image)


def batches_of_classes(batch_size: int = 4) -> Example:
    """Tensors by name that a wrapper puts into a frozen dataclass, losses by name from a registry, shapes checked by a
    decorator, a model built by a chain of class methods."""

    REGISTRY: dict[str, Any] = {}

    def register(name: str) -> Any:
        def put(function: Any) -> Any:
            REGISTRY[name] = function
            return function

        return put

    def shaped(**dims: int) -> Any:
        def wrap(function: Any) -> Any:
            def checked(self: nn.Module, sample: Sample) -> Any:
                for name, count in dims.items():
                    if getattr(sample, name).ndim != count:
                        raise TypeError(f"{name} must have {count} dims")
                return function(self, sample)

            return checked

        return wrap

    @register("dice")
    def dice(p: Tensor, t: Tensor) -> Tensor:
        axes = tuple(range(2, p.ndim))
        return (1 - (2 * (p * t).sum(axes) + 1) / (p.sum(axes) + t.sum(axes) + 1)).mean()

    @register("tversky")
    def tversky(p: Tensor, t: Tensor) -> Tensor:
        tp, fp, fn = (p * t).sum((2, 3)), (p * (1 - t)).sum((2, 3)), ((1 - p) * t).sum((2, 3))
        return torch.pow(1 - (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1), 0.75).mean()

    @register("boundary")
    def boundary(p: Tensor, t: Tensor) -> Tensor:
        edge = (F.max_pool2d(t, 3, 1, 1) - t).clamp(min=0)
        return (F.binary_cross_entropy(p, t, reduction="none") * (1 + edge)).mean()

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList()
            self.losses: list[tuple[float, Any]] = []

        @classmethod
        def empty(cls) -> Segmenter:
            return cls()

        def stage(self, a: int, b: int, stride: int) -> Segmenter:
            self.stages.append(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, stride, 1), nn.InstanceNorm2d(b, affine=True), nn.PReLU(b)
                )
            )
            return self

        def under(self, **weights: float) -> Segmenter:
            self.losses += [(w, REGISTRY[n]) for n, w in weights.items()]
            return self

        def head(self, classes: int) -> Segmenter:
            self.classify = nn.LazyConv2d(classes, 1)
            self.classify(torch.zeros(1, self.stages[-1][0].out_channels, 2, 2))
            return self

        @shaped(image=4, labels=3)
        def predict(self, sample: Sample) -> Tensor:
            h = reduce(lambda x, stage: stage(x), self.stages, sample.image)
            return F.interpolate(
                self.classify(h), sample.labels.shape[1:], mode="bilinear", align_corners=False
            )

        def forward(self, image: Tensor, labels: Tensor) -> Tensor:
            sample = Sample(image, labels, {"size": len(image)}).to(dtype=image.dtype)
            p = self.predict(sample).softmax(1)
            t = F.one_hot(sample.labels, p.shape[1]).movedim(-1, 1).to(p.dtype)
            return reduce(operator.add, (w * loss(p, t) for w, loss in self.losses))

    model = (
        Segmenter.empty()
        .stage(3, 8, 1)
        .stage(8, 8, 2)
        .head(3)
        .under(dice=1.0, tversky=0.5, boundary=0.2)
    )
    return model, {"image": floats(batch_size, 3, 8, 8), "labels": tokens(3, batch_size, 8, 8)}


def guarded_training(batch_size: int = 4) -> Example:
    """A loss that is left out where it is not finite, a running scale of it in a buffer, gradients scaled on their way
    by a function of one's own, numbers told to a logger, weights under a parametrization of unit norm."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.factor, None

    class Unit(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return F.normalize(w, dim=1)

        def right_inverse(self, w: Tensor) -> Tensor:
            return w

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
            parametrize.register_parametrization(self.net, "weight", Unit())
            self.register_buffer("scale", torch.ones(()))

        @cached_property
        def slope(self) -> float:
            return 0.3

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = F.leaky_relu(self.net(x), self.slope)
            loss = F.mse_loss(self.out(Scale.apply(h, 0.5)), y, reduction="none").mean(1)
            loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)).mean()
            with torch.no_grad():
                self.scale.lerp_(loss.detach(), 0.1)
            log.debug("loss %s over %d rows", loss.dtype, len(x))
            return loss / 2 + 0.01 * self.out.weight.abs().sum()

    return Guarded(), _rows(batch_size)


def teacher_by_lists(batch_size: int = 4) -> Example:
    """data2vec: a teacher that follows through calls over lists of tensors, targets of its upper layers normed, a mask
    given by the batch, a loss on masked places only by weights."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(3)
            )

        def forward(self, h: Tensor) -> tuple[Tensor, list[Tensor]]:
            kept = []
            for layer in self.layers:
                h = layer(h)
                kept.append(h)
            return h, kept

    class Data2Vec(nn.Module):
        def __init__(self, decay: float = 0.9) -> None:
            super().__init__()
            self.into, self.student, self.decay = nn.Linear(6, WIDTH), Encoder(), decay
            self.teacher = copy.deepcopy(self.student).eval().requires_grad_(False)
            self.mask_emb, self.predict = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.into(x)
            with torch.no_grad():
                torch._foreach_mul_(list(self.teacher.parameters()), self.decay)
                torch._foreach_add_(
                    list(self.teacher.parameters()),
                    list(self.student.parameters()),
                    alpha=1 - self.decay,
                )
                layers = [F.layer_norm(one, one.shape[-1:]) for one in self.teacher(h)[1][-2:]]
                target = sum(layers) / len(layers)
            masked = torch.where(mask.unsqueeze(-1), self.mask_emb, h)
            made = self.predict(self.student(masked)[0])
            weight = mask.to(h.dtype)
            error = F.smooth_l1_loss(made, target, reduction="none", beta=0.5).mean(-1)
            return (error * weight).sum() / weight.sum().clamp(min=1)

    return Data2Vec(), {"x": floats(batch_size, 6, 6), "mask": floats(batch_size, 6) > 0}


def neural_sort(batch_size: int = 4) -> Example:
    """Sorting made smooth (NeuralSort) for a top-k loss over a set that is embedded by induced attention blocks, with
    ranks by a sum of sigmoids beside it."""

    class Induced(nn.Module):
        def __init__(self, dim: int, points: int) -> None:
            super().__init__()
            self.I = nn.Parameter(torch.empty(1, points, dim))
            nn.init.xavier_uniform_(self.I)
            self.one, self.two = (nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.one(self.I.repeat(x.size(0), 1, 1), x, x)
            return x + self.two(x, h, h)[0]

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.set = (
                nn.Linear(5, WIDTH),
                nn.Sequential(Induced(WIDTH, 3), nn.LayerNorm(WIDTH)),
            )
            self.score = nn.Linear(WIDTH, 1)

        def soft_sort(self, s: Tensor, tau: float = 1.0) -> Tensor:
            n = s.shape[1]
            gaps = (s - s.transpose(1, 2)).abs()
            total = gaps @ torch.ones(n, 1, dtype=s.dtype)
            scaling = (n + 1 - 2 * (torch.arange(n) + 1)).to(s.dtype)
            top = (s @ scaling.unsqueeze(0) - total.expand(-1, -1, n)).transpose(1, 2)
            return (top / tau).softmax(-1)

        def forward(self, items: Tensor, gain: Tensor) -> Tensor:
            s = self.score(self.set(self.into(items)))
            p = self.soft_sort(s)
            gains = (p @ gain.unsqueeze(-1)).squeeze(-1)
            discount = 1.0 / torch.log2(torch.arange(gain.shape[1], dtype=s.dtype) + 2.0)
            ideal = (gain.sort(dim=1, descending=True).values * discount).sum(1)
            dcg = (gains * discount).sum(1) / (ideal + 1e-6)
            ranks = torch.sigmoid(s.transpose(1, 2) - s).sum(-1)
            return (1 - dcg).mean() + 0.01 * (ranks * gain).mean()

    return Ranker(), {"items": floats(batch_size, 6, 5), "gain": floats(batch_size, 6).abs()}


def frozen_copies(batch_size: int = 4) -> Example:
    """ControlNet: a trained copy of a frozen encoder with convolutions that start at zero, noise by a schedule kept in
    buffers, weights of the loss by signal to noise, text that is dropped where the batch says so."""

    def zero(module: nn.Module) -> nn.Module:
        for p in module.parameters():
            p.detach().zero_()
        return module

    class Res(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.norm, self.conv, self.time = (
                nn.GroupNorm(2, a),
                nn.Conv2d(a, b, 3, padding=1),
                nn.Linear(8, 2 * b),
            )
            self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
            return self.skip(x) + self.conv(F.silu(self.norm(x))) * (1 + scale) + shift

    class Encoder(nn.ModuleList):
        def forward(self, x: Tensor, t: Tensor) -> list[Tensor]:
            kept = []
            for layer in self:
                x = layer(x, t)
                kept.append(x)
                x = F.avg_pool2d(x, 2)
            return kept

    class Control(nn.Module):
        def __init__(self, steps: int = 20) -> None:
            super().__init__()
            betas = torch.linspace(1e-2**0.5, 0.2**0.5, steps) ** 2
            self.register_buffer("alphas_cumprod", torch.cumprod(1.0 - betas, 0))
            self.stem, self.encoder = (
                nn.Conv2d(4, 8, 3, padding=1),
                Encoder([Res(8, 8), Res(8, 16)]),
            )
            self.middle, self.up, self.out = (
                Res(16, 16),
                nn.ModuleList([Res(32, 8), Res(16, 8)]),
                nn.Conv2d(8, 4, 3, padding=1),
            )
            self.text = nn.Embedding(20, 8)
            for part in (self.stem, self.encoder, self.text):
                part.requires_grad_(False)
            self.control = copy.deepcopy(self.encoder).requires_grad_(True)
            self.hint = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), zero(nn.Conv2d(8, 8, 1))
            )
            self.zeros = nn.ModuleList(zero(nn.Conv2d(c, c, 1)) for c in (8, 16))

        def forward(
            self,
            latents: Tensor,
            hint: Tensor,
            words: Tensor,
            drop: Tensor,
            t: Tensor,
            noise: Tensor,
        ) -> Tensor:
            a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
            noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
            freqs = torch.exp(-math.log(100.0) * torch.arange(4, dtype=latents.dtype) / 4)
            angle = t[:, None].to(freqs.dtype) * freqs[None]
            text = torch.where(
                drop[:, None], torch.zeros_like(angle[:, :1]), self.text(words).mean(1)
            )
            emb = torch.cat([angle.sin(), angle.cos()], -1) + text
            with torch.no_grad():
                h = self.stem(noisy)
                frozen = self.encoder(h, emb)
            extra = [z(c) for z, c in zip(self.zeros, self.control(h + self.hint(hint), emb))]
            skips = [f + e for f, e in zip(frozen, extra)]
            x = self.middle(skips[-1], emb)
            for n, up in enumerate(self.up):
                skip = skips.pop()
                if n:
                    x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = up(torch.cat([x, skip], 1), emb)
            error = (self.out(x) - noise).pow(2).mean(dim=list(range(1, noise.ndim)))
            snr = a.flatten() / (1 - a.flatten())
            return (error * torch.stack([snr, 5 * torch.ones_like(snr)], 1).min(1)[0] / snr).mean()

    return Control(), {
        "latents": floats(batch_size, 4, 8, 8),
        "hint": floats(batch_size, 3, 8, 8),
        "words": tokens(20, batch_size, 4),
        "drop": tokens(2, batch_size).bool(),
        "t": tokens(20, batch_size),
        "noise": floats(batch_size, 4, 8, 8).flip(0),
    }


def neural_process(batch_size: int = 4) -> Example:
    """An attentive neural process: cross attention from targets to context, a latent of given noise, a divergence
    between two posteriors by ``torch.distributions``."""

    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deterministic, self.latent = (
                nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
                for _ in range(2)
            )
            self.mu, self.sigma, self.query = (
                nn.Linear(WIDTH, 4),
                nn.Linear(WIDTH, 4),
                nn.Bilinear(1, 1, WIDTH),
            )
            self.decoder = nn.Sequential(
                nn.Linear(WIDTH + 5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
            )

        def posterior(self, x: Tensor, y: Tensor) -> torch.distributions.Independent:
            h = self.latent(torch.cat([x, y], -1)).mean(1)
            normal = torch.distributions.Normal(
                self.mu(h), 0.1 + 0.9 * torch.sigmoid(self.sigma(h))
            )
            return torch.distributions.Independent(normal, 1)

        def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
            x_c, y_c = x[:, :4], y[:, :4]
            prior, post = self.posterior(x_c, y_c), self.posterior(x, y)
            z = post.mean + post.stddev * noise
            r = self.deterministic(torch.cat([x_c, y_c], -1))
            q, k = self.query(x, x), self.query(x_c, x_c)
            r = F.scaled_dot_product_attention(q, k, r)
            h = torch.cat([r, z.unsqueeze(1).expand(-1, x.shape[1], -1), x], -1)
            mean, raw = self.decoder(h).chunk(2, -1)
            dist = torch.distributions.Normal(mean, 0.1 + 0.9 * F.softplus(raw))
            kl = torch.distributions.kl_divergence(post, prior)
            return -(dist.log_prob(y).sum((1, 2)) - kl).mean() / x.shape[1]

    return Process(), {
        "x": floats(batch_size, 7, 1),
        "y": floats(batch_size, 7, 1).flip(0),
        "noise": floats(batch_size, 4),
    }


def lagrangian(batch_size: int = 4) -> Example:
    """A Lagrangian network: accelerations from a Hessian that is solved, by nested transforms of functions over rows,
    one leapfrog step and the error of it."""

    class Lagrangian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(4, WIDTH),
                nn.Softplus(),
                nn.Linear(WIDTH, WIDTH),
                nn.Softplus(),
                nn.Linear(WIDTH, 1),
            )

        def value(self, q: Tensor, v: Tensor) -> Tensor:
            return self.net(torch.cat([q, v])).squeeze(0) + 0.5 * v.dot(v)

        def acceleration(self, q: Tensor, v: Tensor) -> Tensor:
            by_q = torch.func.grad(self.value, 0)(q, v)
            hess = torch.func.hessian(self.value, 1)(q, v)
            mixed = torch.func.jacrev(torch.func.grad(self.value, 1), 0)(q, v)
            return torch.linalg.solve(hess + 1e-2 * torch.eye(2, dtype=q.dtype), by_q - mixed @ v)

        def forward(self, q: Tensor, v: Tensor, q_next: Tensor, v_next: Tensor) -> Tensor:
            step = torch.vmap(self.acceleration)
            half = v + 0.05 * step(q, v)
            moved = q + 0.1 * half
            done = half + 0.05 * step(moved, half)
            return F.mse_loss(moved, q_next) + F.mse_loss(done, v_next)

    return Lagrangian(), {
        "q": floats(batch_size, 2),
        "v": floats(batch_size, 2).flip(0),
        "q_next": floats(batch_size, 2) + 0.1,
        "v_next": floats(batch_size, 2).flip(0) - 0.1,
    }


def tied_both_ways(batch_size: int = 4) -> Example:
    """An autoencoder whose decoder is its encoder's transpose, shared layers in a dict by name, weights binarised with
    their signs kept by hand (XNOR), and a sparsity penalty on mean activations of the batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bias = (
                nn.Conv2d(3, 8, 3, stride=2, padding=1),
                nn.Parameter(torch.zeros(3)),
            )
            shared = nn.Linear(WIDTH, WIDTH)
            self.steps = nn.ModuleDict({"a": shared, "b": nn.Linear(WIDTH, WIDTH), "c": shared})
            self.squeeze = nn.Linear(128, WIDTH)

        def binary(self, w: Tensor) -> Tensor:
            scale = w.abs().mean((1, 2, 3), keepdim=True).detach()
            soft = torch.clamp(w, -1.0, 1.0)
            return (scale * w.sign()).detach() - soft.detach() + soft

        def forward(self, x: Tensor) -> Tensor:
            w = self.binary(self.conv.weight)
            h = F.conv2d(x, w, self.conv.bias, stride=2, padding=1).tanh()
            z = self.squeeze(h.flatten(1))
            for name in ("a", "b", "c", "a"):
                z = z + self.steps[name](z).sigmoid()
            rho = z.sigmoid().mean(0).clamp(1e-3, 1 - 1e-3)
            sparsity = (0.05 * (0.05 / rho).log() + 0.95 * (0.95 / (1 - rho)).log()).sum()
            back = F.linear(z, self.squeeze.weight.T).view_as(h)
            out = F.conv_transpose2d(back, w, self.bias, stride=2, padding=1, output_padding=1)
            return F.binary_cross_entropy_with_logits(out, x.sigmoid()) + 1e-2 * sparsity

    return Net(), {"x": floats(batch_size, 3, 8, 8)}


def wrapped_layers(batch_size: int = 4) -> Example:
    """A stack in which each layer is a partial of a function over a dict of parameters, written as functional code, with
    a wrapper that adds the loss."""

    class Functional(nn.Module):
        def __init__(self, sizes: tuple[int, ...] = (8, 16, 16, 4)) -> None:
            super().__init__()
            self.params = nn.ParameterDict()
            for n, (a, b) in enumerate(itertools.pairwise(sizes)):
                self.params[f"w{n}"], self.params[f"b{n}"] = (
                    nn.Parameter(torch.randn(b, a) / a**0.5),
                    nn.Parameter(torch.zeros(b)),
                )
            self.layers = [
                partial(self.layer, n=n, last=n == len(sizes) - 2) for n in range(len(sizes) - 1)
            ]

        def layer(self, x: Tensor, n: int, last: bool) -> Tensor:
            y = F.linear(x, self.params[f"w{n}"], bias=self.params[f"b{n}"])
            return y if last else F.celu(y)

        def forward(self, x: Tensor) -> Tensor:
            return reduce(lambda h, layer: layer(h), self.layers, x)

    return WithLoss(Functional()), _rows(batch_size)
