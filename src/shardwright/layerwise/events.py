"""A step of a pipeline with unequal stages, replayed operation by operation.

Closed forms exist for equal stages only. Here every worker runs its operations in the order of the
schedule, each as soon as the worker is free and its input has arrived. Transfers occupy no compute.
A worker has a link to the stage before it and one to the stage after; each carries one transfer at a
time, in the order they are ready, unless ``has_own_links`` gives every transfer a link of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.core.schedules import PLANNED, SCHEDULES, ScheduleKind
from shardwright.layerwise.problem import in_flight

# With a flush, and one operation of a worker at a time.
REPLAYED = tuple(
    name for name in PLANNED if SCHEDULES[name].flushes and SCHEDULES[name].at_end == 1
)
Phase = Literal["F", "B"]
Action = tuple[Phase, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch on one replica, of its input's transfer (each way), and of the
    weights' message at the end of the step."""

    forward: float
    backward: float
    receive: float = 0.0
    message: float = 0.0
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When the step ends, and how many microbatches a worker of each stage held at most."""

    seconds: float
    held: tuple[int, ...]


def replay(
    stages: Sequence[StageTimes],
    schedule: ScheduleKind,
    num_microbatches: int,
    *,
    has_own_links: bool = False,
) -> Replay:
    """Run one step: ``gpipe``, ``1f1b-sno`` or ``1f1b-so``, or ``1f1b-as``, whose transfers stream
    and cost nothing here. Microbatch i goes to replica i mod r of every stage.

    O(microbatches * stages * log). Raises ValueError for other schedules.
    """
    if schedule not in REPLAYED:
        raise ValueError(f"schedule {schedule!r} cannot be replayed")
    if SCHEDULES[schedule].executes == "streaming":
        stages = [replace(stage, receive=0.0) for stage in stages]
    orders: list[list[Action]] = []
    homes: list[tuple[int, int]] = []
    from_here = sum(stage.replicas for stage in stages)
    for number, stage in enumerate(stages):
        held = in_flight(schedule, stage.replicas, from_here, num_microbatches)
        for replica in range(stage.replicas):
            mine = range(replica, num_microbatches, stage.replicas)
            orders.append(
                _order(mine, len(mine) if SCHEDULES[schedule].per_stage is None else held - 1)
            )
            homes.append((number, replica))
        from_here -= stage.replicas
    pipeline = _Pipeline(stages, orders, homes, has_own_links)
    pipeline.run()
    finish = max(
        free + stages[number].message
        for free, (number, _) in zip(pipeline.free, homes, strict=True)
    )
    peaks = [0] * len(stages)
    for order, (number, _) in zip(orders, homes, strict=True):
        peaks[number] = max(peaks[number], _most_held(order))
    return Replay(seconds=finish, held=tuple(peaks))


def _order(mine: range, ahead: int) -> list[Action]:
    """Run ``ahead`` forwards, then one of each in turn, then the backwards left."""
    ahead = min(ahead, len(mine))
    order: list[Action] = []
    order.extend(("F", m) for m in mine[:ahead])
    for forward, backward in zip(mine[ahead:], mine, strict=False):
        order.append(("F", forward))
        order.append(("B", backward))
    order.extend(("B", m) for m in mine[len(mine) - ahead :])
    return order


def _most_held(order: Sequence[Action]) -> int:
    held = most = 0
    for phase, _ in order:
        held += 1 if phase == "F" else -1
        most = max(most, held)
    return most


class _Pipeline:
    """The state of a replay; events are (time, order of creation, worker, what)."""

    def __init__(
        self,
        stages: Sequence[StageTimes],
        orders: Sequence[Sequence[Action]],
        homes: Sequence[tuple[int, int]],
        has_own_links: bool,
    ) -> None:
        self.stages, self.orders, self.homes = stages, orders, homes
        self.has_own_links = has_own_links
        self.workers = {home: worker for worker, home in enumerate(homes)}
        self.free = [0.0] * len(orders)
        self.place = [0] * len(orders)
        self.is_busy = [False] * len(orders)
        self.links: dict[tuple[int, int], float] = {}
        self.arrived: set[tuple[int, Action]] = set()
        self.count = 0
        self.events: list[tuple[float, int, int, Action, bool]] = []

    def run(self) -> None:
        """Replay everything. Raises ValueError when the orders wait for each other for ever."""
        for worker, (number, _) in enumerate(self.homes):
            if number == 0:
                self.arrived |= {(worker, action) for action in self.orders[worker]
                                 if action[0] == "F"}  # fmt: skip
                self._start(worker, 0.0)
        while self.events:
            time, _, worker, action, is_done = heapq.heappop(self.events)
            if is_done:
                self.is_busy[worker] = False
                self._send(worker, action, time)
            else:
                self.arrived.add((worker, action))
            self._start(worker, time)
        if any(at < len(order) for at, order in zip(self.place, self.orders, strict=True)):
            raise ValueError("the stages' orders wait for each other for ever")

    def _start(self, worker: int, time: float) -> None:
        """Start the worker's next operation, if it can."""
        order, place = self.orders[worker], self.place[worker]
        if (
            self.is_busy[worker]
            or place == len(order)
            or (worker, order[place]) not in self.arrived
        ):
            return
        stage = self.stages[self.homes[worker][0]]
        end = time + (stage.forward if order[place][0] == "F" else stage.backward)
        self.place[worker], self.is_busy[worker], self.free[worker] = place + 1, True, end
        self._push(end, worker, order[place], is_done=True)

    def _send(self, worker: int, action: Action, time: float) -> None:
        """Send what an operation made to the stage after it, or its gradient to the one before."""
        phase, microbatch = action
        number = self.homes[worker][0]
        if phase == "F" and number == len(self.stages) - 1:
            self.arrived.add((worker, ("B", microbatch)))
            return
        other = number + (1 if phase == "F" else -1)
        if other < 0:
            return
        target = self.workers[other, microbatch % self.stages[other].replicas]
        seconds = self.stages[max(number, other)].receive
        if seconds and not self.has_own_links:
            ends = ((worker, other - number), (target, number - other))
            time = max(time, *(self.links.get(end, 0.0) for end in ends))
            self.links.update(dict.fromkeys(ends, time + seconds))
        self._push(time + seconds, target, action, is_done=False)

    def _push(self, time: float, worker: int, action: Action, *, is_done: bool) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, worker, action, is_done))
