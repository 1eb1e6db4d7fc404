"""Parameters and buffers that forward gives new values: teachers that follow, memory that is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch
WIDTH = 4


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named if one.requires_grad], lr=0.1)


class Model(nn.Module):
    """A body behind a layer, under mean squared error."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.body(self.first(x)), y)


def example(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(make()).double()
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    return model, {"x": x, "y": x.flip(0)}


class Teacher(nn.Module):
    """Follows a layer slowly, with parameters that nothing trains, unless ``asks``."""

    def __init__(self, *, looks: bool, by: str, asks: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(asks)
        nn.init.zeros_(self.student.bias)  # what the first step writes is what stands there
        nn.init.zeros_(self.teacher.bias)
        self.looks, self.by = looks, by

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.mean().item() < -100:
            return x
        with torch.no_grad():
            for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                if self.by == "data":
                    old.data = old.data * 0.9 + new.data * 0.1
                elif self.by == "list":
                    torch._foreach_mul_([old], [0.9])
                    torch._foreach_add_([old], torch._foreach_neg([new]), alpha=-0.1)
                else:
                    old.lerp_(new, 0.1)
        return self.student(x) - self.teacher(x)


WAYS = [
    (False, "lerp"),
    (False, "data"),
    (True, "lerp"),
    (True, "data"),
    (True, "list"),
    (False, "list"),
]


@pytest.mark.parametrize(("looks", "by"), WAYS)
def test_a_frozen_teacher_that_forward_writes_trains_as_it_is_written(looks: bool, by: str) -> None:
    def make() -> nn.Module:
        return Teacher(looks=looks, by=by)

    module, batch = example(make)
    captured = capture(module, batch)
    kinds = {operator.kind for operator in captured.graph.operators}
    assert ("opaque.Teacher" in kinds) == looks
    roles = {tensor.name: tensor.role for tensor in captured.graph.tensors}
    assert roles["body.teacher.weight"] == roles["body.teacher.bias"] == "buffer"
    plain = train_plain(lambda: example(make), sgd)
    for seed in (Seed(data=2, zero=3), Seed(tensor=2)):
        strategy = seed_strategy(captured.graph, seed)
        runs, _ = train_rehearsed(captured, strategy, example(make)[0], batch, sgd)
        assert_close(runs[0], plain, seed.label)


@pytest.mark.parametrize(("looks", "by"), WAYS)
def test_trained_parameters_that_forward_writes_are_refused(looks: bool, by: str) -> None:
    """What was written was lost, without a word."""
    line = Teacher.forward.__code__.co_firstlineno + {"data": 6, "list": 8, "lerp": 11}[by]
    says = rf"body\.teacher\.weight.*requires_grad_.*\(at test_written_parameters\.py:{line}\)"
    with pytest.raises(CaptureError, match=says):
        capture(*example(lambda: Teacher(looks=looks, by=by, asks=True)))


class Renewed(nn.Module):
    """A buffer that is given other memory, in a module that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean().item() > 100:
            return x
        self.mean.data = self.mean.data * 0.5 + x.detach().mean((0, 1))
        return x - self.mean


def test_a_buffer_of_an_opaque_module_may_be_given_other_memory() -> None:
    module, batch = example(Renewed)
    captured = capture(module, batch)
    plain = train_plain(lambda: example(Renewed), sgd)
    strategy = seed_strategy(captured.graph, Seed(data=2))
    runs, _ = train_rehearsed(captured, strategy, module, batch, sgd)
    assert_close(runs[0], plain, "renewed")
    torch.testing.assert_close(runs[0].buffers, plain.buffers, rtol=1e-12, atol=0)
