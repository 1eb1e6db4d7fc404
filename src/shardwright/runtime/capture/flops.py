"""Floating point operations of one forward call, from shapes alone.

Matrix products, convolutions and attention are counted exactly (2 per multiply-add); everything
else counts one per output element, which is what its memory traffic makes it cost at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwright.core.graph import Constant

Shape = tuple[int, ...]
Shapes = Sequence[Shape]


def count_flops(
    kind: str, inputs: Shapes, outputs: Shapes, attributes: dict[str, Constant]
) -> float:
    """Return the flops of an operator of these input and output shapes."""
    rule = _RULES.get(kind)
    if rule is not None:
        return float(rule(inputs, outputs, attributes))
    return float(sum(math.prod(shape) for shape in outputs))


def _linear(inputs: Shapes, outputs: Shapes, _: dict[str, Constant]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[1][-1]


def _linear_blocks(inputs: Shapes, _: Shapes, __: dict[str, Constant]) -> int:
    return 2 * math.prod(inputs[0][:-1]) * math.prod(inputs[1])


def _matrix_product(inputs: Shapes, outputs: Shapes, _: dict[str, Constant]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][-1]


def _biased_product(inputs: Shapes, outputs: Shapes, _: dict[str, Constant]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[1][-1]


def _convolution(inputs: Shapes, outputs: Shapes, _: dict[str, Constant]) -> int:
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])


def _transposed_convolution(inputs: Shapes, _: Shapes, __: dict[str, Constant]) -> int:
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _attention(inputs: Shapes, outputs: Shapes, attributes: dict[str, Constant]) -> int:
    query, key = inputs[0], inputs[1]
    products = math.prod(query[:-1]) * key[-2] * (query[-1] + outputs[0][-1])
    # Kernels skip the masked half of a causal product.
    return products if attributes.get("is_causal") else 2 * products


def _lstm(inputs: Shapes, outputs: Shapes, _: dict[str, Constant]) -> int:
    steps = math.prod(outputs[0][:-1])
    return 2 * steps * sum(math.prod(shape) for shape in inputs[1:] if len(shape) == 2)


def _cell(inputs: Shapes, _: Shapes, __: dict[str, Constant]) -> int:
    weights = [shape for shape in inputs if len(shape) == 2][-2:]
    return 2 * inputs[0][0] * sum(math.prod(shape) for shape in weights)


_RULES: dict[str, Callable[[Shapes, Shapes, dict[str, Constant]], int]] = {
    "aten.linear.default": _linear,
    "shardwright.linear_blocks": _linear_blocks,
    "aten.mm.default": _matrix_product,
    "aten.bmm.default": _matrix_product,
    "aten.matmul.default": _matrix_product,
    "aten.addmm.default": _biased_product,
    "aten.baddbmm.default": _biased_product,
    "aten._grouped_mm.default": _matrix_product,
    "transformers.grouped_mm_fallback.default": _matrix_product,
    "shardwright.grouped_product": _matrix_product,
    "aten.conv1d.default": _convolution,
    "aten.conv1d.padding": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.convolution.default": _convolution,
    "aten.conv_transpose1d.default": _transposed_convolution,
    "aten.conv_transpose2d.input": _transposed_convolution,
    "aten.conv_transpose3d.input": _transposed_convolution,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.lstm.input": _lstm,
    "aten.gru.input": _lstm,
    "shardwright.packed_recurrence": _lstm,
    "aten.lstm_cell.default": _cell,
    "aten.gru_cell.default": _cell,
    "aten.rnn_tanh_cell.default": _cell,
    "aten.rnn_relu_cell.default": _cell,
}
