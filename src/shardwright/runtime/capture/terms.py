"""Terms of a loss that no sample has a part in: penalties on weights, added to a mean over the batch.

Every microbatch would add them again, and no partial sum could pass. As the mean of one equal number per
sample they are as large, and share out like the rest of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch

from shardwright.runtime.capture.record import Record, Recorder, Value, aten, tensors_in
from shardwright.runtime.randomness import is_random

# How a sum is written with both terms as tensors.
SUMS: dict[Any, Any] = {one: one for one in (aten.add.Tensor, aten.sub.Tensor)} | {
    aten.rsub.Scalar: aten.sub.Tensor
}
# Through these the terms of their first argument are still terms of the result.
SCALED = frozenset(
    {
        aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
        aten.reshape.default, aten.to.dtype, aten.sum.default, aten.mean.default, aten.squeeze.dims,
    }
)  # fmt: skip
DEEPEST = 200  # sums in sums; those of longer chains are left as they are


def shared_out(recorder: Recorder, loss: Value, batch: Sequence[Value]) -> Value:
    """Return the loss with every such term shared out among the batch's rows, the loss itself without any."""
    rows = max((one.meta.shape[0] for one in batch if one.meta.dim()), default=0)
    if rows < 2:
        return loss
    moving = _moving(recorder.records, batch)
    return _rewritten(recorder, loss, moving, rows) if loss in moving else loss


def _moving(records: Iterable[Record], batch: Iterable[Value]) -> set[Value]:
    """Return what depends on the batch, or is drawn."""
    found = set(batch)
    for record in records:
        inputs = tensors_in([record.args, list(record.kwargs.values())])
        is_drawn = is_random(record.target, record.args, record.kwargs)
        if is_drawn or not found.isdisjoint(inputs):
            found.update(record.outputs)
    return found


def _rewritten(
    recorder: Recorder, value: Value, moving: set[Value], rows: int, depth: int = 0
) -> Value:
    if value.producer < 0 or value.meta.numel() != 1 or depth > DEEPEST:
        return value
    record = recorder.records[value.producer]
    target, old, named = _linear_in(record, moving)
    new: list[Any] = []
    for one in old:
        if isinstance(one, Value) and one in moving:
            new.append(_rewritten(recorder, one, moving, rows, depth + 1))
        else:
            new.append(_per_row(recorder, one, value, rows) if target in SUMS else one)
    same = all(map(is_, new, old)) and not _is_turned(record, moving)
    return value if same else recorder.emit(target, *new, **named)


def _linear_in(record: Record, moving: set[Value]) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return a call that makes what a record makes, its arguments none where terms do not pass."""
    if record.target in SUMS and (terms := _terms(record)):
        return SUMS[record.target], terms, {}
    if _is_turned(record, moving):
        return record.target, list(record.args[::-1]), record.kwargs
    if record.target in SCALED and moving.isdisjoint(tensors_in(list(record.args[1:]))):
        return record.target, list(record.args), record.kwargs
    return record.target, [], {}


def _is_turned(record: Record, moving: set[Value]) -> bool:
    """Whether a weight is multiplied by what it weighs: partial sums pass through a product's first factor."""
    is_product = record.target is aten.mul.Tensor and len(record.args) == 2
    return is_product and record.args[0] not in moving and record.args[1] in moving


def _terms(record: Record) -> list[Any]:
    """Return the two terms of a sum, none where one is multiplied."""
    given = dict(zip(("self", "other"), record.args)) | record.kwargs
    if given.pop("alpha", 1) != 1:
        return []
    terms = [given["self"], given["other"]]
    return terms[::-1] if record.target is aten.rsub.Scalar else terms


def _per_row(recorder: Recorder, given: Value | float, total: Value, rows: int) -> Value:
    term = given if isinstance(given, Value) else _number(recorder, given, total)
    if term.meta.numel() != 1 or not term.meta.is_floating_point():
        return term
    with torch.set_grad_enabled(term.meta.requires_grad):
        flat = recorder.emit(aten.reshape.default, term, [])
        mean = recorder.emit(aten.mean.default, recorder.emit(aten.expand.default, flat, [rows]))
        return recorder.emit(aten.reshape.default, mean, [*term.meta.shape])


def _number(recorder: Recorder, number: float, total: Value) -> Value:
    with torch.no_grad():
        return recorder.emit(aten.full.default, [], number, dtype=total.meta.dtype, device=None)
