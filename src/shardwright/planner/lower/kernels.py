"""What the steps of a stage wait for, and when its values appear and disappear, compiled.

A step waits for what wrote what it reads: for all terms of what adds up (a gradient), else for the last
write, in its own phase or in the one before that wrote it. Whatever sends waits for the compute before it too.

A microbatch's forward and backward are looked at together. A value that backward reads before it
writes survives from forward; one that backward writes first (recomputed, or gathered again) does not.
Data lives as long as the last alias or view of it.

Importing this module compiles it, or loads what was compiled (a fifth of a second): a server that
processes are forked from does it once for all. So import it late.
"""

# NumPy's stubs call an element of an array "array or scalar"; Numba checks the types it compiles.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.compiled import compiled, fill, inner
from shardwright.core.program import Kind
from shardwright.planner.lower.builder import ACTIVATION, BY_MICROBATCH, GATHERED, GRADIENT, WIDE
from shardwright.planner.lower.phases import (
    ADDS,
    ASIDE,
    BEFORE,
    BEHIND,
    EACH,
    FLAGS,
    PREVIOUS,
    STASHES,
    UPDATES,
)
from shardwright.planner.lower.template import (
    ALLOCATED,
    BACKWARDS,
    COMPUTES,
    FREED,
    KIND,
    LAST_ONLY,
    READ,
    SENDS,
    SYNCS,
    TEMPORARY,
    Facts,
    Flags,
    Ints,
)
from shardwright.planner.lower.touched import Steps, read_where, span, steps_of, times_written

UPDATE, WEIGHT = int(Kind.UPDATE), int(Kind.WEIGHT_GRADIENT)


class Found(NamedTuple):
    """What there is to say of the steps of a stage.

    ``sizes``: bytes of every step in rows: what it allocates, frees and needs for a while; what it also
    allocates with the first microbatch only (gradients that accumulate), and needs for a while with
    the second and with later ones, which add to those (0 but in phases that add).
    ``frees``: rows place and value; ``needed``: rows place, phase and place there; both go on beyond
    what there is. ``ends``: per phase where it ends in these two, its last compute (-1), and in bits
    which phases it waits for.
    """

    sizes: Ints
    frees: Ints
    needed: Ints
    ends: Ints


class Sets(NamedTuple):
    """The values that die in a phase, those that are made there, and those alive, which is kept up to
    date."""

    dying: Flags
    returning: Flags
    alive: Flags


@compiled
def look_over(
    rows: Ints, touched: tuple[Ints, Ints], stops: Ints, values: Facts, mesh: int, many: int
) -> Found:
    """Find waits and lifetimes of all phases of one mesh; ``touched`` are values held and written, and
    values read, ``many`` the number of microbatches."""
    steps = steps_of(rows, touched, stops)
    count = len(rows)
    sizes = np.zeros((6, count), dtype=np.int64)
    fill(sizes, rows[:, ALLOCATED : TEMPORARY + 1].T)
    frees = np.empty((2, len(touched[0]) + 2 * len(values.bytes)), dtype=np.int64)
    ends = np.zeros((len(stops), 4), dtype=np.int64)
    written = _written_by(steps, values)
    alive = np.zeros(len(values.bytes), dtype=np.bool_)
    size = 0
    for number in range(len(stops)):
        begin, stop = span(steps, number)
        ends[number, 0] = size
        if begin == stop:
            continue
        sets = _sets(steps, values, number, written, alive)
        size = _walk(steps, values, number, sets, (sizes, frees, size))
        if FLAGS[number] & STASHES:
            alive = sets.alive
        if FLAGS[number] & ADDS:
            _add_up(steps, values, number, sizes)
            _let_go(steps, values, number, sizes)
        if FLAGS[number] & UPDATES:
            frame = number, mesh, many
            size = _free_at_update(steps, values, written, frame, (sizes, frees, size))
        ends[number, 0] = size
    needed = _wait(steps, values, ends)
    return Found(sizes, frees, needed, ends)


