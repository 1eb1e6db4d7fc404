"""Backwards that are not linear in the gradient they are given are given all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
MOST = 0.01


class Clamp(torch.autograd.Function):
    """Holds a gradient within bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-MOST, MOST)


class Swish(torch.autograd.Function):
    """Keeps what it is given only; its gradient is linear in the one that comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))


class Turned(torch.autograd.Function):
    """Turns gradients round, as domain adaptation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


turned = Turned.apply


class Adversary(nn.Module):
    """Two layers, the first of which gets a gradient turned round, by a function held in one of two places."""

    def __init__(self, *, is_global: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.turned, self.is_global = Turned.apply, is_global

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        x = turned(x) if self.is_global else self.turned(x)
        return nn.functional.mse_loss(self.last(x), y)


class Images(nn.Module):
    """Maps of features through a function with a gradient of its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x)).square().mean()


class Hooked(nn.Module):
    """A layer whose hook holds the gradient of what it is given within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.register_full_backward_hook(lambda *given: (given[1][0].clamp(-MOST, MOST),))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x))


class Table(nn.Module):
    """Weights made of others, by what they are, with a hook on them: one opaque operator that sees no samples."""

    def forward(self, weight: Tensor) -> Tensor:
        made = weight * (1 if float(weight.detach().sum()) < 1e9 else 2)
        made.register_hook(lambda gradient: gradient.clamp(-MOST, MOST))
        return made


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 4), kind
        self.middle = Hooked() if kind == "hook" else nn.Tanh()
        self.table = Table()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.table(self.first.weight) if self.kind == "table" else self.first.weight
        weight = Clamp.apply(weight) if self.kind == "weight" else weight
        x = self.middle(nn.functional.linear(x, weight, self.first.bias))
        return nn.functional.mse_loss(self.last(Clamp.apply(x) if self.kind == "rows" else x), y)


@pytest.mark.parametrize("kind", ["weight", "table"])
def test_gradients_of_microbatches_that_are_bent_one_by_one_are_refused(kind: str) -> None:
    batch = {"x": torch.zeros(8, 8), "y": torch.zeros(8, 4)}
    graph = capture(Net(kind), batch).graph
    strategy = seed_strategy(graph, Seed(num_microbatches=2))
    with pytest.raises(InputError, match=r"more than one microbatch.*bend.* the gradient"):
        lower(graph, strategy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_whether_a_backward_is_linear_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    batch = {"x": torch.zeros(4, 2, 5, 5, dtype=dtype)}
    kinds = {
        operator.kind
        for function in (Clamp, Swish)
        for operator in capture(Images(function).to(dtype), batch).graph.operators
    }
    assert {"bent.Clamp", "pointwise.Swish"} <= kinds


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


@pytest.mark.parametrize("kind", ["hook", "weight", "rows", "table"])
@pytest.mark.parametrize("splits", ["samples", "columns"])
def test_a_gradient_that_is_bent_is_summed_before(kind: str, splits: str) -> None:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        batch = {"x": torch.randn(8, 8).double(), "y": 4 * torch.randn(8, 4).double()}
        return Net(kind).double(), batch

    module, batch = build()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    if splits == "columns":
        last = max(
            place
            for place, operator in enumerate(captured.graph.operators)
            if operator.kind == "aten.linear.default"
        )
        configs = [replace(one, dims=("",)) for one in strategy.configs]
        configs[last] = replace(configs[last], dims=("n",))
        strategy = replace(strategy, configs=tuple(configs))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], train_plain(build, sgd), kind)


@pytest.mark.parametrize("is_global", [False, True])
def test_a_function_held_by_another_name_keeps_its_gradient(is_global: bool) -> None:
    """``turned = Turned.apply``, as PyTorch's own pages write it."""

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        batch = {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 4).double()}
        return Adversary(is_global=is_global).double(), batch

    module, batch = build()
    captured = capture(module, batch)
    assert "pointwise.Turned" in [one.kind for one in captured.graph.operators]
    runs, _ = train_rehearsed(
        captured, seed_strategy(captured.graph, Seed(data=2)), module, batch, sgd
    )
    assert_close(runs[0], train_plain(build, sgd), "turned")
