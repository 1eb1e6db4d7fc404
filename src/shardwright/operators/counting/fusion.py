"""Which tensors pass through memory where chains of element-wise operators run as one kernel.

Operators that work on single elements or single rows fuse with their neighbours until a product, a
collective operation or a lookup lies between (compilers' and Megatron's fused norms, rotary
embeddings, activations). Inside a chain nothing is read or written; what enters is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.operators.derivatives import base_kind, is_view, storages

FUSIBLE = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "mean", "rsqrt", "sqrt",
    "reciprocal", "to", "_to_copy", "type_as", "float", "where", "masked_fill", "maximum",
    "minimum", "clamp", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm",
    "dropout", "native_dropout", "gelu", "silu", "relu", "tanh", "sigmoid", "exp", "log", "sin",
    "cos", "softmax", "_softmax", "cat", "clone", "sum", "erf", "hardswish", "mish", "softplus",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Passing:
    """Which inputs are read from memory, which results are written to it, by one operator."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def passing(
    graph: OperatorGraph, apart: frozenset[str] = frozenset()
) -> tuple[Passing | None, ...]:
    """Return for every operator of a chain what it reads and writes, None for all others; those
    named in ``apart`` are kernels of their own."""
    storage = storages(graph)
    views = [is_view(base_kind(operator.kind)) for operator in graph.operators]
    fuses = [base_kind(operator.kind) in FUSIBLE - apart for operator in graph.operators]
    chains = _Chains(graph, fuses, _depths(graph, fuses, views))
    readers = _readers(graph, storage, views)
    found: list[Passing | None] = [None] * len(graph.operators)
    for index, operator in enumerate(graph.operators):
        if fuses[index]:
            reads = [chains.reads(index, storage[tensor]) for tensor in operator.inputs]
            writes = [chains.writes(index, readers.get(tensor, ())) for tensor in operator.outputs]
            found[index] = Passing(tuple(reads), tuple(writes))
    return tuple(found)


class _Chains:
    """Operators of equal depth that fuse are one kernel, which reads each storage once."""

    def __init__(self, graph: OperatorGraph, fuses: list[bool], depth: list[int]) -> None:
        self.graph, self.fuses, self.depth = graph, fuses, depth
        self.seen: set[tuple[int, int]] = set()

    def reads(self, index: int, root: int) -> bool:
        """Whether an operator is the first of its chain to read a storage from outside."""
        maker, key = self.graph.tensors[root].producer, (root, self.depth[index])
        is_new = key not in self.seen
        self.seen.add(key)
        return is_new and not (maker >= 0 and self._are_one(index, maker))

    def writes(self, index: int, readers: Sequence[int]) -> bool:
        """Whether what an operator makes is read outside its chain, or by nobody."""
        return not readers or not all(self._are_one(index, reader) for reader in readers)

    def _are_one(self, index: int, other: int) -> bool:
        return self.fuses[other] and self.depth[other] == self.depth[index]


def _depths(graph: OperatorGraph, fuses: list[bool], views: list[bool]) -> list[int]:
    """Return how many kernels that do not fuse lie before each operator on the longest way."""
    depth: list[int] = []
    for index in range(len(graph.operators)):
        before = [depth[one] + (not (fuses[one] or views[one])) for one in graph.makers(index)]
        depth.append(max(before, default=0))
    return depth


def _readers(graph: OperatorGraph, storage: list[int], views: list[bool]) -> dict[int, list[int]]:
    """Return the operators that read each storage, through views too."""
    found: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        if views[index]:
            continue
        for tensor in operator.inputs:
            found.setdefault(storage[tensor], []).append(index)
    return found
