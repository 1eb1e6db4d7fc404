"""Fused projections with slots for unlike things: the heads of many queries beside one key and value.

As one product its columns can hardly be split: a piece would hold some queries, another the rest and
the key. Rewritten as a product for each, with slices of the one weight, queries are split by heads
while key and value are made everywhere, as multi-query attention is split over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.runtime.capture.assemble import Entry
from shardwright.runtime.capture.record import Record, Recorder, Value, aten, tensors_in

TURNED = frozenset({aten.numpy_T.default, aten.t.default, aten.transpose.int})


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of an activation with a weight ``n k``, maybe turned round before, and a bias."""

    input: Value
    weight: Value
    bias: Value | None
    turned: Record | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Slots from ``start`` to before ``stop``, made by the record at ``place``."""

    start: int
    stop: int
    place: int
    value: Value


def take_slots(
    records: Sequence[Record], entries: Sequence[Entry], results: Iterable[Value]
) -> list[Record]:
    """Rewrite every projection whose heads are cut into unequal shares that cover it."""
    readers: dict[Value, list[int]] = {}
    for position, record in enumerate(records):
        for value in tensors_in([record.args, list(record.kwargs.values())]):
            readers.setdefault(value, []).append(position)
    kept = set(results)
    parameters = {entry.value for entry in entries if entry.spec.role == "parameter"}
    constants = {entry.value: entry.constant for entry in entries if entry.constant is not None}
    makers = {value: record for record in records for value in record.outputs}
    written: dict[int, list[Record]] = {}
    for position, record in enumerate(records):
        product = _product(record, makers)
        if product is None or product.weight not in parameters:
            continue
        made = record.outputs[0]
        places = readers.get(made, [])
        if made in kept or len(places) != 1:
            continue
        view = records[places[0]]
        if not _makes_slots(view, made) or view.outputs[0] in kept:
            continue
        pieces = _pieces(records, readers.get(view.outputs[0], []), view.outputs[0], constants)
        if pieces:
            written |= {place: [] for place in (places[0], *(one.place for one in pieces))}
            written[position] = _rewritten(record, product, view, pieces)
    return [one for at, record in enumerate(records) for one in written.get(at, [record])]


def _product(record: Record, makers: Mapping[Value, Record]) -> _Product | None:
    if record.target is aten.linear.default:
        given = [*record.args, record.kwargs.get("bias"), None]
        return _Product(given[0], given[1], given[2], None)
    if record.target is not aten.matmul.default:
        return None
    turned = makers.get(record.args[1])
    if turned is None or turned.target not in TURNED or turned.outputs[0].meta.dim() != 2:
        return None
    return _Product(record.args[0], turned.args[0], None, turned)


def _makes_slots(view: Record, made: Value) -> bool:
    """Whether a reshape does nothing but write the last dim as slots of features."""
    shape = view.outputs[0].meta.shape
    return (
        view.target is aten.reshape.default
        and len(shape) == made.meta.dim() + 1
        and shape[:-2] == made.meta.shape[:-1]
    )


def _pieces(
    records: Sequence[Record],
    places: Sequence[int],
    heads: Value,
    constants: Mapping[Value, torch.Tensor],
) -> list[_Piece]:
    """Return the readers in order where each takes a run of slots and together they take all, unequal
    ones; else nothing."""
    dim, count = heads.meta.dim() - 2, heads.meta.shape[-2]
    found: list[_Piece] = []
    for place in places:
        run = _run_of(records[place], heads, dim, constants)
        if run is None:
            return []
        found.append(_Piece(run[0], run[1], place, records[place].outputs[0]))
    found.sort(key=lambda one: one.start)
    borders = [0, *(one.stop for one in found)]
    is_whole = borders[:-1] == [one.start for one in found] and borders[-1] == count
    are_equal = len({one.stop - one.start for one in found}) < 2
    return found if is_whole and not are_equal else []


def _run_of(
    record: Record, heads: Value, dim: int, constants: Mapping[Value, torch.Tensor]
) -> tuple[int, int] | None:
    """Return the slots from and to which a record takes, None where it does anything else."""
    count = heads.meta.shape[dim]
    if record.target is aten.slice.Tensor:
        if (
            record.kwargs.get("dim", 0) % heads.meta.dim() != dim
            or record.kwargs.get("step", 1) != 1
        ):
            return None
        start = (record.kwargs.get("start") or 0) % count
        return start, start + record.outputs[0].meta.shape[dim]
    if record.target is not aten.index.Tensor or record.args[0] is not heads:
        return None
    picks = {at: one for at, one in enumerate(record.args[1]) if one is not None}
    chosen = constants.get(picks.get(dim))  # type: ignore[arg-type]
    if set(picks) != {dim} or chosen is None or chosen.dim() != 1 or chosen.is_floating_point():
        return None
    wanted = [int(one) % count for one in chosen]
    is_run = wanted == list(range(wanted[0], wanted[0] + len(wanted))) if wanted else False
    return (wanted[0], wanted[-1] + 1) if is_run else None


def _rewritten(
    record: Record, product: _Product, view: Record, pieces: Sequence[_Piece]
) -> list[Record]:
    """Return a product and a view for each piece, with its rows of the weight."""
    recorder = Recorder(node_name=record.name, path=record.path)
    width = view.outputs[0].meta.shape[-1]
    with torch.set_grad_enabled(record.outputs[0].meta.requires_grad):
        for piece in pieces:
            rows = (0, piece.start * width, piece.stop * width)
            weight = recorder.emit(aten.slice.Tensor, product.weight, *rows)
            if product.turned is not None:
                turned = recorder.emit(product.turned.target, weight, **product.turned.kwargs)
                made = recorder.emit(aten.matmul.default, product.input, turned)
            else:
                bias = product.bias and recorder.emit(aten.slice.Tensor, product.bias, *rows)
                made = recorder.emit(aten.linear.default, product.input, weight, bias)
            shape = [*made.meta.shape[:-1], piece.stop - piece.start, width]
            recorder.emit(aten.reshape.default, made, shape)
            recorder.records[-1].outputs = (piece.value,)
    return recorder.records
