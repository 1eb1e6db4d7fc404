"""Segments with what is known of them when all is lowered: what others read, what is saved and viewed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.core.program import Segment
from shardwright.operators.keeping.memory import SegmentMemory, viewed_inputs
from shardwright.planner.lower.builder import Finished, ProgramBuilder


def finish(builder: ProgramBuilder, segment: Segment, outputs: tuple[int, ...]) -> Finished:
    """Return a segment with only the ``outputs`` that somebody reads."""
    graph, values = builder.graph, builder.values
    memory = SegmentMemory(graph, segment.calls, values, segment.inputs)
    kept, temporary = memory.bytes(outputs, segment.has_backward)
    bare = memory.bytes(outputs, False)[1][0] if segment.recomputed else 0
    told = {*segment.rematerialised, *segment.unused_in_backward}
    idle = [v for v in memory.idle_inputs() if v not in told] if segment.has_backward else []
    finished = replace(
        segment,
        outputs=outputs,
        unused_in_backward=(*segment.unused_in_backward, *idle),
        saved_bytes=kept,
        temporary_bytes=temporary,
        bare_bytes=bare,
    )
    if builder.splits_backward and segment.has_backward:
        half = memory.split(outputs, builder.strategy.precision)
        finished = replace(
            finished,
            deferred=half.calls,
            deferred_values=half.values,
            deferred_bytes=half.bytes,
            split_temporary_bytes=half.temporary_bytes,
        )
    views, stored = memory.lying(outputs)
    return Finished(
        finished, memory.kept(outputs), viewed_inputs(graph, finished, values) | views, stored
    )


def joined_bytes(builder: ProgramBuilder, segment: Segment, sums: Mapping[int, bool]) -> int:
    """Return the temporary bytes of a finished segment's backward that is joined to the one before (``core.joining``);
    ``sums`` are the inputs to whose gradients it adds (``backward_peak``)."""

    def found() -> int:
        memory = SegmentMemory(builder.graph, segment.calls, builder.values, segment.inputs)
        return memory.joined(segment.outputs, sums)

    return builder.once(("joined", segment, tuple(sums.items())), found)
