"""Small models written as others write them, for ``outside.py``: every function returns ``(module, batch)``.

None was written with this planner in mind; each stands for a family that people bring along.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Example = tuple[nn.Module, dict[str, Tensor]]
WIDTH = 16
ROW_WIDTH = 8


def floats(*shape: int) -> Tensor:
    """Return normal numbers, the same on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(high: int, *shape: int, low: int = 0) -> Tensor:
    """Return integers below ``high``, the same on every call."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))


def row_batch(batch_size: int, *lengths: int) -> dict[str, Tensor]:
    """Return rows and what is to be made of them: others'."""
    x = floats(batch_size, *lengths, ROW_WIDTH)
    return {"x": x, "y": x.flip(0) * 0.5}


def two_layers(into: int = ROW_WIDTH, out: int = ROW_WIDTH, hidden: int = 12) -> nn.Sequential:
    """Return a perceptron."""
    return nn.Sequential(nn.Linear(into, hidden), nn.GELU(), nn.Linear(hidden, out))


def word_batch(batch_size: int, length: int = 6) -> dict[str, Tensor]:
    """Draw words, and as their labels the words before."""
    ids = tokens(20, batch_size, length, low=1)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def next_words(batch_size: int, length: int = 8, vocabulary: int = 20) -> dict[str, Tensor]:
    """Draw words, and as their labels the words behind."""
    ids = tokens(vocabulary, batch_size, length, low=1)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of every token."""
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


class WithLoss(nn.Module):
    """A network of one input under mean squared error."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


class Classifier(nn.Module):
    """A network of one input under cross entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


# -- images -------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Down, up by transposed convolutions, with skips."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, kernel, stride=2, padding=(kernel - 2) // 2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.middle(F.relu(self.down2(F.max_pool2d(one, 2)))))
        return self.out(torch.cat([one, F.relu(self.up(two))], 1))


def unet(batch_size: int = 4) -> Example:
    return WithLoss(UNet(2)), {
        "x": floats(batch_size, 3, 16, 16),
        "y": floats(batch_size, 1, 16, 16),
    }


def unet_overlapping(batch_size: int = 4) -> Example:
    return WithLoss(UNet(4)), {
        "x": floats(batch_size, 3, 16, 16),
        "y": floats(batch_size, 1, 16, 16),
    }


class Separable(nn.Module):
    """A block of MobileNetV3: depthwise, squeeze and excitation, hard swish."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(width, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.depth, self.norm2 = (
            nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
            nn.BatchNorm2d(32),
        )
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project, self.norm3 = nn.Conv2d(32, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm1(self.expand(x)))
        y = F.hardswish(self.norm2(self.depth(y)))
        scale = F.adaptive_avg_pool2d(y, 1)
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(scale))))
        return x + self.norm3(self.project(y * scale))


def mobilenet_v3(batch_size: int = 4) -> Example:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)]
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), Separable(16), Separable(16), *head
    )
    return Classifier(net), {"x": floats(batch_size, 3, 16, 16), "y": tokens(8, batch_size)}


class Vae(nn.Module):
    """A variational autoencoder; the noise comes from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 2 * WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        made = self.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(made, x.sigmoid()) + divergence


def vae(batch_size: int = 4) -> Example:
    return Vae(), {"x": floats(batch_size, 32), "noise": floats(batch_size, WIDTH)}


class VectorQuantised(nn.Module):
    """A codebook with straight-through gradients, looked up by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.codes = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        passed = z + (code - z).detach()
        return F.mse_loss(self.decode(passed), x) + F.mse_loss(code, z.detach())


def vq_vae(batch_size: int = 4) -> Example:
    return VectorQuantised(), {"x": floats(batch_size, 32)}


# -- sequences and sound ------------------------------------------------------------------------------


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Conv1d(WIDTH, 32, 1)
        self.gates = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[:, :-1]).transpose(1, 2)
        skips = 0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(h, (2**i, 0))).chunk(2, 1)
            h = h + mix(a.tanh() * b.sigmoid())
            skips = skips + h
        return F.cross_entropy(self.head(F.relu(skips)), x[:, 1:])


def wavenet(batch_size: int = 4) -> Example:
    return WaveNet(), {"x": tokens(32, batch_size, 17)}


