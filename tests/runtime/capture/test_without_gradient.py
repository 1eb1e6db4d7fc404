"""What forward computes or writes without a gradient has none in the graph, and no other than in PyTorch.

Views made under ``torch.no_grad`` that show the same elements once kept theirs, and what was written
without gradients took away that of what stood there: both trained differently, without a word.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from shardwright.verbs.coverage import random_strategy
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch
WIDTH = 4

SAME_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(h.shape),
    "reshape": lambda h: h.reshape(-1, WIDTH),
    "expand": lambda h: h.expand(h.shape),
    "slice": lambda h: h[:],
    "narrow": lambda h: h.narrow(0, 0, h.shape[0]),
    "squeeze": lambda h: h.squeeze(0),
    "permute": lambda h: h.permute(0, 1),
    "einsum": lambda h: torch.einsum("ij->ij", h),
    "split": lambda h: torch.cat(h.split(2, -1), -1),
    "detached views": lambda h: h.detach().view(-1).view(h.shape),
}
SELF: dict[str, Callable[[Tensor], Tensor]] = {  # return what they are given, with its gradient
    "flatten of one dim": lambda h: h.flatten(0, 0),
    "same dtype": lambda h: h.to(h.dtype),
    "broadcast": lambda h: torch.broadcast_tensors(h, h)[0],
    "contiguous": lambda h: h.contiguous(),
}


def clamped(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(-0.2, 0.2)
    return h


def rounded(h: Tensor) -> Tensor:
    h.data = (h.data * 4).round() / 4
    return h


def scaled(h: Tensor) -> Tensor:
    h.detach().mul_(2)
    return h * h


def partly_zero(h: Tensor) -> Tensor:
    first = h[:, :1]
    with torch.no_grad():
        h[:, 0] = 0
        h[h > 1] = 1
    return h + first


def filled(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[:2] = h[:2]
    with torch.no_grad():
        made[2:] = h[2:]
    return made * h


def cut_off(h: Tensor) -> Tensor:
    made = h * 2
    made.detach_()
    return made * h


def replaced(h: Tensor) -> Tensor:
    """A write that is part of the history: the gradient of what stood there ends."""
    other = h.tanh()
    made = h * 3
    made.copy_(other)
    return made


WRITES = (clamped, rounded, scaled, partly_zero, filled, cut_off, replaced)


class Model(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.change(self.first(x))), y)


def without_gradient(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def change(h: Tensor) -> Tensor:
        with torch.no_grad():
            seen = view(h)
        return seen * h.tanh()

    return change


def build(change: Callable[[Tensor], Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return Model(change).double(), {"x": rows[0], "y": rows[1]}


def assert_captured(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Assert that a captured model has the loss and gradients of plain PyTorch."""
    module, batch = build(change)
    expected, plain = module(**batch), list(module.parameters())
    wanted = torch.autograd.grad(expected, plain)
    captured = capture(module, batch)
    loss = evaluate(captured, bind_tensors(captured, module, batch))
    found = torch.autograd.grad(loss, plain)
    assert not any(one.kind.startswith("opaque.") for one in captured.graph.operators), name
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0, msg=name)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15, msg=name)


def test_a_view_that_shows_the_same_is_cut_off_where_gradients_are() -> None:
    for name, view in SAME_VIEWS.items():
        assert_captured(name, without_gradient(view))


def test_an_operator_that_returns_what_it_is_given_keeps_its_gradient() -> None:
    for name, view in SELF.items():
        assert_captured(name, without_gradient(view))


def test_what_is_written_without_gradients_leaves_that_of_what_stood_there() -> None:
    for change in WRITES:
        assert_captured(change.__name__, change)


@pytest.mark.parametrize("change", [clamped, partly_zero])
def test_such_writes_train_as_plain_pytorch_does_when_split(
    change: Callable[[Tensor], Tensor],
) -> None:
    ways = {
        "samples": lambda graph: seed_strategy(graph, Seed(data=2, num_microbatches=2)),
        "at random": lambda graph: random_strategy(graph, 1),
    }
    assert_equivalent(2, lambda: build(change), ways)
