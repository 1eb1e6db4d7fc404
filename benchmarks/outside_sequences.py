"""More models as others write them, for ``outside.py``: text, sound, time and memory."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from outside_models import Example, WithLoss, floats, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 16, 32


def _text(batch_size: int, length: int = 8) -> dict[str, Tensor]:
    return {"x": tokens(WORDS, batch_size, length + 1)}


def _series(batch_size: int, length: int = 8) -> dict[str, Tensor]:
    return {"x": floats(batch_size, length, WIDTH), "y": floats(batch_size, length, WIDTH).flip(0)}


class Language(nn.Module):
    """Next words by any mixer of places, with tied weights."""

    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.embed, self.mixers, self.norm = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(mixers),
            nn.LayerNorm(WIDTH),
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[:, :-1])
        for mixer in self.mixers:
            h = h + mixer(self.norm(h))
        return F.cross_entropy(self.head(h).view(-1, WORDS), x[:, 1:].reshape(-1))


class Attention(nn.Module):
    """Four heads whose scores know of distances in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.kind, self.table = kind, nn.Embedding(8, 4)
        self.far, self.u = nn.Parameter(torch.randn(9, 4, 4)), nn.Parameter(torch.zeros(4, 1, 4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            layer(x).view(b, t, 4, c // 4).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        places = torch.arange(t, device=x.device)
        apart = places[None, :] - places[:, None]
        if self.kind == "rotary":
            angle = places[:, None] * 10000.0 ** (-torch.arange(0, c // 4, 2) / (c // 4))
            cos, sin = (
                f(torch.cat([angle, angle], -1)).to(x.dtype) for f in (torch.cos, torch.sin)
            )

            def turn(a: Tensor) -> Tensor:
                one, two = a.chunk(2, -1)
                return a * cos + torch.cat([-two, one], -1) * sin

            q, k = turn(q), turn(k)
        scores = q @ k.transpose(-1, -2)
        if self.kind == "alibi":
            scores = scores + apart[None, None] * self.slopes.view(1, 4, 1, 1).to(x.dtype)
        if self.kind == "relative":
            bucket = torch.where(
                -apart < 4, -apart, 4 + (torch.log(-apart.clamp(max=-1) / 4.0 + 1) * 2).long()
            ).clamp(0, 7)
            scores = scores + self.table(bucket).permute(2, 0, 1)[None]
        if self.kind == "shifted":  # Transformer-XL's trick: pad, view, drop
            more = torch.einsum("bhtd,shd->bhts", q + self.u, self.far[:t])
            more = F.pad(more, (1, 0)).view(b, 4, t + 1, t)[:, :, 1:].view_as(more)
            scores = scores + more
        keep = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = (
            scores.div(math.sqrt(c // 4))
            .masked_fill(~keep, torch.finfo(scores.dtype).min)
            .softmax(-1)
        )
        return self.o((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


def lm_alibi(batch_size: int = 4) -> Example:
    return Language(Attention("alibi"), Attention("alibi")), _text(batch_size)


def lm_rotary(batch_size: int = 4) -> Example:
    return Language(Attention("rotary"), Attention("rotary")), _text(batch_size)


def lm_relative(batch_size: int = 4) -> Example:
    return Language(Attention("relative")), _text(batch_size)


def lm_shifted(batch_size: int = 4) -> Example:
    return Language(Attention("shifted")), _text(batch_size)


class Performer(nn.Module):
    """Linear attention by random features kept as a buffer, causal by running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("features", torch.randn(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).tensor_split(3, dim=-1)
        q, k = (F.relu(one @ self.features.mT) + 1e-3 for one in (q, k))
        states = torch.cumsum(torch.einsum("btm,btd->btmd", k, v), dim=1)
        return (
            torch.einsum("btm,btmd->btd", q, states)
            / torch.einsum("btm,btm->bt", q, k.cumsum(1))[..., None]
        )


def performer(batch_size: int = 4) -> Example:
    return Language(Performer()), _text(batch_size)


class TimeMix(nn.Module):
    """RWKV-4: a stable running average over time, shifted inputs, channel mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay, self.first = (
            nn.Parameter(torch.rand(3, WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
        )
        self.k, self.v, self.r, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        k, v, r = (
            layer(x * m + before * (1 - m)) for layer, m in zip((self.k, self.v, self.r), self.mix)
        )
        decay = -torch.exp(self.decay)
        num, den, top, out = (
            torch.zeros_like(k[:, 0]),
            torch.zeros_like(k[:, 0]),
            torch.full_like(k[:, 0], -1e38),
            [],
        )
        for t in range(k.size(1)):
            kt, vt = k[:, t], v[:, t]
            high = torch.maximum(top, self.first + kt)
            a, b = torch.exp(top - high), torch.exp(self.first + kt - high)
            out.append(((a * num + b * vt) / (a * den + b)).unsqueeze(1))
            high = torch.maximum(top + decay, kt)
            a, b = torch.exp(top + decay - high), torch.exp(kt - high)
            num, den, top = a * num + b * vt, a * den + b, high
        return self.o(torch.sigmoid(r) * torch.cat(out, 1))


def rwkv_hand(batch_size: int = 4) -> Example:
    return Language(TimeMix()), _text(batch_size, 6)


class Retention(nn.Module):
    """Decays by head as a mask made of powers, complex rotations of queries and keys, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.GroupNorm(4, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        phase = torch.arange(t)[:, None] * 10.0 ** -torch.arange(c // 8)
        turn = torch.polar(torch.ones_like(phase), phase).to(
            torch.promote_types(x.dtype, torch.complex64)
        )
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(one.reshape(*one.shape[:-1], -1, 2)) * turn
            ).flatten(-2)
            for one in (q, k)
        )
        gamma = 1 - 2.0 ** (-5 - torch.arange(4, dtype=x.dtype))
        apart = torch.arange(t)[:, None] - torch.arange(t)[None]
        decay = torch.where(apart >= 0, gamma[:, None, None] ** apart.clamp(min=0), 0.0).to(x.dtype)
        y = (torch.einsum("bhid,bhjd->bhij", q, k) * decay) @ v
        y = self.norm(y.transpose(1, 2).reshape(b * t, c)).view(b, t, c)
        return self.out(F.silu(self.gate(x)) * y)


def retention(batch_size: int = 4) -> Example:
    return Language(Retention(), Retention()), _text(batch_size)


class LongConv(nn.Module):
    """S4D and Hyena: kernels of complex exponentials, applied by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = (
            nn.Parameter(torch.rand(WIDTH, 4)),
            nn.Parameter(torch.randn(WIDTH, 4)),
        )
        self.c, self.skip, self.glu = (
            nn.Parameter(torch.randn(WIDTH, 4, 2)),
            nn.Parameter(torch.randn(WIDTH)),
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, t = x.transpose(-1, -2), x.shape[1]
        power = torch.complex(-self.real.exp(), self.imag)[..., None] * torch.arange(t)
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), power.exp()).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * t) * torch.fft.rfft(kernel, n=2 * t), n=2 * t)[
            ..., :t
        ]
        return F.glu(self.glu(F.gelu(y + u * self.skip[:, None])), dim=1).transpose(-1, -2)


def s4d(batch_size: int = 4) -> Example:
    return WithLoss(nn.Sequential(LongConv(), LongConv())), _series(batch_size)


class Delta(nn.Module):
    """Fast weights corrected by their error (DeltaNet), a loop that writes a list of states in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.beta = (
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 1),
        )
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, beta = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x), self.beta(x).sigmoid()
        state, made = x.new_zeros(len(x), 8, 8), torch.empty_like(v)
        for t in range(x.shape[1]):
            error = v[:, t] - (state @ k[:, t, :, None])[..., 0]
            state = torch.baddbmm(state, (beta[:, t] * error)[:, :, None], k[:, t, None, :])
            made[:, t] = torch.bmm(state, q[:, t].unsqueeze(-1)).squeeze(-1)
        return self.out(made)


def delta_net(batch_size: int = 4) -> Example:
    return WithLoss(Delta()), _series(batch_size, 5)


class Experts(nn.Module):
    """A mixture in a loop over experts, each given the tokens that chose it."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate, self.dense = nn.Linear(WIDTH, 4), dense
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            if self.dense:
                out = out + expert(flat) * (weights * (chosen == i)).sum(-1, keepdim=True)
                continue
            rows, place = torch.where(chosen == i)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


def experts_loop(batch_size: int = 4) -> Example:
    return Language(Experts(False)), _text(batch_size)


def experts_dense(batch_size: int = 4) -> Example:
    return Language(Experts(True)), _text(batch_size)


class Capacity(nn.Module):
    """Switch's einsum form: one-hot places within capacity, a loss of balance beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WIDTH)
        self.wi, self.wo = (
            nn.Parameter(torch.randn(4, WIDTH, 32) / 4),
            nn.Parameter(torch.randn(4, 32, WIDTH) / 6),
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        top, index = p.max(-1)
        mask = F.one_hot(index, 4).to(x.dtype)
        place = (mask.cumsum(1) * mask - 1) * mask
        mask = mask * (place < 3)
        dispatch = mask[..., None] * F.one_hot(place.long().clamp(0, 2), 3).to(x.dtype)
        h = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        h = torch.einsum(
            "ebcf,efd->ebcd", torch.einsum("ebcd,edf->ebcf", h, self.wi).relu(), self.wo
        )
        out = x + torch.einsum("bsec,ebcd->bsd", dispatch * top[..., None, None], h)
        balance = 4 * (F.one_hot(index, 4).to(x.dtype).mean((0, 1)) * p.mean((0, 1))).sum()
        return F.mse_loss(self.head(out), y) + 0.01 * balance + 1e-3 * p.log().logsumexp(
            -1
        ).square().mean(), balance


def experts_capacity(batch_size: int = 4) -> Example:
    return Capacity(), _series(batch_size)


class Cells(nn.Module):
    """Recurrences by hand: a GRU that is given its state, cells in a loop, attention over the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encode = (
            nn.Embedding(WORDS, WIDTH, padding_idx=0),
            nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1),
        )
        self.cell, self.head = nn.LSTMCell(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WORDS)
        self.score = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, source: Tensor, target: Tensor, state: Tensor) -> Tensor:
        memory, last = self.encode(self.embed(source), state)  # time first
        h, c = last[-1], torch.zeros_like(last[-1])
        context, loss = memory.mean(0), []
        for t in range(target.size(0) - 1):
            h, c = self.cell(torch.cat([self.embed(target[t]), context], 1), (h, c))
            weights = self.score(memory, h.expand_as(memory)).squeeze(-1).softmax(0)
            context = torch.einsum("tb,tbd->bd", weights, memory)
            loss.append(
                F.cross_entropy(
                    self.head(torch.cat((h, context), 1)), target[t + 1], ignore_index=0
                )
            )
        return torch.stack(loss).mean()


def seq2seq_cells(batch_size: int = 4) -> Example:
    """Time comes first in two of the three tensors; state has layers first."""
    return Cells(), {
        "source": tokens(WORDS, 6, batch_size),
        "target": tokens(WORDS, 5, batch_size),
        "state": floats(2, batch_size, WIDTH),
    }


class LastState(nn.Module):
    """What an LSTM ends with in both directions, of sequences masked by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True, proj_size=4)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        h0, c0 = x.new_zeros(4, x.size(0), 4), torch.zeros(4, x.size(0), 8, dtype=x.dtype)
        out, (h, _) = self.net(x, (h0, c0))
        mask = torch.arange(x.size(1))[None] < lengths[:, None]
        pooled = (out * mask.unsqueeze(-1)).sum(1) / lengths.clamp(min=1)[:, None]
        last = out[torch.arange(len(x)), lengths - 1]
        return F.cross_entropy(self.head(pooled + last + torch.cat([h[-2], h[-1]], 1)), y)


def lstm_states(batch_size: int = 4) -> Example:
    return LastState(), {
        "x": floats(batch_size, 7, WIDTH),
        "lengths": tokens(8, batch_size, low=1),
        "y": tokens(4, batch_size),
    }


class Field(nn.Module):
    """A conditional random field: forward algorithm against the score of the true path."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.moves = nn.Linear(WIDTH, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores, rows = self.net(x), torch.arange(len(x))
        alpha, true = scores[:, 0], scores[rows, 0, tags[:, 0]]
        for t in range(1, x.shape[1]):
            new = torch.logsumexp(
                alpha.unsqueeze(2) + self.moves.unsqueeze(0) + scores[:, t].unsqueeze(1), 1
            )
            alpha = torch.where(mask[:, t].unsqueeze(1), new, alpha)
            true = (
                true
                + (scores[rows, t, tags[:, t]] + self.moves[tags[:, t - 1], tags[:, t]])
                * mask[:, t]
            )
        return (alpha.logsumexp(1) - true).mean()


def crf(batch_size: int = 4) -> Example:
    mask = torch.arange(6)[None] < tokens(7, batch_size, 1, low=2)
    return Field(), {
        "x": floats(batch_size, 6, WIDTH),
        "tags": tokens(5, batch_size, 6),
        "mask": mask,
    }


class Separation(nn.Module):
    """Conv-TasNet: learnt filters, a temporal network with weight norm, overlap-add, the better permutation."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.encode, self.decode = (
            nn.Conv1d(1, WIDTH, 8, stride=4, bias=False),
            nn.ConvTranspose1d(WIDTH, 1, 8, stride=4, bias=False),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(1, WIDTH),
                norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=2**i, dilation=2**i, groups=WIDTH)),
                nn.PReLU(),
                norm(nn.Conv1d(WIDTH, WIDTH, 1)),
            )
            for i in range(2)
        )
        self.mask = nn.Conv1d(WIDTH, 2 * WIDTH, 1)

    def forward(self, x: Tensor, sources: Tensor) -> Tensor:
        w = F.relu(self.encode(x[:, None]))
        h = w
        for block in self.blocks:
            h = h + block(h)
        masks = self.mask(h).view(len(x), 2, WIDTH, -1).sigmoid()
        made = self.decode((w[:, None] * masks).flatten(0, 1)).view(len(x), 2, -1)

        def ratio(a: Tensor, b: Tensor) -> Tensor:
            a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
            aim = (a * b).sum(-1, keepdim=True) * b / (b.pow(2).sum(-1, keepdim=True) + 1e-8)
            return 10 * torch.log10(aim.pow(2).sum(-1) / ((a - aim).pow(2).sum(-1) + 1e-8) + 1e-8)

        return -torch.maximum(
            ratio(made, sources).mean(1), ratio(made, sources.flip(1)).mean(1)
        ).mean()


def conv_tasnet(batch_size: int = 4) -> Example:
    return Separation(), {"x": floats(batch_size, 64), "sources": floats(batch_size, 2, 64)}


class Spectral(nn.Module):
    """A vocoder's loss of spectrograms at two resolutions, by ``torch.stft``; sums of several codebooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(8, WIDTH) for _ in range(3))
        self.up = nn.Sequential(
            nn.ConvTranspose1d(WIDTH, 8, 8, 4, 2),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(8, 1, 8, 4, 2),
            nn.Tanh(),
        )

    def forward(self, codes: Tensor, y: Tensor) -> Tensor:
        h = sum(table(codes[:, i]) for i, table in enumerate(self.embed))
        made, loss = self.up(h.transpose(1, 2)).squeeze(1), 0
        for size in (16, 32):
            window = torch.hann_window(size, dtype=made.dtype)
            a, b = (
                torch.stft(one, size, size // 4, window=window, return_complex=True)
                .abs()
                .clamp(min=1e-4)
                for one in (made, y)
            )
            loss = loss + (a.log() - b.log()).abs().mean() + torch.norm(b - a) / torch.norm(b)
        return loss


def vocoder(batch_size: int = 4) -> Example:
    return Spectral(), {"codes": tokens(8, batch_size, 3, 4), "y": floats(batch_size, 64)}


class Halting(nn.Module):
    """A universal transformer: one layer again and again, each place halting when it is sure; recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, 0.0, activation="gelu", batch_first=False
        )
        self.halt, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, pad: Tensor, y: Tensor) -> Tensor:
        h = x.transpose(0, 1)
        left, out = x.new_ones(h.shape[:2]), torch.zeros_like(h)
        for _ in range(3):
            h = checkpoint(self.layer, h, None, pad, use_reentrant=False)
            p = self.halt(h).sigmoid().squeeze(-1)
            out = out + (left * p).unsqueeze(-1) * h
            left = left * (1 - p)
        return F.cross_entropy(self.out(out + left[..., None] * h).mean(0), y) + 0.01 * left.mean()


def universal(batch_size: int = 4) -> Example:
    pad = torch.arange(6)[None] >= tokens(7, batch_size, 1, low=2)
    return Halting(), {"x": floats(batch_size, 6, WIDTH), "pad": pad, "y": tokens(4, batch_size)}


class Packed(nn.Module):
    """Documents behind one another in a row: a mask of blocks made at the top, places counted anew."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.attend, self.head = (
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, x: Tensor, documents: Tensor, y: Tensor) -> Tensor:
        t = x.shape[1]
        same = documents[:, :, None] == documents[:, None, :]
        causal = torch.triu(torch.ones(t, t, dtype=torch.bool), diagonal=1)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        steps = torch.arange(t).expand_as(x)
        places = steps - torch.cummax(torch.where(begins, steps, 0), 1).values
        h = self.embed(x) + self.place(places)
        mask = (~same | causal).repeat_interleave(2, dim=0)
        h = h + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        return F.cross_entropy(self.head(h).flatten(0, 1), torch.where(begins, -100, y).flatten())


def packed_documents(batch_size: int = 4) -> Example:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1]]).repeat(
        batch_size, 1
    )[:batch_size]
    return Packed(), {
        "x": tokens(WORDS, batch_size, 8),
        "documents": documents,
        "y": tokens(WORDS, batch_size, 8),
    }


class Adaptive(nn.Module):
    """Words by frequency: the adaptive softmax, whose clusters are filled by what the targets are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.AdaptiveLogSoftmaxWithLoss(WIDTH, WORDS, [8, 20]),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).loss


def adaptive_softmax(batch_size: int = 4) -> Example:
    return Adaptive(), _text(batch_size)


class Turing(nn.Module):
    """A controller that reads and writes a memory by content, shift and sharpening."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.heads, self.out = (
            nn.GRUCell(WIDTH + 6, WIDTH),
            nn.Linear(WIDTH, 6 + 1 + 3 + 1 + 6 + 6),
            nn.Linear(WIDTH + 6, WIDTH),
        )
        self.memory = nn.Parameter(torch.randn(5, 6) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        memory, read, h = (
            self.memory.expand(b, -1, -1),
            x.new_zeros((b, 6)),
            x.new_zeros((b, WIDTH)),
        )
        w, made = torch.zeros((b, 5), dtype=x.dtype).softmax(1), []
        for one in x.unbind(1):
            h = self.cell(torch.cat([one, read], -1), h)
            key, beta, shift, power, erase, add = self.heads(h).split_with_sizes(
                [6, 1, 3, 1, 6, 6], -1
            )
            c = (F.softplus(beta) * F.cosine_similarity(memory, key.unsqueeze(1), dim=-1)).softmax(
                -1
            )
            mixed, s = 0.5 * c + 0.5 * w, shift.softmax(-1)
            moved = sum(mixed.roll(i - 1, 1) * s[:, i : i + 1] for i in range(3))
            w = moved ** (1 + F.softplus(power))
            w = w / (w.sum(-1, keepdim=True) + 1e-8)
            memory = memory * (1 - w[..., None] * erase.sigmoid()[:, None]) + torch.einsum(
                "bn,bd->bnd", w, add
            )
            read = torch.bmm(w[:, None], memory)[:, 0]
            made.append(self.out(torch.cat([h, read], -1)))
        return torch.stack(made, dim=1)


def turing_machine(batch_size: int = 4) -> Example:
    return WithLoss(Turing()), _series(batch_size, 4)
