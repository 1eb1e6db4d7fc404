"""Which tensors pass through memory where chains of element-wise operators run as one kernel.

Operators that work on single elements or single rows fuse with their neighbours until a product, a
collective operation or a lookup lies between (compilers' and Megatron's fused norms, rotary
embeddings, activations). Inside a chain nothing is read or written; what enters is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.planner.cost.derivatives import base_kind, is_view
from shardwright.planner.cost.recomputation import storages

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
    depth = _depths(graph, fuses, views)
    readers = _readers(graph, storage, views)
    seen: set[tuple[int, int]] = set()
    found: list[Passing | None] = []
    for index, operator in enumerate(graph.operators):
        if not fuses[index]:
            found.append(None)
            continue
        reads: list[bool] = []
        for tensor in operator.inputs:
            root = storage[tensor]
            maker = graph.tensors[root].producer
            inside = maker >= 0 and fuses[maker] and depth[maker] == depth[index]
            reads.append(not inside and (root, depth[index]) not in seen)
            seen.add((root, depth[index]))
        writes = tuple(
            not readers.get(tensor)
            or any(not fuses[r] or depth[r] != depth[index] for r in readers[tensor])
            for tensor in operator.outputs
        )
        found.append(Passing(tuple(reads), writes))
    return tuple(found)


def _depths(graph: OperatorGraph, fuses: list[bool], views: list[bool]) -> list[int]:
    """Return how many kernels that do not fuse lie before each operator on the longest way."""
    depth: list[int] = []
    for operator in graph.operators:
        makers = [graph.tensors[tensor].producer for tensor in operator.inputs]
        depth.append(
            max(
                [
                    depth[maker] + (0 if fuses[maker] or views[maker] else 1)
                    for maker in makers
                    if maker >= 0
                ],
                default=0,
            )
        )
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
