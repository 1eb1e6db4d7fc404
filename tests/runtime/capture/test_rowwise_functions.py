"""Functions with a gradient of their own that compute each row by itself are split over rows, others are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.planner.space import Seed
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch


class Sparse(Function):
    """Sparsemax: the nearest point of the simplex, of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = x.sort(-1, descending=True).values
        sums = found.cumsum(-1) - 1
        ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        count = (found * ranks > sums).sum(-1, keepdim=True)
        made = (x - sums.gather(-1, count - 1) / count).clamp(min=0)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        inside = made > 0
        mean = (gradients[0] * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
        return inside * (gradients[0] - mean)


class Chosen(Function):
    """A gate whose gradient goes to the scores of what was chosen, as Phi-MoE's router has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(share, place)
        ctx.width = x.shape[-1]
        return share * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        share, place = ctx.saved_tensors
        zeros = share.new_zeros(len(share), ctx.width)
        return zeros.scatter_add(-1, place, gradients[0] * share), None, None


class Centred(Function):
    """Forward row by row, with a gradient less its mean over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


class Clipped(Sparse):
    """A gradient that is no sum of its terms' gradients."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Sparse.backward(ctx, gradients[0].clamp(-0.01, 0.01))


class Gated(nn.Module):
    """Rows weighed by what a function makes of them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.function is Chosen:
            share, place = scores.softmax(-1).max(-1, keepdim=True)
            made = Chosen.apply(scores, share, place)
        else:
            made = self.function.apply(scores)
        return self.head(made * x).square().mean()


def gated(function: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Gated(function).double(), {"x": torch.randn(8, 6).double()}


WAYS = named(Seed(data=2), Seed(tensor=2))


def kind_of(function: Any) -> str:
    kinds = [operator.kind for operator in capture(*gated(function)).graph.operators]
    return next(kind for kind in kinds if kind.endswith(f".{function.__name__}"))


@pytest.mark.parametrize("function", [Sparse, Chosen])
def test_a_function_of_rows_is_split_over_them(function: Any) -> None:
    assert kind_of(function) == f"rowwise.{function.__name__}"
    ways = WAYS | named(Seed(data=2, num_microbatches=2), Seed(stages=2, num_microbatches=2))
    assert_equivalent(2, partial(gated, function), ways, partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("function", [Centred, Clipped])
def test_a_function_whose_gradient_mixes_rows_or_bends_stays_whole(function: Any) -> None:
    assert kind_of(function) == f"opaque.{function.__name__}"
    assert_equivalent(2, partial(gated, function), WAYS, partial(torch.optim.SGD, lr=0.1))
