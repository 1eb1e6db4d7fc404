"""The rhythm of a pipeline that is never flushed: many minibatches played one behind the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program
from shardwright.core.timeline import Timeline
from shardwright.planner.lower.flushless import unrolled

# Periods over which the rhythm is measured, behind those in which the pipeline fills; a multiple of the
# few that a rhythm may take to repeat.
PERIODS = 12
Play = Callable[[Program, NDArray[np.float64]], Timeline]


def in_periods(
    program: Program, seconds: NDArray[np.float64], timeline: Timeline, play: Play
) -> Timeline:
    """Return the timeline of one minibatch among others, with the seconds of a period, the critical chain of some,
    and the memory of a full pipeline.

    Periods are no steps: no stage waits for all others at their ends.
    """
    shift, filling = program.shift, 2 * len(program.meshes)
    assert shift is not None
    many, source = unrolled(program, filling + PERIODS + 1)
    played = play(many, seconds[source])
    ends = np.zeros(filling + PERIODS + 1 + int(shift.max()))
    minibatch = many.microbatch // program.strategy.pipeline.num_microbatches
    np.maximum.at(ends, minibatch + shift[source], played.end)
    period = (ends[filling + PERIODS] - ends[filling]) / PERIODS
    chain = np.array(played.critical, dtype=np.int64)
    steady = (played.end[chain] > ends[filling]) & (played.end[chain] <= ends[filling + PERIODS])
    own = np.flatnonzero(minibatch == filling + PERIODS // 2)
    times = np.empty((2, program.num_instructions))
    times[:, source[own]] = played.start[own], played.end[own]
    start, end = times - times.min()
    return replace(
        timeline,
        start=start,
        end=end,
        step_seconds=float(period),
        memory=played.memory,
        peak_bytes=played.peak_bytes,
        critical=tuple(source[chain[steady]].tolist()),
        laps=PERIODS,
    )
