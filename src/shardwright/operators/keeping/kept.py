"""What autograd keeps of each operator for its backward.

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
from typing import cast

from shardwright.core.graph import Operator, OperatorGraph
from shardwright.operators.derivatives import (
    OPAQUE,
    RECURRENCES,
    SAME,
    VIEWS,
    ExtraBytes,
    Rule,
    Saved,
    Shapes,
    base_kind,
    is_identity,
)
from shardwright.operators.keeping.contraction import kept_of_einsum, other_factors
from shardwright.operators.keeping.recurrent import kept_of_cell, kept_of_layers, number_bytes

# Names with nothing to keep: the gradient needs shapes only.
KEEPS_NOTHING = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "clone", "to", "_to_copy", "type_as",
    "add_", "sub_", "flip", "roll", "repeat", "constant_pad_nd", "tril", "triu", "vocabulary_logsumexp", "floor",
    "ceil", "round", "sign", "copy_", "fill_", "fill", "zero_", "float", "half", "bfloat16", "repeat_interleave",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "tile", "rot90", "diff", "im2col", "col2im", "deg2rad",
    "rad2deg", "frac", "trunc", "bernoulli", "lift_fresh_copy", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "diag_embed", "diagonal_scatter", "select_scatter", "slice_scatter", "place_slice",
    "meshgrid", "straight", "affine_grid_generator", "positive", "trace", "cartesian_prod", "as_complex",
    "view_as_complex", "real", "imag", "fft_fftshift", "fft_ifftshift", "fft_irfft", "fft_irfft2", "fft_irfftn",
    "fft_hfft", "fft_fft2", "fft_fftn", "fft_ifft2", "fft_ifftn", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
})  # fmt: skip

KEEPS_INPUT = frozenset({
    "gelu", "silu", "leaky_relu", "elu", "celu", "selu", "hardswish", "hardsigmoid", "softplus", "mish",
    "sin", "cos", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "sinc", "log", "log2",
    "log10", "log1p", "logit", "digamma", "lgamma", "abs", "erf", "erfc",
    "erfinv", "var", "var_mean", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "relu6", "hardtanh", "hardshrink", "softshrink", "threshold", "square", "glu",
    "nan_to_num", "nansum", "renorm", "i0", "mvlgamma", "polygamma", "special_entr", "special_ndtri",
})  # fmt: skip

KEEPS_OUTPUT = frozenset({
    "relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "_log_softmax", "exp", "exp2", "expm1",
    "tan", "sqrt", "rsqrt", "reciprocal", "relu_", "polar",
})  # fmt: skip

# Names of whose operands all are kept, and nothing of what they make.
KEEPS_OPERANDS = frozenset({
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "maximum", "minimum", "fmax", "fmin", "atan2", "complex", "linalg_cross",
    "logaddexp", "logaddexp2", "outer", "prelu", "grid_sampler", "vdot", "xlogy", "special_xlog1py",
    "clamp", "clamp_min", "clamp_max",
    "_grouped_mm", "grouped_mm_fallback", "grouped_product",
})  # fmt: skip

# Input positions of index or mask arguments which backward needs, everything else it does not.
KEEPS_POSITIONS = {
    "embedding": (1,), "gather": (0, 1), "index_select": (1,), "where": (0,), "masked_fill": (1,),
    "index": (1, 2, 3), "scatter": (1,), "scatter_add": (1,),
    "index_add": (1, 2), "index_copy": (1, 2), "index_fill": (1,), "take_along_dim": (1,), "take": (0, 1),
    "addcdiv": (1, 2), "addcmul": (1, 2), "bilinear": (0, 1, 2), "max_unpool2d": (1,),
    # Image and weight, whichever of them is trained: one formula makes all gradients.
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
                     "conv_transpose3d"), (0, 1)),
}  # fmt: skip

# Positions of inputs and outputs that backward needs, by the operator's name.
KEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(VIEWS | KEEPS_NOTHING, ((), ())),
    **dict.fromkeys(KEEPS_INPUT, ((0,), ())),
    **dict.fromkeys(KEEPS_OUTPUT, ((), (0,))),
    **{name: (positions, ()) for name, positions in KEEPS_POSITIONS.items()},
    **dict.fromkeys(("kthvalue", "mode", "topk", "sort"), ((), (1,))),
    **dict.fromkeys(("std", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "prod"), ((0,), (0,))),
    **dict.fromkeys(("stft", "matrix_exp", "linalg_matrix_exp"), ((0,), ())),
    **dict.fromkeys(("cholesky", "linalg_cholesky", "linalg_cholesky_ex", "inverse", "linalg_inv"), ((), (0,))),
    "cummax": ((0,), (1,)), "cummin": ((0,), (1,)), "linalg_eigh": ((), (0, 1)), "linalg_qr": ((), (0, 1)),
    "linalg_svd": ((), (0, 1, 2)), "_linalg_svd": ((), (0, 1, 2)), "linalg_lu_factor_ex": ((), (0, 1)),
    "linalg_solve_triangular": ((0,), (0,)), "native_dropout": ((), (1,)),
    **dict.fromkeys(("scatter_reduce", "index_reduce"), ((0, 1, 2), (0,))),
}  # fmt: skip

# What is kept of operators that keep something beside operands and results: positions of these, and bytes by those of
# a number and the shapes of inputs and outputs.
BESIDE: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[int, Shapes, Shapes], int]]] = {
    # The difference; of a distance that, and how long it is.
    "l1_loss": ((), (), lambda size, i, _o: size * max(map(math.prod, i))),
    "pairwise_distance": ((), (0,), lambda size, i, _o: size * max(map(math.prod, i))),
    # Log-probabilities, and the targets; the total weight is one number.
    **dict.fromkeys(
        ("cross_entropy_loss", "cross_entropy_sum", "token_cross_entropy_sum"),
        ((1,), (), lambda size, i, _o: size * (math.prod(i[0]) + 1)),
    ),
    # Direction, length wanted, length found.
    "_weight_norm": ((0, 1), (), lambda size, i, _o: size * math.prod(i[1])),
    # Per sample and channel two statistics and the scale.
    "instance_norm": ((0,), (), lambda _size, i, _o: 12 * math.prod(i[0][:2])),
    # A factor for each channel of each sample.
    "feature_dropout": ((), (), lambda size, i, _o: size * math.prod(i[0][:2])),
    # A matrix, its factors and pivots, and what came of them.
    **dict.fromkeys(
        ("det", "linalg_det", "logdet", "linalg_slogdet", "linalg_solve"),
        ((0,), (0,), lambda size, i, _o: size * math.prod(i[0]) + 4 * math.prod(i[0][:-1])),
    ),
    # What was sorted, whence it came, and of each result the places and numbers on both sides and their weights.
    **dict.fromkeys(
        ("quantile", "nanquantile"),
        ((), (), lambda size, i, o: (size + 8) * math.prod(i[0]) + (3 * size + 16) * math.prod(o[0])),
    ),
}  # fmt: skip

PRODUCTS = frozenset({"linear", "linear_blocks", "mm", "bmm", "mul", "inner", "tensordot",
                      "kron", "mv", "dot"})  # fmt: skip


def _floating(graph: OperatorGraph, tensors: tuple[int, ...]) -> tuple[int, ...]:
    """Return at which positions there are floating-point numbers."""
    return tuple(i for i, tensor in enumerate(tensors) if graph.tensors[tensor].is_floating)


def _trained(graph: OperatorGraph, tensors: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(graph.tensors[index].needs_gradient for index in tensors)


def saved_tensors(
    graph: OperatorGraph, operator: Operator
) -> tuple[tuple[int, ...], tuple[int, ...], ExtraBytes]:
    """Return (input positions, output positions, extra) that autograd saves for backward.

    ``extra(input_shapes, output_shapes)`` are the bytes of statistics, masks and intermediates that
    are no tensor of the graph. Nothing is saved where no input needs a gradient or no output has one.
    """
    needs, made = _trained(graph, operator.inputs), _trained(graph, operator.outputs)
    if not (any(needs) and any(made)) or is_identity(graph, operator):
        return (), (), _nothing
    bare = base_kind(operator.kind)
    bare = SAME.get(bare, bare)
    rule = _told if operator.attribute("saves") is not None else SPECIAL.get(bare)
    if rule is not None:
        return rule(graph, operator, needs)
    if bare in KEPT:
        inputs, outputs = KEPT[bare]
        return tuple(p for p in inputs if p < len(needs)), outputs, _nothing
    if bare in BESIDE:
        (inputs, outputs, count), size = BESIDE[bare], number_bytes(graph, operator)
        return inputs, outputs, lambda i, o: count(size, i, o)
    return _floating(graph, operator.inputs), _floating(graph, operator.outputs), _nothing


def _nothing(_inputs: Shapes, _outputs: Shapes) -> int:
    return 0


def _addmm(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    return tuple(mine for mine, partner in ((1, 2), (2, 1)) if needs[partner]), (), _nothing


def _div(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    if len(needs) == 1:
        return (), (), _nothing
    return ((0, 1) if needs[1] else (1,)), (), _nothing


def _unless_scalar(tensors: int) -> Rule:
    """Where all of so many operands are tensors they are kept; nothing where one is a number."""

    def rule(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
        return (tuple(range(tensors)) if len(needs) >= tensors else ()), (), _nothing

    return rule


def _power(_graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """The result too where an exponent is trained."""
    is_number = operator.kind.endswith("Tensor_Scalar")
    return tuple(range(len(needs))), (() if is_number else (0,)), _nothing


def _extreme(_graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Of a whole tensor or of two: what is compared; along a dim: where it was found."""
    if len(operator.outputs) > 1:
        return (), (1,), _nothing
    return tuple(range(len(needs))), ((0,) if len(needs) == 1 else ()), _nothing


