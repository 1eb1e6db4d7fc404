"""Waits and lifetimes step by step, compiled: what ``waits`` and ``lifetimes`` say with NumPy.

For whoever lowers thousands of strategies (``incremental``); the results are equal. Import this
module late: importing Numba takes longer than lowering one.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.compiled import compiled, inner
from shardwright.planner.lower.template import COMPUTES, SENDS
from shardwright.planner.lower.waits import PREVIOUS

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def columns(rows: Ints, value: Ints) -> tuple[Ints, Flags, Ints, Ints, Ints]:
    """Return ``place``, ``writes``, ``written``, ``written_at`` and ``read_at`` of a
    ``template.Template``."""
    place, writes = np.empty_like(value), np.empty(len(value), dtype=np.bool_)
    written, written_at = np.empty_like(value), np.empty_like(value)
    read_at = np.empty(rows[:, 10].sum(), dtype=np.int64)
    entry = made = read = 0
    for step in range(len(rows)):
        held = entry + rows[step, 8]
        for touch in range(entry, held + rows[step, 9]):
            place[touch], writes[touch] = step, touch >= held
            if touch >= held:
                written[made], written_at[made] = value[touch], step
                made += 1
        entry = held + rows[step, 9]
        read_at[read : read + rows[step, 10]] = step
        read += rows[step, 10]
    return place, writes, written[:made].copy(), written_at[:made].copy(), read_at


class Touched(NamedTuple):
    """Columns of what steps hold and write, step by step: see ``template.Template``."""

    place: Ints
    value: Ints
    writes: Flags
    storage: Ints
    is_gradient: Flags


class Sets(NamedTuple):
    """The values that die here, those that are made here, those alive before; bytes of each."""

    dying: Flags
    returning: Flags
    alive: Flags
    bytes: Ints


@compiled
def play(touched: Touched, sets: Sets, allocated: Ints, freed: Ints) -> tuple[Ints, Ints, Flags]:
    """Add to the bytes that steps allocate and free; return (place, value) of all that is freed, and
    what is alive afterwards. See ``lifetimes._walk``."""
    count, num_values = len(touched.place), len(sets.bytes)
    latest = np.full(num_values, -1, dtype=np.int64)  # pair of (value, place) that touched it last
    value, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    before = np.empty(count, dtype=np.int64)
    is_own, made = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    held, is_last = np.zeros(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    pairs = 0
    for entry in range(count):
        stored = touched.storage[entry]
        pair = latest[stored]
        if pair < 0 or place[pair] != touched.place[entry]:
            value[pairs], place[pairs], before[pairs] = stored, touched.place[entry], pair
            pair, pairs = pairs, pairs + 1
            latest[stored] = pair
        if not touched.writes[entry]:
            held[pair] = True
            continue
        if touched.value[entry] == stored:
            is_own[pair] = True
        if not touched.is_gradient[entry]:
            made[pair] = True
    for pair in range(pairs):
        if before[pair] >= 0 and not (made[pair] and not held[pair]):
            is_last[before[pair]] = False
    living = np.zeros(num_values, dtype=np.bool_)
    alive = sets.alive.copy()
    num_freed = 0
    for pair in range(pairs):
        one, where = value[pair], place[pair]
        if before[pair] < 0:
            living[one] = sets.alive[one]
        if is_own[pair] and sets.returning[one] and not living[one]:
            allocated[where] += sets.bytes[one]
            living[one] = True
        if is_last[pair] and sets.dying[one]:
            if living[one]:
                freed[where] += sets.bytes[one]
                living[one] = False
            place[num_freed], value[num_freed] = where, one
            num_freed += 1
        alive[one] = living[one]
    return place[:num_freed].copy(), value[:num_freed].copy(), alive


class Sums(NamedTuple):
    """Columns of what backward steps write, and of the steps: see ``lifetimes._add_up``."""

    place: Ints
    value: Ints
    is_sum: Flags
    by_microbatch: Flags
    bytes: Ints
    last_only: Flags
    computes: Flags
    saved: Ints
    alone: Ints


@compiled
def add_up(sums: Sums, num_values: int, allocated: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Add to ``allocated``; return ``first``, ``temporary``, ``second`` and ``onward`` of
    ``Lifetimes``. See ``lifetimes._add_up``."""
    count = len(sums.alone)
    seen = np.zeros(num_values, dtype=np.bool_)
    first = np.zeros(count, dtype=np.int64)
    again, later = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    most_again, most_later = np.full(count, -1), np.full(count, -1)
    for entry in range(len(sums.value)):
        value, at, size = sums.value[entry], sums.place[entry], sums.bytes[entry]
        is_first = not seen[value]
        seen[value] = True
        if not sums.is_sum[entry]:
            continue
        if not is_first:
            again[at] += size
            most_again[at] = max(most_again[at], size)
        elif sums.by_microbatch[entry]:
            continue
        elif sums.last_only[at]:
            allocated[at] += size
            continue
        else:
            first[at] += size
        later[at] += size
        most_later[at] = max(most_later[at], size)
    temporary, second = again.copy(), later.copy()
    for at in range(count):
        alone, saved = sums.alone[at], sums.saved[at]
        adds = sums.computes[at] and most_again[at] >= 0
        temporary[at] += max(alone, most_again[at] - saved) if adds else alone
        adds = sums.computes[at] and most_later[at] >= 0
        second[at] += max(alone, most_later[at] - saved) if adds else alone
    return first, temporary, second, sums.alone + later


