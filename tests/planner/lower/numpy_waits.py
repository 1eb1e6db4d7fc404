"""A second way to what ``planner.lower.kernels`` says of waits: NumPy, on all steps of a phase at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.planner.lower.builder import GRADIENT
from shardwright.planner.lower.compile import Needed
from shardwright.planner.lower.phases import PREVIOUS, Phase
from shardwright.planner.lower.template import (
    ALLOCATED,
    COMPUTES,
    FREED,
    HELD,
    ITEM,
    KIND,
    LAST_ONLY,
    READ,
    RESOURCE,
    SENDS,
    SYNCS,
    TEMPORARY,
    WRITTEN,
    Facts,
    Flags,
    Ints,
    Rows,
)


class Template:
    """A list of steps as columns.

    ``place``, ``value`` and ``writes`` list, step by step, what it holds (needs alive) and then
    what it writes. A segment writes its outputs; of these its backward holds only what was saved.
    ``allocated``, ``freed`` and ``temporary`` are a step's bytes besides values. ``syncs`` are messages
    and transforms that synchronise gradients.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        """Take the steps of several parts, one behind the other."""
        rows, self.value, self.read = parts[0]
        if len(parts) > 1:
            rows = np.concatenate([part.rows for part in parts])
            self.value = np.concatenate([part.value for part in parts])
            self.read = np.concatenate([part.read for part in parts])
        columns = np.ascontiguousarray(rows.T)
        self.kind = columns[KIND].astype(np.int8)
        self.item, self.resource = columns[ITEM], columns[RESOURCE]
        self.last_only, self.syncs = columns[LAST_ONLY] > 0, columns[SYNCS] > 0
        self.allocated, self.freed = columns[ALLOCATED], columns[FREED]
        self.temporary = columns[TEMPORARY]
        turn = np.repeat(np.arange(2 * len(rows)), rows[:, HELD : WRITTEN + 1].reshape(-1))
        self.place, self.writes = turn >> 1, (turn & 1) == 1
        self.written = self.value[self.writes]
        self.written_at = self.place[self.writes]
        self.read_at = np.repeat(np.arange(len(rows)), columns[READ])

    def __len__(self) -> int:
        return len(self.kind)

    def chosen(self, flags: Flags) -> tuple[Ints, Ints]:
        """Return what the steps so flagged read: columns (place, value)."""
        mine = flags[self.read_at]
        return self.read_at[mine], self.read[mine]


class Waits:
    """Of every value, which template wrote it last, and at which places.

    What adds up (a gradient) waits for all its terms, anything else for what wrote it last. What a
    template wrote itself, before, counts; else what the last template before it wrote.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.last = np.full(len(facts.bytes), -1)
        self.keys: dict[int, Ints] = {}  # per template: value x steps + place, ascending
        self.lengths: dict[int, int] = {}

    def copy(self) -> Waits:
        """Return the same knowledge, to go another way from here."""
        other = Waits(self.facts)
        other.last, other.keys = self.last.copy(), dict(self.keys)
        other.lengths = dict(self.lengths)
        return other

    def of(self, number: int, template: Template) -> Needed:
        """Return what each step waits for, once each: for what it reads and, where it sends something,
        for the compute before it."""
        count = len(template)
        keys = np.sort(template.written * count + template.written_at)
        places, values = template.read_at, template.read
        values = self.facts.root[values]
        self.keys[number], self.lengths[number] = keys, count
        here = self._writes(number, values, places)
        mine = here[1] > here[0]
        found = [self._columns(number, values[mine], places[mine], here[:, mine])]
        values, places = values[~mine], places[~mine]
        for earlier in np.unique(self.last[values]).tolist():
            if earlier >= 0:
                chosen = self.last[values] == earlier
                ends = np.full(int(chosen.sum()), self.lengths[earlier])
                found.append(
                    self._columns(
                        earlier, values[chosen], places[chosen],
                        self._writes(earlier, values[chosen], ends),
                    )
                )  # fmt: skip
        self.last[template.written] = number
        places, writers, targets = np.concatenate(found, axis=1)
        most = max(self.lengths.values()) + 1
        once = np.unique((places * len(Phase) + writers) * most + targets)
        rest, targets = np.divmod(once, most)
        places, writers = np.divmod(rest, len(Phase))
        computed = np.where(COMPUTES[template.kind], np.arange(count), -1)
        computed = np.maximum.accumulate(computed)
        sending = np.flatnonzero(SENDS[template.kind])
        before = computed[sending]
        return Needed(
            np.concatenate([places, sending]),
            np.concatenate([writers, np.where(before >= 0, number, PREVIOUS)]),
            np.concatenate([targets, np.maximum(before, 0)]),
            int(computed[-1]),
        )

    def _writes(self, number: int, values: Ints, places: Ints) -> Ints:
        """Return which of a template's writes of values lie before places: (first, stop) rows."""
        keys, count = self.keys[number], self.lengths[number]
        first = np.searchsorted(keys, values * count)
        return np.array([first, np.searchsorted(keys, values * count + places)])

    def _columns(self, number: int, values: Ints, places: Ints, writes: Ints) -> Ints:
        """Return the columns of waiting for writes: all where the value adds up, else the last."""
        stop: Ints = writes[1]
        first: Ints = np.where((self.facts.marks[values] & GRADIENT) > 0, writes[0], stop - 1)
        counts: Ints = stop - first
        rows = np.repeat(np.arange(len(values)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets = self.keys[number][first[rows] + within] % max(self.lengths[number], 1)
        return np.array([places[rows], np.full(len(rows), number), targets])
