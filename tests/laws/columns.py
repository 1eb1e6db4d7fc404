"""A Program without its numbering, to compare what different ways of lowering made."""

from __future__ import annotations

import numpy as np

from shardwright.core.program import Kind, Program


def columns(program: Program) -> list[object]:
    """Return all of a Program that does not depend on how values are numbered."""
    names = [program.resource_names[index] for index in program.resource.tolist()]
    kept = (program.kind, program.group, program.microbatch, program.offset, program.predecessor)
    counts = (program.allocated, program.freed, program.temporary, np.diff(program.free_offset))
    items: list[object] = []
    for kind, item in zip(program.kind.tolist(), program.item.tolist(), strict=True):
        if kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            segment = program.segments[item]
            calls = [(call.operator, call.dims, call.result_shapes) for call in segment.calls]
            items.append((calls, segment.saved_bytes, segment.temporary_bytes))
        elif kind in (Kind.MESSAGE, Kind.SEND, Kind.RECEIVE):
            one = program.messages[item]
            items.append((one.primitive, one.axes, one.dims, one.bytes, one.purpose))
        elif kind == Kind.TRANSFORM:
            one = program.transforms[item]
            ends = [[program.values[v] for v in values] for values in (one.reads, one.writes)]
            items.append((one.name, [[(v.dtype, v.shape) for v in values] for values in ends]))
    return [names, program.base_bytes, items, *[column.tolist() for column in (*kept, *counts)]]
