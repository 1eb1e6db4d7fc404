"""Functions that close over a model, or over its parameters, train what the model holds.

A graph once held such parameters as constants: they were never trained, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.capture.evaluating import bind_tensors, evaluate
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch
WIDTH = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.act: Any = torch.tanh

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(self.act(self.one(x))), y)


def with_lambda() -> Model:
    model = Model()
    model.act = lambda h: h * model.scale
    return model


def with_partial() -> Model:
    model = Model()
    model.act = functools.partial(lambda factor, h: h * model.scale * factor, 2.0)
    return model


def with_default() -> Model:
    model = Model()
    model.act = lambda h, scale=model.scale, table=model.table: h * scale + table
    return model


def with_patched_forward() -> Model:
    """An adapter beside a layer, as tools that inject them write it."""
    model = Model()
    model.low, plain = nn.Linear(WIDTH, WIDTH), model.one.forward
    model.one.forward = lambda x: plain(x) + model.low(x)
    return model


def with_hook() -> Model:
    model = Model()
    model.one.register_forward_hook(lambda _m, _given, result: result * model.scale)
    model.two.register_forward_pre_hook(lambda _m, given: (given[0] + model.scale,))
    return model


MODELS = (with_lambda, with_partial, with_default, with_patched_forward, with_hook)


def build(make: Callable[[], Model]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return make().double(), {"x": rows[0], "y": rows[1]}


def test_parameters_that_functions_close_over_have_their_gradients() -> None:
    for make in MODELS:
        module, batch = build(make)
        expected, plain = module(**batch), list(module.parameters())
        wanted = torch.autograd.grad(expected, plain, allow_unused=True)
        captured = capture(module, batch)
        loss = evaluate(captured, bind_tensors(captured, module, batch))
        found = torch.autograd.grad(loss, plain, allow_unused=True)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert not any(one.kind.startswith("opaque.") for one in captured.graph.operators)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None), make.__name__
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15, msg=make.__name__)


def test_a_patched_forward_trains_on_two_ranks_as_plain_pytorch_does() -> None:
    ways = {"samples": lambda graph: seed_strategy(graph, Seed(data=2, zero=3))}
    assert_equivalent(2, lambda: build(with_patched_forward), ways)


def test_capture_leaves_functions_of_the_model_as_they_were() -> None:
    module, batch = build(with_lambda)
    before = module.act
    capture(module, batch)
    assert module.act is before
    assert before.__closure__[0].cell_contents is module


def test_a_model_that_has_run_before_is_captured() -> None:
    """What it kept of that run is not trained: PyTorch itself does not copy it."""
    module, batch = build(Model)
    kept: list[Tensor] = []
    module.kept = kept  # type: ignore[assignment]
    module.one.register_forward_hook(lambda _m, _given, result: kept.append(result))
    module(**batch)
    assert capture(module, batch).graph.operators


def test_parameters_of_a_class_around_them_are_refused_with_the_remedy() -> None:
    """A method cannot be given another closure for one model only."""

    def make() -> Model:
        low = nn.Linear(WIDTH, WIDTH)

        class Around(Model):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return super().forward(low(x), y)

        model = Around()
        model.low = low
        return model

    with pytest.raises(
        CaptureError, match=r"'low\.weight' comes from a function .* take it from self"
    ):
        capture(*build(make))
