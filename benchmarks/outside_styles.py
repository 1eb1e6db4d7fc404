"""More models as others write them, for ``outside.py``: ways of writing PyTorch rather than architectures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from outside_models import Classifier, Example, WithLoss, floats, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 16


def _rows(batch_size: int, outputs: int = 4) -> dict[str, Tensor]:
    return {"x": floats(batch_size, 8), "y": floats(batch_size, outputs).flip(0)}


@dataclass
class Result:
    loss: Tensor
    scores: Tensor | None = None


class Named(NamedTuple):
    loss: Tensor
    parts: dict[str, Tensor]


def _styled(forward: Any, **layers: nn.Module | nn.Parameter) -> nn.Module:
    class Styled(nn.Module):
        pass

    Styled.forward = forward  # type: ignore[method-assign]
    module = Styled()
    for name, layer in layers.items():
        setattr(module, name, layer)
    return module


def dataclass_output(batch_size: int = 4) -> Example:
    def forward(self: Any, x: Tensor, *, y: Tensor, scale: float = 2.0) -> Result:
        scores = self.net(x) * scale
        return Result(F.mse_loss(scores, y), scores)

    return _styled(forward, net=nn.Linear(8, 4)), _rows(batch_size)


def named_tuple_output(batch_size: int = 4) -> Example:
    def forward(self: Any, x: Tensor, y: Tensor) -> Named:
        one, two = F.mse_loss(self.net(x), y), self.net.weight.pow(2).sum()
        return Named(one + 0.01 * two, {"fit": one, "size": two})

    return _styled(forward, net=nn.Linear(8, 4)), _rows(batch_size)


def lists_of_parameters(batch_size: int = 4) -> Example:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        for w in self.ws:
            x = torch.tanh(x @ w)
        return F.mse_loss(x @ self.named["out"] + self.named["bias"], y)

    ws = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
    named = nn.ParameterDict(
        {"out": nn.Parameter(torch.randn(8, 4)), "bias": nn.Parameter(torch.zeros(4))}
    )
    return _styled(forward, ws=ws, named=named), _rows(batch_size)


def scalars_beside(batch_size: int = 4) -> Example:
    """Numbers without a batch dim beside the batch: a temperature, a mask of classes."""

    def forward(self: Any, x: Tensor, allowed: Tensor, temperature: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x).masked_fill(~allowed, -1e4) / temperature
        return F.nll_loss(scores.log_softmax(-1), y, weight=self.weight)

    module = _styled(forward, net=nn.Linear(8, 6))
    module.register_buffer("weight", torch.linspace(0.5, 1.5, 6))
    return module, {
        "x": floats(batch_size, 8),
        "allowed": torch.ones(6, dtype=torch.bool),
        "temperature": torch.tensor(1.5),
        "y": tokens(6, batch_size),
    }


def complex_inputs(batch_size: int = 4) -> Example:
    """A complex-valued network: complex weights, a split activation, magnitudes at the end."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.einsum("bi,oi->bo", x, self.one.to(x.dtype)) + torch.complex(
            self.bias, self.bias.flip(0)
        ).to(x.dtype)
        h = torch.view_as_complex(F.relu(torch.view_as_real(h)))
        return F.mse_loss(torch.abs(h @ self.two.to(x.dtype)), y)

    one, two = (nn.Parameter(torch.randn(*shape, dtype=torch.cfloat)) for shape in ((6, 8), (6, 4)))
    x = torch.complex(floats(batch_size, 8), floats(batch_size, 8).flip(0))
    return _styled(forward, one=one, two=two, bias=nn.Parameter(torch.randn(6))), {
        "x": x,
        "y": floats(batch_size, 4).abs(),
    }


