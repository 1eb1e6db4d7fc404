"""Segments that run twice, in forward and again before backward: both times on what was there at first.

Recomputation makes everything anew but buffers, which the step may have written in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from shardwright.core.program import Program, Segment
from shardwright.runtime.capture import Captured
from shardwright.runtime.parameters import written_buffers


class Run(Protocol):
    """Runs a segment; ``instead`` are tensors, by place among its inputs, to be used for lasting ones."""

    def __call__(self, instead: Mapping[int, Tensor] = ...) -> Any: ...


class Again:
    """Keeps what segments read of buffers from their first run to their second."""

    def __init__(self, captured: Captured, program: Program, leaf: Mapping[int, Tensor]) -> None:
        self.operators, self.values, self.leaf = captured.graph.operators, program.values, leaf
        self.written = written_buffers(captured.graph)
        self._before: dict[tuple[int, int], dict[int, Tensor]] = {}

    def both(
        self, run: Run, segment: Segment, key: tuple[int, int], again: bool
    ) -> Callable[[], Any]:
        """Return the first run of a segment, or the one ``again``; ``key`` is of both."""
        places = self._read(segment) if segment.recomputed else {}
        if not places:
            return run
        before = self._before.setdefault(key, {})

        def first() -> None:
            before.update((place, tensor.detach().clone()) for place, tensor in places.items())
            run()

        def second() -> None:
            run(before)
            before.clear()

        return second if again else first

    def _read(self, segment: Segment) -> dict[int, Tensor]:
        """Return the buffers that a segment reads and a step writes, by place among its inputs."""
        reading = [call for call in segment.calls if self.operators[call.operator].outputs]
        read = {value for call in reading for value in call.operands}
        return {
            place: self.leaf[value]
            for place, value in enumerate(segment.inputs)
            if value in read and value in self.leaf and self.values[value].tensor in self.written
        }
