"""The captured model: tensors, operators and their graph.

Shapes are *global*: the whole batch, unsharded. Nothing here knows about devices. Cross references
are dense integer indices; operator order is a topological order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Backend = Literal["cpu", "cuda"]
TensorRole = Literal["input", "parameter", "buffer", "constant", "activation"]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
# More than a rank's share of a processor's caches.
CACHED_BYTES = 16 * 2**20
# Precisions that are no dtype: what tensors are kept in.
KEPT_AS = {"fp8": "bfloat16", "fp8-row": "bfloat16"}
# Operators that change a tensor's dtype and nothing else.
CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})
# The note of a graph in which batch norm lets samples meet.
SYNCHRONISED = "batch norm takes its statistics over the batch of all devices"
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "complex64", "complex128"})

# A constant argument of an operator as JSON can hold it; sequences are tuples.
Constant = None | bool | int | float | str | tuple["Constant", ...]


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor of this shape."""
    return math.prod(shape) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the model, by its global shape.

    ``name`` is the parameter's, buffer's or input's own name (``transformer.h.0.mlp.up.weight``), or
    the producing operator's name for activations. ``producer`` is an operator index, -1 when the
    tensor enters from outside. ``needs_gradient`` is true where a gradient flows in training:
    trainable parameters and floating activations that depend on one. ``aliases`` lists further
    names of a tied parameter (``lm_head.weight``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: TensorRole
    producer: int = -1
    needs_gradient: bool = False
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name!r} has unknown dtype {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative size in {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether a gradient could exist for it."""
        return self.dtype in FLOATING


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of the captured graph.

    ``kind`` is the ATen name without overload where that is unambiguous for rules, with it otherwise
    (``aten.linear.default``). ``inputs`` are tensor indices in argument order with ``input_names``
    the schema names (``input``, ``weight``, ``bias``; list arguments give ``tensors.0``,
    ``tensors.1``). ``attributes`` holds every other argument by schema name. ``module`` is the path
    of the owning module, ``block`` the index of the repeated block it belongs to or -1.
    ``flops`` counts the forward pass. ``kept_bytes`` is what one that runs as it is (``opaque``) makes inside
    and holds for backward, ``copied`` the positions of inputs that are copied first, since they lie in memory otherwise than
    the kernel wants them; like ``flops`` no part of the fingerprint.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    outputs: tuple[int, ...]
    attributes: tuple[tuple[str, Constant], ...] = ()
    module: str = ""
    block: int = -1
    flops: float = 0.0
    kept_bytes: int = 0
    copied: tuple[int, ...] = ()

    def attribute(self, name: str, default: Constant = None) -> Constant:
        """Return a constant argument by its schema name."""
        for key, value in self.attributes:
            if key == name:
                return value
        return default

    def input_named(self, name: str) -> int:
        """Return the position of a tensor argument by schema name, or -1 when it is absent."""
        return self.input_names.index(name) if name in self.input_names else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated piece of the model, such as one transformer layer.

    Blocks cover the operators contiguously and in order: block ``i`` holds operators
    ``start <= index < stop``. Blocks with equal ``signature`` have equal operators, shapes and inner
    wiring, so that they can share one decision and one cost.
    """

    name: str
    start: int
    stop: int
    signature: str


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in topological order, their tensors, and the loss.

    ``loss`` is the index of the scalar tensor that is minimised, ``outputs`` the (name, index) of
    tensors that are to be reported besides. ``notes`` are sentences about what
    capture changed or could not see (decompositions, batch statistics, opaque operators).
    ``backend`` is the torch device type whose kernels run it, which decides what some keep for backward; the
    fingerprint does not know it.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    operators: tuple[Operator, ...]
    blocks: tuple[Block, ...]
    loss: int
    notes: tuple[str, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    backend: Backend = "cpu"

    def __post_init__(self) -> None:
        self._check_order()
        if not all(0 <= i < len(self.tensors) for i in (self.loss, *dict(self.outputs).values())):
            raise ValueError("the loss or an output is not a tensor of the graph")
        edges = [edge for block in self.blocks for edge in (block.start, block.stop)]
        covered = not edges or (edges[0] == 0 and edges[-1] == len(self.operators))
        if not covered or edges[1:-1:2] != edges[2::2]:
            raise ValueError("blocks must cover the operators contiguously and in order")

    def _check_order(self) -> None:
        seen = {index for index, tensor in enumerate(self.tensors) if tensor.producer < 0}
        for index, operator in enumerate(self.operators):
            if not seen.issuperset(operator.inputs):
                raise ValueError(f"operator {operator.name!r} reads a tensor made after it")
            if len(operator.inputs) != len(operator.input_names):
                raise ValueError(f"operator {operator.name!r} has unnamed inputs")
            if any(self.tensors[out].producer != index for out in operator.outputs):
                raise ValueError(f"an output of {operator.name!r} does not name it as producer")
            seen.update(operator.outputs)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the operators which read it, in order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for index, operator in enumerate(self.operators):
            for tensor in dict.fromkeys(operator.inputs):
                readers[tensor].append(index)
        return tuple(map(tuple, readers))

    def run_on(self, backend: Backend) -> OperatorGraph:
        """Return the graph as kernels of this type run it."""
        return self if backend == self.backend else replace(self, backend=backend)

    def readers(self, index: int) -> set[int]:
        """Return the operators which read what an operator makes."""
        made = self.operators[index].outputs
        return {reader for tensor in made for reader in self.consumers[tensor]}

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """For each operator, the number of its block; -1 where there are none."""
        found = [-1] * len(self.operators)
        for number, block in enumerate(self.blocks):
            found[block.start : block.stop] = [number] * (block.stop - block.start)
        return tuple(found)

    def makers(self, index: int) -> list[int]:
        """Return the operators which make what an operator reads."""
        found = [self.tensors[tensor].producer for tensor in self.operators[index].inputs]
        return [maker for maker in found if maker >= 0]

    def written_buffers(self, *writers: str) -> frozenset[int]:
        """Return the buffers which operators without results write, and those of kinds that begin so may."""
        writing = (one for one in self.operators if not one.outputs or one.kind.startswith(writers))
        return frozenset(
            t for one in writing for t in one.inputs if self.tensors[t].role == "buffer"
        )

    def operators_of(self, blocks: Iterable[int]) -> list[int]:
        """Return the operators of some blocks, one block after another."""
        spans = [self.blocks[number] for number in blocks]
        return [index for one in spans for index in range(one.start, one.stop)]

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Tensor indices of the parameters, in order."""
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.role == "parameter")

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Tensor indices of the batch."""
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.role == "input")

    @property
    def batch_rows(self) -> int:
        """How large a batch is said to be: dim 0 of its first tensor that has one, whether or not that counts samples
        which can be parted. The edges of a graph are more rows than its nodes."""
        shapes = (self.tensors[index].shape for index in self.inputs)
        return next((shape[0] for shape in shapes if shape), 1)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that a plan depends on (names, shapes, dtypes, wiring)."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(repr((tensor.name, tensor.shape, tensor.dtype, tensor.role)).encode())
        for op in self.operators:
            digest.update(repr((op.kind, op.inputs, op.outputs, op.attributes)).encode())
        digest.update(str(self.loss).encode())
        digest.update(repr(self.outputs).encode() if self.outputs else b"")
        return digest.hexdigest()[:16]

    @cached_property
    def outgrows_caches(self) -> bool:
        """Whether parameters, their gradients and all that operators make are more than caches hold:
        then operands come from memory."""
        made = sum(tensor.bytes for tensor in self.tensors if tensor.producer >= 0)
        touched = made + 2 * sum(self.tensors[index].bytes for index in self.parameters)
        return touched > CACHED_BYTES

    @property
    def num_parameters(self) -> int:
        """Total parameter elements, tied parameters counted once."""
        return sum(self.tensors[index].numel for index in self.parameters)