@inner
def _written_by(steps: Steps, values: Facts) -> Flags:
    """Return, per phase, the set of values that it writes."""
    written = np.zeros((len(steps.stops), len(values.bytes)), dtype=np.bool_)
    for number in range(len(steps.stops)):
        begin, stop = span(steps, number)
        for step in range(begin, stop):
            for touch in range(steps.write[step], steps.touch[step + 1]):
                written[number, steps.value[touch]] = True
    return written


@inner
def _sets(steps: Steps, values: Facts, number: int, written: Flags, alive: Flags) -> Sets:
    """Return a phase's sets. ``alive`` is what forward left.

    What is made once per step lives until its end, except temporaries behind the microbatches; sums
    that phases before wrote are there and only accumulate. Every microbatch makes anew what is its own,
    and gathered parameters.
    """
    count = len(values.bytes)
    dying, returning = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    lives = np.zeros(count, dtype=np.bool_)
    if not FLAGS[number] & EACH:
        for value in range(count):
            returning[value] = written[number, value]
            if FLAGS[number] & BEHIND:
                dying[value] = returning[value] and values.marks[value] & ACTIVATION
                for before in range(number):
                    if FLAGS[before] & (ADDS | BEHIND):
                        lives[value] |= written[before, value]
        return Sets(dying, returning, lives)
    for value in range(count):
        lives[value] = alive[value]
        returning[value] |= lives[value] or values.marks[value] & BY_MICROBATCH
        if written[number, value] and values.marks[value] & GATHERED:
            returning[values.storage[value]] = True
    synced = read_where(steps, values, number, SYNCS)
    for value in range(count):
        dying[value] = (returning[value] or synced[value]) and not values.reported[value]
    if FLAGS[number] & STASHES:
        _survive(steps, values, number, dying)
    return Sets(dying, returning, lives)


@inner
def _last() -> int:
    """Return the phase of the last microbatch's backward."""
    last = 0
    for number in range(len(FLAGS)):
        if FLAGS[number] & ADDS and not FLAGS[number] & ASIDE:
            last = number
    return last


@inner
def _survive(steps: Steps, values: Facts, number: int, dying: Flags) -> None:
    """Spare what the phases behind this one, with the last backward, hold before they write it."""
    seen = np.zeros(len(values.bytes), dtype=np.bool_)
    for phase in range(number + 1, _last() + 1):
        if FLAGS[phase] & ASIDE:
            continue
        begin, stop = span(steps, phase)
        for step in range(begin, stop):
            for touch in range(steps.touch[step], steps.touch[step + 1]):
                stored = values.storage[steps.value[touch]]
                if not seen[stored] and touch < steps.write[step]:
                    dying[stored] = False
                seen[stored] = True


@inner
def _walk(
    steps: Steps, values: Facts, number: int, sets: Sets, found: tuple[Ints, Ints, int]
) -> int:
    """Play the steps of a phase: allocate at a first write, free what dies after its last touch, or
    after the last before it is made anew. List what is freed; return how long that list is."""
    sizes, frees, size = found
    begin, stop = span(steps, number)
    most = steps.touch[stop] - steps.touch[begin]
    latest = np.full(len(values.bytes), -1, dtype=np.int64)  # pair (value, step), touched last
    value, place = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    before = np.empty(most, dtype=np.int64)
    is_own, made = np.zeros(most, dtype=np.bool_), np.zeros(most, dtype=np.bool_)
    held, is_last = np.zeros(most, dtype=np.bool_), np.ones(most, dtype=np.bool_)
    pairs = 0
    for step in range(begin, stop):
        for touch in range(steps.touch[step], steps.touch[step + 1]):
            touched = steps.value[touch]
            stored = values.storage[touched]
            pair = latest[stored]
            if pair < 0 or place[pair] != step:
                value[pairs], place[pairs], before[pairs] = stored, step, pair
                pair, pairs = pairs, pairs + 1
                latest[stored] = pair
            if touch < steps.write[step]:
                held[pair] = True
                continue
            is_own[pair] |= touched == stored
            made[pair] |= not values.marks[touched] & GRADIENT
    for pair in range(pairs):
        if before[pair] >= 0 and not (made[pair] and not held[pair]):
            is_last[before[pair]] = False
    alive = sets.alive
    for pair in range(pairs):
        one, step = value[pair], place[pair]
        if is_own[pair] and sets.returning[one] and not alive[one]:
            sizes[0, step] += values.bytes[one]
            alive[one] = True
        if is_last[pair] and sets.dying[one]:
            if alive[one]:
                sizes[1, step] += values.bytes[one]
                alive[one] = False
            frees[0, size], frees[1, size] = step - begin, one
            size += 1
    return size


