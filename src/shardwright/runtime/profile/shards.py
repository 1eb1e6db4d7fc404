"""Operator shards as they are measured: one operator with local shapes, and how to make its tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.core.costs import operator_key
from shardwright.core.graph import KEPT_AS, Operator, OperatorGraph, tensor_bytes
from shardwright.core.vocabulary import LOSS, is_whole
from shardwright.runtime.capture.vocabulary import unmade_logsumexp, whole_cross_entropy_sum
from shardwright.runtime.localise import localise
from shardwright.runtime.offsets import with_offset
from shardwright.runtime.profile.layouts import Layout, Layouts, filled, plain

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Request = tuple[int, Shapes, Shapes]
ROW_BY_ROW = Layouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How to make one input, which lies in memory by these ``strides``; ``is_made``: an operator before this
    one has just made it; ``parameter``: its number, where it is one, which other operators may read too."""

    shape: Shape
    dtype: str
    needs_gradient: bool
    high: int
    strides: tuple[int, ...]
    is_made: bool
    parameter: int

    def make(self, device: str) -> Tensor:
        """Make a tensor with the strides it would have: positive numbers, indices in range."""
        dtype, shape = getattr(torch, self.dtype), self.shape
        if self.dtype == "bool":
            drawn = torch.rand(shape, device=device) < 0.5
        elif dtype.is_floating_point or dtype.is_complex:
            drawn = torch.rand(shape, device=device).add_(0.1).to(dtype)
        else:
            drawn = torch.randint(0, max(self.high, 1), shape, device=device).to(dtype)
        return laid(drawn, self.strides).requires_grad_(self.needs_gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One operator with local shapes, in a form that can be sent to another process. ``seeds`` are the strides of
    the gradients of its results, where these have one."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    seeds: tuple[tuple[int, ...], ...]
    bytes: int
    keys: tuple[str, str]

    def bind(
        self, tensors: list[Tensor]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return what is called with which arguments on tensors made of ``operands``."""
        target = self.target.find() if isinstance(self.target, Overload) else self.target
        args = tuple(filled(argument, tensors) for argument in self.args)
        return target, args, {name: filled(value, tensors) for name, value in self.kwargs}

    def seeds_of(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients of what it made, that lie as they come."""
        known = self.seeds if len(self.seeds) == len(results) else [one.stride() for one in results]
        return [
            laid(torch.rand_like(one), strides) for one, strides in zip(results, known, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be measured: the ``keys`` that count, of ``runs`` of operators, each in the order in which a strategy
    runs them."""

    runs: tuple[tuple[Request, ...], ...]
    keys: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A torch operator by name; torch's own objects cannot be pickled."""

    name: str

    def find(self) -> Callable[..., Any]:
        found: Any = torch.ops
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def make_shard(
    captured: Captured, request: Request, device: str, precision: str, layouts: Layouts = ROW_BY_ROW
) -> Shard | None:
    """Describe a request's operator with its local arguments; None where it cannot be sent."""
    index, inputs, outputs = request
    graph, call = captured.graph, captured.calls[index]
    operator = graph.operators[index]
    if not outputs:
        return None
    unpadded = _with_halos(graph, index, inputs, outputs)
    args, kwargs = localise(call, operator, outputs, device, unpadded)
    target, more = _kernel(graph, operator, inputs, call.target)
    kwargs = {**kwargs, **more}
    if isinstance(target, torch._ops.OpOverload):
        target = Overload(name=str(target))
    operands = tuple(_operands(graph, request, precision, layouts))
    sizes = [tensor_bytes(o.shape, o.dtype) for o in operands]
    sizes += [
        tensor_bytes(shape, _dtype(graph, tensor, precision))
        for tensor, shape in zip(operator.outputs, outputs, strict=True)
    ]
    shard = Shard(
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        operands=operands,
        seeds=tuple(
            _strides(layouts.gradients, tensor, shape)
            for tensor, shape in zip(operator.outputs, outputs, strict=True)
            if graph.tensors[tensor].needs_gradient
        ),
        bytes=sum(sizes),
        keys=tuple(
            operator_key(graph, operator, inputs, outputs, phase, precision)
            for phase in ("forward", "backward")
        ),  # type: ignore[arg-type]
    )
    try:
        pickle.dumps(shard)
    except Exception:  # noqa: BLE001  # pickling runs foreign code; what cannot travel is not timed
        return None
    return shard


def _operands(
    graph: OperatorGraph, request: Request, precision: str, layouts: Layouts
) -> Iterator[Operand]:
    """Yield how to make the inputs of a request's operator."""
    index, inputs, _ = request
    for position, (tensor, shape) in enumerate(
        zip(graph.operators[index].inputs, inputs, strict=True)
    ):
        spec = graph.tensors[tensor]
        yield Operand(
            shape=shape,
            dtype=_dtype(graph, tensor, precision),
            needs_gradient=spec.needs_gradient,
            high=_largest_index(graph, index, position, inputs),
            strides=_strides(layouts.values, tensor, shape),
            is_made=spec.producer >= 0,
            parameter=tensor if spec.role == "parameter" else -1,
        )


def _kernel(
    graph: OperatorGraph, operator: Operator, inputs: Shapes, target: Any
) -> tuple[Any, dict[str, Any]]:
    """Return what computes an operator on shards of these shapes, and the arguments that this takes besides."""
    if inputs and is_whole(graph, operator, inputs[0]):
        return whole_cross_entropy_sum if operator.kind == LOSS else unmade_logsumexp, {}
    is_causal = operator.attribute("is_causal") is True
    if is_causal and inputs[0][-2] < graph.tensors[operator.inputs[0]].shape[-2]:
        # The last queries see most keys: the device that has them is waited for.
        return with_offset(operator), {"offset": inputs[1][-2] - inputs[0][-2]}
    return target, {}


def _with_halos(
    graph: OperatorGraph, index: int, inputs: Shapes, outputs: Shapes
) -> tuple[int, ...]:
    """Return the dims in which a shard of an image has rows of its neighbours: those in which it is
    a larger part of its tensor than the result is.
    """
    operator = graph.operators[index]
    if not inputs or len(inputs[0]) != len(outputs[0]):
        return ()
    before, after = (graph.tensors[t].shape for t in (operator.inputs[0], operator.outputs[0]))
    sizes = enumerate(zip(inputs[0], before, outputs[0], after, strict=True))
    return tuple(dim for dim, (a, whole, b, result) in sizes if a * result > b * whole)


def laid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor's numbers in memory of these strides; what is expanded there has its first ones."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    apart(made).copy_(apart(tensor, strides))
    return made


def apart(tensor: Tensor, strides: tuple[int, ...] = ()) -> Tensor:
    """Return a tensor's elements that have memory of their own (or would have, by these strides)."""
    for dim, stride in enumerate(strides or tensor.stride()):
        tensor = tensor if stride else tensor.narrow(dim, 0, min(tensor.shape[dim], 1))
    return tensor


def _strides(layouts: Mapping[int, Layout], tensor: int, shape: Shape) -> tuple[int, ...]:
    layout = layouts.get(tensor)
    return layout.of(shape) if layout else plain(shape)


def _dtype(graph: OperatorGraph, tensor: int, precision: str) -> str:
    dtype = graph.tensors[tensor].dtype
    return KEPT_AS.get(precision, precision) if dtype == "float32" else dtype


# Kinds whose index counts along a dim that their call names.
_ALONG_DIM = frozenset({
    "gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce",
    "take_along_dim",
})  # fmt: skip


def _largest_index(graph: OperatorGraph, index: int, position: int, inputs: Shapes) -> int:
    """Return the exclusive bound of an integer input: rows, classes or positions it may name."""
    operator = graph.operators[index]
    kind = operator.kind.split(".")[1]
    if not inputs or not inputs[0]:
        return 2
    if kind == "embedding":
        return inputs[operator.input_named("weight")][0]
    if kind in {"cross_entropy_sum", "cross_entropy_loss", "nll_sum", "nll_loss", "nll_loss_nd"}:
        return inputs[0][1] if len(inputs[0]) > 1 else max(inputs[0])
    if kind in {"token_cross_entropy_sum", "vocabulary_cross_entropy_sum"}:
        return inputs[0][-1]
    if kind in _ALONG_DIM:
        dim = operator.attribute("dim", 0)
        return inputs[0][dim] if isinstance(dim, int) else 1
    if kind in {"index", "index_put"} and position > 0:
        return min(inputs[0])
    return 2
