"""Numbers read off a simulated or measured timeline: who is busy, which messages are exposed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program
from shardwright.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStatistics:
    """Where the step's seconds go.

    ``busy_seconds`` is per resource. The others are per mesh and add up to the step:
    ``compute_seconds`` something computes; ``exposed_seconds`` nothing computes but something is
    sent (the non-overlapped communication t_c^no of the DAG model of S-SGD); ``idle_seconds``
    neither (pipeline bubbles, mostly).
    """

    busy_seconds: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    exposed_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


def program_statistics(timeline: Timeline, program: Program) -> ProgramStatistics:
    """Sum up a timeline. Instructions which a measured timeline did not see (NaN) count nothing."""
    seen = np.isfinite(timeline.start) & np.isfinite(timeline.end)
    lengths = np.where(seen, timeline.end - timeline.start, 0.0)
    busy = np.bincount(program.resource, lengths, minlength=len(program.resource_names))
    computing = program.computes
    compute: list[float] = []
    occupied: list[float] = []
    for mesh in range(len(program.meshes)):
        mine = seen & (program.group == mesh)
        compute.append(_covered_seconds(timeline, mine & computing))
        occupied.append(_covered_seconds(timeline, mine))
    return ProgramStatistics(
        busy_seconds=tuple(busy.tolist()),
        compute_seconds=tuple(compute),
        exposed_seconds=tuple(
            max(0.0, both - own) for both, own in zip(occupied, compute, strict=True)
        ),
        idle_seconds=tuple(max(0.0, timeline.step_seconds - both) for both in occupied),
    )


def _covered_seconds(timeline: Timeline, chosen: NDArray[np.bool_]) -> float:
    """Return the total length of the union of the chosen instructions' intervals."""
    start, end = timeline.start[chosen], timeline.end[chosen]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[0.0], end]))[:-1]
    return float(np.maximum(0.0, end - np.maximum(start, reached)).sum())