def in_place(batch_size: int = 4) -> Example:
    """Slices, masks and rows written in place; a view changed through its base."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.net(x)
        h[:, ::2] *= 2
        h[h > 1] = 1
        view = h.view(-1, 2, 2)
        view[:, 0].add_(self.bias)
        out = h.new_empty(h.shape)
        out.copy_(h).clamp_(min=-1)
        out[:, 0] = out[:, 1].detach()
        with torch.no_grad():
            torch.add(out, 1, out=torch.empty_like(out))
        return F.mse_loss(out.relu_(), y)

    return _styled(forward, net=nn.Linear(8, 4), bias=nn.Parameter(torch.randn(2))), _rows(
        batch_size
    )


def hooks_everywhere(batch_size: int = 4) -> Example:
    """Forward hooks that change what passes, and one that collects features for a second loss."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
            self.seen: dict[str, Tensor] = {}
            self.net[1].register_forward_hook(self.keep)
            self.net[2].register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))

        def keep(self, _: nn.Module, __: Any, result: Tensor) -> None:
            self.seen["features"] = result

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.net(x), y) + 0.1 * self.seen["features"].mean()

    return Hooked(), _rows(batch_size)


def gradient_hooks(batch_size: int = 4) -> Example:
    """A hook on a gradient in forward, that halves it."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        return F.mse_loss(self.two(h.tanh()), y)

    return _styled(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4)), _rows(batch_size)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-7, 7) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        inside = (x / scale).abs() <= 7
        return gradient * inside, (
            gradient * ((x / scale).round() - x / scale) * inside
        ).sum().reshape(scale.shape)


def quantised(batch_size: int = 4) -> Example:
    """Weights and activations rounded with learnt steps (LSQ), by a custom gradient."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.linear(Round.apply(x, self.s1), Round.apply(self.one.weight, self.s2), self.one.bias)
        h = h + (h.sign() - h).detach() * 0.1  # straight through
        return F.mse_loss(self.two(F.relu6(h)), y)

    steps = {f"s{i}": nn.Parameter(torch.tensor(0.2)) for i in (1, 2)}
    return _styled(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4), **steps), _rows(batch_size)


def parametrized(batch_size: int = 4) -> Example:
    """Weights that are functions of others: symmetric, orthogonal, weight norm."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    one, two, three = (
        nn.Linear(8, 8),
        parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
        parametrizations.weight_norm(nn.Linear(8, 4)),
    )
    parametrize.register_parametrization(one, "weight", Symmetric())
    return WithLoss(nn.Sequential(one, nn.Tanh(), two, nn.ELU(), three)), _rows(batch_size)


@torch.jit.script
def scripted_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def scripted_function(batch_size: int = 4) -> Example:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(scripted_gelu(self.one(x))), y)

    return _styled(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4)), _rows(batch_size)


def autocast_inside(batch_size: int = 4) -> Example:
    """A part in bfloat16, with the loss outside of it."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.two(F.silu(self.one(x)))
        return F.mse_loss(h.float(), y.float())

    return _styled(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4)), _rows(batch_size)


def running_statistics(batch_size: int = 4) -> Example:
    """Normalisation by hand with running buffers, momentum None, no statistics, and a count of steps."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.plain, self.own, self.out = (
                nn.BatchNorm1d(8, momentum=None),
                nn.BatchNorm1d(8, track_running_stats=False),
                nn.Linear(8, 4),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 0.1)
                    self.steps += 1
            return F.mse_loss(self.out(self.own(self.plain(x - self.mean))), y)

    return Running(), _rows(batch_size)


def many_losses(batch_size: int = 4) -> Example:
    """Nine of torch's losses, weighed by learnt uncertainties."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weights = nn.Linear(8, 6), nn.Parameter(torch.zeros(9))
            self.cosine, self.multi = nn.CosineEmbeddingLoss(margin=0.2), nn.MultiMarginLoss()

        def forward(self, x: Tensor, y: Tensor, sign: Tensor) -> Tensor:
            z = self.net(x)
            wanted = F.one_hot(y, 6).to(z.dtype)
            every = torch.stack([
                self.cosine(z, wanted, sign), self.multi(z, y), F.poisson_nll_loss(z, wanted), F.soft_margin_loss(z, 2 * wanted - 1),
                F.gaussian_nll_loss(z, wanted, F.softplus(z) + 0.1), F.margin_ranking_loss(z[:, 0], z[:, 1], sign, margin=0.1),
                F.triplet_margin_loss(z, wanted, z.flip(1)), F.multilabel_soft_margin_loss(z, wanted), F.hinge_embedding_loss(z[:, 2].abs(), sign),
            ])  # fmt: skip
            return (torch.exp(-self.weights) * every + self.weights).sum()

    return Losses(), {
        "x": floats(batch_size, 8),
        "y": tokens(6, batch_size),
        "sign": (tokens(2, batch_size) * 2 - 1).float(),
    }


