"""Every operator that matrix units run: as ``batch`` products of m x k by k x n, from its shapes.

The list is complete: ``tests/operators/counting/test_products.py`` runs an example of every operator that
has a rule under ``torch.utils.flop_counter`` and fails where one is counted there and not here, or
otherwise. What is not in it runs at the vector rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.operators.equation import Names, dims

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` independent products of m x k by k x n; a multiply-add counts two flops."""

    batch: float
    m: float
    n: float
    k: float

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


def _linear(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    rows = math.prod(inputs[0][:-1])
    return Product(1, rows, math.prod(outputs[0]) / max(rows, 1), inputs[0][-1])


def _linear_blocks(inputs: Shapes, _: Shapes, __: str) -> Product:
    reduced = inputs[0][-1]
    return Product(1, math.prod(inputs[0][:-1]), math.prod(inputs[1]) / max(reduced, 1), reduced)


def _matmul(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    left, right, out = inputs[0], inputs[1], float(math.prod(outputs[0]))
    reduced = left[-1] if left else 1
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    if len(right) <= 2:
        return Product(1, out / max(columns, 1), columns, reduced)
    return Product(out / max(rows * columns, 1), rows, columns, reduced)


def _summed(inputs: Shapes, _: Shapes, __: str) -> Product:
    batch, rows, reduced = inputs[0]
    return Product(batch, rows, inputs[1][-1], reduced)


def _grouped(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    """Rows of all groups share one side; where both operands are flat their shared dim is split."""
    left, right = inputs[0], inputs[1]
    if len(left) == 2 and len(right) == 3:
        return Product(right[0], left[0] / max(right[0], 1), right[2], right[1])
    if len(left) == 3 and len(right) == 2:
        return Product(left[0], left[1], right[1] / max(left[0], 1), left[2])
    if len(left) == 2:
        groups = outputs[0][0] if len(outputs[0]) == 3 else 1
        return Product(groups, left[0], right[-1], left[1] / max(groups, 1))
    return Product(left[0], left[1], right[-1], left[2])


def _convolution(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    """The product that an implicit GEMM runs: output places by output channels."""
    weight = inputs[1]
    spatial = len(weight) - 2
    channels = inputs[0][-spatial - 1]
    groups = max(channels // max(weight[1], 1), 1)
    places = math.prod(outputs[0]) / max(weight[0], 1)
    return Product(groups, places, weight[0] / groups, math.prod(weight[1:]))


def _transposed(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    """The gradient of a convolution: input places by output channels and kernel places."""
    weight = inputs[1]
    spatial = len(weight) - 2
    groups = max(outputs[0][-spatial - 1] // max(weight[1], 1), 1)
    places = math.prod(inputs[0]) / max(weight[0], 1)
    return Product(groups, places, math.prod(weight[1:]), weight[0] / groups)


def _einsum(inputs: Shapes, outputs: Shapes, equation: str) -> Product | None:
    """Dims in all three tensors are batch; the others are of rows, columns or the sum."""
    out = math.prod(outputs[0])
    terms, made = dims(equation, [len(shape) for shape in inputs]) or ([], ())
    if len(terms) > 2:
        return _at_once(terms, inputs, out)
    if len(inputs) != 2:
        return None
    both = float(math.prod(map(math.prod, inputs)))
    sizes = dict(zip(terms[0], inputs[0], strict=True)) if terms else {}
    batch = math.prod(sizes[name] for name in set(made).intersection(*terms))
    total = math.sqrt(both * out * batch) / max(batch, 1) ** 2  # m n k of one
    rows, columns = (math.prod(shape) / max(batch, 1) for shape in inputs)
    area = out / max(batch, 1)
    if not rows * columns * area:
        return None
    reduced = total / area
    return Product(batch, rows / reduced, columns / reduced, reduced)


def _at_once(terms: Sequence[Names], inputs: Shapes, out: int) -> Product:
    """Operands contracted all at once, which is never less than what contraction in pairs takes."""
    named = (
        pair
        for term, shape in zip(terms, inputs, strict=True)
        for pair in zip(term, shape, strict=True)
    )
    sizes = {name: size for name, size in named if size > 1}
    return Product(1, out, 1, math.prod(sizes.values()) / max(out, 1))


def _recurrent(inputs: Shapes, _: Shapes, __: str) -> Product:
    # Every token of the first input passes every matrix, as input or as state.
    weights = sum(math.prod(shape) for shape in inputs[1:] if len(shape) == 2)
    reduced = inputs[0][-1]
    return Product(1, math.prod(inputs[0][:-1]), weights / max(reduced, 1), reduced)


def _cell(inputs: Shapes, outputs: Shapes, equation: str) -> Product:
    # One step: of its matrices the last two are weights, of the input and of the state.
    weights = [shape for shape in inputs if len(shape) == 2][-2:]
    return _recurrent((inputs[0], *weights), outputs, equation)


def _bilinear(inputs: Shapes, outputs: Shapes, _: str) -> Product:
    weight = inputs[2]
    return Product(1, math.prod(outputs[0]) / max(weight[0], 1), weight[0] * weight[1], weight[2])


Rule = Callable[[Shapes, Shapes, str], Product | None]

MATMUL: dict[str, Rule] = {
    "linear": _linear, "linear_blocks": _linear_blocks, "matmul": _matmul, "mm": _matmul,
    "bmm": _matmul, "mv": _matmul, "dot": _matmul, "vdot": _matmul, "_scaled_mm": _matmul,
    "_int_mm": _matmul, "addmm": _matmul, "baddbmm": _matmul,
    "addmv": _matmul, "addbmm": _summed, "einsum": _einsum,
    "inner": _einsum, "tensordot": _einsum,
    "_grouped_mm": _grouped, "_scaled_grouped_mm": _grouped, "grouped_mm_fallback": _grouped,
    "grouped_product": _grouped,
    "bilinear": _bilinear,
}  # fmt: skip
CONVOLUTION: dict[str, Rule] = {
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution,
    "convolution": _convolution, "_convolution": _convolution, "cudnn_convolution": _convolution,
    "convolution_overrideable": _convolution, "_slow_conv2d_forward": _convolution,
    "conv_transpose1d": _transposed, "conv_transpose2d": _transposed,
    "conv_transpose3d": _transposed,
}  # fmt: skip
RECURRENT: dict[str, Rule] = {
    "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
    "packed_recurrence": _recurrent,
    "lstm_cell": _cell, "gru_cell": _cell, "rnn_tanh_cell": _cell, "rnn_relu_cell": _cell,
}  # fmt: skip
PRODUCTS: dict[str, Rule] = {**MATMUL, **CONVOLUTION, **RECURRENT}
# (batch, heads, sequence, width), and those that take the sequence before the heads.
ATTENTION = frozenset({
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "flex_attention", "_flash_attention_forward",
    "_efficient_attention_forward",
})  # fmt: skip
SEQUENCE_FIRST = frozenset({"_flash_attention_forward", "_efficient_attention_forward"})
ADDED_FIRST = frozenset({"addmm", "baddbmm", "addmv", "addbmm"})
GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "grouped_product"})
GROUPED_BY = ("cutlass", "triton")
# What runs on matrix units. Recurrent kernels do too, but their steps wait for each other.
HEAVY = frozenset({*MATMUL, *CONVOLUTION, *ATTENTION})


def product_of(
    kind: str, inputs: Shapes, outputs: Shapes, equation: str = "", is_transposed: bool = False
) -> Product | None:
    """Return the forward product of a shard, None where the kind (bare name) is none.

    ``equation`` is einsum's, ``is_transposed`` the argument of ``aten.convolution``.
    """
    rule = PRODUCTS.get(kind)
    if rule is None or not outputs or not inputs:
        return None
    if kind in ADDED_FIRST:
        inputs = inputs[1:]
    if is_transposed and kind in CONVOLUTION:
        rule = _transposed
    return rule(inputs, outputs, equation)


def grouped_by(kind: str, noted: object) -> str:
    """Return what a product of groups is made by (``Kernels.grouped``), "" where it is none. ``noted`` is the
    kernel that the operator names, if it does."""
    if noted in GROUPED_BY:
        return str(noted)
    return GROUPED_BY[0] if kind in GROUPED else ""


def attention_flops(kind: str, inputs: Shapes) -> float:
    """Return the flops of scores and of their product with the values, nothing masked."""
    query, key, value = inputs[:3]
    keys = key[-3] if kind in SEQUENCE_FIRST else key[-2]
    return 2.0 * math.prod(query) * keys + 2.0 * math.prod(query[:-1]) * keys * value[-1]


def phase_products(
    kind: str, needs: tuple[bool, ...], phase: str, ahead: Product
) -> tuple[Product, ...]:
    """Return the products of a phase: backward one per operand whose gradient is wanted."""
    if phase == "forward":
        return (ahead,)
    start = 1 if kind in ADDED_FIRST else 0
    wanted = (*needs[start : start + 2], False, False)
    sides = (
        Product(ahead.batch, ahead.m, ahead.k, ahead.n),
        Product(ahead.batch, ahead.n, ahead.k, ahead.m),
    )
    return tuple(side for side, is_wanted in zip(sides, wanted, strict=False) if is_wanted)