class SpeechCtc(nn.Module):
    """A bidirectional recurrence under CTC loss."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.recurrence = nn.LSTM(WIDTH, 8, batch_first=True, bidirectional=True)
        self.head, self.packs = nn.Linear(16, 8), packs

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor, y_lengths: Tensor) -> Tensor:
        if self.packs:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(self.recurrence(packed)[0], batch_first=True)
        else:
            h = self.recurrence(x)[0]
        scores = self.head(h).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, lengths, y_lengths)


def _speech(batch_size: int) -> dict[str, Tensor]:
    return {
        "x": floats(batch_size, 12, WIDTH),
        "lengths": torch.tensor([12, 10, 11, 9]).repeat(batch_size)[:batch_size],
        "y": tokens(8, batch_size, 4, low=1),
        "y_lengths": torch.tensor([4, 3, 2, 4]).repeat(batch_size)[:batch_size],
    }


def speech_ctc(batch_size: int = 4) -> Example:
    return SpeechCtc(packs=False), _speech(batch_size)


def speech_packed(batch_size: int = 4) -> Example:
    return SpeechCtc(packs=True), _speech(batch_size)


class PackedTagger(nn.Module):
    """A packed recurrence kept inside a module of its own."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(
                self.recurrence(packed)[0], batch_first=True, total_length=x.shape[1]
            )[0]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(32, WIDTH),
            self.Inner(),
            nn.Linear(WIDTH, 8),
        )

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.inner(self.embed(x), lengths)).flatten(0, 1), y.flatten()
        )


def packed_tagger(batch_size: int = 4) -> Example:
    lengths = torch.tensor([12, 10, 11, 9]).repeat(batch_size)[:batch_size]
    x = tokens(32, batch_size, 12)
    return PackedTagger(), {"x": x, "lengths": lengths, "y": x % 8}


class Conformer(nn.Module):
    """One block: half feed-forward, attention, gated depthwise convolution, half feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ff1 = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
        )
        self.ff2 = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
        )
        self.norm, self.attend = (
            nn.LayerNorm(WIDTH),
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        )
        self.gate, self.depth = (
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        )
        self.out = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        x = x + F.silu(self.depth(F.glu(self.gate(x.transpose(1, 2)), 1))).transpose(1, 2)
        return self.out(x + 0.5 * self.ff2(x))


def conformer(batch_size: int = 4) -> Example:
    net = nn.Sequential(Conformer(), Conformer(), nn.Linear(WIDTH, 8))
    return WithLoss(net), {"x": floats(batch_size, 12, WIDTH), "y": floats(batch_size, 12, 8)}


class Scan(nn.Module):
    """A selective state space written as a loop over time, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.states = nn.Linear(WIDTH, 2 * WIDTH), 4
        self.select = nn.Linear(WIDTH, 2 * self.states + 1)
        self.log_a = nn.Parameter(torch.zeros(WIDTH, self.states))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inner(x).chunk(2, -1)
        b, c, step = self.select(u).split([self.states, self.states, 1], -1)
        step, a = F.softplus(step), -self.log_a.exp()
        h, made = u.new_zeros(u.shape[0], WIDTH, self.states), []
        for t in range(u.shape[1]):
            h = (step[:, t, :, None] * a).exp() * h + step[:, t, :, None] * b[:, t, None] * u[
                :, t, :, None
            ]
            made.append((h * c[:, t, None]).sum(-1))
        return self.out(torch.stack(made, 1) * F.silu(gate))


def scan(batch_size: int = 4) -> Example:
    return WithLoss(nn.Sequential(Scan(), Scan())), {
        "x": floats(batch_size, 6, WIDTH),
        "y": floats(batch_size, 6, WIDTH),
    }


class XLstm(nn.Module):
    """The matrix memory of xLSTM in its parallel form."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 2),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        i, f = self.gates(x).unbind(-1)
        decay = F.logsigmoid(f).cumsum(-1)
        log_d = decay[:, :, None] - decay[:, None] + i[:, None]
        log_d = log_d.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        d = (log_d - log_d.amax(-1, keepdim=True)).exp()
        scores = q @ k.transpose(1, 2) / WIDTH**0.5 * d
        return x + self.out(scores / scores.sum(-1, keepdim=True).abs().clamp(min=1) @ v)


def xlstm(batch_size: int = 4) -> Example:
    return WithLoss(nn.Sequential(XLstm(), XLstm())), {
        "x": floats(batch_size, 8, WIDTH),
        "y": floats(batch_size, 8, WIDTH),
    }


class ProbSparse(nn.Module):
    """Informer: only the queries with the sharpest scores attend, the others take the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        top = (scores.amax(-1) - scores.mean(-1)).topk(4, -1).indices
        chosen = scores.gather(1, top[..., None].expand(-1, -1, x.shape[1])).softmax(-1) @ v
        mean = v.mean(1, keepdim=True).expand(-1, x.shape[1], -1)
        return mean.scatter(1, top[..., None].expand(-1, -1, WIDTH), chosen)


def informer(batch_size: int = 4) -> Example:
    return WithLoss(ProbSparse()), {
        "x": floats(batch_size, 8, WIDTH),
        "y": floats(batch_size, 8, WIDTH),
    }


# -- recommenders -------------------------------------------------------------------------------------


