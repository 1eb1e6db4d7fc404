"""What autograd keeps of operators as models call them: with frozen weights, masks of truths, functions with gradients of
their own, and layers that widen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from shardwright.operators.derivatives import shares_storage
from shardwright.operators.keeping.kept import saved_tensors
from shardwright.runtime.capture import capture
from tests.runtime.test_bent_gradients import Swish

pytestmark = pytest.mark.torch


class KeepsOther(torch.autograd.Function):
    """A square root that keeps half of its reciprocal, which no graph has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.abs().sqrt()
        ctx.save_for_backward(0.5 * x.sign() / made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class KeepsNothing(torch.autograd.Function):
    """A gradient that is a tenth of what it would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.1 * gradient


def frozen_convolution() -> nn.Module:
    return nn.Conv2d(16, 16, 3, padding=1).requires_grad_(False)


class Masked(nn.Module):
    """Attention under truths."""

    def forward(self, x: Tensor) -> Tensor:
        seen = x.new_ones(x.shape[0], 1, x.shape[2], x.shape[2]).bool().tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)


class Wide(nn.Module):
    """Layers of an LSTM, each of which is given more than it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(256, 64, 2, bidirectional=True, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class Across(nn.Module):
    """A layer over tokens, as mixers have it: what it reads is no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.exp().transpose(1, 2))


class ByHand(nn.Module):
    """Scores of heads that are parts of rows."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.exp().unflatten(-1, (4, 8)).transpose(1, 2)
        return heads @ heads.transpose(-1, -2)


class NormedAcross(nn.Module):
    """A norm over features of tokens, which puts them in its own order (PatchTST)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x.transpose(1, 2)).exp().transpose(1, 2))


class Made(nn.Module):
    """Something made of scaled inputs, and the sum of it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.shift = make, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x + self.shift).sum()


def told(module: nn.Module, batch: dict[str, Tensor]) -> int:
    """Return what the planner says of all operators together: activations once, and what no tensor of the graph is."""
    graph = capture(module, batch).graph
    kept, others, root = set[int](), 0, dict[int, int]()
    for operator in graph.operators:
        inputs, outputs, extra = saved_tensors(graph, operator)
        if shares_storage(graph, operator):
            source = operator.inputs[0]
            root |= dict.fromkeys(operator.outputs, root.get(source, source))
        named = [operator.inputs[place] for place in inputs]
        named += [operator.outputs[place] for place in outputs]
        kept |= {root.get(one, one) for one in named}
        shapes = [
            tuple(graph.tensors[one].shape for one in some)
            for some in (operator.inputs, operator.outputs)
        ]
        others += extra(*shapes)
    return others + sum(graph.tensors[i].bytes for i in kept if graph.tensors[i].producer >= 0)


def kept(module: nn.Module, batch: dict[str, Tensor]) -> int:
    """Return the bytes of what autograd keeps besides parameters and the batch."""
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**batch)
    for own in (*module.parameters(), *batch.values()):
        held.pop(own.untyped_storage().data_ptr(), None)
    return sum(one.untyped_storage().nbytes() for one in held.values())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Swish.apply, (8, 64, 32)),
        (KeepsOther.apply, (8, 64, 32)),
        (KeepsNothing.apply, (8, 64, 32)),
        (frozen_convolution, (4, 16, 32, 32)),
        (Masked, (4, 1, 128, 16)),
        (Wide, (24, 16, 256)),
        (lambda x: torch.fft.rfft(x, n=128).abs(), (64, 64)),
        (lambda x: torch.fft.fft(x).real, (64, 64)),
        (nn.Dropout2d, (4, 16, 32, 32)),
        (Across, (8, 64, 32)),
        (ByHand, (8, 64, 32)),
        (NormedAcross, (8, 64, 32)),
    ],
)
def test_what_is_kept_is_told_within_three_percent(
    make: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    is_module = make is frozen_convolution or isinstance(make, type)
    module = Made(make() if is_module else make)
    batch = {"x": torch.randn(shape)}
    unit = 4 * batch["x"].numel()
    found = kept(module, batch)
    assert abs(told(module, batch) - found) <= 0.03 * max(found, unit)
