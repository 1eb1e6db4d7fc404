"""Make the operator graph, and the calls that execute it, from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph import Constant, Operator, OperatorGraph, TensorSpec
from shardwright.operators.counting.work import whole_flops
from shardwright.runtime.capture import operators as own
from shardwright.runtime.capture.blocks import cut_blocks, find_units
from shardwright.runtime.capture.filled import Filled
from shardwright.runtime.capture.hooks import Opaque
from shardwright.runtime.capture.lying import CONVOLUTIONS, copied_operands, order_of_images
from shardwright.runtime.capture.record import (
    Record,
    Slot,
    Value,
    aten,
    map_values,
    parameter_names,
    tensors_in,
)


@dataclass(frozen=True)
class CapturedCall:
    """How to execute one operator.

    ``target`` is a torch overload, a function of ``operators.py`` or a module to be called. ``args``
    holds the leading tensor arguments, ``kwargs`` everything else by schema name, with ``Slot`` where
    a tensor goes (also inside lists). Shapes in ``kwargs`` (``shape``, ``size``) are global. The
    keyword ``device``, where present, is None and means: fill in your own.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph with what it takes to run it.

    ``calls`` has one entry per operator. ``constants`` maps tensor indices of role *constant* to
    their values. ``batch_names`` are the batch's keys in order (positions, for a tuple batch). ``fixed`` are the
    entries whose numbers the graph was made for: what every row of theirs says. ``filled`` say of rows whether they
    are picked: all of a batch must be.
    """

    graph: OperatorGraph
    calls: tuple[CapturedCall, ...]
    constants: dict[int, Tensor]
    batch_names: tuple[str, ...]
    fixed: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    filled: tuple[Filled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor that enters from outside, and its value where that is known now."""

    value: Value
    spec: TensorSpec
    constant: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """What leaves a model: its loss, and outputs by name."""

    loss: Value
    outputs: Mapping[str, Value] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def live_records(records: Sequence[Record], results: Iterable[Value]) -> list[Record]:
    """Return the records that some result depends on or that write a buffer, in order."""
    needed: set[Value] = set(results)
    kept: list[Record] = []
    for record in reversed(records):
        writes = not record.outputs or record.target is aten.batch_norm.default
        if writes or not needed.isdisjoint(record.outputs):
            kept.append(record)
            needed.update(tensors_in([record.args, list(record.kwargs.values())]))
    return kept[::-1]


def with_gradient(records: Sequence[Record], loss: Value) -> set[Value]:
    """Return what a gradient of the loss reaches: not what is only read detached, as rounded weights are."""
    found = {loss}
    for record in reversed(records):
        if any(one in found and one.meta.requires_grad for one in record.outputs):
            found.update(tensors_in([record.args, list(record.kwargs.values())]))
    return found


def assemble(
    *,
    name: str,
    module: nn.Module,
    records: Sequence[Record],
    entries: Sequence[Entry],
    results: Results,
    notes: Sequence[str],
    batch_names: tuple[str, ...],
) -> Captured:
    """Number the tensors, describe every record as an operator, and cut the blocks."""
    records = live_records(records, (results.loss, *results.outputs.values()))
    used = {
        v for record in records for v in tensors_in([record.args, list(record.kwargs.values())])
    }
    unused = [
        entry.spec.name
        for entry in entries
        if entry.value not in used and entry.spec.role == "parameter"
    ]
    if unused:
        notes = (
            *notes,
            f"parameters without influence on the loss are left alone: {', '.join(unused)}",
        )
    reached = with_gradient(records, results.loss)
    index_of: dict[Value, int] = {}
    tensors: list[TensorSpec] = []
    constants: dict[int, Tensor] = {}
    for entry in entries:
        if entry.value in used or entry.spec.role == "input":
            if entry.constant is not None:
                constants[len(tensors)] = entry.constant
            index_of[entry.value] = len(tensors)
            tensors.append(entry.spec)
    operators: list[Operator] = []
    calls: list[CapturedCall] = []
    for position, record in enumerate(records):
        for place, value in enumerate(record.outputs):
            index_of[value] = len(tensors)
            label = record.name if len(record.outputs) == 1 else f"{record.name}.{place}"
            spec = describe(value, label, position)
            tensors.append(replace(spec, needs_gradient=spec.needs_gradient and value in reached))
        operator, call = _operator(record, index_of)
        shapes = tuple(tensors[index].shape for index in operator.inputs)
        made = tuple(tensors[index].shape for index in operator.outputs)
        flops = whole_flops(operator, shapes, made)
        if isinstance(record.target, Opaque):
            work = record.target.work_of(shapes)
            flops += work.flops
            operator = replace(operator, kept_bytes=work.kept)
        operators.append(replace(_as_it_lies(operator, record), flops=flops))
        calls.append(call)
    blocks = cut_blocks(operators, tensors, [record.path for record in records], find_units(module))
    for number, block in enumerate(blocks):
        for index in range(block.start, block.stop):
            operators[index] = replace(operators[index], block=number)
    graph = OperatorGraph(
        name,
        tuple(tensors),
        tuple(operators),
        blocks,
        index_of[results.loss],
        tuple(notes),
        tuple((name, index_of[value]) for name, value in results.outputs.items()),
    )
    return Captured(graph, tuple(calls), constants, batch_names)


