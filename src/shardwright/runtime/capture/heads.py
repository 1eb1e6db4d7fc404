"""Batched products whose batch is samples and heads merged into one dim, as they were before.

``bmm`` takes one batch dim, so models merge two for it and take them apart behind it. A merged dim
can be split by its first factor only; as a product of four-dimensional tensors both can be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.runtime.capture.record import Recorder, Value, aten, shares_storage

MERGING = frozenset({aten.bmm.default, aten.baddbmm.default})
EXPANDING = frozenset({aten.expand.default, aten.expand_as.default})


def reshaped_from(recorder: Recorder, value: Value) -> Value | None:
    """Return what a value is a reshape of, None where it is none."""
    return _made_from(recorder, value, frozenset({aten.reshape.default}))


def expanded_from(recorder: Recorder, value: Value) -> Value | None:
    """Return what a value is copies of, None where it is none."""
    return _made_from(recorder, value, EXPANDING)


def _made_from(recorder: Recorder, value: Value, targets: frozenset[Any]) -> Value | None:
    record = recorder.records[value.producer] if value.producer >= 0 else None
    return record.args[0] if record and record.target in targets else None


def there_and_back(recorder: Recorder, value: Value, shape: list[int]) -> Value | None:
    """Return what a value was before it was reshaped, where it is to get that shape again, in the
    same memory: a write to one must change the other."""
    before = reshaped_from(recorder, value)
    if before is None or list(before.meta.shape) != shape or not shares_storage(before, value):
        return None
    return before


def apart(recorder: Recorder, target: Any, args: Sequence[Any], given: dict[str, Any]) -> Any:
    """Emit a product of merged batches as one of those before merging; None where they are not."""
    left, right = (_before_merging(recorder, value) for value in args[-2:])
    if left is None or right is None or left.meta.shape[:2] != right.meta.shape[:2]:
        return None
    emit, batch = recorder.emit, list(left.meta.shape[:2])
    result = emit(aten.matmul.default, left, right)
    merged = [batch[0] * batch[1], *result.meta.shape[2:]]
    if target is aten.baddbmm.default:
        added, alpha, beta = args[0], given.get("alpha", 1), given.get("beta", 1)
        if added.meta.dim() == 3 and added.meta.shape[0] == merged[0]:
            added = emit(aten.reshape.default, added, [*batch, *added.meta.shape[1:]])
        elif added.meta.shape[:-2] not in ((), (1,)):
            return None
        if alpha != 1:
            result = emit(aten.mul.Scalar, result, alpha)
        if beta:
            added = emit(aten.mul.Scalar, added, beta) if beta != 1 else added
            result = emit(aten.add.Tensor, result, added)
    return emit(aten.reshape.default, result, merged)


def _before_merging(recorder: Recorder, value: Value) -> Value | None:
    """Return the four-dimensional tensor whose first two dims were merged, maybe transposed since."""
    source = reshaped_from(recorder, value)
    if source is not None:
        is_merged = source.meta.dim() == 4 and source.meta.shape[2:] == value.meta.shape[1:]
        return source if is_merged else None
    record = recorder.records[value.producer] if value.producer >= 0 else None
    if record is None or record.target is not aten.transpose.int:
        return None
    dims = {dim % 3 for dim in (record.kwargs["dim0"], record.kwargs["dim1"])}
    inner = _before_merging(recorder, record.args[0]) if dims == {1, 2} else None
    return None if inner is None else recorder.emit(aten.transpose.int, inner, 2, 3)
