"""What one operator has to do in a phase: flops, bytes that pass through memory, kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.core.graph import Operator, OperatorGraph
from shardwright.operators.counting.fusion import Passing
from shardwright.operators.counting.products import (
    ADDED_FIRST,
    ATTENTION,
    HEAVY,
    Product,
    Shapes,
    attention_flops,
    product_of,
)
from shardwright.operators.derivatives import OPAQUE, base_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One operator on one device: by local shapes what it reads, makes, keeps and multiplies."""

    kind: str
    inputs: Shapes
    outputs: Shapes
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    needs: tuple[bool, ...]
    saved: int
    flops: float
    dtype: str
    product: Product | None = None
    passes: Passing | None = None
    hands_on: bool = False
    grouped: str = ""


def has_backward(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether a gradient comes in and goes on."""
    return all(
        any(graph.tensors[tensor].needs_gradient for tensor in tensors)
        for tensors in (operator.inputs, operator.outputs)
    )


def local_flops(
    kind: str,
    inputs: Shapes,
    outputs: Shapes,
    equation: str = "",
    is_transposed: bool = False,
) -> float | None:
    """Return the forward flops of a shard from its shapes, None where shapes do not say.

    ``kind`` is the bare name (``linear``). A multiply-add counts two. See ``product_of``.
    """
    if kind in ATTENTION:
        return attention_flops(kind, inputs)
    product = product_of(kind, inputs, outputs, equation, is_transposed)
    return product.flops if product is not None else None


def whole_flops(operator: Operator, inputs: Shapes, outputs: Shapes) -> float:
    """Return the forward flops of an operator as it was captured: of products and attention all, or the half that a causal
    mask leaves; of all else one for each element made, which is what its memory traffic makes it cost at most."""
    exact = local_flops(base_kind(operator.kind), inputs, outputs, *arguments(operator))
    if exact is None:
        return float(sum(math.prod(shape) for shape in outputs))
    return exact / 2 if operator.attribute("is_causal") is True else exact


def arguments(operator: Operator) -> tuple[str, bool]:
    """Return einsum's equation and whether a convolution is transposed."""
    equation = operator.attribute("equation", "")
    return str(equation), operator.attribute("transposed") is True


def work(shard: Shard, phase: str) -> tuple[float, float, int]:
    """Return (flops, bytes moved, kernels started) of a phase."""
    inputs, outputs = shard.input_bytes, shard.output_bytes
    if shard.passes is not None:
        return _fused_work(shard, phase, shard.passes)
    if phase == "forward":
        read = _touched(shard.kind, inputs, outputs)
        written = shard.saved if shard.kind == OPAQUE else 0  # operands and results are among it
        return shard.flops, float(max(read + sum(outputs), written)), 1
    wanted = sum(size for size, needed in zip(inputs, shard.needs, strict=True) if needed)
    traffic = float(sum(outputs) + shard.saved + wanted) * (not shard.hands_on)
    num_wanted = sum(shard.needs)
    if shard.kind in ATTENTION:
        # Scores are computed again: 5 products for the forward's 2.
        return 2.5 * shard.flops, traffic, 1
    if shard.kind in HEAVY:
        # One product per operand whose gradient is wanted (a bias only needs a sum).
        start = 1 if shard.kind in ADDED_FIRST else 0
        products = sum(shard.needs[start : start + 2])
        return products * shard.flops, traffic, max(products, 1)
    return 2.0 * shard.flops, traffic, 1 if num_wanted else 0


def _fused_work(shard: Shard, phase: str, passes: Passing) -> tuple[float, float, int]:
    """Return the work of one operator in a chain that is one kernel: only its ends are touched."""
    read = sum(
        size for size, is_read in zip(shard.input_bytes, passes.inputs, strict=True) if is_read
    )
    written = sum(
        size for size, is_out in zip(shard.output_bytes, passes.outputs, strict=True) if is_out
    )
    if phase == "forward":
        return shard.flops, float(read + written), int(any(passes.outputs))
    ends = zip(shard.input_bytes, passes.inputs, shard.needs, strict=True)
    wanted = sum(size for size, is_read, needed in ends if is_read and needed)
    traffic = float(written + read + wanted) * (not shard.hands_on)
    return 2.0 * shard.flops, traffic, int(any(passes.inputs))


def _touched(kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Return the input bytes really read: a lookup reads only the rows it returns."""
    if kind in {"embedding", "gather", "index_select", "index"}:
        return min(inputs[0], sum(outputs)) + sum(inputs[1:])
    return sum(inputs)
