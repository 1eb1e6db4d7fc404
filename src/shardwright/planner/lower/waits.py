"""What the steps of a template wait for: those which wrote what they read, here or before."""

from __future__ import annotations

import numpy as np

from shardwright.planner.lower.template import Facts, Ints, Template

# Templates in the order in which they are looked at; a reference names one by its number.
NAMES = ("prologue", "forward", "backward", "last backward", "send", "receive", "epilogue")


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
        # Where compiled, ``last`` is the last entry of every value among all that was written.
        self.entries, self.size = np.empty((4, 0), dtype=np.int64), 0

    def copy(self) -> Waits:
        """Return the same knowledge, to go another way from here."""
        other = Waits(self.facts)
        other.last, other.keys = self.last.copy(), dict(self.keys)
        other.lengths = dict(self.lengths)
        other.entries, other.size = self.entries, self.size
        return other

    def of(self, name: str, template: Template) -> tuple[Ints, Ints, Ints]:
        """Return columns (place, number of the template waited for, place there), each once."""
        number, count = NAMES.index(name), len(template)
        if not count:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, nothing
        if self.facts.compiled:
            return self._of_compiled(number, template)
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
        return places, writers, targets

    def _of_compiled(self, number: int, template: Template) -> tuple[Ints, Ints, Ints]:
        from shardwright.planner.lower import kernels

        size, more = self.size, len(template.written)
        if size + more > len(self.entries[0]):
            self.entries = np.concatenate(
                [self.entries, np.empty((4, size + more), dtype=np.int64)], axis=1
            )
        places, values = template.read_at, template.read
        needs = kernels.Needs(
            places, self.facts.root[values], template.written_at, template.written
        )
        self.size = size + more
        known = kernels.Written(self.last, *self.entries)
        return kernels.wait(needs, known, self.facts.is_gradient, number, size)

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
