"""What a rule sees of an operator, and how it writes its answer.

A rule is a function ``Signature -> Iteration``. It names, for every tensor dim, the iteration dim
that it follows; ``space`` derives the dims, their sizes and their roles from those names. A rule
that meets a form it does not understand raises ``NotUnderstood`` and the operator runs whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.core.graph import Constant
from shardwright.operators.splitting.iteration import Dim, Iteration, Role

Shape = tuple[int, ...]
Names = tuple[str, ...]


class NotUnderstood(Exception):
    """The operator is called in a way that its rule does not cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """An operator without its place in the graph: all that its iteration space depends on.

    ``names`` are the schema names of the tensor arguments. ``are_parameters`` says which of them
    are trained, ``dtypes`` covers inputs and then outputs.
    """

    kind: str
    names: Names
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attributes: tuple[tuple[str, Constant], ...]
    dtypes: Names
    are_parameters: tuple[bool, ...]

    def attribute(self, name: str, default: Constant = None) -> Constant:
        """Return a constant argument by its schema name."""
        return next((value for key, value in self.attributes if key == name), default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer argument."""
        value = self.attribute(name, default)
        if not isinstance(value, int):
            raise NotUnderstood(f"{self.kind}: {name} is {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an argument that is one or several integers; absent and None give ()."""
        value = self.attribute(name)
        if value is None:
            return ()
        values = value if isinstance(value, tuple) else (value,)
        integers = tuple(entry for entry in values if isinstance(entry, int))
        if len(integers) != len(values):
            raise NotUnderstood(f"{self.kind}: {name} is {value!r}")
        return integers

    def tensor_dim(self, name: str, default: int | None = None, rank: int | None = None) -> int:
        """Return a dim of the first input given by an argument, counted from the front."""
        rank = len(self.inputs[0]) if rank is None else rank
        dim = self.integer(name, default)
        if not -max(rank, 1) <= dim < max(rank, 1):
            raise NotUnderstood(f"{self.kind}: {name} is {dim} for {rank} dims")
        return dim % max(rank, 1)

    def position(self, name: str) -> int:
        """Return where a tensor argument stands among the inputs, or -1 when it is absent."""
        return self.names.index(name) if name in self.names else -1

    def shape_of(self, name: str) -> Shape:
        """Return the shape of a tensor argument that must be there."""
        position = self.position(name)
        if position < 0:
            raise NotUnderstood(f"{self.kind}: no tensor {name}")
        return self.inputs[position]


Rule = Callable[[Signature], Iteration]


def _sizes(call: Signature, inputs: Sequence[Names], outputs: Sequence[Names]) -> dict[str, int]:
    """Return the sizes of the dims that may be split, those of the outputs first."""
    sizes: dict[str, int] = {}
    tensors = [*zip(outputs, call.outputs, strict=True), *zip(inputs, call.inputs, strict=True)]
    for names, shape in tensors:
        if len(names) != len(shape):
            raise NotUnderstood(f"{call.kind}: {names} do not name the dims of {shape}")
        for name, size in zip(names, shape, strict=True):
            if name:
                sizes[name] = math.gcd(sizes.get(name, 0), size)
    return {name: size for name, size in sizes.items() if size > 1}


def space(
    call: Signature,
    inputs: Sequence[Names],
    outputs: Sequence[Names],
    *,
    once: tuple[int, ...] = (),
    mean: Iterable[str] = (),
    linear: tuple[int, ...] = (),
) -> Iteration:
    """Build the iteration space from the names of all tensor dims.

    The size of a dim is the greatest common divisor of the tensor dims that follow it: any number
    of pieces that divides it splits all of them. Dims of size 1 are dropped. The role is
    *reduction* where an output lacks the dim, *parameter* where a trained tensor has it, *sample*
    for the first dim of the first output, else *attribute*.
    """
    sizes = _sizes(call, inputs, outputs)
    named_inputs = tuple(_only(names, sizes) for names in inputs)
    named_outputs = tuple(_only(names, sizes) for names in outputs)
    trained = {
        name
        for names, is_parameter in zip(named_inputs, call.are_parameters, strict=True)
        if is_parameter
        for name in names
    }
    sample = next((name for name in named_outputs[0] if name), "")

    def role(name: str) -> Role:
        if any(name not in names for names in named_outputs):
            return "reduction"
        if name in trained:
            return "parameter"
        return "sample" if name == sample else "attribute"

    return Iteration(
        dims=tuple(Dim(name=name, size=size, role=role(name)) for name, size in sizes.items()),
        inputs=named_inputs,
        outputs=named_outputs,
        once=once,
        mean=tuple(name for name in mean if name in sizes),
        linear=linear,
    )


def _only(names: Names, sizes: dict[str, int]) -> Names:
    return tuple(name if name in sizes else "" for name in names)


def family(rule: Rule, names: str) -> dict[str, Rule]:
    """Give one rule to many ATen operators, listed with their overloads (``"add.Tensor ..."``)."""
    return {f"aten.{name}": rule for name in names.split()}


def whole(call: Signature) -> Iteration:
    """Run the operator replicated: it has no dim that may be split."""
    return Iteration(
        dims=(),
        inputs=tuple(("",) * len(shape) for shape in call.inputs),
        outputs=tuple(("",) * len(shape) for shape in call.outputs),
    )


def numbered(rank: int, letter: str = "d") -> Names:
    """Name dims by their place: ``d0, d1, ...``."""
    return tuple(f"{letter}{index}" for index in range(rank))


def leading(rank: int) -> Names:
    """Name the leading dims of a matrix-like tensor: ``b, s, t, ...``."""
    letters = ("b", "s", "t", "u", "v", "w")
    if rank > len(letters):
        raise NotUnderstood(f"{rank} leading dims")
    return letters[:rank]


def broadcast(shape: Shape, names: Names, full: Shape) -> Names:
    """Name the dims of a tensor that is broadcast to ``full``, whose dims have ``names``.

    A dim that is repeated lacks the name.
    """
    skipped = len(full) - len(shape)
    if skipped < 0:
        raise NotUnderstood(f"{shape} does not broadcast to {full}")
    pairs = zip(shape, full[skipped:], names[skipped:], strict=True)
    return tuple(name if size == whole_size else "" for size, whole_size, name in pairs)


def broadcast_shape(shapes: Iterable[Shape]) -> Shape:
    """Return the shape to which all shapes broadcast."""
    listed = list(shapes)
    rank = max((len(shape) for shape in listed), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in listed]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def without(names: Names, dims: Iterable[int], *, keepdim: bool = False) -> Names:
    """Return the names left after ``dims`` are removed, or blanked when ``keepdim``."""
    gone = set(dims)
    if keepdim:
        return blank(names, gone)
    return tuple(name for index, name in enumerate(names) if index not in gone)


def blank(names: Names, dims: Iterable[int]) -> Names:
    """Return the names with those at ``dims`` made unsplittable."""
    gone = set(dims)
    return tuple("" if index in gone else name for index, name in enumerate(names))
