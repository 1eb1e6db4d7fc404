"""What autograd keeps of each operator for its backward, and which results share storage.

The table restates PyTorch 2.13's derivative formulas as they run on CPU; the tests check it against
``torch.autograd.graph.saved_tensors_hooks``. An operator not in the table is taken to keep all its
floating inputs and outputs, which is never too little for one kernel.

Other software runs other kernels of the same operators; then the attribute ``kernel`` says so. Cross
entropy over a vocabulary: ``log_softmax`` is ``torch.nn.functional.cross_entropy``, which keeps the
log-probabilities in place of the scores (its split form is DTensor's ``loss_parallel``); ``in place``
is Megatron-LM's ``vocab_parallel_cross_entropy``, whose exponentials, and then their gradient, lie
where the scores lay; until 2023 (``copied``) it took the greatest score off in a copy of them;
``compiled`` is the first as ``torch.compile`` makes it: scores are kept as they come, and their
gradient is the only other tensor of that size.
Dropout: ``marks`` keeps one byte per element, as on CUDA, not a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.core.graph import DTYPE_BYTES, Operator, OperatorGraph

Shapes = tuple[tuple[int, ...], ...]
ExtraBytes = Callable[[Shapes, Shapes], int]

OPAQUE = "opaque"  # the bare name of every module that runs as one operator
MODULES = (OPAQUE, "rowwise")  # first words of their kinds

VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "expand_as", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "flatten", "unflatten", "view_as", "reshape_as", "alias", "detach", "diagonal",
    "movedim", "swapaxes", "swapdims", "contiguous", "lift_fresh", "numpy_T", "mT", "unfold",
    "tensor_split",
})  # fmt: skip

# Views that copy what does not lie in the order of its dims, and views that keep that order.
MAY_COPY = frozenset({"reshape", "reshape_as", "contiguous", "flatten"})
KEEPS_ORDER = MAY_COPY | {"view", "view_as", "_unsafe_view", "unflatten", "unsqueeze", "squeeze"}

# Names with nothing to keep: the gradient needs shapes only.
KEEPS_NOTHING = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "clone", "to",
    "_to_copy", "type_as", "add_", "sub_", "concat", "flip", "roll", "repeat", "pad",
    "constant_pad_nd", "tril", "triu", "zeros_like", "ones_like", "full_like", "argmax",
    "count_targets", "vocabulary_logsumexp", "eq", "ne", "lt", "gt", "le", "ge", "bitwise_and", "bitwise_or",
    "bitwise_not", "logical_and", "logical_or", "logical_not", "any", "all", "isin", "floor",
    "ceil", "round", "sign", "copy_", "fill_", "zero_", "one_hot", "upsample_nearest2d",
    "float", "half", "bfloat16", "arange", "full", "zeros", "ones", "new_zeros", "new_ones",
    "new_full", "empty", "scalar_tensor", "bincount", "repeat_interleave", "pixel_shuffle",
})  # fmt: skip

KEEPS_INPUT = frozenset({
    "gelu", "silu", "leaky_relu", "elu", "celu", "hardswish", "hardsigmoid", "softplus", "mish",
    "pow", "sin", "cos", "log", "log2", "log1p", "clamp", "clamp_min", "clamp_max", "abs",
    "erf", "var", "std", "avg_pool2d", "adaptive_avg_pool2d", "relu6", "hardtanh",
    "log_sigmoid", "square",
})  # fmt: skip

KEEPS_OUTPUT = frozenset({
    "relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp",
    "sqrt", "rsqrt", "reciprocal", "relu_",
})  # fmt: skip

# Input positions of index or mask arguments which backward needs, everything else it does not.
KEEPS_POSITIONS = {
    "embedding": (1,), "gather": (0, 1), "index_select": (1,), "where": (0,), "masked_fill": (1,),
    "index": (1, 2, 3), "index_put": (1, 2, 3), "scatter": (1,), "scatter_add": (1,),
    "index_add": (1,), "index_copy": (1,), "index_fill": (1,), "take_along_dim": (1,),
}  # fmt: skip

# Positions of inputs and outputs that backward needs, by the operator's name.
KEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(VIEWS | KEEPS_NOTHING, ((), ())),
    **dict.fromkeys(KEEPS_INPUT, ((0,), ())),
    **dict.fromkeys(KEEPS_OUTPUT, ((), (0,))),
    **{name: (positions, ()) for name, positions in KEEPS_POSITIONS.items()},
}

PRODUCTS = frozenset({"linear", "linear_blocks", "matmul", "mm", "bmm", "mul", "einsum", "inner", "tensordot",
                      "kron", "mv", "dot", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
                      "conv_transpose2d", "conv_transpose3d"})  # fmt: skip


# Recurrences by what runs them; of every layer it keeps so many times its outputs, and so much before the first step.
RECURRENCES = {"lstm": "fused", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
KEPT_OF_LAYERS = {"fused": (16.5, 14.4), "LSTM": (8.0, 0.0), "GRU": (8.0, 0.0), "RNN": (2.0, 0.0)}

# Whose operands' gradients are their result's or parts of it, without a copy.
PASSES_PARTS = frozenset({"cat", "concat", "stack", "sum"})
PASSES_ALL = frozenset({"add", "add_", "clone"})


def base_kind(kind: str) -> str:
    """Return the bare operator name: ``aten.linear.default`` -> ``linear``; modules are ``opaque``."""
    parts = kind.split(".")
    if parts[0] in MODULES:
        return OPAQUE
    return parts[1] if len(parts) > 1 else kind


def recurrence(graph: OperatorGraph, operator: Operator) -> str:
    """Return what runs a recurrence on CPUs, "" for other operators: LSTM (in double precision, and packed), GRU or RNN
    as PyTorch composes them, or ``fused``: oneDNN's LSTM."""
    bare = base_kind(operator.kind)
    if bare == "packed_recurrence":
        return str(operator.attribute("mode", "LSTM")).split("_")[0]
    is_double = bare == "lstm" and graph.tensors[operator.inputs[0]].dtype == "float64"
    return "LSTM" if is_double else RECURRENCES.get(bare, "")


