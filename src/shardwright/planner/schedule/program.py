"""What a strategy's pipeline means for lowering: its crews, and the one order of all their actions.

Receiving is an action too. Between processes a transfer begins when both ends have asked for it, so
a receive that is posted where its tensor is used hides behind nothing, however early it was sent.
Schedules that leave a transfer time (``core.schedules.Schedule.posts``) post their receives up to
``AHEAD`` actions before the use: then the transfer runs beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.core.schedules import SCHEDULES
from shardwright.core.strategy import Mesh, Strategy
from shardwright.errors import InputError
from shardwright.planner.schedule.pipeline import (
    Action,
    Crews,
    Line,
    check_order,
    global_order,
    needs,
    pipeline_order,
    written,
)

# A forward and a backward, by which every transfer that both leave time for is hidden; each receive
# further ahead would hold memory for longer.
AHEAD = 2
# The turns that a transfer takes in the merged order of a schedule that hides it.
TRAVEL = 1


class Entry(NamedTuple):
    """One entry of a Program's order: an action, or ``posts``, that what it receives is asked for."""

    action: Action
    posts: bool = False


def crews_of(meshes: Sequence[Mesh]) -> Crews:
    """Return meshes by the devices that they share. Raises ValueError where some but not all are."""
    crews: dict[frozenset[int], list[int]] = {}
    owner: dict[int, frozenset[int]] = {}
    for number, mesh in enumerate(meshes):
        devices = frozenset(mesh.devices)
        crews.setdefault(devices, []).append(number)
        for device in mesh.devices:
            if owner.setdefault(device, devices) != devices:
                raise ValueError(
                    "in an order of crews, meshes that share a device share all of theirs, but "
                    f"device {device} belongs to {sorted(owner[device])} and {sorted(devices)}; "
                    "choose 1f1b or gpipe, or give these meshes the same devices"
                )
    return tuple(map(tuple, crews.values()))


def order_of(strategy: Strategy) -> tuple[Line, ...]:
    """Return the actions of every crew. Raises InputError where they make no order."""
    try:
        return _order_of(strategy)
    except ValueError as error:
        raise InputError(str(error)) from error


def _order_of(strategy: Strategy) -> tuple[Line, ...]:
    pipeline, count = strategy.pipeline, len(strategy.meshes)
    if not SCHEDULES[pipeline.schedule].chunks:
        return pipeline_order(pipeline.schedule, count, pipeline.num_microbatches)
    crews = crews_of(strategy.meshes)
    if pipeline.schedule != "custom":
        return pipeline_order(pipeline.schedule, count, pipeline.num_microbatches, crews)
    lines = written(pipeline.order)
    check_order(lines, crews, pipeline.num_microbatches)
    return lines


def program_order(strategy: Strategy) -> list[Entry]:
    """Return the order in which a Program lists its instructions."""
    lines = order_of(strategy)
    if not SCHEDULES[strategy.pipeline.schedule].posts:
        return [Entry(action) for action in global_order(lines)]
    return with_receives(lines, len(strategy.meshes))


def with_receives(lines: Sequence[Line], num_meshes: int) -> list[Entry]:
    """Merge the crews' orders, every receive as far ahead of its use as it may be.

    That is behind what sends it, so that whoever runs the list in its order waits for nobody. On
    every link receives are posted in the order of their sends.
    """
    merged = global_order(lines, TRAVEL)
    place = {action: number for number, action in enumerate(merged)}
    posted: dict[int, list[Action]] = {}
    for line in lines:
        mine = {action.mesh for action in line}
        for turn, action in enumerate(line):
            sources = [one for one in needs(action, num_meshes) if one.mesh != action.mesh]
            if not sources:
                continue
            first = place[line[max(0, turn - AHEAD)]]
            at = max([first, *[place[one] + 1 for one in sources]])
            if any(one.mesh in mine for one in sources):
                at = place[action]
            posted.setdefault(at, []).append(action)
    result: list[Entry] = []
    for number, action in enumerate(merged):
        ahead = sorted(posted.get(number, ()), key=place.__getitem__)
        result += [Entry(one, posts=True) for one in ahead]
        result.append(Entry(action))
    return result
