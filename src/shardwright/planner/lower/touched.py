"""The steps of a stage as arrays, for the kernels: what each touches, writes and reads."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.compiled import inner
from shardwright.planner.lower.template import HELD, LAST_ONLY, READ, WRITTEN, Facts, Flags, Ints


class Steps(NamedTuple):
    """The steps of a stage, one phase behind the other: see ``template.Rows``. Phase n ends before
    step ``stops[n]``. Of every step, its first touch, its first write and its first read."""

    rows: Ints
    value: Ints
    read: Ints
    stops: Ints
    touch: Ints
    write: Ints
    reads: Ints


@inner
def steps_of(rows: Ints, touched: tuple[Ints, Ints], stops: Ints) -> Steps:
    """Return steps with their first touches, writes and reads; ``touched`` are values held and written, and read."""
    count = len(rows)
    touch, write = np.zeros(count + 1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    reads = np.zeros(count + 1, dtype=np.int64)
    for step in range(count):
        write[step] = touch[step] + rows[step, HELD]
        touch[step + 1] = write[step] + rows[step, WRITTEN]
        reads[step + 1] = reads[step] + rows[step, READ]
    return Steps(rows, touched[0], touched[1], stops, touch, write, reads)


@inner
def span(steps: Steps, number: int) -> tuple[int, int]:
    """Return where a phase begins and stops."""
    return (steps.stops[number - 1] if number else 0), steps.stops[number]


@inner
def read_where(steps: Steps, values: Facts, number: int, column: int) -> Flags:
    """Return what the steps of a phase read that are flagged in a column of ``rows``."""
    found = np.zeros(len(values.bytes), dtype=np.bool_)
    begin, stop = span(steps, number)
    for step in range(begin, stop):
        if steps.rows[step, column]:
            for read in range(steps.reads[step], steps.reads[step + 1]):
                found[steps.read[read]] = True
    return found


@inner
def times_written(steps: Steps, count: int, number: int) -> Ints:
    """Return how often each microbatch writes each value in a phase."""
    found = np.zeros(count, dtype=np.int64)
    begin, stop = span(steps, number)
    for step in range(begin, stop):
        if not steps.rows[step, LAST_ONLY]:
            for touch in range(steps.write[step], steps.touch[step + 1]):
                found[steps.value[touch]] += 1
    return found
