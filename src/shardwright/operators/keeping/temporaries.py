"""What autograd's formulas need for a moment, on any device: tensors between an operator's operands and its results, and
between the gradients of these.

Sizes are multiples of the largest tensor that an operator reads or makes, seen through PyTorch 2.13's allocator; the
tests see them again, kind by kind. Gradients of operands that were broadcast are made whole before they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.core.graph import DTYPE_BYTES, Operator, OperatorGraph
from shardwright.core.program import Call, Value
from shardwright.operators.derivatives import SAME
from shardwright.operators.equation import sides
from shardwright.operators.keeping.contraction import contraction_of

# Of forward.
MADE = {
    "binary_cross_entropy_with_logits": 2.0, "cosine_similarity": 1.0, "huber_loss": 1.0, "kl_div": 2.0,
    "l1_loss": 1.0, "logsumexp": 1.0, "mse_loss": 1.0, "pairwise_distance": 1.0, "smooth_l1_loss": 1.0,
    "special_logsumexp": 1.0,
}  # fmt: skip

# Of backward, besides all gradients of operands.
MADE_BACK = {
    "abs": 1.0, "acos": 5.0, "acosh": 3.0, "amax": 2.0, "amin": 2.0, "asin": 4.0, "asinh": 3.0, "atan": 2.0,
    "atan2": 5.0, "atanh": 3.0, "binary_cross_entropy_with_logits": 1.0, "cos": 2.0,
    "cosh": 1.0, "cosine_similarity": 4.0, "cumprod": 3.0, "cumsum": 2.0, "digamma": 1.0, "erf": 4.0, "erfc": 4.0,
    "erfinv": 4.0, "exp2": 1.0, "expm1": 1.0, "fmod": 1.0, "hypot": 1.0,
    "kl_div": 3.0, "l1_loss": 1.0, "lgamma": 1.0, "linalg_vector_norm": 1.0, "log10": 1.0, "log1p": 1.0,
    "log2": 1.0, "logaddexp": 3.0, "logaddexp2": 3.0, "logcumsumexp": 7.0, "logsumexp": 2.0, "maximum": 1.5,
    "minimum": 1.5, "nan_to_num": 1.0, "norm": 1.0, "pow": 2.0, "prelu": 1.0, "reciprocal": 2.0, "remainder": 1.0,
    "rsqrt": 2.0, "sin": 1.0, "sinc": 7.0, "sinh": 1.0, "soft_margin_loss": 2.0,
    "special_logsumexp": 2.0, "sqrt": 1.0, "square": 2.0, "std": 1.0, "std_mean": 2.0, "tan": 2.0, "var": 1.0,
    "var_mean": 2.0, "xlogy": 2.0,
}  # fmt: skip

# The same of kernels of CPUs.
ON_CPUS = {"batch_norm": 1.0, "group_norm": 1.0, "instance_norm": 1.0, "rms_norm": 4.0}

# What a step of a recurrence makes, in results: forward, backward.
CELLS = {"gru_cell": (3, 3), "lstm_cell": (1, 4), "rnn_tanh_cell": (2, 1), "rnn_relu_cell": (2, 1)}

# What its first product backward reads, of the state; the other is of the input.
OF_STATE = frozenset({"hx", "hx.0", "hx.1", "w_hh", "b_hh"})

# Whose operands' gradients are as large as the result at first.
SPREADS = frozenset({
    "mul", "div", "sub", "maximum", "minimum", "fmax", "fmin", "atan2", "fmod", "remainder", "hypot",
    "logaddexp", "logaddexp2", "xlogy", "where", "clamp", "clamp_min", "clamp_max", "outer", "kron",
    "addcmul",
})  # fmt: skip


def made_forward(bare: str, call: Call, values: Sequence[Value]) -> int:
    """Return the bytes between the operands and the results of a call, whose operator's bare name is given."""
    if bare in CELLS:
        return CELLS[bare][0] * _result(call, values)
    if bare == "grouped_product":
        return _of_groups(call, values)
    factor = MADE.get(bare, 0.0)
    return round(factor * _largest(call, values)) if factor else 0


