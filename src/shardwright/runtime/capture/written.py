"""Buffers that forward writes after it has read them: what was read is kept as it was.

In the graph a write makes a new value and the old one stays. The runtime writes the buffer's own
memory, while a gradient, a view, or a reader that comes later may still need what stood there. Such a
buffer is copied before its first write, and the copy is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from shardwright.runtime.capture.operators import assign, increment, update_running
from shardwright.runtime.capture.record import (
    Record,
    Recorder,
    Value,
    aten,
    map_values,
    shares_storage,
    tensors_in,
)

# How many of its leading arguments an operator writes. Who reads a running statistic after it was
# updated means the new one: the graph has no other value for it.
WRITES = {assign: 1, increment: 1, update_running: 2}


def keep_read(records: Sequence[Record]) -> list[Record]:
    """Let every buffer that is still needed when it is written be read from a copy; linear in records."""
    first: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    for place, record in enumerate(records):
        for buffer in record.args[: WRITES.get(record.target, 0)]:
            first.setdefault(buffer, place)
        for value in _reads(record):
            readers.setdefault(value, []).append(place)
    ahead: dict[int, list[Record]] = {}
    for buffer, written in first.items():
        places = readers.get(buffer, [])
        if records[written].target is update_running:
            places = places[: bisect_left(places, written)]
        if _are_needed(records, buffer, places, written):
            copied = _copied(records, buffer, places)
            ahead.setdefault(places[0], []).append(copied)
    return [one for place, record in enumerate(records) for one in (*ahead.get(place, ()), record)]


def _are_needed(
    records: Sequence[Record], buffer: Value, places: Sequence[int], written: int
) -> bool:
    """Whether some reader needs a buffer's value beyond the moment at which it runs, or runs too late."""
    made = [one for place in places for one in records[place].outputs]
    is_later = bool(places) and places[-1] > written
    return is_later or any(one.meta.requires_grad or shares_storage(one, buffer) for one in made)


def _copied(records: Sequence[Record], buffer: Value, places: Sequence[int]) -> Record:
    """Return the record of a buffer's copy, which is read from now on."""
    begin = records[places[0]]
    recorder = Recorder(node_name=f"{begin.name}.before", path=begin.path)
    with torch.no_grad():
        copy = recorder.emit(aten.clone.default, buffer)
    for place in places:
        _read_instead(records[place], buffer, copy)
    return recorder.records[0]


def _reads(record: Record) -> set[Value]:
    """Return what a record reads: batch norm looks after its own running statistics."""
    if record.target is aten.batch_norm.default:
        return set()
    written = WRITES.get(record.target, 0)
    return {*tensors_in([record.args[written:], list(record.kwargs.values())])}


def _read_instead(record: Record, buffer: Value, copy: Value) -> None:
    written = WRITES.get(record.target, 0)

    def change(value: Value) -> Value:
        return copy if value is buffer else value

    record.args = (*record.args[:written], *map_values(list(record.args[written:]), change))
    record.kwargs = {name: map_values(value, change) for name, value in record.kwargs.items()}
