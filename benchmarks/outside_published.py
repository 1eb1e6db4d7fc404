"""Models and losses in the manner of published repositories, for ``outside.py``: denoisers with time
embeddings, heads of detectors, graphs by scatter, decoders in loops, blocks of image backbones, losses
that pick what they count. Written before any was run here, to see what strangers meet."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from outside_models import Classifier, Example, floats, tokens
from torch import Tensor, nn

WIDTH = 16


def _images(batch_size: int, channels: int = 3, size: int = 16, classes: int = 4) -> dict:
    return {"x": floats(batch_size, channels, size, size), "y": tokens(classes, batch_size)}


def _series(batch_size: int, length: int = 16, channels: int = 4, out: int = 4) -> dict:
    return {"x": floats(batch_size, length, channels), "y": floats(batch_size, out, channels)}


# -- diffusion ----------------------------------------------------------------------------------------


def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs.to(t.device)[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def extract(a: Tensor, t: Tensor, shape: torch.Size) -> Tensor:
    b, *_ = t.shape
    return a.gather(-1, t).reshape(b, *((1,) * (len(shape) - 1)))


class TimedBlock(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, dim), nn.Conv2d(dim, out, 3, padding=1)
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(4 * WIDTH, 2 * out))
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(dim, out, 1) if dim != out else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        emb = self.emb(emb).type(h.dtype)
        while len(emb.shape) < len(h.shape):
            emb = emb[..., None]
        scale, shift = torch.chunk(emb, 2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(h))


class QKVAttention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.qkv, self.proj = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        ch = c // self.heads
        q, k, v = qkv.reshape(b * self.heads, ch * 3, -1).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v).reshape(b, -1, x.shape[-1])
        return (x + self.proj(a)).reshape(b, c, *spatial)


class GuidedUNet(nn.Module):
    """Noise predicted from a noised image, time and class; the schedule is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 50)
        bars = torch.cumprod(1 - betas, 0)
        self.register_buffer("sqrt_alphas_cumprod", bars.sqrt())
        self.register_buffer("sqrt_one_minus", (1 - bars).sqrt())
        self.time_embed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH)
        )
        self.label_emb = nn.Embedding(4, 4 * WIDTH)
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(WIDTH, WIDTH), TimedBlock(WIDTH, 2 * WIDTH)])
        self.mid = QKVAttention(2 * WIDTH, 2)
        self.up = nn.ModuleList([TimedBlock(4 * WIDTH, WIDTH), TimedBlock(2 * WIDTH, WIDTH)])
        self.out = nn.Sequential(
            nn.GroupNorm(4, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        x_t = (
            extract(self.sqrt_alphas_cumprod, t, x.shape) * x
            + extract(self.sqrt_one_minus, t, x.shape) * noise
        )
        emb = self.time_embed(timestep_embedding(t, WIDTH).to(x.dtype)) + self.label_emb(y)
        h, hs = self.stem(x_t), []
        for block in self.down:
            h = block(h, emb)
            hs.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.mid(h)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = block(torch.cat([h, hs.pop()], dim=1), emb)
        loss = F.mse_loss(self.out(h), noise, reduction="none")
        return loss.mean(dim=list(range(1, len(loss.shape)))).mean()


def guided_diffusion(batch_size: int = 4) -> Example:
    batch = _images(batch_size)
    return GuidedUNet(), batch | {
        "t": tokens(50, batch_size),
        "noise": floats(batch_size, 3, 16, 16).flip(0),
    }


# -- detection ----------------------------------------------------------------------------------------


class Fcos(nn.Module):
    """Anchor-free: focal loss over all places, boxes and centredness over the positive ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.GroupNorm(4, WIDTH), nn.ReLU())
        self.cls, self.box = nn.Conv2d(WIDTH, 4, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.ctr, self.scale = nn.Conv2d(WIDTH, 1, 3, padding=1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> dict:
        f = self.body(x)
        cls = self.cls(f).permute(0, 2, 3, 1).reshape(-1, 4)
        box = torch.exp(self.box(f) * self.scale).permute(0, 2, 3, 1).reshape(-1, 4)
        ctr = self.ctr(f).permute(0, 2, 3, 1).reshape(-1)
        labels, boxes = labels.reshape(-1), boxes.reshape(-1, 4)
        pos = torch.nonzero(labels > 0).squeeze(1)
        num_pos = max(pos.numel(), 1)
        target = torch.zeros_like(cls)
        target[pos, labels[pos] - 1] = 1
        p = torch.sigmoid(cls)
        ce = F.binary_cross_entropy_with_logits(cls, target, reduction="none")
        p_t = p * target + (1 - p) * (1 - target)
        cls_loss = (ce * (1 - p_t) ** 2).sum() / num_pos
        pred, goal = box[pos], boxes[pos]
        inter = torch.min(pred[:, :2], goal[:, :2]).prod(1) + torch.min(pred, goal)[:, 2:].prod(1)
        iou = (inter + 1) / (pred.sum(1) + goal.sum(1) + 1)
        lr = goal[:, [0, 2]]
        weight = torch.sqrt(lr.min(-1)[0] / lr.max(-1)[0])
        box_loss = (-torch.log(iou.clamp(min=1e-3)) * weight).sum() / weight.sum().clamp(min=1e-6)
        ctr_loss = F.binary_cross_entropy_with_logits(ctr[pos], weight, reduction="sum") / num_pos
        return {"loss": cls_loss + box_loss + ctr_loss, "cls": cls_loss.detach()}


def fcos(batch_size: int = 4) -> Example:
    return Fcos(), {
        "x": floats(batch_size, 3, 16, 16),
        "labels": (tokens(12, batch_size, 64) - 7).clamp(min=0),
        "boxes": floats(batch_size, 64, 4).abs() + 0.1,
    }


class MultiBox(nn.Module):
    """SSD's loss: hard negatives are mined by ranks, three for each positive."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.conf, self.loc = nn.Conv2d(WIDTH, 5, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, x: Tensor, conf_t: Tensor, loc_t: Tensor) -> Tensor:
        f, num = self.body(x), x.size(0)
        conf = self.conf(f).permute(0, 2, 3, 1).contiguous().view(num, -1, 5)
        loc = self.loc(f).permute(0, 2, 3, 1).contiguous().view(num, -1, 4)
        pos = conf_t > 0
        num_pos = pos.sum(dim=1, keepdim=True)
        pos_idx = pos.unsqueeze(pos.dim()).expand_as(loc)
        loss_l = F.smooth_l1_loss(
            loc[pos_idx].view(-1, 4), loc_t[pos_idx].view(-1, 4), reduction="sum"
        )
        batch_conf = conf.view(-1, 5)
        loss_c = torch.logsumexp(batch_conf, 1, keepdim=True) - batch_conf.gather(
            1, conf_t.view(-1, 1)
        )
        loss_c = loss_c.view(num, -1)
        loss_c[pos] = 0
        _, loss_idx = loss_c.sort(1, descending=True)
        _, idx_rank = loss_idx.sort(1)
        num_neg = torch.clamp(3 * num_pos, max=pos.size(1) - 1)
        neg = idx_rank < num_neg.expand_as(idx_rank)
        both = (pos.unsqueeze(2).expand_as(conf) + neg.unsqueeze(2).expand_as(conf)).gt(0)
        loss_c = F.cross_entropy(conf[both].view(-1, 5), conf_t[(pos + neg).gt(0)], reduction="sum")
        return (loss_l + loss_c) / num_pos.sum()


def multibox(batch_size: int = 4) -> Example:
    return MultiBox(), {
        "x": floats(batch_size, 3, 16, 16),
        "conf_t": (tokens(20, batch_size, 64) - 15).clamp(min=0),
        "loc_t": floats(batch_size, 64, 4),
    }


class MultiScaleDeformable(nn.Module):
    """Deformable attention of several levels: shapes come as a tensor, values are sampled by grids."""

    def __init__(self, levels: int = 2, points: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.levels, self.points, self.heads = levels, points, heads
        self.stem, self.next = nn.Conv2d(3, WIDTH, 3, 2, 1), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        self.level_embed = nn.Parameter(floats(levels, WIDTH))
        self.offsets = nn.Linear(WIDTH, heads * levels * points * 2)
        self.weights = nn.Linear(WIDTH, heads * levels * points)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        srcs = [one, self.next(one.relu())]
        flat, shapes = [], []
        for lvl, src in enumerate(srcs):
            shapes.append(src.shape[-2:])
            flat.append(src.flatten(2).transpose(1, 2) + self.level_embed[lvl].view(1, 1, -1))
        tokens_ = torch.cat(flat, 1)
        spatial_shapes = torch.as_tensor(shapes, dtype=torch.long, device=x.device)
        reference = []
        for h, w in shapes:
            ry, rx = torch.meshgrid(
                torch.linspace(0.5, h - 0.5, h, dtype=x.dtype),
                torch.linspace(0.5, w - 0.5, w, dtype=x.dtype),
                indexing="ij",
            )
            reference.append(torch.stack((rx.reshape(-1) / w, ry.reshape(-1) / h), -1))
        points = torch.cat(reference)[None, :, None, None, None]
        n, q, _ = tokens_.shape
        value = self.value(tokens_).view(n, q, self.heads, WIDTH // self.heads)
        offsets = self.offsets(tokens_).view(n, q, self.heads, self.levels, self.points, 2)
        weights = self.weights(tokens_).view(n, q, self.heads, -1).softmax(-1)
        normalizer = torch.stack([spatial_shapes[..., 1], spatial_shapes[..., 0]], -1)
        locations = points + offsets / normalizer[None, None, None, :, None, :]
        pieces = value.split([h * w for h, w in shapes], dim=1)
        grids, sampled = 2 * locations - 1, []
        for lvl, (h, w) in enumerate(shapes):
            v = pieces[lvl].flatten(2).transpose(1, 2).reshape(n * self.heads, -1, h, w)
            g = grids[:, :, :, lvl].transpose(1, 2).flatten(0, 1)
            sampled.append(F.grid_sample(v, g, "bilinear", "zeros", align_corners=False))
        weights = weights.transpose(1, 2).reshape(n * self.heads, 1, q, -1)
        mixed = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1).view(n, WIDTH, q)
        return self.out(mixed.transpose(1, 2)).mean(1)


def deformable_levels(batch_size: int = 4) -> Example:
    return Classifier(MultiScaleDeformable()), _images(batch_size, size=8)


# -- graphs and points --------------------------------------------------------------------------------


def unsorted_segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    result = data.new_full((num_segments, data.size(1)), 0)
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result.scatter_add_(0, segment_ids, data)
    return result


class EGNN(nn.Module):
    """Coordinates and features along edges; nodes of all samples lie in one list."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(3, hidden)
        self.edge = nn.Sequential(
            nn.Linear(2 * hidden + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.node = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.coord, self.head = nn.Linear(hidden, 1, bias=False), nn.Linear(hidden, 1)

    def edges(self, n: int, batch: int, device: torch.device) -> list[Tensor]:
        rows = [i for i in range(n) for j in range(n) if i != j]
        cols = [j for i in range(n) for j in range(n) if i != j]
        row, col = torch.LongTensor(rows).to(device), torch.LongTensor(cols).to(device)
        return [torch.cat([one + n * i for i in range(batch)]) for one in (row, col)]

    def forward(self, h: Tensor, pos: Tensor, y: Tensor) -> Tensor:
        b, n, _ = h.shape
        row, col = self.edges(n, b, h.device)
        h, x = self.embed(h).view(b * n, -1), pos.view(b * n, -1)
        for _ in range(2):
            diff = x[row] - x[col]
            radial = torch.sum(diff**2, 1).unsqueeze(1)
            feat = self.edge(torch.cat([h[row], h[col], radial], dim=1))
            trans = diff / (radial.sqrt() + 1) * self.coord(feat)
            x = x + unsorted_segment_sum(trans, row, num_segments=x.size(0)) / n
            agg = unsorted_segment_sum(feat, row, num_segments=h.size(0))
            h = h + self.node(torch.cat([h, agg], dim=1))
        return F.l1_loss(self.head(h.view(b, n, -1).sum(1)).squeeze(1), y)


def egnn(batch_size: int = 4) -> Example:
    return EGNN(), {
        "h": floats(batch_size, 5, 3),
        "pos": floats(batch_size, 5, 3).flip(0),
        "y": floats(batch_size),
    }


class DGCNN(nn.Module):
    """Edge convolutions over nearest neighbours found in each layer, by indices into all points."""

    def __init__(self, k: int = 4) -> None:
        super().__init__()
        self.k = k
        self.conv1 = nn.Sequential(
            nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)
        )
        self.conv2 = nn.Sequential(
            nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(48, 4)

    def graph_feature(self, x: Tensor) -> Tensor:
        batch_size, num_points = x.size(0), x.size(2)
        x = x.view(batch_size, -1, num_points)
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=self.k, dim=-1)[1]
        idx_base = torch.arange(0, batch_size, device=x.device).view(-1, 1, 1) * num_points
        idx = (idx + idx_base).view(-1)
        _, num_dims, _ = x.size()
        x = x.transpose(2, 1).contiguous()
        feature = x.view(batch_size * num_points, -1)[idx, :]
        feature = feature.view(batch_size, num_points, self.k, num_dims)
        x = x.view(batch_size, num_points, 1, num_dims).repeat(1, 1, self.k, 1)
        return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        one = self.conv1(self.graph_feature(x)).max(dim=-1, keepdim=False)[0]
        two = self.conv2(self.graph_feature(one)).max(dim=-1, keepdim=False)[0]
        x = torch.cat((one, two), dim=1)
        return self.head(torch.cat([x.max(-1)[0], x.mean(-1)], 1))


def dgcnn(batch_size: int = 4) -> Example:
    return Classifier(DGCNN()), {"x": floats(batch_size, 3, 12), "y": tokens(4, batch_size)}


class EdgeSoftmax(nn.Module):
    """Graph attention over a list of edges of the batch: softmax by scatter, messages by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.att = nn.Linear(4, WIDTH), nn.Parameter(floats(2 * WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        h = self.lin(x)
        src, dst = edge_index
        e = F.leaky_relu(torch.cat([h[src], h[dst]], -1) @ self.att, 0.2)
        top = torch.full((len(x),), -1e9, dtype=x.dtype).scatter_reduce(0, dst, e, "amax")
        e = (e - top[dst].detach()).exp()
        total = torch.zeros(len(x), dtype=x.dtype).index_add_(0, dst, e)
        alpha = e / (total[dst] + 1e-16)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * alpha[:, None])
        deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1)
        return F.cross_entropy(self.head(F.elu(out) / deg.sqrt()[:, None]), y)


def edge_softmax(batch_size: int = 4) -> Example:
    nodes = 8
    return EdgeSoftmax(), {
        "x": floats(nodes, 4),
        "edge_index": tokens(nodes, 2, 20),
        "y": tokens(3, nodes),
    }


# -- sequences ----------------------------------------------------------------------------------------


class LabelSmoothing(nn.Module):
    def __init__(self, size: int, padding_idx: int, smoothing: float) -> None:
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx, self.size = padding_idx, size
        self.confidence, self.smoothing = 1.0 - smoothing, smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert x.size(1) == self.size
        true_dist = x.data.clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.data.unsqueeze(1), self.confidence)
        true_dist[:, self.padding_idx] = 0
        mask = torch.nonzero(target.data == self.padding_idx)
        if mask.dim() > 0:
            true_dist.index_fill_(0, mask.squeeze(), 0.0)
        return self.criterion(x, true_dist.clone().detach())


class Annotated(nn.Module):
    """The annotated Transformer's training: smoothed labels with padding, divided by the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.generator, self.criterion = nn.Linear(WIDTH, 12), LabelSmoothing(12, 0, 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(x.size(1), x.size(1), dtype=torch.uint8)) == 0
        h = self.layer(self.embed(x) * math.sqrt(WIDTH), src_mask=mask)
        out = F.log_softmax(self.generator(h), dim=-1)
        ntokens = (y != 0).data.sum()
        return (
            self.criterion(out.contiguous().view(-1, out.size(-1)), y.contiguous().view(-1))
            / ntokens
        )


def annotated(batch_size: int = 4) -> Example:
    return Annotated(), {"x": tokens(12, batch_size, 6, low=1), "y": tokens(12, batch_size, 6)}


class Bahdanau(nn.Module):
    """A decoder in a loop: additive attention over masked sources, teacher forcing by a row of the batch."""

    def __init__(self, vocab: int = 12, hid: int = WIDTH) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, hid), nn.Embedding(vocab, hid)
        self.encoder = nn.GRU(hid, hid, bidirectional=True)
        self.fc, self.attn = nn.Linear(2 * hid, hid), nn.Linear(3 * hid, hid)
        self.v, self.rnn = nn.Linear(hid, 1, bias=False), nn.GRU(3 * hid, hid)
        self.out, self.vocab = nn.Linear(4 * hid, vocab), vocab

    def forward(self, src: Tensor, trg: Tensor, forced: Tensor) -> Tensor:
        src, trg = src.t(), trg.t()
        enc, hidden = self.encoder(self.src(src))
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))
        mask = (src != 0).permute(1, 0)
        outputs = torch.zeros(trg.shape[0], src.shape[1], self.vocab, dtype=enc.dtype)
        inp = trg[0, :]
        for t in range(1, trg.shape[0]):
            embedded = self.tgt(inp).unsqueeze(0)
            rep = hidden.unsqueeze(1).repeat(1, src.shape[0], 1)
            keys = enc.permute(1, 0, 2)
            energy = torch.tanh(self.attn(torch.cat((rep, keys), dim=2)))
            a = self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10).softmax(1)
            weighted = torch.bmm(a.unsqueeze(1), keys).permute(1, 0, 2)
            output, h = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
            hidden = h.squeeze(0)
            pred = self.out(
                torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), 1)
            )
            outputs[t] = pred
            inp = torch.where(forced[:, t] > 0, trg[t], pred.argmax(1))
        return F.cross_entropy(
            outputs[1:].view(-1, self.vocab), trg[1:].reshape(-1), ignore_index=0
        )


def teacher_forced(batch_size: int = 4) -> Example:
    return Bahdanau(), {
        "src": tokens(12, batch_size, 5),
        "trg": tokens(12, batch_size, 5, low=1),
        "forced": tokens(2, batch_size, 5),
    }


class Pointer(nn.Module):
    """A pointer network for tours: places are masked once they were pointed at."""

    def __init__(self, hid: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Linear(2, hid), nn.LSTM(hid, hid, batch_first=True)
        self.cell, self.start = nn.LSTMCell(hid, hid), nn.Parameter(floats(hid))
        self.w1, self.w2, self.v = nn.Linear(hid, hid), nn.Linear(hid, hid), nn.Linear(hid, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, n, _ = x.shape
        enc, (h, c) = self.encoder(self.embed(x))
        h, c, inp = h[0], c[0], self.start.expand(b, -1)
        mask = torch.zeros(b, n, dtype=torch.bool)
        logits = []
        for t in range(n):
            h, c = self.cell(inp, (h, c))
            u = self.v(torch.tanh(self.w1(enc) + self.w2(h).unsqueeze(1))).squeeze(-1)
            log_p = F.log_softmax(u.masked_fill(mask, -1e6), dim=1)
            logits.append(log_p)
            index = y[:, t]
            mask = mask.scatter(1, index.unsqueeze(1), True)
            inp = enc.gather(1, index.view(b, 1, 1).expand(-1, -1, enc.size(-1))).squeeze(1)
        return F.nll_loss(torch.stack(logits, 1).view(-1, n), y.reshape(-1))


def pointer_network(batch_size: int = 4) -> Example:
    x = floats(batch_size, 5, 2)
    return Pointer(), {"x": x, "y": x[..., 0].argsort(1)}


class MemN2N(nn.Module):
    """End-to-end memory: sentences as sums of words, hops with adjacent tables, time encoded."""

    def __init__(self, vocab: int = 12, hops: int = 2, memory: int = 5) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(vocab, WIDTH, padding_idx=0) for _ in range(hops + 1)
        )
        for table in self.tables:
            table.weight.data.normal_(0, 0.1)
        self.time = nn.Parameter(floats(memory, WIDTH))
        position = torch.ones(4, WIDTH) * torch.linspace(0.5, 1.5, WIDTH)
        self.encoding = position
        self.hops = hops

    def forward(self, story: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        u = torch.sum(self.tables[0](query) * self.encoding.to(self.time), 1)
        for hop in range(self.hops):
            m = self.tables[hop](story.view(story.size(0), -1))
            m = m.view(*story.size(), m.size(-1))
            m = torch.sum(m * self.encoding.to(m), 2) + self.time
            p = F.softmax(torch.sum(m * u.unsqueeze(1).expand_as(m), 2), 1)
            c = torch.sum(self.tables[hop + 1](story) * self.encoding.to(m), 2) + self.time
            u = u + torch.sum(c * p.unsqueeze(2).expand_as(c), 1)
        return F.cross_entropy(u @ self.tables[self.hops].weight.transpose(0, 1), answer)


def memory_network(batch_size: int = 4) -> Example:
    return MemN2N(), {
        "story": tokens(12, batch_size, 5, 4),
        "query": tokens(12, batch_size, 4),
        "answer": tokens(12, batch_size),
    }


class SASRec(nn.Module):
    """Sequential recommendation; padding is zeroed in place, the loss counts items that are there."""

    def __init__(self, items: int = 20) -> None:
        super().__init__()
        self.item, self.pos = nn.Embedding(items, WIDTH, padding_idx=0), nn.Embedding(8, WIDTH)
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.conv1, self.conv2 = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, log: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
        seqs = self.item(log) * self.item.embedding_dim**0.5
        seqs += self.pos(torch.arange(log.shape[1]).unsqueeze(0).expand_as(log))
        empty = log == 0
        seqs *= ~empty.unsqueeze(-1)
        tl = seqs.shape[1]
        causal = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        seqs = torch.transpose(seqs, 0, 1)
        q = self.norm(seqs)
        seqs = torch.transpose(q + self.attn(q, seqs, seqs, attn_mask=causal)[0], 0, 1)
        seqs = seqs + self.conv2(self.conv1(seqs.transpose(-1, -2)).relu()).transpose(-1, -2)
        seqs *= ~empty.unsqueeze(-1)
        pos_logits = (seqs * self.item(pos)).sum(dim=-1)
        neg_logits = (seqs * self.item(neg)).sum(dim=-1)
        indices = torch.where(pos != 0)
        bce = nn.BCEWithLogitsLoss()
        loss = bce(pos_logits[indices], torch.ones_like(pos_logits)[indices])
        return loss + bce(neg_logits[indices], torch.zeros_like(neg_logits)[indices])


def sasrec(batch_size: int = 4) -> Example:
    return SASRec(), {
        "log": tokens(20, batch_size, 8),
        "pos": tokens(20, batch_size, 8).flip(0),
        "neg": tokens(20, batch_size, 8, low=1),
    }


class Biaffine(nn.Module):
    """A dependency parser: lengths make the mask, the loss is taken where it is true."""

    def __init__(self, hid: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(20, hid), nn.LSTM(hid, hid, batch_first=True)
        self.dep, self.head = nn.Linear(hid, hid), nn.Linear(hid, hid)
        self.arc, self.rel = (
            nn.Parameter(floats(hid + 1, hid)),
            nn.Parameter(floats(3, hid + 1, hid)),
        )

    def forward(self, words: Tensor, lens: Tensor, heads: Tensor, rels: Tensor) -> Tensor:
        mask = torch.arange(words.size(1))[None, :] < lens[:, None]
        h, _ = self.lstm(self.embed(words))
        dep = torch.cat((self.dep(h).relu(), torch.ones_like(h[..., :1])), -1)
        head = self.head(h).relu()
        arcs = torch.einsum("bxi,ij,byj->bxy", dep, self.arc, head)
        arcs = arcs.masked_fill(~mask.unsqueeze(1), -1e9)
        labels = torch.einsum("bxi,oij,byj->bxyo", dep, self.rel, head)
        arc_loss = F.cross_entropy(arcs[mask], heads[mask])
        labels = labels[mask]
        labels = labels[torch.arange(len(labels)), heads[mask]]
        return arc_loss + F.cross_entropy(labels, rels[mask])


def biaffine(batch_size: int = 4) -> Example:
    return Biaffine(), {
        "words": tokens(20, batch_size, 6),
        "lens": tokens(7, batch_size, low=3),
        "heads": tokens(3, batch_size, 6),
        "rels": tokens(3, batch_size, 6),
    }


class Tacotron(nn.Module):
    """Location-sensitive attention over cumulative weights, frames of two per step, a stop token."""

    def __init__(self, hid: int = WIDTH, mels: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, hid)
        self.convs = nn.Sequential(
            nn.Conv1d(hid, hid, 5, padding=2), nn.BatchNorm1d(hid), nn.ReLU()
        )
        self.lstm = nn.LSTM(hid, hid // 2, batch_first=True, bidirectional=True)
        self.prenet, self.cell = nn.Linear(mels, hid), nn.LSTMCell(2 * hid, hid)
        self.loc = nn.Conv1d(2, 4, 5, padding=2, bias=False)
        self.q, self.k, self.l = nn.Linear(hid, 8), nn.Linear(hid, 8), nn.Linear(4, 8)
        self.v, self.frame, self.gate = (
            nn.Linear(8, 1),
            nn.Linear(2 * hid, mels),
            nn.Linear(2 * hid, 1),
        )
        self.hid, self.mels = hid, mels

    def init_states(self, memory: Tensor) -> None:
        b, t, _ = memory.shape
        self.h, self.c = memory.new_zeros(b, self.hid), memory.new_zeros(b, self.hid)
        self.weights, self.cum = memory.new_zeros(b, t), memory.new_zeros(b, t)
        self.context, self.memory, self.keys = memory.new_zeros(b, self.hid), memory, self.k(memory)

    def step(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        self.h, self.c = self.cell(torch.cat((frame, self.context), -1), (self.h, self.c))
        cat = torch.cat((self.weights.unsqueeze(1), self.cum.unsqueeze(1)), dim=1)
        loc = self.l(self.loc(cat).transpose(1, 2))
        e = self.v(torch.tanh(self.q(self.h.unsqueeze(1)) + loc + self.keys)).squeeze(-1)
        self.weights = F.softmax(e, dim=1)
        self.cum += self.weights
        self.context = torch.bmm(self.weights.unsqueeze(1), self.memory).squeeze(1)
        out = torch.cat((self.h, self.context), 1)
        return self.frame(out), self.gate(out)

    def forward(self, text: Tensor, mel: Tensor, gate: Tensor) -> Tensor:
        x = self.convs(self.embed(text).transpose(1, 2)).transpose(1, 2)
        memory, _ = self.lstm(x)
        go = mel.new_zeros(1, mel.size(0), self.mels)
        frames = self.prenet(torch.cat((go, mel.permute(1, 0, 2)))).relu()
        self.init_states(memory)
        outs, gates = [], []
        while len(outs) < frames.size(0) - 1:
            out, stop = self.step(frames[len(outs)])
            outs += [out]
            gates += [stop.squeeze(1)]
        outs, gates = torch.stack(outs, 1), torch.stack(gates).transpose(0, 1).contiguous()
        return nn.MSELoss()(outs, mel) + nn.BCEWithLogitsLoss()(
            gates.reshape(-1, 1), gate.view(-1, 1)
        )


def tacotron(batch_size: int = 4) -> Example:
    return Tacotron(), {
        "text": tokens(20, batch_size, 6),
        "mel": floats(batch_size, 5, 4),
        "gate": tokens(2, batch_size, 5).float(),
    }