def made_backward(
    bare: str, graph: OperatorGraph, operator: Operator, call: Call, values: Sequence[Value]
) -> int:
    """Return the bytes between the gradients of a call's results and those of its operands."""
    bare = SAME.get(bare, bare)
    if bare in CELLS:
        return CELLS[bare][1] * _result(call, values)
    if bare == "grouped_product":
        return _of_groups(call, values)
    if bare == "linear_blocks":  # gradients of the blocks, as one
        return sum(values[value].bytes for value in call.results if value >= 0)
    if bare == "einsum" and (contracted := contraction_of(graph, operator)) is not None:
        return contracted.gradient * _result(call, values)
    more = _broadcast(bare, graph, operator, call, values)
    factor = _factor(bare, graph, operator)
    return more + (round(factor * _largest(call, values)) if factor else 0)


def _factor(bare: str, graph: OperatorGraph, operator: Operator) -> float:
    """Return how many times the largest tensor an operator's formulas make besides gradients."""
    if bare in SPREADS and len(operator.inputs) < 2:  # with a number
        return 0.0
    if bare == "kl_div" and not graph.tensors[operator.inputs[1]].needs_gradient:
        return 1.0
    if bare == "div":
        return 2.0 * graph.tensors[operator.inputs[1]].needs_gradient
    if graph.backend == "cpu" and bare in ON_CPUS:
        return ON_CPUS[bare]
    return MADE_BACK.get(bare, 0.0)


def _result(call: Call, values: Sequence[Value]) -> int:
    return next((values[value].bytes for value in call.results if value >= 0), 0)


def _of_groups(call: Call, values: Sequence[Value]) -> int:
    """Return what one group's rows and their products take, of equal groups; of bfloat16 all are multiplied at once."""
    rows, matrices = (values[value] for value in call.operands[:2])
    at_once = 1 if rows.dtype == "bfloat16" else matrices.shape[0]
    return (rows.bytes + _result(call, values)) // at_once


def _largest(call: Call, values: Sequence[Value]) -> int:
    every = (*call.operands, *(value for value in call.results if value >= 0))
    return max((values[value].bytes for value in every), default=0)


def _contracts(operator: Operator) -> bool:
    """Whether an einsum adds up along some dim."""
    terms, made = sides(str(operator.attribute("equation", "")))
    return bool(set("".join(terms)) - set(made))


def _broadcast(
    bare: str, graph: OperatorGraph, operator: Operator, call: Call, values: Sequence[Value]
) -> int:
    """Return by how much trained operands are less than the gradients that are added up to theirs: of the result's size,
    and of products a matrix for each of the result's. All of these are there when the first is added up."""
    result = call.result_shapes[0]
    of_matrices = bare == "matmul" and all(len(values[v].shape) > 2 for v in call.operands)
    if not of_matrices and bare not in SPREADS and (bare != "einsum" or _contracts(operator)):
        return 0
    passed = bare == "addcmul"  # the gradient of what is added to is what comes
    ends = list(zip(operator.inputs, call.operands, strict=True))[passed:]
    trained = [values[value] for tensor, value in ends if graph.tensors[tensor].needs_gradient]
    return _added_up([(_whole(one, result, of_matrices), one.bytes) for one in trained])


def _added_up(sizes: Sequence[tuple[int, int]]) -> int:
    """Return by how much gradients are more than what they are added up to, all there when the first is."""
    wider = [(whole, own) for whole, own in sizes if whole > own]
    return sum(whole - own for whole, own in wider) + sum(own for _, own in wider[:1])


def _whole(operand: Value, result: tuple[int, ...], of_matrices: bool) -> int:
    """Return the bytes of an operand's gradient before it is added up."""
    shape = (*result[:-2], *operand.shape[-2:]) if of_matrices else result
    return math.prod(shape) * DTYPE_BYTES[operand.dtype]
