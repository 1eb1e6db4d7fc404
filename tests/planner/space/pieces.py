"""The oracle for rules: run an operator whole, run it in pieces, put the pieces together.

Knows nothing of how rules are written; it reads an ``Iteration`` the way lowering and the executor
do, and asks torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph import Constant, Operator, OperatorGraph, TensorSpec
from shardwright.planner.space.iteration import Iteration
from shardwright.planner.space.rules import iterate
from shardwright.runtime.capture import operators
from tests.planner.space.rule_examples import Call, Drawn

Named = dict[str, Any]  # arguments by schema name; lists of tensors as lists


def grouped_product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply each run of rows by its own matrix."""
    runs = input.tensor_split(offs[:-1].tolist())
    return torch.cat([rows @ matrix for rows, matrix in zip(runs, weight, strict=True)])


def grouped_product_aten(self: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """Take the arguments by ATen's names."""
    return grouped_product(self, mat2, offs)


OWN = {
    "transformers.grouped_mm_fallback.default": grouped_product,
    # ATen's takes bfloat16 only.
    "aten._grouped_mm.default": grouped_product_aten,
    # A view in place of the copy that functionalisation removes.
    "aten._unsafe_view.default": lambda self, size: self.reshape(size),
}


@dataclass(frozen=True)
class Case:
    """One call with its tensors drawn: ``arguments`` hold positions where tensors go."""

    kind: str
    arguments: Named
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    differentiable: tuple[bool, ...]

    def run(self, tensors: list[Tensor], result_shape: tuple[int, ...] | None = None) -> list[Any]:
        """Run the operator; ``result_shape`` replaces the shape argument, as the executor does."""
        named = {key: _fill(value, tensors) for key, value in self.arguments.items()}
        if result_shape is not None:
            _localise(self.kind, named, result_shape)
        result = _function(self.kind)(**named)
        return list(result) if isinstance(result, (tuple, list)) else [result]


def draw(kind: str, call: Call, seed: int = 0) -> Case:
    """Draw the tensors of an example and sort its arguments by schema name."""
    generator = torch.Generator().manual_seed(seed)
    parameters = _parameters(kind)
    named = dict(zip(parameters, call.args, strict=False)) | call.kwargs
    tensors: list[Tensor] = []
    names: list[str] = []
    differentiable: list[bool] = []

    def place(name: str, value: Any) -> Any:
        if isinstance(value, Drawn):
            tensors.append(_draw(value, generator))
            names.append(name)
            differentiable.append(value.draw in ("float", "unit"))
            return Slot(len(tensors) - 1)
        if isinstance(value, list):
            return [place(f"{name}.{at}", item) for at, item in enumerate(value)]
        return getattr(torch, value) if name == "dtype" else value

    ordered = {name: place(name, named[name]) for name in parameters if name in named}
    return Case(kind, ordered, tuple(tensors), tuple(names), tuple(differentiable))


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes in the arguments."""

    index: int


def rule_of(case: Case, results: list[Tensor]) -> Iteration:
    """Ask the rule, by way of a graph of this one operator."""
    count = len(case.tensors)
    inputs = [_spec(f"x{at}", tensor, -1) for at, tensor in enumerate(case.tensors)]
    outputs = [_spec(f"y{at}", tensor, 0) for at, tensor in enumerate(results)]
    operator = Operator(
        name="operator",
        kind=case.kind,
        inputs=tuple(range(count)),
        input_names=case.names,
        outputs=tuple(range(count, count + len(outputs))),
        attributes=tuple(
            (name, _constant(value))
            for name, value in case.arguments.items()
            if not _holds_tensor(value)
        ),
    )
    graph = OperatorGraph(
        name="one", tensors=(*inputs, *outputs), operators=(operator,), blocks=(), loss=0
    )
    return iterate(graph, 0)


def shapes_of_piece(
    case: Case, iteration: Iteration, results: list[Tensor], dim: str, pieces: int
) -> tuple[Case, list[Tensor]]:
    """Return the first piece's call and results of the right shapes."""
    inputs = [_slice(t, n, dim, pieces, 0) for t, n in _zip(case.tensors, iteration.inputs)]
    outputs = [_slice(t, n, dim, pieces, 0) for t, n in _zip(results, iteration.outputs)]
    named = dict(case.arguments)
    if outputs:
        _localise(case.kind, named, tuple(outputs[0].shape))
    return replace(case, tensors=tuple(inputs), arguments=named), outputs


def whole(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Return results, the gradients assumed for them, and those which follow for the inputs."""
    inputs = _leaves(case, case.tensors)
    results = [result for result in case.run(inputs) if result is not None]
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
        for result in results
    ]
    return results, seeds, _gradients(inputs, results, seeds)


def in_pieces(
    case: Case, iteration: Iteration, dim: str, pieces: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Run the operator split along ``dim`` and assemble results and input gradients."""
    results, seeds, _ = whole(case)
    all_results: list[list[Tensor]] = []
    all_gradients: list[list[Tensor | None]] = []
    for piece in range(pieces):
        inputs = _leaves(
            case,
            [_slice(t, n, dim, pieces, piece) for t, n in _zip(case.tensors, iteration.inputs)],
        )
        shape = _local(tuple(results[0].shape), iteration.outputs[0], dim, pieces)
        fed = list(inputs)
        if iteration.is_reduction(dim) and piece > 0:
            for position in iteration.once:
                fed[position] = fed[position] * 0
        if iteration.offset == dim:
            local = _piece_with_offset(case, fed, piece)
        else:
            local = [result for result in case.run(fed, shape) if result is not None]
        if dim in iteration.mean:
            local = [result / pieces for result in local]
        cotangents = [_slice(t, n, dim, pieces, piece) for t, n in _zip(seeds, iteration.outputs)]
        all_results.append([result.detach() for result in local])
        all_gradients.append(_gradients(inputs, local, cotangents))
    outputs = [
        _assemble(list(parts), names, dim)
        for parts, names in _zip(zip(*all_results, strict=True), iteration.outputs)
    ]
    gradients = [
        None if parts[0] is None else _assemble(list(parts), names, dim)
        for parts, names in _zip(zip(*all_gradients, strict=True), iteration.inputs)
    ]
    return outputs, gradients


def from_partial_sums(case: Case, iteration: Iteration) -> tuple[list[Tensor], list[Tensor | None]]:
    """Feed two terms of a sum through the linear inputs and add the results.

    The gradient of a linear input must come out whole from either term, the others' adds up.
    """
    _, seeds, _ = whole(case)
    shares = [
        torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(9))
        if position in iteration.linear
        else tensor
        for position, tensor in enumerate(case.tensors)
    ]
    rest = [
        tensor - share if position in iteration.linear else tensor
        for position, (tensor, share) in enumerate(_zip(case.tensors, shares))
    ]
    outputs: list[list[Tensor]] = []
    gradients: list[list[Tensor | None]] = []
    for term in (shares, rest):
        inputs = _leaves(case, term)
        results = case.run(inputs)
        outputs.append([result.detach() for result in results])
        gradients.append(_gradients(inputs, results, seeds))
    total = [first + second for first, second in zip(*outputs, strict=True)]
    merged: list[Tensor | None] = []
    for position, (first, second) in enumerate(zip(*gradients, strict=True)):
        if first is None or second is None or position in iteration.linear:
            merged.append(first)
        else:
            merged.append(first + second)
    return total, merged


def _piece_with_offset(case: Case, inputs: list[Tensor], piece: int) -> list[Tensor]:
    if "vocabulary" in case.kind:  # whose pieces have an oracle of their own, torch's cross entropy
        offset = piece * inputs[0].shape[-1]
        return replace(case, arguments=case.arguments | {"offset": offset}).run(inputs)
    return (_embed_piece if "embedding" in case.kind else _attend_piece)(inputs, piece)


def _embed_piece(inputs: list[Tensor], piece: int) -> list[Tensor]:
    """Look up in a piece of the vocabulary, as the executor's kernel does."""
    weight, indices = inputs
    local = indices - piece * len(weight)
    is_here = (local >= 0) & (local < len(weight))
    return [weight[local.where(is_here, 0)] * is_here[..., None]]


def _attend_piece(inputs: list[Tensor], piece: int) -> list[Tensor]:
    """Let a piece of the queries attend to the keys before them, written out."""
    query, key, value = inputs
    if query.dim() > 3 and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    place = piece * query.shape[-2] + torch.arange(query.shape[-2])
    later = place[:, None] < torch.arange(key.shape[-2])
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return [scores.masked_fill(later, -torch.inf).softmax(-1) @ value]


def _function(kind: str) -> Any:
    if kind in OWN:
        return OWN[kind]
    namespace, name, *overload = kind.split(".")
    if namespace == "shardwright":
        return getattr(operators, name)
    return getattr(getattr(torch.ops.aten, name), overload[0])


def _parameters(kind: str) -> list[str]:
    function = _function(kind)
    if hasattr(function, "_schema"):
        return [argument.name for argument in function._schema.arguments]
    code = function.__code__
    return list(code.co_varnames[: code.co_argcount])


def _draw(value: Drawn, generator: torch.Generator) -> Tensor:
    if value.draw == "given":
        return torch.tensor(value.shape)
    if value.draw == "float":
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if value.draw == "complex":
        return torch.randn(value.shape, generator=generator, dtype=torch.complex128)
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    if value.draw in ("unit", "constant"):
        return unit * 0.9 + 0.05
    if value.draw == "boolean":
        keys = unit > 0.4
        if value.shape:  # no query may be without any key
            keys[..., 0] = True
        return keys
    return torch.randint(0, value.high, value.shape, generator=generator)


def _fill(value: Any, tensors: list[Tensor]) -> Any:
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
    return str(value) if isinstance(value, torch.dtype) else value


def _spec(name: str, tensor: Tensor, producer: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    role = "input" if producer < 0 else "activation"
    return TensorSpec(
        name=name, shape=tuple(tensor.shape), dtype=dtype, role=role, producer=producer
    )


def _localise(kind: str, named: Named, shape: tuple[int, ...]) -> None:
    for name in ("size", "shape"):
        if isinstance(named.get(name), list):
            named[name] = list(shape)
    if kind == "aten.unflatten.int":
        start = named["dim"] % (len(shape) - len(named["sizes"]) + 1)
        named["sizes"] = list(shape[start : start + len(named["sizes"])])


def _local(shape: tuple[int, ...], names: tuple[str, ...], dim: str, pieces: int) -> Any:
    return tuple(
        size // pieces if name == dim else size for size, name in zip(shape, names, strict=True)
    )


def _slice(tensor: Tensor, names: tuple[str, ...], dim: str, pieces: int, piece: int) -> Tensor:
    if dim not in names:
        return tensor
    at = names.index(dim)
    assert tensor.shape[at] % pieces == 0
    return tensor.chunk(pieces, at)[piece].contiguous()


def _assemble(parts: list[Tensor], names: tuple[str, ...], dim: str) -> Tensor:
    if dim in names:
        return torch.cat(parts, names.index(dim))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _leaves(case: Case, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors so that gradients are taken."""
    return [
        tensor.detach().clone().requires_grad_(is_leaf)
        for tensor, is_leaf in _zip(tensors, case.differentiable)
    ]


def _gradients(
    inputs: list[Tensor], results: list[Tensor], seeds: list[Tensor]
) -> list[Tensor | None]:
    pairs = [(r, s) for r, s in _zip(results, seeds) if r.requires_grad and r.is_floating_point()]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    )
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _zip(*columns: Any) -> Any:
    return zip(*columns, strict=True)
