"""Which results share storage, whose gradients are each other's, and what an operator's kind is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from shardwright.core.graph import Operator, OperatorGraph

Shapes = tuple[tuple[int, ...], ...]
# What autograd keeps of an operator: which inputs and outputs, and bytes besides, by local shapes of both.
ExtraBytes = Callable[[Shapes, Shapes], int]
Saved = tuple[tuple[int, ...], tuple[int, ...], ExtraBytes]
Rule = Callable[[OperatorGraph, Operator, tuple[bool, ...]], Saved]

OPAQUE = "opaque"  # the bare name of every module that runs as one operator
MODULES = (OPAQUE, "rowwise")  # first words of their kinds

# Names that ATen has twice.
SAME = {
    "absolute": "abs", "clip": "clamp", "concat": "cat", "concatenate": "cat", "cross": "linalg_cross",
    "divide": "div", "ger": "outer", "multiply": "mul", "negative": "neg", "special_erf": "erf",
    "special_expit": "sigmoid", "subtract": "sub", "true_divide": "div",
}  # fmt: skip

VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze",
    "expand", "expand_as", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "flatten", "unflatten", "view_as", "reshape_as", "alias", "detach", "diagonal",
    "movedim", "swapaxes", "swapdims", "contiguous", "lift_fresh", "numpy_T", "mT", "unfold",
    "tensor_split", "ravel", "adjoint", "mH", "matrix_H", "view_as_real",
})  # fmt: skip

# Views that copy what does not lie in the order of its dims, and views that keep that order.
MAY_COPY = frozenset({"reshape", "reshape_as", "contiguous", "flatten", "ravel"})
KEEPS_ORDER = MAY_COPY | {"view", "view_as", "_unsafe_view", "unflatten", "unsqueeze", "squeeze"}

# Recurrences by what runs them.
RECURRENCES = {"lstm": "fused", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}

# Whose operands' gradients are their result's or parts of it, without a copy.
PASSES_PARTS = frozenset({"cat", "stack", "sum", "view_as_real"})
PASSES_ALL = frozenset({"add", "add_", "clone", "positive", "lift_fresh_copy"})


@cache
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


def shares_storage(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether results lie where the first operand does: views that copied nothing when captured, and what returns it."""
    views = is_view(base_kind(operator.kind)) and not operator.copied
    return bool(operator.inputs) and (views or is_identity(graph, operator))


def storages(graph: OperatorGraph) -> list[int]:
    """Return, per tensor, the tensor whose storage it shares (itself where it is new)."""
    storage = list(range(len(graph.tensors)))
    for operator in graph.operators:
        if shares_storage(graph, operator):
            for tensor in operator.outputs:
                storage[tensor] = storage[operator.inputs[0]]
    return storage


def is_identity(graph: OperatorGraph, operator: Operator) -> bool:
    """Whether the operator returns its input itself: a cast to the same dtype, no dropout."""
    bare = base_kind(operator.kind)
    if bare in {"to", "_to_copy", "type_as", "float"} and operator.inputs:
        same = graph.tensors[operator.inputs[0]].dtype == graph.tensors[operator.outputs[0]].dtype
        return same and bare != "_to_copy" and operator.attribute("copy") is not True
    if bare in {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}:
        return operator.attribute("p") in (0, 0.0) or operator.attribute("train") is False
    return False


def passes_gradient(
    operator: Operator, position: int, operand: tuple[int, ...], result: tuple[int, ...]
) -> bool:
    """Whether an operand's gradient lies where its result's does, given their (local) shapes."""
    bare = base_kind(operator.kind)
    bare = SAME.get(bare, bare)
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
