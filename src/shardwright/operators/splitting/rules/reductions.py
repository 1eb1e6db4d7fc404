"""Operators that fold or scan dims: sums, extrema, norms, softmax, cumulative sums, sorting.

A sum leaves partial sums when its dim is split. Every other fold needs the whole dim.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.operators.splitting.iteration import Iteration
from shardwright.operators.splitting.rules.notation import equation
from shardwright.operators.splitting.rules.signature import (
    Names,
    NotUnderstood,
    Rule,
    Signature,
    blank,
    broadcast,
    broadcast_shape,
    family,
    leading,
    numbered,
    space,
    without,
)


def total(call: Signature) -> Iteration:
    """Sum over ``dim``, or everything; any dim can be split."""
    names, after = _folded(call)
    return space(call, [names], [after], linear=(0,))


def average(call: Signature) -> Iteration:
    """Average over ``dim``, or everything; any dim can be split if the result is scaled."""
    names, after = _folded(call)
    return space(call, [names], [after], mean=set(names) - set(after), linear=(0,))


def count(call: Signature) -> Iteration:
    """Count over ``dim``, or everything, or sum what is a number; results add up, but not those of partial sums."""
    names, after = _folded(call)
    return space(call, [names], [after])


def fold(call: Signature) -> Iteration:
    """Fold ``dim`` whole and split the others; all results have the same dims."""
    names, after = _folded(call)
    kept = tuple(name if name in after else "" for name in names)
    return space(call, [kept], [after] * len(call.outputs))


def _folded(call: Signature) -> tuple[Names, Names]:
    rank = len(call.inputs[0])
    names = numbered(rank)
    dims = {dim % max(rank, 1) for dim in call.integers("dim")} or set(range(rank))
    return names, without(names, dims, keepdim=call.attribute("keepdim") is True)


def quantiles(call: Signature) -> Iteration:
    """Fold ``dim`` whole into as many results as there are quantiles, which become a new first dim, and split the others."""
    names = numbered(len(call.inputs[0]))
    dim = call.attribute("dim")
    dims = set(range(len(names))) if dim is None else {call.tensor_dim("dim")}
    after = without(names, dims, keepdim=call.attribute("keepdim") is True)
    many = ("",) * len(call.inputs[1])
    return space(call, [blank(names, dims), many], [(*many, *after)])


def fold_last(call: Signature) -> Iteration:
    """Fold ``dim``, by default the last, whole."""
    rank = len(call.inputs[0])
    names = numbered(rank)
    dim = call.tensor_dim("dim", -1)
    after = without(names, {dim}, keepdim=call.attribute("keepdim") is True)
    return space(call, [blank(names, {dim})], [after] * len(call.outputs))


def along(call: Signature) -> Iteration:
    """Work along ``dim``, by default the last, and keep it: softmax, sort, topk."""
    names = blank(numbered(len(call.inputs[0])), {call.tensor_dim("dim", -1)})
    return space(call, [names] * len(call.inputs), [names] * len(call.outputs))


def cross(call: Signature) -> Iteration:
    """Multiply vectors that lie along ``dim``; the other dims split where both have them."""
    if call.attribute("dim") is None and call.kind == "aten.cross.default":
        raise NotUnderstood("a cross product along the first dim of three")
    if len(call.inputs[0]) != len(call.inputs[1]) or call.inputs[0] != call.inputs[1]:
        raise NotUnderstood("a cross product that is broadcast")
    return along(call)


def scan(call: Signature) -> Iteration:
    """Work along ``dim`` linearly: cumulative sums and differences."""
    return replace(along(call), linear=tuple(range(len(call.inputs))))


def integral(call: Signature) -> Iteration:
    """Integrate along ``dim`` at places that all share, or of each its own."""
    values, places = call.inputs
    dim = call.tensor_dim("dim", -1)
    names = numbered(len(values))
    if len(places) > 1 and places != values:
        raise NotUnderstood("places that are broadcast")
    along = blank(names, {dim})
    where = along if len(places) > 1 else ("",)
    return space(call, [along, where], [without(names, {dim})], linear=(0,))


def pairwise_distance(call: Signature) -> Iteration:
    """Split the rows of which distances are taken."""
    if len(set(call.inputs)) > 1:
        raise NotUnderstood("rows that are broadcast")
    rows = leading(len(call.inputs[0]) - 1)
    made = (*rows, "") if call.attribute("keepdim") is True else rows
    return space(call, [(*rows, "")] * 2, [made])


def cosine_similarity(call: Signature) -> Iteration:
    """Compare two broadcast tensors along ``dim``."""
    full = broadcast_shape(call.inputs)
    dim = call.tensor_dim("dim", 1, rank=len(full))
    names = blank(numbered(len(full)), {dim})
    inputs = [broadcast(shape, names, full) for shape in call.inputs]
    return space(call, inputs, [without(names, {dim})])


def histogram(call: Signature) -> Iteration:
    """Count into fixed bins: every element is counted on its own."""
    if call.attribute("min", 0) == call.attribute("max", 0):
        return fold(call)  # the data decide the range
    return space(call, [numbered(len(call.inputs[0]))], [("",)])


RULES: dict[str, Rule] = {
    **family(total, "sum.default sum.dim_IntList"),
    **family(average, "mean.default mean.dim"),
    **family(count, "count_nonzero.default count_nonzero.dim_IntList nansum.default"),
    **family(
        fold,
        """
        all.default all.dim all.dims amax.default amin.default aminmax.default any.default any.dim
        any.dims argmax.default argmin.default linalg_vector_norm.default median.default
        nanmedian.default std_mean.default std_mean.dim var_mean.default var_mean.dim
        logsumexp.default special_logsumexp.default nanmean.default quantile.scalar
        nanquantile.scalar max.default max.dim min.default min.dim norm.Scalar norm.ScalarOpt_dim
        prod.default prod.dim_int std.correction std.default std.dim std_mean.correction
        var.correction var.default var.dim var_mean.correction
        """,
    ),
    **family(quantiles, "quantile.default nanquantile.default"),
    **family(fold_last, "kthvalue.default median.dim mode.default nanmedian.dim"),
    **family(
        along,
        """
        _log_softmax.default _softmax.default argsort.default argsort.stable cummax.default
        cummin.default cumprod.default glu.default log_softmax.int logcumsumexp.default softmax.int
        sort.default sort.stable topk.default
        """,
    ),
    **family(scan, "cumsum.default diff.default"),
    "aten.trapezoid.x": integral,
    **family(cross, "cross.default linalg_cross.default"),
    "aten.cosine_similarity.default": cosine_similarity,
    "aten.dist.default": equation("self _.., other _.. ->"),
    "aten.pairwise_distance.default": pairwise_distance,
    "aten.histc.default": histogram,
}
