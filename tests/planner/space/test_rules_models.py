"""The rules on the operators of real models, with the arguments that capture gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.core.graph import Operator, OperatorGraph, TensorSpec
from shardwright.planner.space.rules import has_rule
from shardwright.runtime import capture as capturing
from tests import zoo
from tests.planner.space.pieces import Case, Slot
from tests.planner.space.test_rules import check

pytestmark = pytest.mark.torch

MODELS = (zoo.gpt, zoo.bert, zoo.cnn, zoo.lstm_translation, zoo.llama, zoo.t5, zoo.vit)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_every_operator_of_a_model_in_pieces_equals_it_whole(build: Any) -> None:
    module, batch = build()
    captured = capturing.capture(module, batch)
    seen: set[Any] = set()
    num_split = 0
    for operator, call in zip(captured.graph.operators, captured.calls, strict=True):
        assert has_rule(operator.kind)
        case = draw_like(captured.graph, operator, call)
        key = (case.kind, str(case.arguments), *(tensor.shape for tensor in case.tensors))
        if key not in seen:
            seen.add(key)
            num_split += bool(check(case).dims)
    assert num_split > len(seen) / 2


def draw_like(graph: OperatorGraph, operator: Operator, call: capturing.CapturedCall) -> Case:
    """Draw tensors like those of a captured call."""
    generator = torch.Generator().manual_seed(3)
    tensors = tuple(_like(graph.tensors[index], generator) for index in operator.inputs)

    def place(value: Any) -> Any:
        if isinstance(value, capturing.Slot):
            return Slot(value.index)
        return [place(item) for item in value] if isinstance(value, (list, tuple)) else value

    leading = list(dict.fromkeys(name.partition(".")[0] for name in operator.input_names))
    named = dict(zip(leading, call.args, strict=False)) | call.kwargs
    named.pop("device", None)
    differentiable = [
        tensor.is_floating_point() and "running" not in name
        for tensor, name in zip(tensors, operator.input_names, strict=True)
    ]
    arguments = {name: place(value) for name, value in named.items()}
    return Case(operator.kind, arguments, tensors, operator.input_names, tuple(differentiable))


def _like(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.dtype == "bool":
        keys = torch.rand(spec.shape, generator=generator) > 0.4
        if spec.shape:
            keys[..., 0] = True
        return keys
    if spec.is_floating:
        return torch.rand(spec.shape, generator=generator, dtype=torch.float64) + 0.05
    return torch.randint(0, 2, spec.shape, generator=generator)