class Dlrm(nn.Module):
    """Bags of categories beside dense features, and their pairwise products."""

    def __init__(self, tables: int, mode: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(64, WIDTH, mode=mode) for _ in range(tables))
        self.bottom, self.top = (
            nn.Linear(8, WIDTH),
            nn.Linear(WIDTH + tables * (tables + 1) // 2, 1),
        )

    def interact(self, dense: Tensor, bags: list[Tensor], click: Tensor) -> Tensor:
        h = F.relu(self.bottom(dense))
        every = torch.stack([h, *bags], 1)
        rows, columns = torch.tril_indices(every.shape[1], every.shape[1], -1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, rows, columns]
        return F.binary_cross_entropy_with_logits(
            self.top(torch.cat([h, pairs], 1)).squeeze(1), click
        )


class RowDlrm(Dlrm):
    def forward(self, dense: Tensor, indices: Tensor, click: Tensor) -> Tensor:
        bags = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        return self.interact(dense, bags, click)


class BagDlrm(Dlrm):
    """Bags of any length: indices in one row per table, and where each bag begins."""

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor, click: Tensor) -> Tensor:
        bags = [table(indices[i], offsets[i]) for i, table in enumerate(self.tables)]
        return self.interact(dense, bags, click)


def dlrm(batch_size: int = 4) -> Example:
    batch = {"dense": floats(batch_size, 8), "indices": tokens(64, batch_size, 3, 4)}
    return RowDlrm(3, "sum"), batch | {"click": tokens(2, batch_size).float()}


def dlrm_offsets(batch_size: int = 4) -> Example:
    offsets = torch.stack([torch.arange(batch_size) * 3, torch.arange(batch_size) * 2 + 1])
    offsets[:, 0] = 0
    batch = {
        "dense": floats(batch_size, 8),
        "indices": tokens(64, 2, 4 * batch_size),
        "offsets": offsets,
    }
    return BagDlrm(2, "mean"), batch | {"click": tokens(2, batch_size).float()}


class DeepFm(nn.Module):
    """A factorisation machine beside a deep network on shared embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(100, 8), nn.Embedding(100, 1)
        self.deep = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("offsets", torch.arange(5) * 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = x + self.offsets
        e = self.embed(places)
        crossed = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1)
        scores = self.linear(places).sum((1, 2)) + crossed + self.deep(e.flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, y)


def deepfm(batch_size: int = 4) -> Example:
    return DeepFm(), {"x": tokens(20, batch_size, 5), "y": tokens(2, batch_size).float()}


# -- graphs and sets ----------------------------------------------------------------------------------


class Gcn(nn.Module):
    """Message passing over edges by ``index_add``, with degrees."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)])
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.attends = attends

    def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(
            0, target, torch.ones(len(target), dtype=x.dtype)
        )
        norm = degree.clamp(min=1).rsqrt()
        for layer in self.layers:
            weight = norm[source] * norm[target]
            if self.attends:
                score = F.leaky_relu(self.left(x)[source] + self.right(x)[target]).squeeze(1).exp()
                total = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, target, score)
                weight = score / (total[target] + 1e-9)
            h = layer(x)
            x = torch.zeros_like(h).index_add(0, target, h[source] * weight[:, None]).relu()
        return F.cross_entropy(x, y)


def gcn(batch_size: int = 4) -> Example:
    nodes = 4 * batch_size
    return Gcn(False), {
        "x": floats(nodes, WIDTH),
        "edge_index": tokens(nodes, 2, 10 * batch_size),
        "y": tokens(8, nodes),
    }


def gat(batch_size: int = 4) -> Example:
    nodes = 4 * batch_size
    return Gcn(True), {
        "x": floats(nodes, WIDTH),
        "edge_index": tokens(nodes, 2, 10 * batch_size),
        "y": tokens(8, nodes),
    }


