"""Exchanges: from a choice near a limit of memory to a cheap one within it, one variable at a time.

Between two corners of a hull lies what no weighting of seconds and bytes finds. While too much memory
is used, the variable changes that gives it back most cheaply; then whatever still saves seconds and
fits, the most first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.planner.solve.buckets import Floats, Scope, neighbours
from shardwright.planner.solve.wide.problem import Ints


class Exchange:
    """Seconds and bytes of a network's tables, shaped by their scopes; infinite seconds: forbidden."""

    def __init__(
        self,
        sizes: Sequence[int],
        scopes: Sequence[Scope],
        seconds: Sequence[Floats],
        memory: Sequence[Floats],
    ) -> None:
        self._scopes = scopes
        self._tables = [np.stack(pair) for pair in zip(seconds, memory, strict=True)]
        self._touching: list[list[int]] = [[] for _ in sizes]
        for number, scope in enumerate(scopes):
            for variable in scope:
                self._touching[variable].append(number)
        self._free = [v for v, size in enumerate(sizes) if size > 1 and self._touching[v]]
        self._near = neighbours(len(sizes), scopes)

    def costs(self, picks: Ints) -> Floats:
        """Return the seconds and bytes of a choice."""
        found = np.zeros(2)
        for table, scope in zip(self._tables, self._scopes, strict=True):
            found += table[(slice(None), *[picks[v] for v in scope])]
        return found

    def within(self, picks: Ints, limit: float) -> Ints | None:
        """Return a choice within a limit of bytes that no exchange makes faster, or None."""
        picks = picks.copy()
        seconds, memory = self.costs(picks)
        changes = {variable: self._change(picks, variable) for variable in self._free}
        while changes:
            merits = {v: _merit(more, seconds, memory - limit) for v, more in changes.items()}
            variable = min(merits, key=lambda v: merits[v].min())
            choice = int(merits[variable].argmin())
            if not np.isfinite(merits[variable][choice]):
                break
            slower, larger = changes[variable][:, choice].tolist()
            picks[variable] = choice
            seconds, memory = seconds + slower, memory + larger
            for other in changes.keys() & {variable, *self._near[variable]}:
                changes[other] = self._change(picks, other)
        return picks if memory <= limit else None

    def _change(self, picks: Ints, variable: int) -> Floats:
        """Return what every choice of a variable adds to seconds and bytes."""
        totals = np.zeros(())
        for number in self._touching[variable]:
            scope = self._scopes[number]
            place = [slice(None) if v == variable else picks[v] for v in scope]
            totals = totals + self._tables[number][(slice(None), *place)]
        return totals - totals[:, picks[variable], None]


def _merit(more: Floats, seconds: float, over: float) -> Floats:
    """Rank the changes of a choice that is so many bytes over the limit, the least first: by seconds for
    a byte that is too much, else by seconds if they are fewer; infinite where they do not help."""
    if over > 0:
        given = np.minimum(-more[1], over)
        return np.where(given > 0, more[0] / np.where(given > 0, given, 1.0), np.inf)
    return np.where((more[0] < -1e-9 * seconds) & (over + more[1] <= 0), more[0], np.inf)
