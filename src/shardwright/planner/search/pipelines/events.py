"""A step of a pipeline with unequal stages, replayed operation by operation.

Closed forms exist for equal stages only. Here every worker runs its operations in the order of the
schedule, each as soon as the worker is free and its input has arrived; an input arrives a transfer
after its producer ended, and transfers occupy no compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.profile import ScheduleKind
from shardwright.planner.search.pipelines.problem import in_flight

Phase = Literal["F", "B"]


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


def replay(stages: Sequence[StageTimes], schedule: ScheduleKind, num_microbatches: int) -> Replay:
    """Run one step: ``gpipe``, ``1f1b-sno`` or ``1f1b-so``, or ``1f1b-as``, whose transfers stream
    and cost nothing here. Microbatch i goes to replica i mod r of every stage.

    O(microbatches * stages). Raises ValueError for other schedules.
    """
    if schedule not in ("gpipe", "1f1b-sno", "1f1b-so", "1f1b-as"):
        raise ValueError(f"schedule {schedule!r} cannot be replayed")
    streams = schedule == "1f1b-as"
    orders: list[list[tuple[Phase, int]]] = []
    homes: list[int] = []
    from_here = sum(stage.replicas for stage in stages)
    for number, stage in enumerate(stages):
        held = in_flight(schedule, stage.replicas, from_here, num_microbatches)
        for replica in range(stage.replicas):
            mine = range(replica, num_microbatches, stage.replicas)
            orders.append(_order(mine, held - 1 if schedule != "gpipe" else len(mine)))
            homes.append(number)
        from_here -= stage.replicas
    ended = _run(stages, orders, homes, streams)
    finish = max(
        (ended["B", number, m] + stage.message)
        for number, stage in enumerate(stages)
        for m in range(num_microbatches)
    )
    peaks = [0] * len(stages)
    for order, number in zip(orders, homes, strict=True):
        peaks[number] = max(peaks[number], _most_held(order))
    return Replay(seconds=finish, held=tuple(peaks))


def _order(mine: range, ahead: int) -> list[tuple[Phase, int]]:
    """Run ``ahead`` forwards, then one of each in turn, then the backwards left."""
    ahead = min(ahead, len(mine))
    order: list[tuple[Phase, int]] = []
    order.extend(("F", m) for m in mine[:ahead])
    for forward, backward in zip(mine[ahead:], mine, strict=False):
        order.append(("F", forward))
        order.append(("B", backward))
    order.extend(("B", m) for m in mine[len(mine) - ahead :])
    return order


def _most_held(order: Sequence[tuple[Phase, int]]) -> int:
    held = most = 0
    for phase, _ in order:
        held += 1 if phase == "F" else -1
        most = max(most, held)
    return most


def _run(
    stages: Sequence[StageTimes],
    orders: Sequence[Sequence[tuple[Phase, int]]],
    homes: Sequence[int],
    streams: bool,
) -> dict[tuple[Phase, int, int], float]:
    """Return when each (phase, stage, microbatch) ended."""
    ended: dict[tuple[Phase, int, int], float] = {}
    last = len(stages) - 1
    place, free = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(orders):
            number = homes[worker]
            stage = stages[number]
            while place[worker] < len(order):
                phase, m = order[place[worker]]
                if phase == "F":
                    source = ("F", number - 1, m) if number else None
                    delay, work = stage.receive, stage.forward
                else:
                    source = ("B", number + 1, m) if number < last else ("F", number, m)
                    delay = stages[number + 1].receive if number < last else 0.0
                    work = stage.backward
                if source is not None and source not in ended:
                    break
                ready = 0.0 if source is None else ended[source] + (0.0 if streams else delay)
                free[worker] = max(free[worker], ready) + work
                ended[phase, number, m] = free[worker]
                place[worker] += 1
                moved = True
    if any(at < len(order) for at, order in zip(place, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other for ever")
    return ended
