"""Whose gradients of parameters wait for W where backward is split: planner and runtime alike.

They are those of products and lookups that read a parameter as it is (Qi et al., 2024, section 2): their W
needs what they read and the gradient of what they made. What other operators give to parameters
(scales and shifts of norms, tables that are added) is small and found on the way: I computes it, and
W only adds it up. So do products in 8 bits, one kernel for both.
"""

from __future__ import annotations

from shardwright.core.float8 import FLOAT8, is_float8_product
from shardwright.core.graph import Operator, OperatorGraph
from shardwright.core.program import Program, Segment

DEFERRED = frozenset({
    "linear", "linear_blocks", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
})  # fmt: skip
Shapes = tuple[tuple[int, ...], ...]


def deferred_operands(
    graph: OperatorGraph, operator: Operator, shapes: Shapes, precision: str
) -> tuple[int, ...]:
    """Return the positions of the trained parameters whose gradients W computes, none where I does."""
    if bare_name(operator.kind) not in DEFERRED:
        return ()
    if precision in FLOAT8 and is_float8_product(graph, operator, shapes):
        return ()
    specs = [graph.tensors[tensor] for tensor in operator.inputs]
    return tuple(
        place
        for place, spec in enumerate(specs)
        if spec.role == "parameter" and spec.needs_gradient
    )


def bare_name(kind: str) -> str:
    """Return the name of an operator without its library and overload: ``aten.linear.default`` is linear."""
    parts = kind.split(".")
    return parts[1] if len(parts) > 1 else kind


def weight_share(graph: OperatorGraph, operator: Operator, deferred: tuple[int, ...]) -> float:
    """Return W's share of the time of an operator's whole backward: a product for each factor whose
    gradient is wanted, all of equal flops, and a bias is only summed."""
    if not deferred:
        return 0.0
    factors = FACTORS.get(bare_name(operator.kind), (0, 1))
    wanted = [p for p in factors if graph.tensors[operator.inputs[p]].needs_gradient]
    return sum(place in deferred for place in wanted) / len(wanted) if wanted else 1.0


# Where the factors of a product stand, if not first; a lookup has one.
FACTORS = {"addmm": (1, 2), "baddbmm": (1, 2), "embedding": (0,)}


def weight_shares(graph: OperatorGraph, program: Program, segment: Segment) -> list[float]:
    """Return W's share of the backward of each of a segment's calls, 0 of those that leave nothing to it."""
    found = [0.0] * len(segment.calls)
    for place in segment.deferred:
        call = segment.calls[place]
        operator = graph.operators[call.operator]
        shapes = tuple(program.values[value].shape for value in call.operands)
        later = deferred_operands(graph, operator, shapes, program.strategy.precision)
        found[place] = weight_share(graph, operator, later)
    return found
