"""Eight more models for ``choice.py``, by which no constant was chosen: written as users would, before any of them had run."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = {
    "residual": 16, "lstm": 32, "gpt2": 8, "t5": 8, "unet": 8, "recommender": 512, "experts": 16, "vision": 16,
}  # fmt: skip
WORDS, CLASSES, ROWS = 2000, 100, 20_000


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        narrow = (nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.around = nn.Sequential(*narrow) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norms[0](self.first(x))))
        return F.relu(self.norms[1](y) + self.around(x))


class Residual(nn.Module):
    """A residual network for small images."""

    def __init__(self) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        widths = (32, 32, 64, 64, 128, 128, 256, 256)
        blocks = [ResidualBlock(a, b, b // a) for a, b in itertools.pairwise(widths)]
        self.layers = nn.Sequential(*stem, *blocks)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 256), nn.Linear(256, WORDS)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        y, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten())


def _twice(before: int, after: int) -> nn.Sequential:
    parts = [
        part
        for width in (before, after)
        for part in (nn.Conv2d(width, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())
    ]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Two levels down and up again, with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_twice(3, 32), _twice(32, 64)])
        self.middle = _twice(64, 128)
        self.up = nn.ModuleList([_twice(192, 64), _twice(96, 32)])
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.avg_pool2d(first, 2))
        made = self.middle(F.avg_pool2d(second, 2))
        made = self.up[0](torch.cat([F.interpolate(made, scale_factor=2), second], 1))
        made = self.up[1](torch.cat([F.interpolate(made, scale_factor=2), first], 1))
        return F.mse_loss(self.out(made), y)


class Recommender(nn.Module):
    """Eight tables and the products of what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 32) for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
        parts = ((68, 512), (512, 256))
        wide = [part for a, b in parts for part in (nn.Linear(a, b), nn.ReLU())]
        self.top = nn.Sequential(*wide, nn.Linear(256, 1))

    def forward(self, dense: Tensor, sparse: Tensor, y: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = [table(sparse[:, number]) for number, table in enumerate(self.tables)]
        rows = torch.stack([x, *found], 1)
        products = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(9, 9, -1)
        made = self.top(torch.cat([x, products[:, i, j]], 1))[:, 0]
        return F.binary_cross_entropy_with_logits(made, y)


class ExpertLayer(nn.Module):
    """Attention, then experts that all compute and two of which count."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.second(x)
        shares = self.gate(y).softmax(-1)
        values, places = shares.topk(2, -1)
        shares = torch.zeros_like(shares).scatter(-1, places, values)
        made = F.gelu(torch.einsum("bsd,edf->ebsf", y, self.up))
        made = torch.einsum("ebsf,efd->ebsd", made, self.down)
        return x + torch.einsum("ebsd,bse->bsd", made, shares)


class Experts(nn.Module):
    """A language model of two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 128), nn.Linear(128, 1000)
        self.layers = nn.Sequential(ExpertLayer(128, 4), ExpertLayer(128, 4))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.layers(self.embedding(tokens)))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Vision(nn.Module):
    """A vision transformer of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 192))
        self.places = nn.Parameter(torch.randn(1, 65, 192) * 0.02)
        layer = nn.TransformerEncoderLayer(
            192, 6, 768, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.patches(x).flatten(2).transpose(1, 2)
        made = torch.cat([self.first.expand(len(x), -1, -1), made], 1) + self.places
        return F.cross_entropy(self.head(self.layers(made)[:, 0]), y)


def residual() -> nn.Module:
    return Residual()


def residual_batch(batch_size: int = 16) -> dict[str, Tensor]:
    return _images(batch_size, 32)


def lstm() -> nn.Module:
    return Recurrent()


def lstm_batch(batch_size: int = 32) -> dict[str, Tensor]:
    return _tokens(batch_size, 32, WORDS)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=192, n_layer=6, n_head=6, vocab_size=4000, n_positions=128, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_batch(batch_size: int = 8) -> dict[str, Tensor]:
    tokens = torch.randint(0, 4000, (batch_size, 64))
    return {"input_ids": tokens, "labels": tokens}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, vocab_size=3000, dropout_rate=0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def t5_batch(batch_size: int = 8) -> dict[str, Tensor]:
    lengths = {"input_ids": 48, "labels": 32}
    return {name: torch.randint(1, 3000, (batch_size, one)) for name, one in lengths.items()}


def unet() -> nn.Module:
    return UNet()


def unet_batch(batch_size: int = 8) -> dict[str, Tensor]:
    return {name: torch.randn(batch_size, 3, 32, 32) for name in ("x", "y")}


def recommender() -> nn.Module:
    return Recommender()


def recommender_batch(batch_size: int = 512) -> dict[str, Tensor]:
    sparse = torch.randint(0, ROWS, (batch_size, 8))
    return {"dense": torch.randn(batch_size, 13), "sparse": sparse, "y": torch.rand(batch_size)}


def experts() -> nn.Module:
    return Experts()


def experts_batch(batch_size: int = 16) -> dict[str, Tensor]:
    return _tokens(batch_size, 64, 1000)


def vision() -> nn.Module:
    return Vision()


def vision_batch(batch_size: int = 16) -> dict[str, Tensor]:
    return _images(batch_size, 64)


def _tokens(batch_size: int, length: int, words: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, words, (batch_size, length)) for name in ("tokens", "targets")}


def _images(batch_size: int, side: int) -> dict[str, Tensor]:
    labels = torch.randint(0, CLASSES, (batch_size,))
    return {"x": torch.randn(batch_size, 3, side, side), "y": labels}
