"""One call of an operator with real tensors, drawn from an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardwright.core.example import Call, Drawn
from shardwright.core.graph import Constant, Operator, OperatorGraph, TensorSpec
from shardwright.errors import InputError
from shardwright.runtime.capture import Captured, CapturedCall, Slot, operators
from shardwright.runtime.capture.record import parameter_names
from shardwright.runtime.halos import average_inside
from shardwright.runtime.localise import localise
from shardwright.runtime.offsets import with_offset
from shardwright.runtime.randomness import is_random

# What torch raises where an operator does not take its arguments.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


# Per split dim with a halo: (dim, rows before the whole tensor, rows after it).
Outside = tuple[tuple[int, int, int], ...]


class Refused(Exception):
    """Torch does not take this call."""


def grouped_product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply each run of rows by its own matrix."""
    runs = input.tensor_split(offs[:-1].tolist())
    return torch.cat([rows @ matrix for rows, matrix in zip(runs, weight, strict=True)])


def grouped_product_aten(self: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """Take the arguments by ATen's names; ATen's own takes bfloat16 only."""
    return grouped_product(self, mat2, offs)


STAND_INS: dict[str, Callable[..., Any]] = {
    "transformers.grouped_mm_fallback.default": grouped_product,
    "aten._grouped_mm.default": grouped_product_aten,
}


@dataclass(frozen=True)
class Case:
    """One call with its tensors drawn: ``arguments`` hold ``Slot`` where tensors go."""

    kind: str
    target: Callable[..., Any]
    arguments: dict[str, Any]
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    differentiable: tuple[bool, ...]

    @cached_property
    def results(self) -> tuple[Tensor, ...]:
        """The results of the whole call. Raises Refused where torch does not take it."""
        try:
            return tuple(self.run(self.tensors))
        except REFUSALS as error:
            raise Refused(str(error).partition("\n")[0]) from error

    @property
    def is_random(self) -> bool:
        """Whether values cannot be compared: drawn at random, or memory as it was found."""
        name = self.kind.split(".")[1]
        named = {key: value for key, value in self.arguments.items() if not _holds_tensor(value)}
        return "empty" in name or is_random(self.target, (), named)

    def run(
        self,
        tensors: Sequence[Tensor],
        result_shape: tuple[int, ...] | None = None,
        offset: int | None = None,
        outside: Outside = (),
    ) -> list[Tensor]:
        """Run the operator, on a shard by way of its local result shape, as the executor does."""
        target, arguments = self.target, self.arguments
        if result_shape is not None:
            call = CapturedCall(target, (), arguments)
            unpadded = [dim for dim, _, _ in outside]
            operator = self.graph.operators[0]
            _, arguments = localise(call, operator, (result_shape,), "cpu", unpadded)
        if outside and arguments.get("count_include_pad", True) is False:
            target = partial(average_inside, kernel=target, outside=outside)
            arguments = {**arguments, "tensor": arguments["self"]}
            del arguments["self"]
        if offset is not None:
            target, arguments = (
                with_offset(self.graph.operators[0]),
                {**arguments, "offset": offset},
            )
        result = target(**{key: _fill(value, tensors) for key, value in arguments.items()})
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return [one for one in results if one is not None]

    @cached_property
    def graph(self) -> OperatorGraph:
        """A graph of this one operator, such as capture makes."""
        results = [_spec(f"y{at}", result, 0) for at, result in enumerate(self.results)]
        count = len(self.tensors)
        operator = Operator(
            name="operator",
            kind=self.kind,
            inputs=tuple(range(count)),
            input_names=self.names,
            outputs=tuple(range(count, count + len(results))),
            attributes=tuple(
                (name, _constant(value))
                for name, value in self.arguments.items()
                if not _holds_tensor(value)
            ),
        )
        inputs = [_spec(f"x{at}", tensor, -1) for at, tensor in enumerate(self.tensors)]
        return OperatorGraph(
            name="one", tensors=(*inputs, *results), operators=(operator,), blocks=(), loss=0
        )


def draw(kind: str, call: Call, seed: int = 0, target: Callable[..., Any] | None = None) -> Case:
    """Draw the tensors of an example, floats as float64, and sort its arguments by schema name."""
    generator = torch.Generator().manual_seed(seed)
    target = target or find_operator(kind)
    parameters = list(dict(parameter_names(target)))
    named = dict(zip(parameters, call.args, strict=False)) | call.kwargs
    tensors: list[Tensor] = []
    names: list[str] = []
    differentiable: list[bool] = []

    def place(name: str, value: Any) -> Any:
        if isinstance(value, Drawn):
            tensors.append(_draw(value, generator))
            names.append(name)
            differentiable.append(value.draw in ("float", "unit", "definite"))
            return Slot(len(tensors) - 1)
        if isinstance(value, (list, tuple)):
            return [place(f"{name}.{at}", item) for at, item in enumerate(value)]
        return getattr(torch, value) if name == "dtype" and isinstance(value, str) else value

    ordered = {name: place(name, named[name]) for name in parameters if name in named}
    return Case(kind, target, ordered, tuple(tensors), tuple(names), tuple(differentiable))


def example_of(captured: Captured, index: int) -> Call:
    """Return a captured call as an example, its tensors to be drawn anew."""
    operator, call = captured.graph.operators[index], captured.calls[index]
    drawn = [
        _like(captured.graph.tensors[tensor], name)
        for tensor, name in zip(operator.inputs, operator.input_names, strict=True)
    ]

    def place(value: Any) -> Any:
        if isinstance(value, Slot):
            return drawn[value.index]
        return [place(item) for item in value] if isinstance(value, (list, tuple)) else value

    kwargs = {name: place(value) for name, value in call.kwargs.items() if name != "device"}
    return Call(tuple(place(value) for value in call.args), kwargs)


def find_operator(kind: str) -> Callable[..., Any]:
    """Return the function behind a kind. Raises InputError where there is none."""
    if kind in STAND_INS:
        return STAND_INS[kind]
    namespace, _, rest = kind.partition(".")
    if namespace == "shardwright" and hasattr(operators, rest):
        return getattr(operators, rest)
    found: Any = torch.ops
    try:
        for part in kind.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise InputError(
            f"torch has no operator {kind!r}; write it with namespace and overload, such as "
            "aten.softmax.int, as `shardwright capture` prints it"
        )
    return found


def _like(spec: TensorSpec, name: str) -> Drawn:
    if spec.dtype == "bool":
        return Drawn("boolean", spec.shape)
    if spec.dtype.startswith("complex"):
        return Drawn("complex", spec.shape)
    if spec.is_floating:
        return Drawn("constant" if "running" in name else "unit", spec.shape)
    return Drawn("integer", spec.shape, 2)


def _draw(value: Drawn, generator: torch.Generator) -> Tensor:
    if value.draw == "given":
        return torch.tensor(value.shape)
    if value.draw == "float":
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if value.draw == "complex":
        return torch.randn(value.shape, generator=generator, dtype=torch.complex128)
    if value.draw == "places":
        *outer, rows, columns = value.shape
        order = torch.rand((*outer, value.high), generator=generator).argsort(-1)
        return order[..., : rows * columns].reshape(value.shape)
    if value.draw == "definite":
        root = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return root @ root.mT + torch.eye(value.shape[-1], dtype=torch.float64)
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    if value.draw == "pivots":
        rows = torch.arange(1, value.shape[-1] + 1)
        return (rows + unit * (value.shape[-1] + 1 - rows)).to(torch.int32)
    if value.draw in ("unit", "constant"):
        return unit * 0.9 + 0.05
    if value.draw == "boolean":
        keys = unit > 0.4
        if value.shape:  # no query may be without any key
            keys[..., 0] = True
        return keys
    return torch.randint(0, value.high, value.shape, generator=generator)


def _fill(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    return [_fill(item, tensors) for item in value] if isinstance(value, list) else value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, Slot)


def _constant(value: Any) -> Constant:
    if isinstance(value, list):
        return tuple(_constant(item) for item in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _spec(name: str, tensor: Tensor, producer: int) -> TensorSpec:
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        role="input" if producer < 0 else "activation",
        producer=producer,
    )
