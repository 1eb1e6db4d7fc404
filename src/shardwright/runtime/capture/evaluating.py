"""Run a captured graph as it is, on one device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shardwright.runtime.capture.assemble import Captured
from shardwright.runtime.capture.fused import seen_as
from shardwright.runtime.capture.record import substitute


def bind_tensors(
    captured: Captured, module: nn.Module, batch: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Return the module's, the batch's and the graph's own tensors by tensor index."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    bound: dict[int, Tensor] = dict(captured.constants)
    for index, spec in enumerate(captured.graph.tensors):
        if spec.role in ("parameter", "buffer"):
            bound[index] = seen_as(state[spec.name], spec.shape)
        elif spec.role == "input":
            bound[index] = batch[spec.name]
    return bound


def evaluate(captured: Captured, tensors: Mapping[int, Tensor]) -> Tensor:
    """Run the whole graph on real tensors, one operator after another, and return the loss."""
    values = dict(tensors)
    device = next(iter(values.values())).device
    for operator, call in zip(captured.graph.operators, captured.calls, strict=True):
        inputs = [values[index] for index in operator.inputs]
        kwargs = {name: substitute(value, inputs) for name, value in call.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = device
        result = call.target(*substitute(call.args, inputs), **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        values.update(zip(operator.outputs, outputs, strict=True))
    return values[captured.graph.loss]
