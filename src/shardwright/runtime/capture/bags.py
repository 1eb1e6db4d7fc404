"""Bags of embeddings: a lookup and a sum over each bag, where bags are rows of one length.

``embedding_bag`` takes all indices in one row and where each bag begins, which cannot be split by
samples; ``nn.EmbeddingBag`` makes it of indices ``b l``. Bags of any length stay one operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.runtime.capture import operators
from shardwright.runtime.capture.heads import reshaped_from
from shardwright.runtime.capture.record import Recorder, Value, aten, named_arguments

BAGS = frozenset({aten.embedding_bag.default, aten.embedding_bag.padding_idx})
SUM, MEAN, MAX = 0, 1, 2
RESULTS = 4


def summed(
    recorder: Recorder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Value]:
    """Emit a call whose bags are rows as a lookup and a sum; others as one operator of our own.

    The first of the operator's results then stands for all: the rest is for its own backward.
    """
    given = named_arguments(target, args, kwargs)
    rows = _as_rows(recorder, given)
    if rows is not None:
        return rows
    if given.get("scale_grad_by_freq"):
        return recorder.emit(target, *args, **kwargs)
    padding = given.get("padding_idx")
    found = recorder.emit(
        operators.embedding_bags, given["weight"], given["indices"], given["offsets"],
        given.get("per_sample_weights"), given.get("mode") or SUM,
        bool(given.get("include_last_offset")), None if padding is None or padding < 0 else padding,
    )  # fmt: skip
    return [found] * RESULTS


def _as_rows(recorder: Recorder, given: dict[str, Any]) -> list[Value] | None:
    rows, weights = reshaped_from(recorder, given["indices"]), given["per_sample_weights"]
    if rows is None or rows.meta.dim() != 2 or given.get("include_last_offset"):
        return None
    if not _begins_rows(recorder, given["offsets"], *rows.meta.shape):
        return None
    padding = given.get("padding_idx")
    emit = recorder.emit
    found = emit(
        aten.embedding.default, given["weight"], rows, -1,
        given["scale_grad_by_freq"], given["sparse"],
    )  # fmt: skip
    if weights is not None:
        shares = emit(aten.reshape.default, weights, [*rows.meta.shape, 1])
        found = emit(aten.mul.Tensor, found, shares)
    if padding is not None and padding >= 0:
        return [_without(emit, found, emit(aten.eq.Scalar, rows, padding), given["mode"])] * RESULTS
    if given["mode"] == MAX:  # of equal ones the first has the gradient; amax would share it out
        return [emit(aten.max.dim, found, 1)[0]] * RESULTS
    fold = aten.mean.dim if given["mode"] == MEAN else aten.sum.dim_IntList
    return [emit(fold, found, [1])] * RESULTS


def _without(emit: Callable[..., Any], found: Value, skipped: Value, mode: int) -> Value:
    """Emit the fold of what is not skipped; of nothing it is 0."""
    places = emit(aten.unsqueeze.default, skipped, -1)
    if mode == MAX:
        folded = emit(aten.max.dim, emit(aten.masked_fill.Scalar, found, places, -math.inf), 1)[0]
        return emit(aten.masked_fill.Scalar, folded, emit(aten.all.dim, skipped, 1, True), 0.0)
    folded = emit(aten.sum.dim_IntList, emit(aten.masked_fill.Scalar, found, places, 0.0), [1])
    if mode == SUM:
        return folded
    count = emit(aten.sum.dim_IntList, emit(aten.logical_not.default, skipped), [1], True)
    return emit(aten.div.Tensor, folded, emit(aten.clamp.default, count, 1))


def _begins_rows(recorder: Recorder, offsets: Value, rows: int, length: int) -> bool:
    """Whether offsets are 0, l, 2 l ...: where rows of this length begin."""
    record = recorder.records[offsets.producer] if offsets.producer >= 0 else None
    if record is None or record.target is not aten.arange.start_step:
        return False
    return (
        record.kwargs.get("start", 0),
        record.kwargs.get("end"),
        record.kwargs.get("step", 1),
    ) == (0, rows * length, length)
