"""What the first half of a split backward leaves to the second, in bytes and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Call, Value
from shardwright.operators.keeping.backward import split_peak
from shardwright.runtime.capture import capture
from tests.operators.keeping.test_memory import calls_alone

pytestmark = pytest.mark.torch


class Activated(nn.Module):
    """A product with activations behind it; the last one's result leaves the segment."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.product, self.depth = nn.Linear(8, 8), depth

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.product(x)
        for _ in range(self.depth):
            x = torch.tanh(x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("depth", range(1, 13))
def test_gradients_that_leave_a_segment_are_told_from_later_ones_in_their_place(depth: int) -> None:
    # Of several calls between the outgoing gradient and the product, one may get its object's address.
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    graph = capture(Activated(depth), batch).graph
    calls, values = _alone(graph, ("linear", "tanh"))
    assert len(calls) == 1 + depth
    inputs = tuple(v for v in calls[0].operands if v >= 0)
    product, outgoing = calls[0].results[0], calls[-1].results[0]
    work = ([0] * len(calls), {0: (1, 2)})
    for _ in range(50):
        split = split_peak(graph, calls, values, (inputs, (outgoing,)), work)
        assert split.outputs == ()
        assert split.kept == values[product].bytes
    # Where the product's result itself leaves the segment, its gradient is somebody else's.
    split = split_peak(graph, calls[:1], values, (inputs, (product,)), ([0], {0: (1, 2)}))
    assert split.outputs == (product,)
    assert split.kept == 0


def _alone(graph: OperatorGraph, kinds: tuple[str, ...]) -> tuple[list[Call], list[Value]]:
    """Return the calls of operators on one device, and every tensor as a value of its number."""
    values = [
        Value(
            tensor=index, mesh=0, layout=(), shape=spec.shape, dtype=spec.dtype, scope="step",
            role="parameter" if spec.role == "parameter" else "activation",
        )
        for index, spec in enumerate(graph.tensors)
    ]  # fmt: skip
    calls = [
        call
        for call in calls_alone(graph)
        if any(f"aten.{kind}." in graph.operators[call.operator].kind for kind in kinds)
    ]
    return calls, values
