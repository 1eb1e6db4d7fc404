"""Products in 8-bit floats: which of a graph's operators are computed so, by planner and runtime alike.

Tensors stay in bfloat16; the two operands of such a product are scaled and rounded to 8 bits just
before it, forward and backward, with one scale each (``fp8``) or one for each row (``fp8-row``).
What makes the scores of a loss stays in 16 bits, as in Transformer Engine's and torchtitan's models:
its rounding errors would enter the loss unaveraged.
"""

from __future__ import annotations

import math

from shardwright.core.graph import CASTS, Operator, OperatorGraph
from shardwright.core.vocabulary import LOG_SUMS, LOSS

FLOAT8 = frozenset({"fp8", "fp8-row"})
# What matrix units want every size of such a product to divide by.
GRAIN = 16
# Of an activation's columns and those of the product, the fewer must be more than this share of the others:
# rounding all the wide side costs more than a narrow product saves (adapters of low rank, routers).
NARROW = 1 / 64

PRODUCTS = frozenset({"aten.linear.default", "shardwright.linear_blocks"})
# Between scores and their loss: other dtypes and shapes of the same numbers.
PASSED_ON = CASTS | {"aten.view.default", "aten.reshape.default", "aten.flatten.using_ints"}
LOSSES = frozenset({
    "shardwright.cross_entropy_sum", "shardwright.token_cross_entropy_sum", LOSS, LOG_SUMS,
    "aten.log_softmax.int",
})  # fmt: skip


def is_float8_product(
    graph: OperatorGraph, operator: Operator, shapes: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether an operator with these local input shapes is a product that 8 bits are used for: of an
    activation with a weight (``linear``, or several in one), all local sizes multiples of
    ``GRAIN``, neither side ``NARROW``."""
    if operator.kind not in PRODUCTS or len(operator.inputs) < 2:
        return False
    reduced = shapes[0][-1]
    sizes = (math.prod(shapes[0][:-1]), reduced, math.prod(shapes[1]) // max(reduced, 1))
    return (
        graph.tensors[operator.inputs[1]].role == "parameter"
        and min(sizes[1:]) > NARROW * max(sizes[1:])
        and all(size > 0 and size % GRAIN == 0 for size in sizes)
        and not any(_is_scored(graph, tensor) for tensor in operator.outputs)
    )


def _is_scored(graph: OperatorGraph, tensor: int) -> bool:
    """Whether a loss reads a tensor."""
    readers = [graph.operators[reader] for reader in graph.consumers[tensor]]
    return any(
        reader.kind in LOSSES
        or (reader.kind in PASSED_ON and any(_is_scored(graph, one) for one in reader.outputs))
        for reader in readers
    )