def describe(value: Value, name: str, producer: int) -> TensorSpec:
    """Return the spec of an activation."""
    return TensorSpec(
        name=name,
        shape=tuple(value.meta.shape),
        dtype=dtype_name(value.meta.dtype),
        role="activation",
        producer=producer,
        needs_gradient=value.meta.requires_grad,
    )


def _as_it_lies(operator: Operator, record: Record) -> Operator:
    """Say of an operator what it copies first, and of a convolution whether channels lie last."""
    metas = [one.meta for one in tensors_in([record.args, list(record.kwargs.values())])]
    if record.target in CONVOLUTIONS and order_of_images(*metas[:2]) != torch.contiguous_format:
        operator = replace(operator, attributes=(*operator.attributes, ("channels_last", True)))
    shapes = [tuple(one.meta.shape) for one in record.outputs]
    return replace(operator, copied=copied_operands(operator.kind, metas, shapes))


def kind_of(target: Callable[..., Any]) -> str:
    """Return the operator kind of a call's target."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return own.KINDS.get(target) or target.kind  # an opaque module knows its own


def _operator(record: Record, index_of: dict[Value, int]) -> tuple[Operator, CapturedCall]:
    """Return the operator of a record and its call, its inputs in argument order."""
    slots: dict[str, Value] = {}
    attributes: list[tuple[str, Constant]] = []
    names = parameter_names(record.target)
    given = dict(zip((name for name, _ in names), record.args, strict=False)) | record.kwargs
    for name, default in names:
        argument = given.get(name, default)
        if isinstance(argument, Value):
            slots[name] = argument
        elif any(True for _ in tensors_in(argument)):
            slots |= {f"{name}.{i}": item for i, item in enumerate(argument) if item is not None}
        elif name not in _HINTS and not (argument is None and name not in given):
            attributes.append((name, constant(argument)))
    order = list(slots)
    numbers = iter(range(len(order)))
    # Both walk the arguments in schema order, so the next slot is always the next number.
    args = tuple(map_values(list(record.args), lambda _: Slot(next(numbers))))
    kwargs: dict[str, Any] = {}
    for name, _ in names:
        if name in record.kwargs:
            kwargs[name] = map_values(record.kwargs[name], lambda _: Slot(next(numbers)))
    attributes += getattr(record.target, "attributes", ())
    operator = Operator(
        name=record.name,
        kind=kind_of(record.target),
        inputs=tuple(index_of[value] for value in slots.values()),
        input_names=tuple(order),
        outputs=tuple(index_of[value] for value in record.outputs),
        attributes=tuple(attributes),
        module=record.path[-1] if record.path else "",
    )
    return operator, CapturedCall(record.target, args, kwargs)


_HINTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


def constant(argument: Any) -> Constant:
    """Return an argument as the graph's values can hold it."""
    if isinstance(argument, torch.dtype):
        return dtype_name(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(constant(item) for item in argument)
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    return str(argument)


def with_modules_of(captured: Captured, model: nn.Module) -> Captured:
    """Return a captured model whose opaque operators run the submodules of ``model``."""
    calls = [
        replace(call, target=call.target.of(model)) if isinstance(call.target, Opaque) else call
        for call in captured.calls
    ]
    return replace(captured, calls=tuple(calls))