class PooledGraphs(nn.Module):
    """Many small graphs in one batch: node features pooled by ``batch``, its number read from data."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        source, target = edge_index
        h = self.node(x).relu()
        h = h + torch.zeros_like(h).index_add_(0, target, h[source])
        graphs = int(batch.max()) + 1
        pooled = h.new_zeros(graphs, WIDTH).index_add_(0, batch, h)
        return F.cross_entropy(self.head(pooled), y)


def pooled_graphs() -> Example:
    """Three graphs of 5, 4 and 6 nodes; a batch of another size has other edges."""
    batch = torch.tensor([0] * 5 + [1] * 4 + [2] * 6)
    example = {"x": floats(15, WIDTH), "edge_index": tokens(15, 2, 40), "batch": batch}
    return PooledGraphs(), example | {"y": tokens(4, 3)}


def pointnet(batch_size: int = 4) -> Example:
    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.align = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 9))
            self.points, self.head = nn.Conv1d(3, 32, 1), nn.Linear(32, 8)
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            turn = self.align(x.mean(1)).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
            h = F.relu(self.norm(self.points(torch.bmm(x, turn).transpose(1, 2))))
            penalty = ((turn @ turn.transpose(1, 2) - torch.eye(3, dtype=x.dtype)) ** 2).mean()
            return F.cross_entropy(self.head(h.max(2).values), y) + 0.001 * penalty

    return PointNet(), {"x": floats(batch_size, 16, 3), "y": tokens(8, batch_size)}


def deep_sets(batch_size: int = 4) -> Example:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            h = self.inner(x).relu() * mask[..., None]
            return F.mse_loss(self.outer(h.sum(1) / mask.sum(1, keepdim=True)).squeeze(1), y)

    mask = (torch.arange(6) < tokens(7, batch_size, 1, low=1)).float()
    return Masked(), {"x": floats(batch_size, 6, 8), "mask": mask, "y": floats(batch_size)}


def matching_detector(batch_size: int = 4) -> Example:
    """DETR after its paper: queries over image features, each matched to one box by least cost."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Conv2d(3, WIDTH, 4, stride=4)
            self.queries = nn.Parameter(torch.randn(6, WIDTH))
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.classes, self.boxes = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
            features = self.trunk(x).flatten(2).transpose(1, 2)
            queries = self.queries.expand(len(x), -1, -1)
            h = queries + self.attend(queries, features, features, need_weights=False)[0]
            scores, found = self.classes(h), self.boxes(h).sigmoid()
            targets = torch.full(scores.shape[:2], 4)
            total = scores.new_zeros(())
            for i in range(len(x)):
                cost = torch.cdist(found[i], boxes[i], p=1) - scores[i].softmax(-1)[:, labels[i]]
                taken: list[int] = []
                for j in range(boxes.shape[1]):
                    column = cost[:, j].detach().clone()
                    column[taken] = math.inf
                    taken.append(int(column.argmin()))
                targets[i, taken] = labels[i]
                total = total + F.l1_loss(found[i, taken], boxes[i])
            return F.cross_entropy(scores.transpose(1, 2), targets) + total / len(x)

    batch = {"x": floats(batch_size, 3, 16, 16), "labels": tokens(4, batch_size, 2)}
    return Detector(), batch | {"boxes": floats(batch_size, 2, 4).sigmoid()}


def perceiver(batch_size: int = 4) -> Example:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(4, WIDTH))
            self.read = nn.MultiheadAttention(WIDTH, 2, kdim=8, vdim=8, batch_first=True)
            self.think = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            latents = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
            h = latents + self.read(latents, x, x)[0]
            return F.cross_entropy(self.head(self.think(h).mean(1)), y)

    return Perceiver(), {"x": floats(batch_size, 12, 8), "y": tokens(8, batch_size)}


def transformer_seq2seq(batch_size: int = 4) -> Example:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
            self.net = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(
                y.shape[1] - 1, dtype=self.head.weight.dtype
            )
            h = self.net(
                self.embed(x), self.embed(y[:, :-1]), tgt_mask=mask, src_key_padding_mask=x == 0
            )
            return F.cross_entropy(self.head(h).flatten(0, 1), y[:, 1:].flatten())

    return Translator(), {"x": tokens(32, batch_size, 8), "y": tokens(32, batch_size, 9)}


def siamese(batch_size: int = 4) -> Example:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH)
            )

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            one, two = F.normalize(self.net(x), dim=-1), F.normalize(self.net(z), dim=-1)
            scores = torch.cat([one, two]) @ torch.cat([one, two]).T / 0.5
            scores = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -1e9)
            n = len(one)
            return F.cross_entropy(scores, torch.cat([torch.arange(n) + n, torch.arange(n)]))

    return Contrast(), {"x": floats(batch_size, 32), "z": floats(batch_size, 32).flip(0)}


# -- packages that may be installed -------------------------------------------------------------------


def geometric(batch_size: int = 4) -> Example:
    """A graph network of PyTorch Geometric, of as many nodes as its one graph has."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (
                GCNConv(8, WIDTH),
                GATConv(WIDTH, 4, heads=4),
                SAGEConv(WIDTH, WIDTH),
            )
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, y: Tensor) -> Tensor:
            h = self.one(x, edge_index).relu()
            h = self.three(self.two(h, edge_index).relu(), edge_index).relu()
            return F.cross_entropy(self.head(global_mean_pool(h, batch)), y)

    nodes = 4 * batch_size
    example = {"x": floats(nodes, 8), "edge_index": tokens(nodes, 2, 40)}
    return Net(), example | {"batch": torch.arange(nodes) // 4, "y": tokens(4, batch_size)}


HAND = [
    name for name, value in list(globals().items())
    if callable(value) and getattr(value, "__annotations__", {}).get("return") == "Example"
]  # fmt: skip
