"""Steps in a row of a pipeline whose devices begin the next when they are done (``core.completion.meets_at_end``).

What they idle at the end of one step and at the beginning of the next is then the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.completion import connected
from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.planner.simulate.flushless import PERIODS

if TYPE_CHECKING:
    from shardwright.planner.simulate.full import Times, Wiring

# Steps that are played. Where the last one took all devices equally long, so does every other. Else ``PERIODS`` more
# are, and their mean counts.
FEW = 3
ALIKE = 1e-9
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Clock = Callable[["Wiring", Floats], "Times"]


class _Row(NamedTuple):
    """Steps one behind the other: their wiring, and of each instruction which one of a step it is (-1: none) and its crew;
    by step and crew where a crew is done."""

    wiring: Wiring
    source: Ints
    crew: Ints
    closings: Ints


def in_a_row(
    program: Program, wiring: Wiring, seconds: Floats, timeline: Timeline, clock: Clock
) -> Timeline:
    """Return the timeline of a step with the seconds from one step to the next, and a critical chain of those, where
    that is less than a step takes that all devices begin together; instructions and memory stay those of such a step.

    A device begins a step when all is done that it computes, sends and receives in the one before; what others
    send it waits for that, too.
    """
    row, laps = _row_of(program, wiring, FEW), 1
    _, end, cause = clock(row.wiring, _durations(row, seconds))
    took = np.diff(end[row.closings], axis=0)[-1]
    if np.ptp(took) > ALIKE * took.max():
        row, laps = _row_of(program, wiring, FEW + PERIODS), PERIODS
        _, end, cause = clock(row.wiring, _durations(row, seconds))
    moments = end[row.closings].max(axis=1)
    period = float(moments[-1] - moments[-1 - laps]) / laps
    if period > timeline.step_seconds * (1 - ALIKE):
        return timeline
    critical, laps = _recurring(row, end, cause)
    return replace(timeline, step_seconds=period, critical=critical, laps=laps)


def _recurring(row: _Row, end: Floats, cause: Ints) -> tuple[tuple[int, ...], int]:
    """Follow causes back from the last end of all until a crew is met again at the end of a step; return the chain in
    between, and of how many steps it is."""
    met, chain = dict[int, tuple[int, int]](), list[int]()
    steps, size = len(row.closings), len(row.source) // len(row.closings)
    step, index = steps, int(row.closings[-1][end[row.closings[-1]].argmax()])
    while index >= 0:
        if index // size < step:
            step, crew = index // size, int(row.crew[index])
            if crew in met:
                later, begin = met[crew]
                return tuple(chain[begin:]), later - step
            met[crew] = step, len(chain)
        if row.source[index] >= 0:
            chain.append(int(row.source[index]))
        index = int(cause[index])
    return tuple(chain), steps


def _durations(row: _Row, seconds: Floats) -> Floats:
    return np.where(row.source < 0, 0.0, seconds[row.source])


def _row_of(program: Program, wiring: Wiring, steps: int) -> _Row:
    """Return steps in a row. Behind each, an instruction of every crew that takes no time waits for the last that the
    crew has on every resource; the crew's first of the next step wait for that, and so does what is sent to it."""
    from shardwright.planner.simulate.full import Wiring

    crew_of = np.unique(connected([m.devices for m in program.meshes]), return_inverse=True)[1]
    crew = crew_of[program.group]
    computing = np.flatnonzero(program.computes)
    closers = computing[_first_of(crew[computing])]
    count, size = len(crew), len(crew) + len(closers)
    pairs = _waits(program, wiring, crew, crew_of)
    later, earlier = (pairs[..., None] + size * np.arange(steps)).reshape(2, -1)
    order = np.argsort(later, kind="stable")
    order = order[earlier[order] >= 0]  # before the first step there is none
    counts = np.bincount(later[order], minlength=steps * size)

    def behind(column: NDArray[Any], closing: NDArray[Any]) -> NDArray[Any]:
        return np.tile(np.append(column, closing), steps)

    return _Row(
        wiring=Wiring(
            resource=behind(wiring.resource, wiring.resource[closers]),
            group=behind(wiring.group, wiring.group[closers]),
            offset=np.concatenate([[0], np.cumsum(counts)]),
            predecessor=earlier[order].astype(np.int32),
        ),
        source=behind(np.arange(count), np.full(len(closers), -1)),
        crew=behind(crew, crew[closers]),
        closings=np.arange(steps * size).reshape(steps, size)[:, count:],
    )


def _waits(program: Program, wiring: Wiring, crew: Ints, crew_of: Ints) -> Ints:
    """Return (later, earlier) pairs of a step with its closing instructions, which come last, crew by crew. What is of the
    step before has a number less than 0."""
    count, crews = len(crew), int(crew_of.max()) + 1
    sends = np.flatnonzero(program.kind == Kind.SEND)
    items: list[int] = program.item[sends].tolist()
    receiver = crew_of[[program.messages[item].destination for item in items]]
    begins = _first_of(crew, wiring.resource)
    ends = count - 1 - _first_of(crew[::-1], wiring.resource[::-1])
    sent = _first_of(receiver, wiring.resource[sends])
    inner = np.repeat(np.arange(count), np.diff(wiring.offset))
    later = [inner, count + crew[ends], begins, sends[sent]]
    earlier = [wiring.predecessor, ends, crew[begins] - crews, receiver[sent] - crews]
    return np.array([np.concatenate(later), np.concatenate(earlier)], dtype=np.int64)


def _first_of(*columns: NDArray[Any]) -> Ints:
    """Return the first place of every distinct row of columns, in their order."""
    return np.unique(np.stack(columns), axis=1, return_index=True)[1]