@inner
def _to_add(alone: int, saved: int, most: int, new: int) -> int:
    """Return what a backward needs besides its terms, of which one has ``most`` bytes (-1: there are none): what it
    needs ``alone``, or behind it what the largest ``new`` sum does, with what autograd ``saved`` gone."""
    return max(alone, max(new, 0) - saved) if most >= 0 else alone


@inner
def _add_up(steps: Steps, values: Facts, number: int, sizes: Ints) -> None:
    """Count gradients that are written more than once, in a microbatch or over all of them.

    All terms of a backward are there before the first is added (of W one at a time), and a sum is first taken out
    of place (``new_*`` the largest of these); by then what autograd saved is gone. Later the sums are the store's
    alone, and are added to in place: those over all microbatches from their third term on, be several of one
    microbatch. What is added to a wider sum is another tensor even the first time, of half its bytes. A new sum
    that a message makes comes when what has arrived goes.
    """
    seen = np.zeros(len(values.bytes), dtype=np.int64)
    times = times_written(steps, len(values.bytes), number)
    begin, stop = span(steps, number)
    for step in range(begin, stop):
        again = later = first = terms = sums = 0
        most_again = most_later = new_again = new_later = new_onward = -1
        for touch in range(steps.write[step], steps.touch[step + 1]):
            value = steps.value[touch]
            size, is_first, is_second = values.bytes[value], not seen[value], seen[value] == 1
            seen[value] += 1
            if not values.marks[value] & GRADIENT:
                continue
            if values.marks[value] & WIDE:
                if is_first and steps.rows[step, LAST_ONLY]:
                    sizes[0, step] += size
                    continue
                terms += size // 2
                if is_first:
                    first += size
                    sums += size
                continue
            if not is_first:
                again += size
                most_again = max(most_again, size)
                new_again = max(new_again, size * is_second)
                if values.marks[value] & BY_MICROBATCH:
                    new_later = max(new_later, size * is_second)
                    new_onward = max(new_onward, size * is_second)
            elif values.marks[value] & BY_MICROBATCH:
                continue
            elif steps.rows[step, LAST_ONLY]:
                sizes[0, step] += size
                continue
            else:
                first += size
                new_later = max(new_later, size * (times[value] == 1))
            later += size
            most_later = max(most_later, size)
        saved, alone = steps.rows[step, FREED], steps.rows[step, TEMPORARY]
        if steps.rows[step, KIND] == WEIGHT:
            again, later, saved = max(most_again, 0), max(most_later, 0), 0
        sizes[3, step] = first
        sizes[2, step], sizes[4, step], sizes[5, step] = again + alone, later + alone, later + alone
        if BACKWARDS[steps.rows[step, KIND]]:
            sizes[2, step] = again + _to_add(alone, saved, most_again, new_again)
            sizes[4, step] = later + _to_add(alone, saved, most_later, new_later)
            sizes[5, step] = later + _to_add(alone, saved, most_later, new_onward)
        if terms:
            late = alone + terms - sums // 2
            if BACKWARDS[steps.rows[step, KIND]]:
                late = max(alone + terms - sums, terms - saved)
            sizes[2, step] += late - alone
            sizes[4, step] += terms
            sizes[5, step] += terms


@inner
def _let_go(steps: Steps, values: Facts, number: int, sizes: Ints) -> None:
    """Free gradients kept over microbatches where they are synchronised at last."""
    synced = read_where(steps, values, number, SYNCS)
    done = np.full(len(values.bytes), -1, dtype=np.int64)
    begin, stop = span(steps, number)
    for step in range(begin, stop):
        if steps.rows[step, LAST_ONLY]:
            for read in range(steps.reads[step], steps.reads[step + 1]):
                value = steps.read[read]
                if synced[value] and not values.marks[value] & BY_MICROBATCH and done[value] < step:
                    done[value] = step
                    sizes[1, step] += values.bytes[value]


