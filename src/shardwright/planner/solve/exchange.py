"""Exchanges: from a choice near a limit of memory to a cheap one within it, one variable at a time.

Between two corners of a hull lies what no weighting of seconds and bytes finds. While too much memory
is used, the variable changes that gives it back most cheaply; then whatever still saves seconds and
fits, the most first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.planner.solve.buckets import Floats, Scope
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
        while True:
            best: tuple[float, int, int, float, float] | None = None
            for variable in self._free:
                more = self._change(picks, variable)
                if memory > limit:
                    given = np.minimum(-more[1], memory - limit)
                    merit = np.where(given > 0, more[0] / np.where(given > 0, given, 1.0), np.inf)
                else:
                    gains = (more[0] < -1e-9 * seconds) & (memory + more[1] <= limit)
                    merit = np.where(gains, more[0], np.inf)
                choice = int(np.argmin(merit))
                if np.isfinite(merit[choice]) and (best is None or merit[choice] < best[0]):
                    step = float(more[0, choice]), float(more[1, choice])
                    best = float(merit[choice]), variable, choice, *step
            if best is None:
                return picks if memory <= limit else None
            _, variable, choice, slower, larger = best
            picks[variable] = choice
            seconds, memory = seconds + slower, memory + larger

    def _change(self, picks: Ints, variable: int) -> Floats:
        """Return what every choice of a variable adds to seconds and bytes."""
        totals = np.zeros(())
        for number in self._touching[variable]:
            scope = self._scopes[number]
            place = [slice(None) if v == variable else picks[v] for v in scope]
            totals = totals + self._tables[number][(slice(None), *place)]
        return totals - totals[:, picks[variable], None]
