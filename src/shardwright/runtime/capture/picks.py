"""Spellings of models that hide the samples: an element per row picked by ``arange``, parameters repeated
for the batch, sums that begin with zeros, joins that begin with nothing. Each is written here as what shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.runtime.capture.record import Recorder, Value, aten

ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default})
_EXPANSIONS = frozenset({aten.expand.default, aten.expand_as.default})
_VIEWS = frozenset({aten.reshape.default, aten.unsqueeze.default})


def shown(
    recorder: Recorder, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Value | None:
    """Return what a call makes, by operators that show samples; None where they would not. It is for the
    caller a new tensor, though its memory may be an argument's."""
    found = _SHOWN.get(target)
    if found is None or kwargs:
        return None
    made = found(recorder, args)
    return None if made is None else recorder.cut(made)


def _sum(recorder: Recorder, args: Sequence[Any]) -> Value | None:
    """Return the other term of a sum with zeros: partial sums pass through nothing better."""
    terms = args[:2]
    if not all(isinstance(term, Value) for term in terms):
        return None
    for zeros, other in (terms, terms[::-1]):
        if not _is_zeros(recorder, zeros) or not other.meta.is_floating_point():
            continue
        made = zeros.meta + other.meta
        if made.dtype != other.meta.dtype:
            continue
        if made.shape == other.meta.shape:
            return other
        if made.numel() == other.meta.numel():
            return recorder.emit(aten.reshape.default, other, [*made.shape])
    return None


def _is_zeros(recorder: Recorder, value: Value) -> bool:
    record = _maker(recorder, value)
    return record is not None and record.target in ZEROS


def _index(recorder: Recorder, args: Sequence[Any]) -> Value | None:
    """Return ``x[rows, i]``, where ``rows`` counts those of ``x`` along the result's first dim, as choices along
    dim 1 in every row."""
    source, places = args
    found = _in_rows(recorder, source, places)
    if found is None:
        return None
    index, made = found
    picked = recorder.emit(aten.gather.default, source, 1, index)
    return recorder.emit(aten.reshape.default, picked, made)


def _put(recorder: Recorder, args: Sequence[Any]) -> Value | None:
    """Return ``x[rows, i] = values``, where ``rows`` counts those of ``x``, as places along dim 1 in every row."""
    source, places, values, *accumulate = args
    found = _in_rows(recorder, source, places)
    if found is None or accumulate not in ([], [False]):
        return None
    index, made = found
    emit = recorder.emit
    values = emit(aten.expand.default, values, made)
    values = emit(aten.reshape.default, values, [*index.meta.shape])
    return emit(aten.scatter.src, source, 1, index, values)


def _in_rows(
    recorder: Recorder, source: Value, places: Sequence[Any]
) -> tuple[Value, list[int]] | None:
    """Return the places along dim 1 that ``x[rows, i]`` chooses in every row and at all further dims, and the shape
    of what is chosen; None where rows are not counted."""
    if len(places) < 2 or any(one is not None for one in places[2:]):
        return None
    rows, chosen = places[:2]
    if not (isinstance(rows, Value) and isinstance(chosen, Value)):
        return None
    count, width, *rest = source.meta.shape
    made = torch.broadcast_shapes(rows.meta.shape, chosen.meta.shape)
    is_plain = rows.meta.dim() == len(made) and chosen.meta.dtype.itemsize == 8
    if not is_plain or not _counts(recorder, rows, count):
        return None
    emit = recorder.emit
    ahead = emit(aten.add.Scalar, chosen, width)
    chosen = emit(aten.where.self, emit(aten.lt.Scalar, chosen, 0), ahead, chosen)
    each = made.numel() // count
    index = emit(aten.reshape.default, emit(aten.expand.default, chosen, [*made]), [count, each])
    index = emit(aten.reshape.default, index, [count, each, *[1] * len(rest)])
    return emit(aten.expand.default, index, [count, each, *rest]), [*made, *rest]


def _unexpanded(recorder: Recorder, rows: Value) -> Value:
    """Return what was expanded along dims of its own."""
    record = _maker(recorder, rows)
    if record is None or record.target not in _EXPANSIONS:
        return rows
    return record.args[0] if record.args[0].meta.dim() == rows.meta.dim() else rows


def _counts(recorder: Recorder, rows: Value, count: int) -> bool:
    """Whether integers are 0, 1, ... up to as many rows along dim 0, of which each has one (or that one everywhere)."""
    rows = _unexpanded(recorder, rows)
    if rows.meta.shape[:1] != (count,) or rows.meta.numel() != count:
        return False
    record = _maker(recorder, rows)
    while record is not None and record.target in _VIEWS:
        record = _maker(recorder, record.args[0])
    if record is None or rows.meta.is_floating_point():
        return False
    is_plain = record.target is aten.arange.default or (
        record.target is aten.arange.start and record.kwargs.get("start", 0) == 0
    )
    return is_plain and record.outputs[0].meta.shape == (count,)


def _cat(recorder: Recorder, args: Sequence[Any]) -> Value | None:
    """Return what is joined without the nothing that it begins with, ``torch.tensor([])``, of whatever shape the rest is."""
    parts, *dim = args
    filled = [one for one in parts if one.meta.shape != (0,)]
    if len(filled) in (0, len(parts)):
        return None
    joined = torch.cat([one.meta for one in parts], *dim)
    if any(one.meta.dtype != joined.dtype for one in filled):
        return None
    return filled[0] if len(filled) == 1 else recorder.emit(aten.cat.default, filled, *dim)


def _repeat(recorder: Recorder, args: Sequence[Any]) -> Value | None:
    """Return a repetition along dims of size 1 as an expansion, which a gradient sums over."""
    source, times = args
    before = [*[1] * (len(times) - source.meta.dim()), *source.meta.shape]
    if all(n == 1 for n in times) or any(n > 1 and old > 1 for n, old in zip(times, before)):
        return None
    if not all(times):
        return None
    return recorder.emit(aten.expand.default, source, [n * old for n, old in zip(times, before)])


def diagonal_filled(recorder: Recorder, matrix: Value, number: float) -> Value:
    """Return a matrix with a number on its diagonal."""
    places = recorder.emit(aten.eye.m, *matrix.meta.shape, dtype=torch.bool, device=None)
    return recorder.emit(aten.masked_fill.Scalar, matrix, places, number)


def _maker(recorder: Recorder, value: Value) -> Any:
    return recorder.records[value.producer] if value.producer >= 0 else None


_SHOWN: dict[Any, Callable[[Recorder, Sequence[Any]], Value | None]] = {
    aten.add.Tensor: _sum,
    aten.cat.default: _cat,
    aten.index.Tensor: _index,
    aten.index_put.default: _put,
    aten.repeat.default: _repeat,
}
