"""More models in the manner of published repositories, for ``outside.py``: image blocks, fields and
depth, long attention, flows, forecasts, tables, and losses that sort or pick."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from outside_models import Classifier, Example, WithLoss, floats, tokens
from outside_published import WIDTH, _images, _series
from torch import Tensor, nn

# -- image blocks -------------------------------------------------------------------------------------


class SwishImplementation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, i):
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        i = ctx.saved_tensors[0]
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishImplementation.apply(x)


class Conv2dSame(nn.Conv2d):
    """Padding as TensorFlow has it, from the size at hand."""

    def forward(self, x: Tensor) -> Tensor:
        ih, iw = x.size()[-2:]
        kh, kw = self.weight.size()[-2:]
        oh, ow = -(-ih // self.stride[0]), -(-iw // self.stride[1])
        ph = max((oh - 1) * self.stride[0] + (kh - 1) + 1 - ih, 0)
        pw = max((ow - 1) * self.stride[1] + (kw - 1) + 1 - iw, 0)
        if ph > 0 or pw > 0:
            x = F.pad(x, [pw // 2, pw - pw // 2, ph // 2, ph - ph // 2])
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class MBConv(nn.Module):
    def __init__(self, dim: int, out: int, stride: int) -> None:
        super().__init__()
        mid = 4 * dim
        self.expand, self.bn0 = Conv2dSame(dim, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.depth = Conv2dSame(mid, mid, 3, stride, groups=mid, bias=False)
        self.bn1, self.swish = nn.BatchNorm2d(mid), MemoryEfficientSwish()
        self.reduce, self.excite = Conv2dSame(mid, dim, 1), Conv2dSame(dim, mid, 1)
        self.project, self.bn2 = Conv2dSame(mid, out, 1, bias=False), nn.BatchNorm2d(out)
        self.keeps = stride == 1 and dim == out

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.swish(self.bn0(self.expand(inputs)))
        x = self.swish(self.bn1(self.depth(x)))
        s = self.excite(self.swish(self.reduce(F.adaptive_avg_pool2d(x, 1))))
        x = self.bn2(self.project(torch.sigmoid(s) * x))
        return x + inputs if self.keeps else x


def efficient_net(batch_size: int = 4) -> Example:
    net = nn.Sequential(
        Conv2dSame(3, 8, 3, 2), MBConv(8, 8, 1), MBConv(8, 16, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return Classifier(net), _images(batch_size)


class MobileViT(nn.Module):
    """Convolutions around a Transformer over pixels of unfolded patches."""

    def __init__(self, dim: int = WIDTH, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.stem, self.local = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, dim, 1)
        self.former = nn.TransformerEncoderLayer(dim, 2, 32, 0.0, batch_first=True)
        self.proj, self.fuse = nn.Conv2d(dim, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        fm = self.local(x)
        b, c, h, w = fm.shape
        p = self.patch
        nh, nw = h // p, w // p
        fm = fm.reshape(b * c * nh, p, nw, p).transpose(1, 2).reshape(b, c, nh * nw, p * p)
        fm = fm.transpose(1, 3).reshape(b * p * p, nh * nw, c)
        fm = self.former(fm).contiguous().view(b, p * p, nh * nw, c).transpose(1, 3)
        fm = fm.reshape(b * c * nh, nw, p, p).transpose(1, 2).reshape(b, c, nh * p, nw * p)
        return self.head(self.fuse(torch.cat((x, self.proj(fm)), dim=1)).mean((2, 3)))


def mobile_vit(batch_size: int = 4) -> Example:
    return Classifier(MobileViT()), _images(batch_size)


class CondConv(nn.Module):
    """A kernel of its own for every sample, by one convolution in groups of samples."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.route, self.weight = (
            nn.Linear(3, experts),
            nn.Parameter(floats(experts, 8, 3, 3, 3) / 5),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        k, out, *kernel = self.weight.size()
        r = torch.sigmoid(self.route(x.mean((2, 3))))
        weight = torch.mm(r, self.weight.view(k, -1)).view(b * out, *kernel)
        y = F.conv2d(x.view(1, b * c, h, w), weight, padding=1, groups=b)
        return self.head(y.view(b, out, h, w).relu().mean((2, 3)))


def cond_conv(batch_size: int = 4) -> Example:
    return Classifier(CondConv()), _images(batch_size, size=8)


