"""Fused projections taken apart: a linear whose output is cut into equal blocks of features.

Queries, keys and values of GPT-2, or gate and value of a gated layer, are one weight. Split into
equal pieces, its columns would put queries on one device and values on another. Rewritten as
``linear_blocks``, with the weight seen as ``blocks x features``, every device gets its share of each
block. It is still one product, and the module keeps its own shape: ``seen_as`` is the only border.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.runtime.capture import operators
from shardwright.runtime.capture.assemble import Entry
from shardwright.runtime.capture.record import Record, Recorder, Value, aten, tensors_in

SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})


def seen_as(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a parameter as the graph shapes it, or as its module does: the same memory."""
    return tensor if tuple(tensor.shape) == tuple(shape) else tensor.reshape(tuple(shape))


@dataclass(frozen=True, slots=True)
class _Found:
    """A fused projection: its record, the views between it and the cut, and what the cut makes.

    ``records`` are all positions that the new operator replaces, in order.
    """

    records: tuple[int, ...]
    views: tuple[Record, ...]
    pieces: tuple[Value, ...]


def take_apart(
    records: Sequence[Record], entries: Sequence[Entry], results: Iterable[Value]
) -> tuple[list[Record], list[Entry]]:
    """Rewrite every fused projection whose weight and bias serve nothing else."""
    readers: dict[Value, list[int]] = {}
    for position, record in enumerate(records):
        for value in tensors_in([record.args, list(record.kwargs.values())]):
            readers.setdefault(value, []).append(position)
    kept = set(results)
    parameters = {entry.value: entry for entry in entries if _is_own(entry, readers)}
    changed: dict[Value, Entry] = {}
    written: dict[int, list[Record]] = {}
    for position, record in enumerate(records):
        given = _projection(record)
        if given is None or not set(given[1:]) <= parameters.keys():
            continue
        found = _follow(records, readers, position, kept)
        if found is None:
            continue
        is_rows = record.target is aten.linear.default
        for value in given[1:]:
            changed[value] = _in_blocks(parameters[value], len(found.pieces), is_rows)
        seen = [changed[value].value for value in given[1:]]
        written |= {place: [] for place in found.records}
        written[position] = _rewritten(record, found, (given[0], *seen), is_rows)
    result: list[Record] = []
    for position, record in enumerate(records):
        result += written.get(position, [record])
    return result, [changed.get(entry.value, entry) for entry in entries]


def _is_own(entry: Entry, readers: dict[Value, list[int]]) -> bool:
    """Whether one operator alone reads a parameter that has one name and lies in order."""
    spec, meta = entry.spec, entry.value.meta
    is_plain = spec.role == "parameter" and not spec.aliases and meta.is_contiguous()
    return is_plain and len(readers.get(entry.value, ())) == 1


def _projection(record: Record) -> tuple[Value, ...] | None:
    """Return the input, the weight and the bias, if any, of a linear layer."""
    if record.target is aten.linear.default:
        return tuple(value for value in (*record.args, *record.kwargs.values()) if value)
    if record.target is aten.addmm.default and not record.kwargs:
        bias, rows, weight = record.args
        return (rows, weight, bias) if bias.meta.dim() == 1 else None
    return None


def _follow(
    records: Sequence[Record], readers: dict[Value, list[int]], position: int, kept: set[Value]
) -> _Found | None:
    """Follow the features of a projection through views to where they are cut into equal blocks."""
    value = records[position].outputs[0]
    width, dim = value.meta.shape[-1], value.meta.dim() - 1
    taken, views = [position], list[Record]()
    while value not in kept and len(readers.get(value, ())) == 1:
        place = readers[value][0]
        record = records[place]
        if record.target is aten.reshape.default and record.outputs[0].meta.shape[-1:] == (width,):
            if dim != value.meta.dim() - 1:
                return None
            dim = record.outputs[0].meta.dim() - 1
        elif record.target is aten.transpose.int:
            dim = _transposed(record, dim, value.meta.dim())
        else:
            break
        taken.append(place)
        views.append(record)
        value = record.outputs[0]
    if value in kept:
        return None
    cut = _pieces(records, readers.get(value, []), dim, value)
    return _Found((*taken, *cut[0]), tuple(views), cut[1]) if cut else None


def _transposed(record: Record, dim: int, rank: int) -> int:
    first, second = (record.kwargs[name] % rank for name in ("dim0", "dim1"))
    return {first: second, second: first}.get(dim, dim)


def _pieces(
    records: Sequence[Record], places: list[int], dim: int, value: Value
) -> tuple[tuple[int, ...], tuple[Value, ...]] | None:
    """Return the readers that together cut ``dim`` into equal blocks, and the blocks in order."""
    width = value.meta.shape[dim]
    cuts: list[tuple[int, Value]] = []
    for place in places:
        record = records[place]
        is_split = record.target in SPLITS and len(places) == 1
        is_slice = record.target is aten.slice.Tensor and record.kwargs.get("step", 1) == 1
        if not (is_split or is_slice) or record.kwargs.get("dim", 0) % value.meta.dim() != dim:
            return None
        if is_split:
            size = record.outputs[0].meta.shape[dim]
            cuts += [(size * number, piece) for number, piece in enumerate(record.outputs)]
        else:
            cuts.append((record.kwargs.get("start") or 0, record.outputs[0]))
    cuts.sort(key=lambda cut: cut[0])
    size = width // len(cuts) if cuts else 0
    if len(cuts) < 2 or any(
        start != size * number or piece.meta.shape[dim] != size
        for number, (start, piece) in enumerate(cuts)
    ):
        return None
    return tuple(places), tuple(piece for _, piece in cuts)


def _in_blocks(entry: Entry, blocks: int, is_rows: bool) -> Entry:
    """Return a parameter with its features seen as blocks of features."""
    shape = entry.spec.shape
    dim = 0 if is_rows else len(shape) - 1
    seen = (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    meta = torch.empty(seen, dtype=entry.value.meta.dtype, device="meta")
    value = Value(meta.requires_grad_(entry.value.meta.requires_grad))
    return replace(entry, value=value, spec=replace(entry.spec, shape=seen))


def _rewritten(
    record: Record, found: _Found, given: tuple[Value, ...], is_rows: bool
) -> list[Record]:
    """Return one product, and for each of its blocks the views that led to the cut."""
    recorder = Recorder(node_name=record.name, path=record.path)
    source = record.outputs[0].meta
    with torch.set_grad_enabled(source.requires_grad):
        made = recorder.emit(operators.linear_blocks, *given, rows=is_rows)
        for piece, block in zip(found.pieces, made, strict=True):
            value = block
            for view in found.views:
                value = _view_again(recorder, view, value)
            last = recorder.records[
                value.producer
            ]  # whose result later operators know as the piece
            last.outputs = tuple(piece if one is value else one for one in last.outputs)
    return recorder.records


def _view_again(recorder: Recorder, view: Record, value: Value) -> Value:
    recorder.node_name, recorder.path = view.name, view.path
    if view.target is aten.reshape.default:
        shape = [*view.outputs[0].meta.shape[:-1], value.meta.shape[-1]]
        return recorder.emit(aten.reshape.default, value, shape)
    return recorder.emit(view.target, value, **view.kwargs)
