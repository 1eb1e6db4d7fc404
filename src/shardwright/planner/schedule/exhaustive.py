"""The shortest order of few actions, by branch and bound.

Microbatches are alike, so that every phase of a stage runs them in ascending order, and a state is
how far each phase of each stage is. At each step the stage whose next action could end first is
looked at: it runs an action that begins before that end, since whatever begins later leaves room for
the one that ends first (Giffler and Thompson, 1960). A forward takes memory, so that running it
early may be worse: there it may also be put behind the stage's next action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwright.planner.schedule.clock import StageTimes
from shardwright.planner.schedule.pipeline import Action, Line, Phase
from shardwright.planner.schedule.play import ROUNDING, Room

PHASES: tuple[Phase, ...] = ("F", "I", "W")


def best_order(
    stages: Sequence[StageTimes], num_microbatches: int, room: Room, most: float
) -> tuple[Line, ...] | None:
    """Return the order with the least longest span of a stage, or None where none beats ``most``.

    Exponential in the number of actions.
    """
    search = _Search(stages, num_microbatches, room, most)
    search.go_on()
    return search.best


class _Search:
    """A partial order: the actions of each stage so far and when they end."""

    def __init__(self, stages: Sequence[StageTimes], count: int, room: Room, most: float) -> None:
        self.stages, self.count, self.room, self.most = stages, count, room, most
        self.best: tuple[Line, ...] | None = None
        self.lines: list[list[Action]] = [[] for _ in stages]
        self.ends: dict[Phase, list[list[float]]] = {p: [[] for _ in stages] for p in PHASES}
        self.free = [0.0] * len(stages)
        self.memory = [0.0] * len(stages)
        self.is_held = [False] * len(stages)
        self.begin: list[float] = []
        at = 0.0
        for stage in stages:  # every stage begins with the first forward, as soon as it can
            self.begin.append(at := at + (stage.receive if self.begin else 0.0))
            at += stage.forward
        self.seen: dict[tuple[tuple[int, ...], ...], list[tuple[float, ...]]] = {}

    def go_on(self) -> None:
        """Try whatever can come next."""
        if self._bound() >= self.most * (1 - ROUNDING):
            return
        ready: list[tuple[float, float, int, Phase]] = [(start + self.stages[k].seconds(phase), start, k, phase)
                 for k in range(len(self.stages)) for phase, start in self._ready(k)]  # fmt: skip
        if not ready:
            if all(len(line) == 3 * self.count for line in self.lines):
                self.most = self._bound()
                self.best = tuple(map(tuple, self.lines))
            return
        if self._is_known():
            return
        end, _, stage, first = min(ready)
        for _, start, k, phase in sorted(ready):
            if k == stage and (start < end or phase == first):
                self._try(stage, phase, start)
        if first == "F" and len(self.lines[stage]) and not self.is_held[stage]:
            self.is_held[stage] = True
            self.go_on()
            self.is_held[stage] = False

    def _is_known(self) -> bool:
        """Whether the same actions were done no later before: then nothing better follows."""
        key = tuple(tuple(len(self.ends[p][k]) for p in PHASES) for k in range(len(self.stages)))
        key = (*key, tuple(self.is_held))
        times = (*self.free, *(end for p in ("F", "I") for own in self.ends[p] for end in own))
        before = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(one, times, strict=True)) for one in before):
            return True
        before.append(times)
        return False

    def _bound(self) -> float:
        """Return what the longest span is at least: what is left to do on every stage."""
        spans: list[float] = []
        for k, stage in enumerate(self.stages):
            left = sum(stage.seconds(p) * (self.count - len(self.ends[p][k])) for p in PHASES)
            spans.append(max(self.free[k], self.begin[k]) + left - self.begin[k])
        return max(spans)

    def _ready(self, k: int) -> Iterator[tuple[Phase, float]]:
        """Yield the phases that a stage can run next and when they could start."""
        free = self.free[k]
        forwards, gradients, weights = (len(self.ends[p][k]) for p in PHASES)
        if forwards < self.count and not self.is_held[k] and self.room.fits(k, self.memory[k], k):
            arrives = self._arrival("F", k, forwards)
            if arrives < math.inf:
                yield "F", max(free, arrives)
        if gradients < forwards:
            arrives = self._arrival("I", k, gradients)
            if arrives < math.inf:
                yield "I", max(free, arrives)
        if weights < gradients:
            yield "W", free

    def _arrival(self, phase: Phase, k: int, number: int) -> float:
        """Return when what a stage's phase reads has come; infinite where it is not begun."""
        if phase == "F" and k == 0:
            return 0.0
        if phase == "I" and k == len(self.stages) - 1:
            return self.ends["F"][k][number]
        source, link = (k - 1, self.stages[k]) if phase == "F" else (k + 1, self.stages[k + 1])
        ends = self.ends[phase][source]
        return ends[number] + link.receive if number < len(ends) else math.inf

    def _try(self, k: int, phase: Phase, start: float) -> None:
        free, is_held, memory = self.free[k], self.is_held[k], self.memory[k]
        self.lines[k].append(Action(k, phase, len(self.ends[phase][k])))
        self.free[k] = start + self.stages[k].seconds(phase)
        self.ends[phase][k].append(self.free[k])
        self.memory[k] += self.room.added(k, phase)
        self.is_held[k] = False
        self.go_on()
        self.free[k], self.is_held[k], self.memory[k] = free, is_held, memory
        self.ends[phase][k].pop()
        self.lines[k].pop()