class MaskedConv2d(nn.Conv2d):
    """PixelCNN's: the weight is masked where it lies."""

    def __init__(self, kind: str, *args: int, **options: int) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mask", self.weight.data.clone())
        _, _, h, w = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
        self.mask[:, :, h // 2 + 1 :] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class PixelCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            MaskedConv2d("A", 1, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(),
            MaskedConv2d("B", 8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def pixel_cnn(batch_size: int = 4) -> Example:
    return PixelCNN(), {"x": floats(batch_size, 1, 8, 8), "y": tokens(4, batch_size, 8, 8)}


class ConvLSTM(nn.Module):
    """Frames in a loop, states made from nothing, channels split by gates."""

    def __init__(self, hid: int = 8) -> None:
        super().__init__()
        self.conv, self.out, self.hid = (
            nn.Conv2d(1 + hid, 4 * hid, 3, padding=1),
            nn.Conv2d(hid, 1, 1),
            hid,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, length, _, height, width = x.size()
        h = torch.zeros(b, self.hid, height, width, device=self.conv.weight.device).type_as(x)
        c, outs = torch.zeros_like(h), []
        for t in range(length):
            gates = self.conv(torch.cat([x[:, t, :, :, :], h], dim=1))
            i, f, o, g = torch.split(gates, self.hid, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(self.out(h))
        return F.l1_loss(torch.stack(outs, dim=1), y)


def conv_lstm(batch_size: int = 4) -> Example:
    return ConvLSTM(), {
        "x": floats(batch_size, 4, 1, 8, 8),
        "y": floats(batch_size, 4, 1, 8, 8).flip(0),
    }


# -- depth and fields ---------------------------------------------------------------------------------


class PSMNet(nn.Module):
    """Stereo: a cost volume written piece by piece, soft argmin over disparities."""

    def __init__(self, disparities: int = 4) -> None:
        super().__init__()
        self.d = disparities
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.fuse = nn.Sequential(
            nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1)
        )

    def forward(self, left: Tensor, right: Tensor, disp: Tensor) -> Tensor:
        lf, rf = self.features(left), self.features(right)
        cost = lf.new_zeros(lf.size(0), lf.size(1) * 2, self.d, lf.size(2), lf.size(3))
        for i in range(self.d):
            if i > 0:
                cost[:, : lf.size(1), i, :, i:] = lf[:, :, :, i:]
                cost[:, lf.size(1) :, i, :, i:] = rf[:, :, :, :-i]
            else:
                cost[:, : lf.size(1), i, :, :] = lf
                cost[:, lf.size(1) :, i, :, :] = rf
        p = F.softmax(torch.squeeze(self.fuse(cost.contiguous()), 1), dim=1)
        values = torch.arange(self.d, dtype=p.dtype).view(1, -1, 1, 1)
        found = torch.sum(p * values, 1)
        mask = disp < 3
        mask.detach_()
        return F.smooth_l1_loss(found[mask], disp[mask])


def stereo(batch_size: int = 4) -> Example:
    return PSMNet(), {
        "left": floats(batch_size, 3, 8, 8),
        "right": floats(batch_size, 3, 8, 8).flip(0),
        "disp": floats(batch_size, 8, 8).abs() * 2,
    }


class SSIM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.refl = nn.AvgPool2d(3, 1), nn.ReflectionPad2d(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.refl(x), self.refl(y)
        mx, my = self.pool(x), self.pool(y)
        sx, sy = self.pool(x**2) - mx**2, self.pool(y**2) - my**2
        sxy = self.pool(x * y) - mx * my
        n = (2 * mx * my + 0.01**2) * (2 * sxy + 0.03**2)
        d = (mx**2 + my**2 + 0.01**2) * (sx + sy + 0.03**2)
        return torch.clamp((1 - n / d) / 2, 0, 1)


class Monodepth(nn.Module):
    """Depth and pose without labels: points are back-projected, moved, projected and sampled."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.depth = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 1, 3, padding=1)
        )
        self.pose, self.ssim, self.size = nn.Conv2d(6, 6, size), SSIM(), size
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        grid = torch.stack([x, y, torch.ones_like(x)]).float().reshape(3, -1)
        self.pix = nn.Parameter(grid, requires_grad=False)

    def transform(self, v: Tensor) -> Tensor:
        angle = torch.norm(v[:, 0], 2, 1, True)
        axis = v[:, 0] / (angle + 1e-7)
        ca, sa = torch.cos(angle), torch.sin(angle)
        x, y, z = (axis[..., i].unsqueeze(1) for i in range(3))
        rot = torch.zeros((v.shape[0], 4, 4), dtype=v.dtype, device=v.device)
        rot[:, 0, 0] = torch.squeeze(x * x * (1 - ca) + ca)
        rot[:, 0, 1] = torch.squeeze(x * y * (1 - ca) - z * sa)
        rot[:, 1, 0] = torch.squeeze(x * y * (1 - ca) + z * sa)
        rot[:, 1, 1] = torch.squeeze(y * y * (1 - ca) + ca)
        rot[:, 2, 2] = torch.squeeze(z * z * (1 - ca) + ca)
        rot[:, 3, 3] = 1
        rot[:, :3, 3] = v[:, 1]
        return rot

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        b, s = target.shape[0], self.size
        disp = torch.sigmoid(self.depth(target))
        depth = 1 / (0.1 + 9.9 * disp)
        pose = 0.01 * self.pose(torch.cat([target, source], 1)).view(b, 2, 3)
        cam = depth.view(b, 1, -1) * self.pix.unsqueeze(0)
        cam = torch.cat([cam, torch.ones(b, 1, s * s, dtype=cam.dtype)], 1)
        moved = torch.matmul(self.transform(pose)[:, :3, :], cam)
        pix = moved[:, :2, :] / (moved[:, 2, :].unsqueeze(1) + 1e-7)
        pix = pix.view(b, 2, s, s).permute(0, 2, 3, 1)
        pix[..., 0] /= s - 1
        pix[..., 1] /= s - 1
        warped = F.grid_sample(source, (pix - 0.5) * 2, padding_mode="border", align_corners=True)
        reprojection = 0.85 * self.ssim(warped, target).mean(1, True)
        reprojection = reprojection + 0.15 * torch.abs(target - warped).mean(1, True)
        identity = torch.abs(target - source).mean(1, True)
        to_optimise, _ = torch.min(torch.cat((reprojection, identity), 1), dim=1)
        norm = disp / (disp.mean(2, True).mean(3, True) + 1e-7)
        gx = torch.abs(norm[:, :, :, :-1] - norm[:, :, :, 1:])
        gx *= torch.exp(-torch.mean(torch.abs(target[..., :-1] - target[..., 1:]), 1, keepdim=True))
        return to_optimise.mean() + 1e-3 * gx.mean()


def monodepth(batch_size: int = 4) -> Example:
    return Monodepth(), {
        "target": floats(batch_size, 3, 8, 8),
        "source": floats(batch_size, 3, 8, 8).flip(0),
    }


class HierarchicalNerf(nn.Module):
    """Coarse and fine: new places are drawn where the coarse weights lie (evenly, as for rendering)."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Sequential(nn.Linear(21, 32), nn.ReLU(), nn.Linear(32, 4))
        self.fine = nn.Sequential(nn.Linear(21, 32), nn.ReLU(), nn.Linear(32, 4))

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat(
            [x, *(f(x * 2.0**k) for k in range(3) for f in (torch.sin, torch.cos))], -1
        )

    def render(self, net: nn.Module, rays: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        o, d = rays[:, None, :3], rays[:, None, 3:]
        raw = net(self.encode(o + d * z[..., None]))
        dists = z[..., 1:] - z[..., :-1]
        dists = torch.cat([dists, torch.Tensor([1e3]).to(z).expand(dists[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        ones = torch.ones((alpha.shape[0], 1), dtype=alpha.dtype)
        trans = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * trans
        return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights

    def sample_pdf(self, bins: Tensor, weights: Tensor, n: int) -> Tensor:
        weights = weights + 1e-5
        pdf = weights / torch.sum(weights, -1, keepdim=True)
        cdf = torch.cumsum(pdf, -1)
        cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
        u = (
            torch.linspace(0.0, 1.0, steps=n, dtype=cdf.dtype)
            .expand([*cdf.shape[:-1], n])
            .contiguous()
        )
        inds = torch.searchsorted(cdf, u, right=True)
        below = torch.max(torch.zeros_like(inds - 1), inds - 1)
        above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds)
        inds_g = torch.stack([below, above], -1)
        shape = [inds_g.shape[0], inds_g.shape[1], cdf.shape[-1]]
        cdf_g = torch.gather(cdf.unsqueeze(1).expand(shape), 2, inds_g)
        bins_g = torch.gather(bins.unsqueeze(1).expand(shape), 2, inds_g)
        denom = cdf_g[..., 1] - cdf_g[..., 0]
        denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
        t = (u - cdf_g[..., 0]) / denom
        return bins_g[..., 0] + t * (bins_g[..., 1] - bins_g[..., 0])

    def forward(self, rays: Tensor, rgb: Tensor) -> Tensor:
        z = torch.linspace(0, 1, 6, dtype=rays.dtype).expand(len(rays), 6)
        coarse, weights = self.render(self.coarse, rays, z)
        mid = 0.5 * (z[..., 1:] + z[..., :-1])
        new = self.sample_pdf(mid, weights[..., 1:-1], 4).detach()
        z, _ = torch.sort(torch.cat([z, new], -1), -1)
        fine, _ = self.render(self.fine, rays, z)
        return torch.mean((coarse - rgb) ** 2) + torch.mean((fine - rgb) ** 2)


def nerf_fine(batch_size: int = 8) -> Example:
    return HierarchicalNerf(), {
        "rays": floats(batch_size, 6),
        "rgb": floats(batch_size, 3).sigmoid(),
    }


# -- long attention, scans, experts, slots ------------------------------------------------------------


class SlidingChunks(nn.Module):
    """Longformer's: overlapping chunks are views by strides, scores are skewed by padding."""

    def __init__(self, w: int = 4) -> None:
        super().__init__()
        self.w, self.qkv, self.head = w, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 12)
        self.embed = nn.Embedding(12, WIDTH)

    def chunk(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), x.size(1) // (self.w * 2), self.w * 2, x.size(2)).contiguous()
        size, stride = list(x.size()), list(x.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        return x.as_strided(size=size, stride=stride)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k, v = self.chunk(q.contiguous()), self.chunk(k.contiguous()), self.chunk(v.contiguous())
        scores = torch.einsum("bcxd,bcyd->bcxy", q, k) / 4
        mixed = torch.einsum("bcxy,bcyd->bcxd", scores.softmax(-1), v)
        mixed = mixed[:, :, : self.w].flatten(1, 2)
        mixed = F.pad(mixed, (0, 0, 0, x.size(1) - mixed.size(1)))
        return F.cross_entropy(self.head(h + mixed).transpose(1, 2), y)


def sliding_chunks(batch_size: int = 4) -> Example:
    return SlidingChunks(), {
        "x": tokens(12, batch_size, 16),
        "y": tokens(12, batch_size, 16).flip(0),
    }


class LSHAttention(nn.Module):
    """Reformer's: sorted by buckets of hashes, attended in chunks, put back in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.v = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12)
        self.register_buffer("rotations", floats(8, 2))

    def pick(self, values: Tensor, indices: Tensor) -> Tensor:
        return values.gather(1, indices[:, :, None].expand(-1, -1, values.shape[-1]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, t = x.shape
        h = self.embed(x)
        qk, v = self.qk(h), self.v(h)
        with torch.no_grad():
            rotated = torch.einsum("btf,fi->bti", qk, self.rotations)
            buckets = torch.argmax(torch.cat([rotated, -rotated], dim=-1), dim=-1)
            ticker = torch.arange(t).unsqueeze(0).expand_as(buckets)
            _, sticker = (t * buckets + (ticker % t)).sort(dim=-1)
            _, undo = sticker.sort(dim=-1)
        sqk, sv = (
            self.pick(qk, sticker).reshape(b, 4, -1, 8),
            self.pick(v, sticker).reshape(b, 4, -1, 8),
        )
        pos = sticker.reshape(b, 4, -1)
        back = lambda one: torch.cat([one, torch.cat([one[:, -1:], one[:, :-1]], 1)], 2)  # noqa: E731
        bk, bv, kpos = back(F.normalize(sqk, dim=-1)), back(sv), back(pos)
        dots = torch.einsum("bhie,bhje->bhij", sqk, bk) * 8**-0.5
        dots.masked_fill_(pos[:, :, :, None] < kpos[:, :, None, :], -1e9)
        dots.masked_fill_(pos[:, :, :, None] == kpos[:, :, None, :], -5e4)
        lse = torch.logsumexp(dots, dim=-1, keepdim=True)
        so = torch.einsum("buij,buje->buie", torch.exp(dots - lse), bv).reshape(b, t, -1)
        return F.cross_entropy(self.head(h + self.pick(so, undo)).flatten(0, 1), y.flatten())


def hashed_attention(batch_size: int = 4) -> Example:
    return LSHAttention(), {
        "x": tokens(12, batch_size, 16),
        "y": tokens(12, batch_size, 16).flip(0),
    }


def segsum(x: Tensor) -> Tensor:
    t = x.size(-1)
    x = x[..., None].repeat(1, 1, 1, 1, t)
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal=-1)
    x = x.masked_fill(~mask, 0)
    s = torch.cumsum(x, dim=-2)
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool), diagonal=0)
    return s.masked_fill(~mask, -torch.inf)


class SSD(nn.Module):
    """Mamba-2's minimal form: products inside blocks, states between them."""

    def __init__(self, heads: int = 2, block: int = 4) -> None:
        super().__init__()
        self.heads, self.block = heads, block
        self.inp, self.out = nn.Linear(8, 2 * heads * 4 + 8 + heads), nn.Linear(heads * 4, 8)
        self.conv = nn.Conv1d(heads * 4 + 8, heads * 4 + 8, 4, padding=3, groups=heads * 4 + 8)
        self.a_log, self.dt_bias, self.d = (nn.Parameter(floats(heads) * s) for s in (1, 0.5, 0.3))

    def forward(self, u: Tensor) -> Tensor:
        a = -torch.exp(self.a_log)
        z, xbc, dt = torch.split(self.inp(u), [self.heads * 4, self.heads * 4 + 8, self.heads], -1)
        dt = F.softplus(dt + self.dt_bias)
        xbc = F.silu(self.conv(xbc.transpose(1, 2)).transpose(1, 2)[:, : u.shape[1], :])
        x, b, c = torch.split(xbc, [self.heads * 4, 4, 4], dim=-1)
        x = x.view(*x.shape[:2], self.heads, 4)
        blocks = lambda one: one.reshape(one.shape[0], -1, self.block, *one.shape[2:])  # noqa: E731
        xb, ab, bb, cb = (
            blocks(one) for one in (x * dt.unsqueeze(-1), a * dt, b.unsqueeze(2), c.unsqueeze(2))
        )
        bb, cb = bb.expand(-1, -1, -1, self.heads, -1), cb.expand(-1, -1, -1, self.heads, -1)
        ab = ab.permute(0, 3, 1, 2)
        acs = torch.cumsum(ab, dim=-1)
        ell = torch.exp(segsum(ab))
        diag = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", cb, bb, ell, xb)
        decay = torch.exp(acs[:, :, :, -1:] - acs)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", bb, decay, xb)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        chunk = torch.exp(segsum(F.pad(acs[:, :, :, -1], (1, 0))[..., None, :])[:, :, 0])
        states = torch.einsum("bhzc,bchpn->bzhpn", chunk, states)[:, :-1]
        off = torch.einsum("bclhn,bchpn,bhcl->bclhp", cb, states, torch.exp(acs))
        y = (diag + off).reshape(x.shape) + x * self.d.unsqueeze(-1)
        return self.out(y.reshape(*y.shape[:2], -1) * F.silu(z)).mean(1)


def state_space_duality(batch_size: int = 4) -> Example:
    return WithLoss(SSD()), {"x": floats(batch_size, 8, 8), "y": floats(batch_size, 8)}


class DeepseekMoE(nn.Module):
    """Training form: rows repeated for each choice, each expert takes those that a mask picks."""

    def __init__(self, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))
            for _ in range(experts)
        )
        self.gate, self.shared, self.k = (
            nn.Linear(WIDTH, experts, bias=False),
            nn.Linear(WIDTH, WIDTH),
            k,
        )
        self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)

    def moe(self, x: Tensor) -> Tensor:
        identity, shape = x, x.shape
        scores = self.gate(x.view(-1, shape[-1])).softmax(dim=-1)
        weight, idx = torch.topk(scores, k=self.k, dim=-1, sorted=False)
        x = x.view(-1, shape[-1]).repeat_interleave(self.k, dim=0)
        flat, y = idx.view(-1), torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(x[flat == i])
        y = (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)
        return y.view(*shape) + self.shared(identity)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.moe(self.embed(x))).flatten(0, 1), y.flatten())


def deepseek_experts(batch_size: int = 4) -> Example:
    return DeepseekMoE(), {"x": tokens(12, batch_size, 6), "y": tokens(12, batch_size, 6).flip(0)}


class SlotAttention(nn.Module):
    """Slots compete for inputs, updated by a cell in a loop."""

    def __init__(self, slots: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.slots = nn.Parameter(floats(1, slots, dim))
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.gru, self.ni, self.ns = nn.GRUCell(dim, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.decode = nn.Linear(dim, 16 * 9)

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        slots = self.slots.expand(b, -1, -1)
        x = self.ni(x)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            prev = slots
            dots = torch.einsum("bid,bjd->bij", self.q(self.ns(slots)), k) * d**-0.5
            attn = dots.softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, d), prev.reshape(-1, d)).reshape(b, -1, d)
        out = self.decode(slots).view(b, -1, 16, 9)
        recon, masks = out.split([8, 1], -1)
        return (recon * masks.softmax(1)).sum(1)


def slots(batch_size: int = 4) -> Example:
    return WithLoss(SlotAttention()), {
        "x": floats(batch_size, 16, 8),
        "y": floats(batch_size, 16, 8),
    }


# -- flows and quantisers -----------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Glow's: the first batch sets location and scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def initialize(self, x: Tensor) -> None:
        with torch.no_grad():
            flatten = x.permute(1, 0, 2, 3).contiguous().view(x.shape[1], -1)
            mean = flatten.mean(1).view(1, -1, 1, 1)
            std = flatten.std(1).view(1, -1, 1, 1)
            self.loc.data.copy_(-mean)
            self.scale.data.copy_(1 / (std + 1e-6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, _, height, width = x.shape
        if self.initialized.item() == 0:
            self.initialize(x)
            self.initialized.fill_(1)
        logdet = height * width * torch.sum(torch.log(torch.abs(self.scale)))
        return self.scale * (x + self.loc), logdet


class Glow(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.norm = ActNorm(channels)
        self.weight = nn.Parameter(torch.linalg.qr(floats(channels, channels))[0])
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, log_det = self.norm(x)
        _, _, h, w = x.shape
        x = F.conv2d(x, self.weight[:, :, None, None])
        log_det = log_det + h * w * torch.slogdet(self.weight)[1]
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        out = torch.cat([a, (b + t) * s], 1)
        log_det = log_det + torch.sum(torch.log(s).view(x.shape[0], -1), 1)
        log_p = (-0.5 * out**2).sum((1, 2, 3))
        return -(log_p + log_det).mean() / (h * w)


def glow(batch_size: int = 4) -> Example:
    return Glow(), {"x": floats(batch_size, 4, 4, 4)}


class ResidualVQ(nn.Module):
    """Codebooks in a row, each for what the one before left; straight-through; a list of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
        self.books = nn.ModuleList(nn.Embedding(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.enc(x)
        residual, out, losses = z, 0.0, []
        for book in self.books:
            d = torch.cdist(residual.reshape(-1, 4), book.weight)
            idx = d.argmin(-1)
            q = book(idx).view_as(residual)
            losses.append(
                F.mse_loss(q, residual.detach()) + 0.25 * F.mse_loss(residual, q.detach())
            )
            q = residual + (q - residual).detach()
            residual, out = residual - q.detach(), out + q
        return F.mse_loss(self.dec(out), x) + torch.stack(losses).mean()


def residual_codes(batch_size: int = 4) -> Example:
    return ResidualVQ(), {"x": floats(batch_size, 5, 8)}


class Distributed(nn.Module):
    """Likelihoods by torch.distributions: full covariance, mixtures, Bernoulli and categories."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.loc, self.tril = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 9)
        self.mix, self.cat, self.bern = nn.Linear(8, 6), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        import torch.distributions as D

        h = self.body(x).tanh()
        lower = torch.tril(self.tril(h).view(-1, 3, 3), -1) + torch.diag_embed(
            F.softplus(self.loc(h)) + 0.1
        )
        full = D.MultivariateNormal(self.loc(h), scale_tril=lower).log_prob(y)
        m, s = self.mix(h).chunk(2, -1)
        mixture = D.MixtureSameFamily(D.Categorical(logits=m), D.Normal(m, F.softplus(s) + 0.1))
        kl = D.kl_divergence(D.Normal(m, F.softplus(s) + 0.1), D.Normal(0.0, 1.0)).sum(-1)
        bern = D.Independent(D.Bernoulli(logits=self.bern(h)), 1).log_prob((y[:, :2] > 0).to(y))
        cat = D.Categorical(logits=self.cat(h))
        total = (
            full + mixture.log_prob(y[:, 0]) + bern + cat.log_prob(c) + 0.01 * cat.entropy() - kl
        )
        return -total.mean()


def distributions(batch_size: int = 4) -> Example:
    return Distributed(), {
        "x": floats(batch_size, 6),
        "y": floats(batch_size, 3),
        "c": tokens(4, batch_size),
    }


# -- forecasts and tables -----------------------------------------------------------------------------


class NBeats(nn.Module):
    """Stacks of blocks that take away what they explain: trend and seasonality by fixed bases."""

    def __init__(self, back: int = 12, fore: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(back, 16), nn.ReLU()) for _ in range(3))
        self.thetas = nn.ModuleList(nn.Linear(16, 4, bias=False) for _ in range(3))
        tb, tf = torch.arange(back) / back, torch.arange(fore) / fore
        self.trend = [torch.stack([t**i for i in range(2)]) for t in (tb, tf)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        backcast, forecast = x, torch.zeros(size=(x.size(0), 4)).to(x)
        for block, theta in zip(self.blocks, self.thetas, strict=True):
            t = theta(block(backcast))
            b, f = (t[:, 2 * i : 2 * i + 2].mm(self.trend[i].to(x)) for i in (0, 1))
            backcast, forecast = backcast - b, forecast + f
        return (2 * (forecast - y).abs() / (forecast.abs() + y.abs() + 1e-8).detach()).mean()


def nbeats(batch_size: int = 4) -> Example:
    return NBeats(), {"x": floats(batch_size, 12), "y": floats(batch_size, 4)}


class TimesNet(nn.Module):
    """Periods are read off a spectrum; the series is folded by them."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.k, self.embed, self.head = k, nn.Linear(4, 8), nn.Linear(8, 4)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        b, t, n = h.size()
        xf = torch.fft.rfft(h, dim=1)
        freq = abs(xf).mean(0).mean(-1)
        freq[0] = 0
        _, top = torch.topk(freq, self.k)
        top = top.detach().cpu().numpy()
        weight, res = abs(xf).mean(-1)[:, top], []
        for period in t // top:
            length = -(-t // period) * period
            out = F.pad(h, (0, 0, 0, int(length - t)))
            out = (
                out.reshape(b, int(length // period), int(period), n)
                .permute(0, 3, 1, 2)
                .contiguous()
            )
            res.append(self.conv(out).permute(0, 2, 3, 1).reshape(b, -1, n)[:, :t, :])
        res = torch.stack(res, dim=-1)
        weight = F.softmax(weight, dim=1).unsqueeze(1).unsqueeze(1).repeat(1, t, n, 1)
        return self.head(torch.sum(res * weight, -1) + h)[:, -4:]


def times_net(batch_size: int = 4) -> Example:
    return WithLoss(TimesNet()), _series(batch_size)


class PatchTST(nn.Module):
    """Reversible normalisation, patches by unfold, channels as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Parameter(torch.ones(4))
        self.pad, self.proj = nn.ReplicationPad1d((0, 4)), nn.Linear(8, WIDTH)
        self.pos = nn.Parameter(floats(4, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(4 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x, dim=1, keepdim=True).detach()
        std = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        z = self.pad(((x - mean) / std * self.affine).permute(0, 2, 1))
        z = z.unfold(dimension=-1, size=8, step=4)
        z = self.proj(z)
        u = torch.reshape(z, (z.shape[0] * z.shape[1], z.shape[2], z.shape[3]))
        u = self.layer(u + self.pos)
        u = torch.reshape(u, (-1, x.shape[2], u.shape[-2], u.shape[-1]))
        return self.head(u.flatten(2)).permute(0, 2, 1) / (self.affine + 1e-10) * std + mean


def patch_tst(batch_size: int = 4) -> Example:
    return WithLoss(PatchTST()), _series(batch_size)


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim=-1):
        ctx.dim = dim
        top, _ = x.max(dim=dim, keepdim=True)
        x = x - top
        z, _ = torch.sort(x, dim=dim, descending=True)
        rho = torch.arange(1, x.size(dim) + 1, device=x.device, dtype=x.dtype)
        cum = z.cumsum(dim) - 1
        support = rho * z > cum
        size = support.sum(dim=dim).unsqueeze(dim)
        tau = cum.gather(dim, size - 1) / size.to(x.dtype)
        out = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        size, out = ctx.saved_tensors
        dim = ctx.dim
        g = grad.clone()
        g[out == 0] = 0
        v = g.sum(dim=dim) / size.to(out.dtype).squeeze(dim)
        return torch.where(out != 0, g - v.unsqueeze(dim), g), None


class GBN(nn.Module):
    def __init__(self, dim: int, virtual: int = 4) -> None:
        super().__init__()
        self.bn, self.virtual = nn.BatchNorm1d(dim, momentum=0.02), virtual

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(-(-x.shape[0] // self.virtual), 0)
        return torch.cat([self.bn(one) for one in chunks], dim=0)


class TabNet(nn.Module):
    """Steps that attend to features by sparsemax, with priors and an entropy of masks; ghost norms."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.bn, self.first = nn.BatchNorm1d(dim), nn.Linear(dim, 8)
        self.att = nn.ModuleList(nn.Linear(4, dim) for _ in range(2))
        self.norms = nn.ModuleList(GBN(dim) for _ in range(2))
        self.feat, self.head = nn.ModuleList(nn.Linear(dim, 16) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.bn(x)
        prior, loss, out = torch.ones(x.shape).to(x), 0, 0
        att = self.first(x)[:, 4:]
        for step in range(2):
            mask = Sparsemax.apply(self.norms[step](self.att[step](att)) * prior, -1)
            loss += torch.mean(torch.sum(torch.mul(mask, torch.log(mask + 1e-15)), dim=1))
            prior = torch.mul(1.3 - mask, prior)
            h = F.glu(self.feat[step](torch.mul(mask, x)))
            d, att = F.relu(h[:, :4]), h[:, 4:]
            out = out + d
        return F.cross_entropy(self.head(out), y) - 1e-3 * loss


def tab_net(batch_size: int = 8) -> Example:
    return TabNet(), {"x": floats(batch_size, 6), "y": tokens(3, batch_size)}


# -- losses that sort, pick and project ---------------------------------------------------------------


class ArcFace(nn.Module):
    """Margins by angle with an easy way out; a centre loss beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight = nn.Linear(8, 8), nn.Parameter(floats(4, 8))
        self.centers, self.cos_m, self.sin_m = nn.Parameter(floats(4, 8) / 2), 0.8776, 0.4794

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        f = self.net(x)
        cosine = F.linear(F.normalize(f), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-9, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > -0.8, phi, cosine - 0.24)
        one_hot = torch.zeros(cosine.size(), device=x.device, dtype=x.dtype)
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        logits = 10 * ((one_hot * phi) + ((1.0 - one_hot) * cosine))
        size = f.size(0)
        dist = f.pow(2).sum(1, keepdim=True).expand(size, 4)
        dist = dist + self.centers.pow(2).sum(1, keepdim=True).expand(4, size).t()
        dist.addmm_(f, self.centers.t(), beta=1, alpha=-2)
        classes = torch.arange(4).long()
        mask = label.unsqueeze(1).expand(size, 4).eq(classes.expand(size, 4))
        center = (dist * mask.to(dist)).clamp(min=1e-12, max=1e12).sum() / size
        return F.cross_entropy(logits, label) + 0.1 * center


def arc_face(batch_size: int = 4) -> Example:
    return ArcFace(), {"x": floats(batch_size, 8), "label": tokens(4, batch_size)}


def lovasz_grad(gt_sorted: Tensor) -> Tensor:
    p = len(gt_sorted)
    gts = gt_sorted.sum()
    intersection = gts - gt_sorted.float().cumsum(0)
    union = gts + (1 - gt_sorted).float().cumsum(0)
    jaccard = 1.0 - intersection / union
    if p > 1:
        jaccard[1:p] = jaccard[1:p] - jaccard[0:-1]
    return jaccard


class Lovasz(nn.Module):
    """Lovász softmax: errors sorted by class; classes that are not there are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        probas = F.softmax(self.net(x), 1).permute(0, 2, 3, 1).contiguous().view(-1, 3)
        labels, losses = y.view(-1), []
        for c in range(3):
            fg = (labels == c).float()
            if fg.sum() == 0:
                continue
            errors = (fg - probas[:, c]).abs()
            errors_sorted, perm = torch.sort(errors, 0, descending=True)
            losses.append(torch.dot(errors_sorted, lovasz_grad(fg[perm]).to(errors)))
        return sum(losses) / len(losses)


def lovasz(batch_size: int = 4) -> Example:
    return Lovasz(), {"x": floats(batch_size, 3, 8, 8), "y": tokens(3, batch_size, 8, 8)}


class Ohem(nn.Module):
    """Online hard examples: those above a threshold, but at least so many."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y, ignore_index=255, reduction="none").view(-1)
        loss, _ = torch.sort(loss, descending=True)
        n_min = y.numel() // 4
        loss = loss[loss > 1.0] if loss[n_min] > 1.0 else loss[:n_min]
        return torch.mean(loss)


def hard_examples(batch_size: int = 4) -> Example:
    return Ohem(), {"x": floats(batch_size, 3, 8, 8), "y": tokens(3, batch_size, 8, 8)}


class C51(nn.Module):
    """A distribution of returns, the target's projected onto its atoms by index_add_."""

    def __init__(self, atoms: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2 * atoms))
        self.target = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2 * atoms))
        self.target.load_state_dict(self.net.state_dict())
        self.register_buffer("support", torch.linspace(-1, 1, atoms))
        self.atoms = atoms

    def forward(self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, done: Tensor) -> Tensor:
        b, n = s.size(0), self.atoms
        with torch.no_grad():
            dist = self.target(s2).view(b, 2, n).softmax(-1)
            best = (dist * self.support).sum(2).argmax(1)
            dist = dist[range(b), best]
            z = (r.unsqueeze(1) + (1 - done.unsqueeze(1)) * 0.9 * self.support).clamp(-1, 1)
            pos = (z + 1) / 0.5
            low, up = pos.floor().to(torch.int64), pos.ceil().to(torch.int64)
            low[(up > 0) * (low == up)] -= 1
            up[(low < (n - 1)) * (low == up)] += 1
            m = s.new_zeros(b, n)
            offset = torch.linspace(0, ((b - 1) * n), b).unsqueeze(1).expand(b, n).to(a)
            m.view(-1).index_add_(0, (low + offset).view(-1), (dist * (up.to(pos) - pos)).view(-1))
            m.view(-1).index_add_(0, (up + offset).view(-1), (dist * (pos - low.to(pos))).view(-1))
        log_p = F.log_softmax(self.net(s).view(b, 2, n), 2)[range(b), a]
        return -torch.sum(m * log_p, 1).mean()


def returns_by_atoms(batch_size: int = 4) -> Example:
    return C51(), {
        "s": floats(batch_size, 6),
        "a": tokens(2, batch_size),
        "r": floats(batch_size),
        "s2": floats(batch_size, 6).flip(0),
        "done": tokens(2, batch_size).float(),
    }


class SwAV(nn.Module):
    """Codes of one view predict the other's: Sinkhorn's steps on scores, prototypes normed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Linear(8, 6, bias=False)

    @torch.no_grad()
    def sinkhorn(self, out: Tensor) -> Tensor:
        q = torch.exp(out / 0.5).t()
        q /= torch.sum(q)
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True) * q.shape[0]
            q /= torch.sum(q, dim=0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        bs = one.size(0)
        out = F.normalize(self.net(torch.cat([one, two])), dim=1, p=2)
        scores, loss = F.linear(out, F.normalize(self.prototypes.weight, dim=1)), 0
        for crop in (0, 1):
            with torch.no_grad():
                q = self.sinkhorn(scores[bs * crop : bs * (crop + 1)].detach())[-bs:]
            other = scores[bs * (1 - crop) : bs * (2 - crop)] / 0.1
            loss -= torch.mean(torch.sum(q * F.log_softmax(other, dim=1), dim=1))
        return loss / 2


def swav(batch_size: int = 4) -> Example:
    return SwAV(), {"one": floats(batch_size, 8), "two": floats(batch_size, 8).flip(0)}


class Byol(nn.Module):
    """The target follows inside forward, by assigning ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8)
        self.predictor = nn.Linear(8, 8)
        for o, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
            t.data.copy_(o.data)
            t.requires_grad = False

    @torch.no_grad()
    def update(self) -> None:
        for o, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
            t.data = t.data * 0.9 + o.data * 0.1

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        p = self.predictor(self.online(one))
        with torch.no_grad():
            self.update()
            z = self.target(two)
        return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


def target_by_data(batch_size: int = 4) -> Example:
    return Byol(), {"one": floats(batch_size, 8), "two": floats(batch_size, 8).flip(0)}


class Adaptive(nn.Module):
    """A neural ODE whose steps halve while the error is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        t, h = 0.0, 0.5
        while t < 1.0:
            k1 = self.f(x)
            k2 = self.f(x + h * k1)
            error = (h * (k2 - k1) / 2).abs().max()
            if error > 0.05 and h > 0.1:
                h = h / 2
                continue
            x, t = x + h * (k1 + k2) / 2, t + h
        return self.head(x)


def adaptive_steps(batch_size: int = 4) -> Example:
    return WithLoss(Adaptive()), {"x": floats(batch_size, 4), "y": floats(batch_size, 4)}