def is_view(bare: str) -> bool:
    """Whether an operator (bare name) only describes existing storage anew."""
    return bare in VIEWS


def is_identity(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether the operator returns its input itself: a cast to the same dtype, no dropout."""
    bare = base_kind(operator.kind)
    if bare in {"to", "_to_copy", "type_as", "float"} and operator.inputs:
        same = graph.tensors[operator.inputs[0]].dtype == graph.tensors[operator.outputs[0]].dtype
        return same and bare != "_to_copy" and operator.attribute("copy") is not True
    if bare == "dropout":
        return operator.attribute("p") in (0, 0.0) or operator.attribute("train") is False
    return False


def passes_gradient(
    operator: Operator, position: int, operand: tuple[int, ...], result: tuple[int, ...]
) -> bool:
    """Whether an operand's gradient lies where its result's does, given their (local) shapes."""
    bare = base_kind(operator.kind)
    if bare in PASSES_PARTS:
        return True
    if bare in PASSES_ALL or (bare in {"sub", "sub_"} and position == 0):
        return operand == result
    return is_view(bare) and math.prod(operand) == math.prod(result)


def hands_on(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether a sum's gradient is that of its terms, which nothing else reads and adds to."""
    ends = {graph.tensors[tensor].shape for tensor in (*operator.inputs, *operator.outputs)}
    alone = all(len(graph.consumers[tensor]) == 1 for tensor in operator.inputs)
    return base_kind(operator.kind) == "add" and len(ends) == 1 and alone


def _floating(graph: OperatorGraph, tensors: tuple[int, ...]) -> tuple[int, ...]:
    """Return at which positions there are floating-point numbers."""
    return tuple(i for i, tensor in enumerate(tensors) if graph.tensors[tensor].is_floating)


def saved_tensors(
    graph: OperatorGraph, operator: Operator
) -> tuple[tuple[int, ...], tuple[int, ...], ExtraBytes]:
    """Return (input positions, output positions, extra) that autograd saves for backward.

    ``extra(input_shapes, output_shapes)`` are the bytes of statistics, masks and intermediates that
    are no tensor of the graph. Nothing is saved where no input needs a gradient.
    """
    needs = tuple(graph.tensors[index].needs_gradient for index in operator.inputs)
    if not any(needs) or is_identity(graph, operator):
        return (), (), _nothing
    bare = base_kind(operator.kind)
    if bare in SPECIAL:
        return SPECIAL[bare](graph, operator, needs)
    if bare in KEPT:
        inputs, outputs = KEPT[bare]
        return tuple(p for p in inputs if p < len(needs)), outputs, _nothing
    if bare in PRODUCTS:
        return _other_factors(needs), (), _nothing
    return _floating(graph, operator.inputs), _floating(graph, operator.outputs), _nothing


def _nothing(_inputs: Shapes, _outputs: Shapes) -> int:
    return 0


def _other_factors(needs: tuple[bool, ...]) -> tuple[int, ...]:
    """A product keeps each factor whose partner wants a gradient."""
    if len(needs) == 1:
        return ()
    return tuple(mine for mine, partner in ((0, 1), (1, 0)) if needs[partner])


Saved = tuple[tuple[int, ...], tuple[int, ...], ExtraBytes]


def _addmm(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    return tuple(mine for mine, partner in ((1, 2), (2, 1)) if needs[partner]), (), _nothing


def _div(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    if len(needs) == 1:
        return (), (), _nothing
    return ((0, 1) if needs[1] else (1,)), (), _nothing


def _maximum(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    return tuple(range(len(needs))), (), _nothing


def _normalised(per_row: int) -> Callable[[OperatorGraph, Operator, tuple[bool, ...]], Saved]:
    """Layer or RMS norm: the input, the scale, and ``per_row`` float32 statistics per row."""

    def rule(_graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
        dims = operator.attribute("normalized_shape")
        tail = len(dims) if isinstance(dims, tuple) else 1
        kept = tuple(range(min(2, len(needs))))
        return kept, (), lambda i, _o: 4 * per_row * math.prod(i[0][: len(i[0]) - tail])

    return rule


def _group_norm(_graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    groups = operator.attribute("num_groups")
    count = groups if isinstance(groups, int) else 1
    return tuple(range(min(2, len(needs)))), (), lambda i, _o: 8 * i[0][0] * count


def _batch_norm(_graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    kept = tuple(
        position
        for position, name in enumerate(operator.input_names)
        if name != "bias" and position < len(needs)
    )
    return kept, (), lambda i, _o: 8 * i[0][1]


def _attention(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """Flash attention keeps its operands, its result and one logsumexp per query row."""
    kept = tuple(range(len(operator.inputs)))
    size = DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]
    drops = operator.attribute("dropout_p", 0.0)
    if isinstance(drops, int | float) and drops > 0 and graph.backend == "cpu":
        # The unfused path: scores after softmax, the mask, and the dropped scores. A GPU's kernels draw
        # the mask again from the seed that they keep.
        return kept, (), lambda i, _o: 3 * size * math.prod(i[0][:-1]) * i[1][-2]
    return kept, (0,), lambda i, _o: max(4, size) * math.prod(i[0][:-1])


def _dropout(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What was dropped is kept: a GPU's kernel marks it in a byte."""
    marks = graph.backend == "cuda"
    size = 1 if marks else DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]
    return (), (), lambda i, _o: size * math.prod(i[0])


def _cross_entropy(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """The log-probabilities are kept, and the targets; the total weight is one number."""
    size = DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]
    return (1,), (), lambda i, _o: size * (math.prod(i[0]) + 1)


def _nll(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    size = DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]
    return (0, 1), (), lambda _i, _o: size


def _vocabulary_loss(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    if operator.attribute("kernel") != "log_softmax":
        return _both(graph, operator, needs)
    size = DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]
    return (1,), (), lambda i, _o: size * math.prod(i[0])


def _both(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    return tuple(range(len(needs))), (), _nothing


def _max_pool(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    if len(operator.outputs) > 1:
        return (0,), (1,), _nothing
    return (0,), (), lambda _i, o: 8 * math.prod(o[0])


def _global_pool(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    size = operator.attribute("output_size")
    # A pool to one value per channel is a mean, which keeps nothing.
    is_mean = isinstance(size, tuple) and all(extent == 1 for extent in size)
    return (() if is_mean else (0,)), (), _nothing


def _indices(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    return (), ((1,) if len(operator.outputs) > 1 else ()), _nothing


def _opaque(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What it makes inside, as was seen of all rows, besides its operands and results."""
    shape = graph.tensors[operator.inputs[0]].shape
    rows, kept = (shape[0] if shape else 1), operator.kept_bytes
    inputs, outputs = (_floating(graph, indices) for indices in (operator.inputs, operator.outputs))
    return inputs, outputs, lambda i, _o: round(kept * (i[0][0] if i[0] else 1) / rows)


def _input_and_output(
    _graph: OperatorGraph, _operator: Operator, _needs: tuple[bool, ...]
) -> Saved:
    return (0,), (0,), _nothing


def _recurrent(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """What kernels keep of every layer, as multiples of its outputs, which are among them: gates and states as PyTorch
    composes them of operators, what oneDNN keeps of an LSTM, states before the first step with it; and of sequences
    whose first dim is samples a copy."""
    floats, layers = _floating(graph, operator.inputs), operator.attribute("num_layers", 1)
    depth = layers if isinstance(layers, int) else 1
    is_first = operator.attribute("batch_first") is True
    each, before = KEPT_OF_LAYERS[recurrence(graph, operator)]
    size = DTYPE_BYTES[graph.tensors[operator.inputs[0]].dtype]

    def extra(inputs: Shapes, outputs: Shapes) -> int:
        steps = inputs[0][1 if is_first and len(inputs[0]) > 2 else 0]
        kept = (each + before / max(steps, 1)) * depth - 1
        copied = math.prod(inputs[0]) if is_first else 0
        return round(size * (kept * math.prod(outputs[0]) + copied))

    return floats, (0,), extra


SPECIAL: dict[str, Callable[[OperatorGraph, Operator, tuple[bool, ...]], Saved]] = {
    "addmm": _addmm, "baddbmm": _addmm, "div": _div, "maximum": _maximum, "minimum": _maximum,
    "layer_norm": _normalised(2), "native_layer_norm": _normalised(2), "rms_norm":
    _normalised(1), "_fused_rms_norm": _normalised(1), "group_norm": _group_norm, "batch_norm":
    _batch_norm, "scaled_dot_product_attention": _attention, "dropout": _dropout,
    "native_dropout": _dropout, "cross_entropy_loss": _cross_entropy, "cross_entropy_sum":
    _cross_entropy, "token_cross_entropy_sum": _cross_entropy,
    "vocabulary_cross_entropy_sum": _vocabulary_loss, "nll_loss": _nll, "nll_sum": _nll, "nll_loss_nd": _nll,
    "mse_loss": _both, "l1_loss": _both,
    "smooth_l1_loss": _both, "huber_loss": _both, "binary_cross_entropy": _both,
    "binary_cross_entropy_with_logits": _both, "max_pool2d": _max_pool,
    "max_pool2d_with_indices": _max_pool, "adaptive_avg_pool2d": _global_pool, "topk": _indices,
    "sort": _indices, "max": _indices, "min": _indices, "logsumexp": _input_and_output, "norm":
    _input_and_output, "linalg_vector_norm": _input_and_output, "prod": _input_and_output,
    OPAQUE: _opaque, **dict.fromkeys((*RECURRENCES, "packed_recurrence"), _recurrent),
}  # fmt: skip
