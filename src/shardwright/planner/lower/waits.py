"""What the steps of a template wait for: those which wrote what they read, here or before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.planner.lower.template import COMPUTES, SENDS, Facts, Ints, Template

# Templates in the order in which they are looked at; a reference names one by its number.
NAMES = ("prologue", "forward", "backward", "last backward", "send", "receive", "epilogue")
# Stands for the number of a template where the last compute before this template is waited for.
PREVIOUS = len(NAMES)


class Needed(NamedTuple):
    """What the steps at ``place`` wait for: the number of a template, and the place there. Also the
    place of the last compute (-1)."""

    place: Ints
    writer: Ints
    target: Ints
    last_compute: int


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

    def of(self, name: str, template: Template) -> Needed:
        """Return what each step waits for, once each: for what it reads and, where it sends something,
        for the compute before it."""
        number, count = NAMES.index(name), len(template)
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
        once = np.unique((places * len(NAMES) + writers) * most + targets)
        rest, targets = np.divmod(once, most)
        places, writers = np.divmod(rest, len(NAMES))
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
        first: Ints = np.where(self.facts.is_gradient[values], writes[0], stop - 1)
        counts: Ints = stop - first
        rows = np.repeat(np.arange(len(values)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets = self.keys[number][first[rows] + within] % max(self.lengths[number], 1)
        return np.array([places[rows], np.full(len(rows), number), targets])
