"""What a strategy's pipeline means for lowering: its crews, and the one order of all their actions.

Receiving is an action too. Between processes a transfer begins when both ends have asked for it, so
a receive that is posted where its tensor is used hides behind nothing, however early it was sent.
Schedules that leave transfers time (``core.schedules.Schedule.posts``) therefore post receives up to
``AHEAD`` actions before the use, as early as their send allows, and the transfer runs beside these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.core.schedules import SCHEDULES
from shardwright.core.strategy import Mesh, Pipeline, Strategy
from shardwright.errors import InputError
from shardwright.planner.schedule.generators import pipeline_order
from shardwright.planner.schedule.pipeline import (
    Action,
    Crews,
    Line,
    alone,
    check_order,
    global_order,
    halved,
    handing,
    needs,
    written,
)

# A forward and a backward: more has hidden no more in any case tried, and would hold more memory.
AHEAD = 2
KEPT = 32  # orders that are remembered
# The turns that a transfer takes in the merged order, so that its receive comes a turn before its use.
TRAVEL = 1


class Entry(NamedTuple):
    """One entry of a Program's order: an action, or ``posts``, that what it receives is asked for."""

    action: Action
    posts: bool = False


def crews_of(meshes: Iterable[Iterable[int]]) -> Crews:
    """Return meshes, of which only devices are given, by those that they share. Raises ValueError where some
    but not all are."""
    crews: dict[frozenset[int], list[int]] = {}
    for number, shared in enumerate(meshes):
        crews.setdefault(frozenset(shared), []).append(number)
    owner: dict[int, frozenset[int]] = {}
    for devices in crews:
        for device in devices:
            other = owner.setdefault(device, devices)
            if other is not devices:
                raise ValueError(
                    "in an order of crews, meshes that share a device share all of theirs, but "
                    f"device {device} belongs to {sorted(other)} and {sorted(devices)}; "
                    "choose 1f1b or gpipe, or give these meshes the same devices"
                )
    return tuple(map(tuple, crews.values()))


def shares_devices(meshes: Sequence[Mesh]) -> bool:
    """Whether some device belongs to several meshes."""
    distinct = set[int]().union(*(mesh.devices for mesh in meshes))
    return len(distinct) < sum(len(mesh.devices) for mesh in meshes)


def order_of(strategy: Strategy) -> tuple[Line, ...]:
    """Return the actions of every crew. Raises InputError where they make no order."""
    return _orders(*_key(strategy))[0]


def program_order(strategy: Strategy) -> tuple[Entry, ...]:
    """Return the order in which a Program lists its instructions. Raises InputError where there is none.

    Where the schedule does not post receives they stand where they are used.
    """
    return _orders(*_key(strategy))[1]


def _key(strategy: Strategy) -> tuple[Pipeline, int, Crews, bool]:
    """Return all of a strategy that its order depends on."""
    pipeline, count = strategy.pipeline, len(strategy.meshes)
    schedule = SCHEDULES[pipeline.schedule]
    shares = shares_devices(strategy.meshes)
    if not schedule.chunks:
        return pipeline, count, (), schedule.posts and not shares
    try:
        crews = crews_of(mesh.devices for mesh in strategy.meshes) if shares else alone(count)
        return pipeline, count, crews, True
    except ValueError as error:
        raise InputError(str(error)) from error


@lru_cache(maxsize=KEPT)
def _orders(
    pipeline: Pipeline, count: int, crews: Crews, posts: bool
) -> tuple[tuple[Line, ...], tuple[Entry, ...]]:
    pieces = pipeline.num_microbatches
    try:
        if pipeline.schedule == "custom":
            lines = written(pipeline.order)
            check_order(lines, crews, pieces)
            # Where some backwards are split, forward keeps what both halves need.
            lines = tuple(map(halved, lines)) if pipeline.splits_backward else lines
        else:
            lines = pipeline_order(pipeline.schedule, count, pieces, crews)
            if SCHEDULES[pipeline.schedule].folds:
                check_order(lines, crews, pieces)
    except ValueError as error:
        raise InputError(str(error)) from error
    if posts:
        return lines, with_receives(lines, count)
    return lines, tuple(Entry(action) for action in global_order(lines))


def with_receives(lines: tuple[Line, ...], num_meshes: int) -> tuple[Entry, ...]:
    """Merge the crews' orders, every receive as far ahead of its use as it may be.

    That is behind what sends it, so that whoever runs the list in its order waits for nobody. On
    every link receives are posted in the order of their sends.
    """
    merged = global_order(lines, TRAVEL)
    place = {handing(action): number for number, action in enumerate(merged)}
    posted = _posted(lines, place, num_meshes)
    result: list[Entry] = []
    for number, action in enumerate(merged):
        ahead = sorted(posted.get(number, ()), key=lambda one: place[handing(one)])
        result += [Entry(one, posts=True) for one in ahead]
        result.append(Entry(action))
    return tuple(result)


def _posted(
    lines: tuple[Line, ...], place: Mapping[Action, int], num_meshes: int
) -> dict[int, list[Action]]:
    """Return which receives are posted at each place of the merged order: those of actions' inputs."""
    posted: dict[int, list[Action]] = {}
    for line in lines:
        mine = {action.mesh for action in line}
        for turn, action in enumerate(line):
            sources = [one for one in needs(action, num_meshes) if one.mesh != action.mesh]
            if not sources:
                continue
            first = place[handing(line[max(0, turn - AHEAD)])]
            at = max([first, *[place[one] + 1 for one in sources]])
            if any(one.mesh in mine for one in sources):
                at = place[handing(action)]
            posted.setdefault(at, []).append(action)
    return posted
