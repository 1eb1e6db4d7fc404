"""A step of a pipeline, replayed action by action: the clock for orders without a Program.

Every line of an order is a worker. It runs its actions one after another, each as soon as the worker
is free and what it reads has arrived; a transfer begins when its producer ends and occupies no
compute. Each transfer has a link of its own, or else every worker has one link to the stages before
it and one to those after, and each carries one transfer at a time. Lines of one device share its
compute: two actions at once take as long as one after the other (BaPipe's FBP-AS).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.planner.schedule.pipeline import Action, Line, handing, needs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch on a mesh, of its input's transfer (each way), and of the weights'
    message at the end of the step.

    ``backward`` is that of the input's gradient, ``weight`` that of the weights'; an action B takes
    both.
    """

    forward: float
    backward: float
    weight: float = 0.0
    receive: float = 0.0
    message: float = 0.0

    def seconds(self, phase: str) -> float:
        """Return how long an action of a phase takes."""
        if phase == "B":
            return self.backward + self.weight
        return {"F": self.forward, "I": self.backward, "W": self.weight}[phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When every action of every line starts and ends, and when the step is over."""

    lines: tuple[Line, ...]
    start: dict[Action, float]
    end: dict[Action, float]
    seconds: float

    @property
    def span(self) -> float:
        """The longest time from the first start to the last end of a worker: what a step takes where
        no barrier stands between steps (Qi et al., 2024)."""
        return max(
            (max(self.end[a] for a in line) - min(self.start[a] for a in line) for line in self.lines if line),
            default=0.0,
        )  # fmt: skip


def replay(
    lines: Sequence[Line],
    stages: Sequence[StageTimes],
    *,
    devices: Sequence[int] = (),
    after: Mapping[Action, Sequence[Action]] | None = None,
    has_own_links: bool = True,
) -> Replay:
    """Run one step. ``devices``: the device of each line, its own if not given; ``after``: what else
    an action waits for.

    O(actions log actions). Raises ValueError where lines wait for each other for ever.
    """
    clock = _Clock(lines, stages, devices or range(len(lines)), after or {}, has_own_links)
    clock.run()
    finish = max(
        (end + stages[action.mesh].message for action, end in clock.end.items()), default=0.0
    )
    return Replay(
        lines=tuple(map(tuple, lines)), start=clock.start, end=clock.end, seconds=finish
    )  # fmt: skip


class _Clock:
    """The state of a replay; events are (time, order of creation, line, action, whether it ends,
    the version of the line's rate)."""

    def __init__(
        self,
        lines: Sequence[Line],
        stages: Sequence[StageTimes],
        devices: Sequence[int],
        after: Mapping[Action, Sequence[Action]],
        has_own_links: bool,
    ) -> None:
        self.lines, self.stages, self.devices = lines, stages, devices
        self.has_own_links = has_own_links
        self.home = {action: number for number, line in enumerate(lines) for action in line}
        self.missing = dict.fromkeys(self.home, 0)
        self.feeds: dict[Action, list[Action]] = {}
        for action in self.home:
            for other in (*needs(action, len(stages)), *after.get(action, ())):
                self.missing[action] += 1
                self.feeds.setdefault(other, []).append(action)
        self.beside = [
            [one for one, device in enumerate(devices) if device == mine] for mine in devices
        ]
        self.place = [0] * len(lines)
        self.running: dict[int, tuple[float, float]] = {}  # line: seconds left, since when
        self.version = [0] * len(lines)
        self.start: dict[Action, float] = {}
        self.end: dict[Action, float] = {}
        self.links: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, Action, int]] = []
        self.count = 0

    def run(self) -> None:
        for number in range(len(self.lines)):
            self._start(number, 0.0)
        while self.events:
            time, _, number, action, version = heapq.heappop(self.events)
            if version < 0:
                self.missing[action] -= 1
            elif version == self.version[number]:
                del self.running[number]
                self.end[action] = time
                self.place[number] += 1
                self._send(number, action, time)
                self._share(number, time)
            for one in self.beside[number]:
                self._start(one, time)
        stuck = [str(line[at]) for line, at in zip(self.lines, self.place, strict=True)
                 if at < len(line)]  # fmt: skip
        if stuck:
            raise ValueError(
                f"the lines of an order wait for each other for ever, at {' '.join(stuck[:8])}; "
                "list what these read before them"
            )

    def _start(self, number: int, time: float) -> None:
        line, at = self.lines[number], self.place[number]
        if number in self.running or at == len(line) or self.missing[line[at]]:
            return
        action = line[at]
        self.start[action] = time
        self.running[number] = self.stages[action.mesh].seconds(action.phase), time
        self._share(number, time, started=True)

    def _share(self, number: int, time: float, *, started: bool = False) -> None:
        """Settle when the lines of a device end, now that one of them has started or ended."""
        sharing = [one for one in self.beside[number] if one in self.running]
        before = len(sharing) - 1 if started else len(sharing) + 1
        for one in sharing:
            left, since = self.running[one]
            if one != number or not started:
                left -= (time - since) / before
            self.running[one] = left, time
            self.version[one] += 1
            action = self.lines[one][self.place[one]]
            self._push(time + left * len(sharing), one, action, self.version[one])

    def _send(self, number: int, action: Action, time: float) -> None:
        """Hand what an action made to all that read it."""
        for reader in self.feeds.get(handing(action), ()):
            other, start = self.home[reader], time
            if self.devices[other] == self.devices[number]:
                self.missing[reader] -= 1
                continue
            direction = reader.mesh - action.mesh
            seconds = self.stages[max(reader.mesh, action.mesh)].receive
            if seconds and not self.has_own_links:
                ends = ((number, direction), (other, -direction))
                start = max(time, *(self.links.get(end, 0.0) for end in ends))
                self.links.update(dict.fromkeys(ends, start + seconds))
            self._push(start + seconds, other, reader, -1)

    def _push(self, time: float, number: int, action: Action, version: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, number, action, version))