class Written(NamedTuple):
    """All that templates wrote, entry by entry: the one before of the same value in the same template
    (-1), its template, its place there, and the first entry of that place. ``newest`` is the last
    entry of every value (-1)."""

    newest: Ints
    before: Ints
    template: Ints
    place: Ints
    first: Ints


class Needs(NamedTuple):
    """The steps of one template, what they read and write by ascending place, and of every value
    whose data it is and whether it adds up."""

    kind: NDArray[np.int8]
    read_at: Ints
    read: Ints
    written_at: Ints
    written: Ints
    root: Ints
    is_gradient: Flags


@compiled
def wait(needs: Needs, known: Written, number: int, begin: int) -> tuple[Ints, Ints, Ints, int]:
    """Note from entry ``begin`` on what template ``number`` writes, and return what it needs: see
    ``waits.Waits.of``."""
    newest, before, template, place, first = known
    found = np.empty((3, 2 * len(needs.read) + len(needs.kind) + 16), dtype=np.int64)
    seen = np.full(begin + len(needs.written), -1, dtype=np.int64)
    size, entry, turn, computed = 0, begin, 0, -1
    for at in range(len(needs.kind)):
        while turn < len(needs.read) and needs.read_at[turn] == at:
            value = needs.root[needs.read[turn]]
            one, turn = newest[value], turn + 1
            while one >= 0:
                if seen[first[one]] != at:
                    seen[first[one]] = at
                    found = _noted(found, size, at, template[one], place[one])
                    size += 1
                one = before[one] if needs.is_gradient[value] else -1
        if SENDS[needs.kind[at]]:
            writer = number if computed >= 0 else PREVIOUS
            found = _noted(found, size, at, writer, max(computed, 0))
            size += 1
        elif COMPUTES[needs.kind[at]]:
            computed = at
        begun = entry
        while entry - begin < len(needs.written) and needs.written_at[entry - begin] == at:
            value = needs.written[entry - begin]
            before[entry] = newest[value] if newest[value] >= begin else -1
            template[entry], place[entry], first[entry] = number, at, begun
            newest[value] = entry
            entry += 1
    return found[0, :size], found[1, :size], found[2, :size], computed


@inner
def _noted(found: Ints, size: int, at: int, writer: int, target: int) -> Ints:
    """Write a column, in a larger array where this one is full."""
    if size == found.shape[1]:
        larger = np.empty((3, 2 * size), dtype=np.int64)
        larger[:, :size] = found
        found = larger
    found[0, size], found[1, size], found[2, size] = at, writer, target
    return found
