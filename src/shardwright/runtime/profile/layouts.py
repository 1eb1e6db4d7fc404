"""How tensors of a model, and their gradients, lie in memory.

What an operator takes depends on that: elements that lie apart are read one by one, and what was transposed before
is copied. Shapes do not tell, so a graph runs once, operator by operator, forward and backward, on tensors that have
strides but no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.graph import Operator

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

Ints = tuple[int, ...]
_EXPECTED = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides, in elements, of a whole tensor."""

    shape: Ints
    strides: Ints

    def of(self, shape: Ints) -> Ints:
        """Return the strides of a part of it: dims in the same order, as far apart in proportion.

        Rows that lie in a larger tensor stay as far apart beside their length; what was expanded stays so.
        """
        if len(shape) != len(self.shape):
            return plain(shape)
        strides, whole, own = [0] * len(shape), 1, 1
        # Dims of one come first where strides are equal: their own then says nothing of another order.
        for dim in sorted(range(len(shape)), key=lambda d: (self.strides[d], self.shape[d] > 1)):
            stride = self.strides[dim]
            if not stride or self.shape[dim] == 1:
                strides[dim] = own if stride else 0
                continue
            if stride < whole:
                return plain(shape)  # windows that overlap
            strides[dim] = -(-own * stride // whole)
            whole, own = stride * self.shape[dim], strides[dim] * shape[dim]
        return tuple(strides)


@dataclass(frozen=True, slots=True)
class Layouts:
    """How values lie, and the gradients that come back to them, by tensor of the graph."""

    values: Mapping[int, Layout] = field(default_factory=dict)
    gradients: Mapping[int, Layout] = field(default_factory=dict)


def plain(shape: Ints) -> Ints:
    """Return the strides of what lies row by row."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def lay_out(captured: Captured, device: str) -> Layouts:
    """Run a graph on tensors without memory; what cannot run so makes what lies row by row."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        run = _Run(captured, device)
        for index in range(len(captured.calls)):
            run.forward(index)
        values = {tensor: _seen(value) for tensor, value in run.values.items()}
        for index in reversed(range(len(captured.calls))):
            run.backward(index)
    return Layouts(values, {tensor: _seen(one) for tensor, one in run.gradients.items()})


def _seen(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tuple(tensor.stride()))


class _Run:
    """One step, operator by operator: each reads what others made as leaves of its own."""

    def __init__(self, captured: Captured, device: str) -> None:
        self.captured, self.device = captured, device
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.read: list[list[Tensor]] = []
        self.made: list[list[Tensor]] = []

    def forward(self, index: int) -> None:
        operator, call = self.captured.graph.operators[index], self.captured.calls[index]
        read = [self._operand(tensor) for tensor in operator.inputs]
        kwargs = {name: filled(value, read) for name, value in call.kwargs.items()}
        if "device" in kwargs and kwargs["device"] is None:
            kwargs["device"] = self.device
        made = self._outputs(operator, lambda: call.target(*filled(call.args, read), **kwargs))
        self.values |= zip(operator.outputs, made, strict=True)
        self.read.append(read)
        self.made.append(made)

    def backward(self, index: int) -> None:
        operator = self.captured.graph.operators[index]
        ends = zip(operator.outputs, self.made[index], strict=True)
        back = [(tensor, made) for tensor, made in ends if made.requires_grad]
        fore = [
            (tensor, read)
            for tensor, read in zip(operator.inputs, self.read[index], strict=True)
            if read.requires_grad
        ]
        if not back or not fore:
            return
        seeds = [self._seed(tensor, made) for tensor, made in back]
        outs, ins = [made for _, made in back], [read for _, read in fore]
        try:
            found = torch.autograd.grad(outs, ins, seeds, allow_unused=True)
        except _EXPECTED:
            found = tuple(torch.empty_like(read) for read in ins)
        for (tensor, _), gradient in zip(fore, found, strict=True):
            if gradient is not None:
                before = self.gradients.get(tensor)
                self.gradients[tensor] = gradient if before is None else before + gradient

    def _seed(self, tensor: int, made: Tensor) -> Tensor:
        seed = self.gradients.get(tensor)
        return torch.ones_like(made) if seed is None or seed.shape != made.shape else seed

    def _operand(self, tensor: int) -> Tensor:
        if tensor not in self.values:
            self.values[tensor] = self._made(tensor)
        value = self.values[tensor]
        return value.detach().requires_grad_(value.requires_grad)

    def _outputs(self, operator: Operator, call: Callable[[], Any]) -> list[Tensor]:
        specs = self.captured.graph.tensors
        try:
            result = call()
        except _EXPECTED:
            result = None
        results = result if isinstance(result, (list, tuple)) else [result]
        made = [one for one in results if isinstance(one, Tensor)]
        if [tuple(one.shape) for one in made] == [specs[t].shape for t in operator.outputs]:
            return made
        return [self._made(tensor) for tensor in operator.outputs]

    def _made(self, tensor: int) -> Tensor:
        spec = self.captured.graph.tensors[tensor]
        value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
        return value.requires_grad_(spec.needs_gradient)


def filled(argument: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an argument of a call with tensors where its slots are."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(filled(item, tensors) for item in argument)
    is_slot = type(argument).__name__ == "Slot"
    return tensors[argument.index] if is_slot else argument