def _product(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Each factor whose partner wants a gradient, or its copy."""
    kept, size = other_factors(needs), number_bytes(graph, operator)
    copies = [place for place in kept if place in operator.copied]
    original = tuple(place for place in kept if place not in copies)
    return original, (), lambda i, _o: size * sum(math.prod(i[place]) for place in copies)


def _operands(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    return tuple(range(len(needs))), (), _nothing


def _spectrum(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """Real numbers are kept, for their type and lengths; filled up, where more than there are were asked for."""
    if "complex" in graph.tensors[operator.inputs[0]].dtype:
        return (), (), _nothing
    asked, dim = operator.attribute("n"), operator.attribute("dim", -1)
    length = graph.tensors[operator.inputs[0]].shape[dim if isinstance(dim, int) else -1]
    if not isinstance(asked, int) or asked <= length:
        return (0,), (), _nothing
    size = number_bytes(graph, operator)
    return (), (), lambda i, _o: size * math.prod(i[0]) * asked // length


def _divergence(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Of a target given as logarithms its exponentials, and where it is trained the difference."""
    if operator.attribute("log_target") is not True:
        return ((0, 1) if needs[1] else (1,)), (), _nothing
    copies = number_bytes(graph, operator) * (1 + needs[1])
    return (), (), lambda i, _o: copies * math.prod(i[0])


def _log_sigmoid(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """A CPU keeps exponentials too."""
    size = number_bytes(graph, operator) * (graph.backend == "cpu")
    return (0,), (), lambda i, _o: size * math.prod(i[0])


def _cosine(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """Both, both of length one, and lengths twice."""
    size = number_bytes(graph, operator)
    dim = operator.attribute("dim", 1)

    def extra(inputs: Shapes, outputs: Shapes) -> int:
        length = max(shape[dim] for shape in inputs) if isinstance(dim, int) else 1
        return size * math.prod(outputs[0]) * (2 * length + 4)

    return (0, 1), (), extra


def _matmul(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Matrices that one side has fewer of are copied for each of the other's."""
    left, right = (graph.tensors[tensor].shape for tensor in operator.inputs)
    if min(len(left), len(right)) < 3 or left[:-2] == right[:-2]:
        return _product(graph, operator, needs)
    kept, size = other_factors(needs), number_bytes(graph, operator)

    def copies(inputs: Shapes, outputs: Shapes) -> int:
        matrices = math.prod(outputs[0][:-2])
        return size * matrices * sum(math.prod(inputs[position][-2:]) for position in kept)

    return (), (), copies


def _pad(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """Reflected and repeated edges need what they were made of."""
    return ((0,) if operator.attribute("mode", "constant") != "constant" else ()), (), _nothing


def _index_put(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """The indices, which lie between what is written to and what is written."""
    return tuple(range(1, len(needs) - 1)), (), _nothing


def _bags(_graph: OperatorGraph, _operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """Where rows are, and with weights of their own the rows."""
    return (tuple(range(4)) if len(needs) > 3 else (1, 2)), (), _nothing


def _normalised(per_row: int) -> Rule:
    """Layer or RMS norm: the input, the scale, and ``per_row`` float32 statistics per row. A CPU composes the latter of
    operators, and keeps what it scales."""

    def rule(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
        dims = operator.attribute("normalized_shape")
        tail = len(dims) if isinstance(dims, tuple) else 1
        kept = tuple(range(min(2, len(needs))))
        scaled = per_row == 1 and len(needs) > 1 and graph.backend == "cpu"
        size = number_bytes(graph, operator) * scaled

        def extra(inputs: Shapes, _outputs: Shapes) -> int:
            rows = math.prod(inputs[0][: len(inputs[0]) - tail])
            return 4 * per_row * rows + size * math.prod(inputs[0])

        return kept, (), extra

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
    of_batch = 8 * (operator.attribute("training") is not False)
    return kept, (), lambda i, _o: of_batch * i[0][1]


def _flash(graph: OperatorGraph, operator: Operator) -> Saved:
    """Operands, the result, one logsumexp per query row, and of a mask of truths one of numbers."""
    size, kept = number_bytes(graph, operator), tuple(range(len(operator.inputs)))
    marks = any(graph.tensors[tensor].dtype == "bool" for tensor in operator.inputs)
    masked = size * marks

    def extra(inputs: Shapes, _outputs: Shapes) -> int:
        return max(4, size) * math.prod(inputs[0][:-1]) + masked * math.prod(inputs[-1])

    return kept[: 3 if marks else None], (0,), extra


def _attention(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    """What ``_flash`` says; where a CPU composes it (dropout, trained masks, heads of unlike widths), copies of queries,
    keys and values that lie as products want them, and scores after softmax; dropped, the mask and these scores too."""
    size = number_bytes(graph, operator)
    drops = operator.attribute("dropout_p", 0.0)
    drawn = isinstance(drops, int | float) and drops > 0
    query, _, value = (graph.tensors[tensor].shape for tensor in operator.inputs[:3])
    unlike = len(query) != 4 or value[-1] != query[-1] or any(needs[3:])
    if graph.backend != "cpu" or not (drawn or unlike):
        return _flash(graph, operator)

    def composed(inputs: Shapes, _outputs: Shapes) -> int:
        q, k, v = inputs[:3]
        scores, repeats = math.prod(q[:-1]) * k[-2], math.prod(q[:-2]) // max(math.prod(k[:-2]), 1)
        copies = math.prod(q) + repeats * (math.prod(k) + math.prod(v))
        return size * (copies + (3 if drawn else 1) * scores)

    return (), (), composed


def _dropout(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What was dropped is kept: a GPU's kernel marks it in a byte."""
    marks = graph.backend == "cuda"
    size = 1 if marks else number_bytes(graph, operator)
    return (), (), lambda i, _o: size * math.prod(i[0])


def _nll(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    size = number_bytes(graph, operator)
    return tuple(range(len(needs))), (), lambda _i, _o: size


def _vocabulary_loss(graph: OperatorGraph, operator: Operator, needs: tuple[bool, ...]) -> Saved:
    if operator.attribute("kernel") != "log_softmax":
        return tuple(range(len(needs))), (), _nothing
    size = number_bytes(graph, operator)
    return (1,), (), lambda i, _o: size * math.prod(i[0])


def _max_pool(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    if len(operator.outputs) > 1:
        return (0,), (1,), _nothing
    return (0,), (), lambda _i, o: 8 * math.prod(o[0])


def _global_pool(_graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    size = operator.attribute("output_size")
    # A pool to one value per channel is a mean, which keeps nothing.
    is_mean = isinstance(size, tuple) and all(extent == 1 for extent in size)
    return (() if is_mean else (0,)), (), _nothing


def _opaque(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What it makes inside, as was seen of all rows, besides its operands and results."""
    shape = graph.tensors[operator.inputs[0]].shape
    rows, kept = (shape[0] if shape else 1), operator.kept_bytes
    inputs, outputs = (_floating(graph, indices) for indices in (operator.inputs, operator.outputs))
    return inputs, outputs, lambda i, _o: round(kept * (i[0][0] if i[0] else 1) / rows)


def _told(graph: OperatorGraph, operator: Operator, _needs: tuple[bool, ...]) -> Saved:
    """What a function with a gradient of its own was seen to keep: operands, results behind them, and others."""
    count, whole = len(operator.inputs), math.prod(graph.tensors[operator.inputs[0]].shape)
    saves = cast("tuple[int, ...]", operator.attribute("saves"))
    inputs = tuple(place for place in saves if place < count)
    outputs = tuple(place - count for place in saves if place >= count)
    kept = operator.kept_bytes / max(whole, 1)
    return inputs, outputs, lambda i, _o: round(kept * math.prod(i[0]))


SPECIAL: dict[str, Rule] = {
    **dict.fromkeys(KEEPS_OPERANDS, _operands), **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr"), _addmm),
    **dict.fromkeys(("max", "min", "median", "nanmedian"), _extreme),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_rfft2", "fft_rfftn"), _spectrum),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
                     "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d",
                     "adaptive_max_pool3d"), _max_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _global_pool),
    **dict.fromkeys(("nll_loss", "nll_sum", "nll_loss_nd"), _nll),
    **dict.fromkeys((*RECURRENCES, "packed_recurrence"), kept_of_layers),
    **dict.fromkeys(("dropout", "alpha_dropout"), _dropout),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), _normalised(2)),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), _normalised(1)),
    **dict.fromkeys(("fmod", "remainder"), _unless_scalar(2)), "lerp": _unless_scalar(3),
    "div": _div, "pow": _power, "group_norm": _group_norm, "batch_norm": _batch_norm,
    "scaled_dot_product_attention": _attention,
    "vocabulary_cross_entropy_sum": _vocabulary_loss, "log_sigmoid": _log_sigmoid,
    "cosine_similarity": _cosine, "gru_cell": kept_of_cell(6), "lstm_cell": kept_of_cell(5), "embedding_bags": _bags,
    "matmul": _matmul, "pad": _pad, "index_put": _index_put,
    "einsum": kept_of_einsum, "kl_div": _divergence, OPAQUE: _opaque,
}  # fmt: skip
