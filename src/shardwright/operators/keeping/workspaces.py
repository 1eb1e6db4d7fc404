"""What kernels need for a moment besides their operands and results, in forward and in backward.

On CPUs these are PyTorch's and oneDNN's, seen through the allocator: recurrences copy weights and gates; convolutions see
``convolved``. On GPUs only what software is known to need is counted: cuDNN's workspaces are not. Other software runs
other kernels of the same operators: see ``kept``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.core.graph import DTYPE_BYTES, Operator, OperatorGraph
from shardwright.core.program import Call, Value
from shardwright.core.vocabulary import LOG_SUMS, LOSS, is_whole
from shardwright.operators.derivatives import base_kind, recurrence
from shardwright.operators.keeping.convolved import convolution_workspaces
from shardwright.operators.keeping.temporaries import made_backward, made_forward

# What the runtime exponentiates at a time on a CPU; on an accelerator it is more, of much more.
LOGSUMEXP_ELEMENTS = 1 << 18
CROSS_ENTROPIES = frozenset({
    "cross_entropy_sum", "token_cross_entropy_sum", "cross_entropy_loss",
    "vocabulary_cross_entropy_sum",
})  # fmt: skip
IN_PLACE = frozenset({"in place", "copied"})
CONVOLUTIONS = frozenset({
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
# By the kind of a recurrence's kernel: so many times its outputs in forward, in backward, and of its recurrent weights
# in backward, whichever of the two is more.
COMPOSITE = {"LSTM": (4.0, 2.9, 3.24), "GRU": (3.0, 2.0, 3.0), "RNN": (1.0, 1.25, 4.0)}


def forward_workspace(graph: OperatorGraph, call: Call, values: Sequence[Value]) -> int:
    """Return the bytes that the kernel of a call needs besides its results."""
    operator = graph.operators[call.operator]
    if (found := _of_cpus(graph, operator, call, values)) is not None:
        return found[0]
    kernel = operator.attribute("kernel")
    if kernel in ("copied", "log_softmax"):
        scores = values[call.operands[0]]
        return scores.bytes if kernel == "copied" or _is_split(graph, operator, scores) else 0
    bare = base_kind(operator.kind)
    if operator.kind in (LOG_SUMS, LOSS):
        return _over_vocabulary(graph, call, values)
    return made_forward(bare, call, values)


def backward_workspace(graph: OperatorGraph, call: Call, values: Sequence[Value]) -> int:
    """Return the bytes that the kernels of a call's backward need besides all gradients that they make; less than
    none where these come one by one, as what was saved goes.

    Cross entropy takes two steps, and over a split vocabulary four numbers, a place and two marks per token.
    Other kernels: where a vocabulary is split, ``loss_parallel`` adds exponentials to marks before it scales the sum;
    ``in place`` needs no room for its result.
    """
    operator = graph.operators[call.operator]
    if (found := _of_cpus(graph, operator, call, values)) is not None:
        return found[1]
    bare, kernel = base_kind(operator.kind), operator.attribute("kernel")
    if bare not in CROSS_ENTROPIES:
        return made_backward(bare, graph, operator, call, values)
    scores = values[call.operands[0]]
    if kernel in IN_PLACE:
        return -scores.bytes
    if bare == "vocabulary_cross_entropy_sum" and kernel != "log_softmax":
        wide = max(4, DTYPE_BYTES[scores.dtype])
        own = (4 * wide + 8 + 2) * math.prod(scores.shape[:-1])
        return own + _rows_copied(operator, scores)
    return scores.bytes * (2 if _is_split(graph, operator, scores) else 1)


def _is_split(graph: OperatorGraph, operator: Operator, scores: Value) -> bool:
    """Whether devices have the scores of some classes only: ``loss_parallel``, and Megatron-LM once, then have scores
    less their greatest beside what they make of them."""
    return scores.shape[-1] < graph.tensors[operator.inputs[0]].shape[-1]


def _over_vocabulary(graph: OperatorGraph, call: Call, values: Sequence[Value]) -> int:
    """Return what forward of a loss over a vocabulary needs: that of all classes makes log-probabilities, so many rows
    at once, where else the log sums before it make exponentials."""
    operator, scores = graph.operators[call.operator], values[call.operands[0]]
    makes_sums = operator.kind == LOG_SUMS
    if makes_sums == is_whole(graph, operator, scores.shape):
        return 0 if makes_sums else _rows_copied(operator, scores)
    if makes_sums:
        return _exponentials(scores, values[call.results[0]])
    return _at_once(scores) + _rows_copied(operator, scores)


def _rows_copied(operator: Operator, scores: Value) -> int:
    """Return the bytes of scores whose rows are copied first, such as those of all tokens but each last."""
    return scores.bytes if operator.copied else 0


def _exponentials(scores: Value, sums: Value) -> int:
    """Return the bytes of exponentials before they are added up, so many at once, of scores that were widened to float32
    first, a number for each row and each sum (``runtime/capture/vocabulary.py``)."""
    wide = max(4, DTYPE_BYTES[scores.dtype])
    count = min(math.prod(scores.shape), LOGSUMEXP_ELEMENTS)
    copies = 1 if DTYPE_BYTES[scores.dtype] == wide else 2
    return wide * (copies * count + count * (sums.shape[-1] + 1) // scores.shape[-1])


def _at_once(scores: Value) -> int:
    """Return the bytes of the log-probabilities that are there at once."""
    wide = max(4, DTYPE_BYTES[scores.dtype])
    return wide * min(math.prod(scores.shape), LOGSUMEXP_ELEMENTS)


def _of_cpus(
    graph: OperatorGraph, operator: Operator, call: Call, values: Sequence[Value]
) -> tuple[int, int] | None:
    """Return the workspaces of forward and backward where a CPU's kernel has them."""
    if graph.backend != "cpu":
        return None
    if base_kind(operator.kind) in CONVOLUTIONS:
        trains = graph.tensors[operator.inputs[0]].needs_gradient
        result = next(value for value in call.results if value >= 0)
        ends = values[call.operands[0]], values[call.operands[1]], values[result]
        return convolution_workspaces(operator, ends, trains_input=trains)
    if kernel := recurrence(graph, operator):
        return _recurrence(kernel, operator, call, values)
    return None


def _recurrence(
    kernel: str, operator: Operator, call: Call, values: Sequence[Value]
) -> tuple[int, int]:
    """Return the workspaces of a recurrence. In backward gradients of weights come layer by layer, and what was saved
    goes meanwhile: what all gradients take is more than is there at any time, and is taken off."""
    operands = [values[value] for value in call.operands]
    named = zip(operator.input_names, operands, strict=True)
    weights = [one for name, one in named if name.startswith("params")]
    made = math.prod(call.result_shapes[0]) * DTYPE_BYTES[operands[0].dtype]
    later = sum(one.bytes for one in weights) + operands[0].bytes
    if kernel == "fused":
        layer = sum(one.bytes for one in weights[-4:])
        return 4 * made + layer, round(5.15 * made) + 3 * layer - later
    forward, backward, recurrent = COMPOSITE[kernel]
    widest = max((one.bytes for one in weights[1:2]), default=0)
    return round(forward * made), round(max(backward * made, recurrent * widest)) - later