@inner
def _free_at_update(
    steps: Steps, values: Facts, written: Flags, frame: tuple[int, int, int],
    found: tuple[Ints, Ints, int],
) -> int:  # fmt: skip
    """Give back what lived for the whole step: what was made before all microbatches, reduced
    gradients, what is reported. ``frame``: the phase, the mesh, the number of microbatches."""
    sizes, frees, size = found
    number, mesh, many = frame
    update = begin = span(steps, number)[0]
    while steps.rows[update, KIND] != UPDATE:
        update += 1
    synced = read_where(steps, values, _last(), LAST_ONLY)
    for asked in (True, False):
        for value in range(len(values.bytes)):
            marks = values.marks[value]
            is_sum = marks & GRADIENT and not marks & BY_MICROBATCH and not synced[value]
            ends = False
            for phase in range(len(FLAGS)):
                if FLAGS[phase] & BEFORE or (is_sum and FLAGS[phase] & (ADDS | BEHIND)):
                    ends |= written[phase, value]
            if values.mesh[value] != mesh or ends == asked:
                continue
            if ends or values.reported[value]:
                lives = many if asked and marks & BY_MICROBATCH else 1
                sizes[1, update] += lives * values.bytes[value]
                frees[0, size], frees[1, size] = update - begin, value
                size += 1
    return size


@inner
def _wait(steps: Steps, values: Facts, ends: Ints) -> Ints:
    """Return what all steps wait for, phase by phase; note in ``ends``.

    Of every write is known: the one before of the same value in the same phase (-1), its phase and
    its step. No step waits for one twice, so for fewer than there are.
    """
    most = len(steps.value)
    before, phase = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    place = np.empty(most, dtype=np.int64)
    seen = np.full(len(steps.rows), -1, dtype=np.int64)  # by whom a step was waited for last
    newest = np.full(len(values.bytes), -1, dtype=np.int64)
    needed = np.empty((3, 2 * (len(steps.read) + len(steps.rows)) + 16), dtype=np.int64)
    size = 0
    for number in range(len(steps.stops)):
        begin, stop = span(steps, number)
        known = newest.copy() if FLAGS[number] & ASIDE else newest
        computed, writers = -1, 0
        for step in range(begin, stop):
            if size + len(steps.rows) >= needed.shape[1]:
                needed = _wider(needed)
            for read in range(steps.reads[step], steps.reads[step + 1]):
                value = values.root[steps.read[read]]
                one = known[value]
                while one >= 0:
                    writer, maker = phase[one], place[one]
                    if seen[maker] != step:
                        seen[maker] = step
                        needed[0, size], needed[1, size] = step - begin, writer
                        needed[2, size] = maker - (steps.stops[writer - 1] if writer else 0)
                        writers, size = writers | 1 << writer, size + 1
                    one = before[one] if values.marks[value] & GRADIENT else -1
            if SENDS[steps.rows[step, KIND]]:
                writer = number if computed >= 0 else PREVIOUS
                needed[0, size], needed[1, size] = step - begin, writer
                needed[2, size] = max(computed, 0)
                writers, size = writers | 1 << writer, size + 1
            elif COMPUTES[steps.rows[step, KIND]]:
                computed = step - begin
            for touch in range(steps.write[step], steps.touch[step + 1]):
                value = steps.value[touch]
                is_here = known[value] >= steps.touch[begin]
                before[touch] = known[value] if is_here else -1
                phase[touch], place[touch] = number, step
                known[value] = touch
        ends[number, 1], ends[number, 2], ends[number, 3] = size, computed, writers
    return needed


@inner
def _wider(needed: Ints) -> Ints:
    wider = np.empty((3, 2 * needed.shape[1]), dtype=np.int64)
    fill(wider, needed)
    return wider


def _load() -> None:
    """Compile for the types that there are, or load that."""
    none, empty = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    rows, stops = np.zeros((0, READ + 1), dtype=np.int64), np.zeros(len(FLAGS), dtype=np.int64)
    look_over(rows, (none, none), stops, Facts(none, none, none, none, none, empty), 0, 1)


_load()