def layers_zoo(batch_size: int = 4) -> Example:
    """Layers and activations that few networks have."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x)
        for name in (
            "celu",
            "softsign",
            "mish",
            "hardtanh",
            "logsigmoid",
            "tanhshrink",
            "softshrink",
            "relu6",
            "selu",
        ):
            h = h + 0.1 * getattr(F, name)(h)
        h = torch.cat(
            [
                F.cosine_similarity(h, self.two(x), dim=1)[:, None],
                F.pairwise_distance(h, self.two(x))[:, None],
                F.normalize(h, p=1),
            ],
            1,
        )
        h = self.bilinear(h, F.rms_norm(x, (8,)))
        h = (
            torch.special.erf(h)
            + torch.sinc(h)
            + torch.erfinv(h.tanh() * 0.5)
            + torch.nan_to_num(torch.log1p(h.abs()))
            + torch.hypot(h, h + 1)
        )
        return F.mse_loss(h.unflatten(1, (2, 2)).movedim(1, 2).rot90(1, (1, 2)).flatten(1), y)

    return _styled(
        forward, one=nn.Linear(8, 8), two=nn.Linear(8, 8), bilinear=nn.Bilinear(10, 8, 4)
    ), _rows(batch_size)


def einops_like(batch_size: int = 4) -> Example:
    """Axes split, swapped and merged in all ways, as einops writes them."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        b, c, h, w = x.shape
        a = (
            x.reshape(b, c, h // 2, 2, w // 2, 2)
            .permute(0, 2, 4, 3, 5, 1)
            .reshape(b, h // 2 * (w // 2), 4 * c)
        )
        a = self.one(a)
        a = (
            a.reshape(b, h // 2, w // 2, 4, -1)
            .permute(0, 4, 1, 3, 2)
            .reshape(b * a.shape[-1] // 4, h // 2, -1)
        )
        a = torch.stack([a, a.flip(-1)], 0).mean(0).reshape(b, -1, h, w).swapaxes(1, 2)
        a = torch.cat([part.contiguous() for part in a.unbind(1)], dim=-1).flatten(1)
        return F.mse_loss(
            self.two(a).unsqueeze(0).repeat(3, 1, 1).transpose(0, 1).reshape(b, -1), y
        )

    return _styled(forward, one=nn.Linear(12, 16), two=nn.Linear(4 * 64, 2)), {
        "x": floats(batch_size, 3, 8, 8),
        "y": floats(batch_size, 6),
    }


def masks_at_the_top(batch_size: int = 4) -> Example:
    """Padding and causal masks made of the batch before anything else, for torch's own layers, batch second."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH, padding_idx=0)
            self.net = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0), 2, enable_nested_tensor=False
            )
            self.cross, self.head = (
                nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True),
                nn.Linear(WIDTH, 32),
            )

        def forward(self, x: Tensor) -> Tensor:
            pad = x[:, :-1] == 0
            causal = torch.full((x.shape[1] - 1,) * 2, float("-inf")).triu(1)
            h = self.embed(x[:, :-1]).transpose(0, 1) * WIDTH**0.5
            h = self.net(
                h,
                mask=causal,
                src_key_padding_mask=torch.zeros_like(pad, dtype=h.dtype).masked_fill(
                    pad, float("-inf")
                ),
            )
            h, weights = self.cross(
                h, h, h, key_padding_mask=pad, attn_mask=causal.bool(), average_attn_weights=False
            )
            scores = self.head(h).permute(1, 2, 0)
            return F.cross_entropy(scores, x[:, 1:], ignore_index=0) + 0.01 * weights.var()

    return Masks(), {
        "x": tokens(32, batch_size, 7, low=1)
        * (torch.arange(7)[None] < tokens(8, batch_size, 1, low=4))
    }


def decoder_stack(batch_size: int = 4) -> Example:
    """torch's decoder layers with memory masks and a norm at the end, layers shared by weight."""

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(
                WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True, activation=F.silu
            )
            self.net = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(WIDTH))
            self.net.layers[1] = self.net.layers[0]
            self.read, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, memory: Tensor, missing: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            h = self.net(
                x,
                self.read(memory),
                tgt_mask=mask,
                tgt_is_causal=True,
                memory_key_padding_mask=missing,
            )
            return F.mse_loss(self.out(h), y)

    missing = torch.arange(5)[None] >= tokens(6, batch_size, 1, low=1)
    return Decode(), {
        "x": floats(batch_size, 6, WIDTH),
        "memory": floats(batch_size, 5, 8),
        "missing": missing,
        "y": floats(batch_size, 6, 4),
    }


def frozen_parts(batch_size: int = 4) -> Example:
    """LoRA beside frozen weights, a frozen norm in evaluation mode, a stop of gradients, no-grad statistics."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8).eval()
            self.base.requires_grad_(False)
            self.down, self.up, self.out = (
                nn.Linear(8, 2, bias=False),
                nn.Linear(2, 8, bias=False),
                nn.Linear(8, 4),
            )

        def train(self, mode: bool = True) -> Adapted:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.norm(self.base(x) + self.up(self.down(x)) * 2.0)
            with torch.no_grad():
                high = h.abs().amax(-1, keepdim=True)
            return F.mse_loss(self.out(h / (high + 1e-6) + h.detach()), y)

    return Adapted(), _rows(batch_size)


def bags_weighed(batch_size: int = 4) -> Example:
    """Bags with a weight per element, a table with a largest norm left out, hashed places."""

    def forward(self: Any, places: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        hashed = (places * 2654435761 + 7) % 40
        bag = F.embedding_bag(hashed, self.table.weight, mode="sum", per_sample_weights=weights)
        return F.binary_cross_entropy(torch.sigmoid(self.out(bag)).squeeze(1), y)

    return _styled(forward, table=nn.Embedding(40, 8), out=nn.Linear(8, 1)), {
        "places": tokens(1000, batch_size, 5),
        "weights": floats(batch_size, 5).sigmoid(),
        "y": tokens(2, batch_size).float(),
    }


def scripted_module(batch_size: int = 4) -> Example:
    """A part compiled by TorchScript, which is to be refused with what to use instead."""
    return Classifier(
        nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    ), {"x": floats(batch_size, 8), "y": tokens(8, batch_size)}


def nested_batch(batch_size: int = 4) -> Example:
    """A batch of dicts, which is to be refused with what to use instead."""

    def forward(self: Any, inputs: dict[str, Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(self.net(inputs["a"] + inputs["b"]), y)

    return _styled(forward, net=nn.Linear(8, 4)), {
        "inputs": {"a": floats(batch_size, 8), "b": floats(batch_size, 8)},
        "y": floats(batch_size, 4),
    }  # type: ignore[dict-item]


def compiled_part(batch_size: int = 4) -> Example:
    """A block behind ``torch.compile``."""
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return WithLoss(nn.Sequential(torch.compile(block), nn.Linear(8, 4))), _rows(batch_size)


def branches_on_data(batch_size: int = 4) -> Example:
    """A forward that asks a number of its batch which way to go."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(x)
        if h.mean() > 0:
            h = h.relu()
        return F.mse_loss(self.two(h), y)

    return _styled(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 4)), _rows(batch_size)


def clamped_embedding(batch_size: int = 4) -> Example:
    """A table renormed as it is read (``max_norm``): it writes its weight, which is to be refused."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(self.table(x).sum(1)), y)

    return _styled(forward, table=nn.Embedding(20, 8, max_norm=1.0), out=nn.Linear(8, 4)), {
        "x": tokens(20, batch_size, 3),
        "y": floats(batch_size, 4),
    }
