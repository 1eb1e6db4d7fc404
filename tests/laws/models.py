"""The models that the laws are tried on, captured once, and how plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.operators.splitting.samples import Samples, find_samples
from shardwright.runtime.capture import Captured, capture
from tests import zoo
from tests.runtime.captures import shared
from tests.runtime.equivalence import Run, train_plain

OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MAX_NORM = 0.1
EXACT = 1e-9
# Hugging Face's norms and rotary embeddings compute in float32 whatever the model's dtype.
SINGLE = 1e-5


class Rotary(nn.Module):
    """A Llama layer in its parameters' own dtype: RMS norm, grouped queries, gated projection."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x_BLD: Tensor, turn_LD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        y = self.norm1(x_BLD)

        def turned(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * turn_LD.cos() + other * turn_LD.sin()

        def repeated(x: Tensor) -> Tensor:
            x = x.view(batch, length, self.groups, 1, self.size)
            x = x.expand(batch, length, self.groups, self.heads // self.groups, self.size)
            return x.reshape(batch, length, self.heads, self.size).transpose(1, 2)

        query = self.query(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            turned(query), turned(repeated(self.key(y))), repeated(self.value(y)), is_causal=True
        )
        x = x_BLD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ExactLlama(nn.Module):
    """Llama's architecture, all of it in float64 where its parameters are."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2, length: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Rotary(width, heads, heads // 2) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        angles = torch.arange(length)[:, None] / 10.0 ** torch.arange(width // heads // 2)
        self.register_buffer("turn", torch.cat([angles, angles], -1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.turn)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def exact_llama() -> zoo.Example:
    """Build it with a batch."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, zoo.BATCH, 8), generator=torch.Generator().manual_seed(1))
    return ExactLlama().double(), {"tokens": tokens[0], "targets": tokens[1]}


class Reporting(nn.Module):
    """A GPT that returns two losses and outputs of every sort: per sample and position, per sample,
    over all samples, counted, and of parameters alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        body = self.body
        x = body.embed(tokens) + body.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in body.layers:
            x = layer(x)
        logits = body.head(body.norm(x))
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        penalty = 0.01 * x.square().mean()
        return {
            "loss": entropy + penalty,
            "entropy": entropy,
            "penalty": penalty,
            "logits": logits.detach(),
            "last": x[:, -1],
            "energy": x.square().sum((1, 2)),
            "centre": x.mean((0, 1)),
            "guess": logits.argmax(-1),
            "accuracy": (logits.argmax(-1) == targets).to(x.dtype).mean(),
            "hits": (logits.argmax(-1) == targets).sum(),
            "weights": body.head.weight.square().sum(),
        }


def reporting() -> zoo.Example:
    """Build it with a batch."""
    module, batch = zoo.gpt(length=8)
    return Reporting(module), batch


@dataclass(frozen=True)
class Model:
    """A captured model with its sample dims, and how close its training must come."""

    factory: Callable[[], zoo.Example]
    module: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    samples: Samples
    tolerance: float


FACTORIES: dict[str, tuple[Callable[[], zoo.Example], float]] = {
    "mlp": (zoo.mlp, EXACT),
    "cnn": (zoo.cnn_groupnorm, EXACT),
    "cnn_batch_norm": (zoo.cnn, EXACT),
    "inception": (zoo.inception, EXACT),
    "windows": (zoo.windows, EXACT),
    "segmentation": (zoo.segmentation, EXACT),
    "gpt": (partial(zoo.gpt, tied=True, length=8), EXACT),
    "fused": (zoo.fused, EXACT),
    "bert": (partial(zoo.bert, length=8), EXACT),
    "lstm_translation": (zoo.lstm_translation, EXACT),
    "llama": (exact_llama, EXACT),
    "vit": (zoo.vit, EXACT),
    "experts": (zoo.switching, EXACT),
    "reporting": (reporting, EXACT),
    "t5": (partial(zoo.t5, length=8), SINGLE),
    "hf_llama": (partial(zoo.llama, length=8), SINGLE),
    "mixtral": (partial(zoo.mixtral, length=8), SINGLE),
}

# Outputs besides the loss which every step must give as one process does.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "reporting": (
        "entropy", "penalty", "logits", "last", "energy", "centre", "guess", "accuracy", "hits",
        "weights",
    ),
    "vit": ("logits",),
    "t5": ("logits", "encoder_last_hidden_state"),
}  # fmt: skip


@cache
def model(name: str) -> Model:
    """Capture a model; batch norm statistics are synchronised, since local ones are not one process's."""
    factory, tolerance = FACTORIES[name]
    module, batch = factory()
    make = partial(capture, module, batch, batch_norm="synchronised", outputs=OUTPUTS.get(name, ()))
    captured = shared(make, "laws", name)  # ranks read it
    samples = find_samples(captured.graph)
    return Model(factory, module, batch, captured, samples, tolerance)


@cache
def plain(name: str, clips: bool) -> Run:
    """Train a model with plain PyTorch."""
    max_norm = MAX_NORM if clips else None
    return train_plain(FACTORIES[name][0], OPTIMIZER, max_norm, OUTPUTS.get(name, ()))
