"""Products in 8-bit floats: which of a graph's operators are computed so, by planner and runtime alike.

Tensors stay in bfloat16; the two operands of such a product are scaled and rounded to 8 bits just
before it, forward and backward, with one scale each (``fp8``) or one for each row (``fp8-row``).
"""

from __future__ import annotations

import math

from shardwright.core.graph import Operator, OperatorGraph

FLOAT8 = frozenset({"fp8", "fp8-row"})
# What matrix units want every size of such a product to divide by.
GRAIN = 16


def is_float8_product(
    graph: OperatorGraph, operator: Operator, shapes: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether an operator with these local input shapes is a product that 8 bits are used for: of an
    activation with a weight (``linear``), all local sizes multiples of ``GRAIN``."""
    if operator.kind.split(".")[:2] != ["aten", "linear"] or len(operator.inputs) < 2:
        return False
    weight = graph.tensors[operator.inputs[1]]
    rows = math.prod(shapes[0][:-1])
    return weight.role == "parameter" and all(
        size > 0 and size % GRAIN == 0 for size in (rows, *shapes[1])
    )
