"""Regions of ``torch.autocast`` inside forward compute what PyTorch computes, to the last bit.

In float32: autocast leaves float64 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH = 8
HALF = torch.bfloat16


def halved(**options: Any) -> Any:
    return torch.autocast("cpu", dtype=HALF, **options)


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(self, x).float(), y)


def mixed(model: Model, x: Tensor) -> Tensor:
    with halved():
        h = model.conv(model.one(x).transpose(1, 2)).transpose(1, 2)
        h = h + model.attention(h, h, h, need_weights=False)[0]
        return model.norm(h).softmax(-1) @ model.two.weight


def shared_weight(model: Model, x: Tensor) -> Tensor:
    """Autocast casts a parameter once, so that its gradients add up in half precision."""
    with halved():
        return model.one(model.one(x).tanh())


def written(model: Model, x: Tensor) -> Tensor:
    with halved():
        h = model.one(x)
        h += x
        return torch.cat([h.relu_(), x], -1)[..., :WIDTH].logsumexp(-1, keepdim=True) + x


def islands(model: Model, x: Tensor) -> Tensor:
    with halved():
        h = model.two(x)
        with torch.autocast("cpu", enabled=False):
            h = model.one(h.float())
        return model.two(h)


def without_gradient(model: Model, x: Tensor) -> Tensor:
    with halved():
        h = model.one(x)
        with torch.no_grad():
            size = model.two(h).norm(dim=-1, keepdim=True)
        return h / size


def switched_off(model: Model, x: Tensor) -> Tensor:
    """What had no gradient here once had one."""
    with torch.autocast("cpu", enabled=False):
        h = model.one(x)
        with torch.no_grad():
            size = model.two(h).norm(dim=-1, keepdim=True)
        return h / size


BODIES = (mixed, shared_weight, written, islands, without_gradient, switched_off)


def build(body: Callable[[Model, Tensor], Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Model(body)
    rows = torch.randn(2, 4, 6, WIDTH)
    return module, {"x": rows[0], "y": rows[1]}


def opaque(captured: Captured) -> list[str]:
    kinds = [operator.kind for operator in captured.graph.operators]
    return [kind for kind in kinds if kind.startswith("opaque.")]


@pytest.mark.parametrize("body", BODIES)
def test_autocast_in_forward_computes_what_pytorch_does(body: Any) -> None:
    module, batch = build(body)
    expected, plain = module(**batch), list(module.parameters())
    wanted = torch.autograd.grad(expected, plain, allow_unused=True)
    captured = capture(module, batch)
    loss = evaluate(captured, bind_tensors(captured, module, batch))
    found = torch.autograd.grad(loss, plain, allow_unused=True)
    assert not opaque(captured)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_autocast_around_what_it_casts_inside_stays_whole() -> None:
    """A recurrence is one operator, and casts what it has computed itself."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with halved():
                return self.layer(x)[0]

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Recurrent(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.last(self.inner(x).float()), y)

    module, batch = Around(), build(mixed)[1]
    captured = capture(module, batch)
    assert opaque(captured) == ["opaque.Recurrent"]
    loss = evaluate(captured, bind_tensors(captured, module, batch))
    torch.testing.assert_close(loss, module(**batch), rtol=0, atol=0)


def test_a_model_with_autocast_trains_in_microbatches_and_split() -> None:
    module, batch = build(shared_weight)
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))

    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for _, one in named], lr=0.1)

    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    plain = train_plain(lambda: build(shared_weight), sgd)
    assert_close(runs[0], plain, "samples", tolerance=0.01)  # sums of bfloat16 in another order
