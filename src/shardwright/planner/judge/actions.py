"""What the actions of a pipeline take and keep, read off a simulated step, and an order laid out for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Kind, Program
from shardwright.core.schedules import SCHEDULES
from shardwright.core.strategy import Pipeline, Strategy
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.price import Prices
from shardwright.planner.judge.evaluate import evaluate_program, priced
from shardwright.planner.model.context import Context
from shardwright.planner.schedule import (
    Line,
    Room,
    StageTimes,
    order_of,
    search_order,
    timed_order,
)

# F, I and W; what runs again runs ahead of I.
PHASES = ((Kind.FORWARD,), (Kind.RECOMPUTE, Kind.INPUT_GRADIENT), (Kind.WEIGHT_GRADIENT,))


def timed(context: Context, strategy: Strategy) -> Strategy | None:
    """Return a strategy with its F, I and W in an order for what they are predicted to take, which keeps no more;
    None where its own is as short. Raises ValueError where it is illegal."""
    lines, pipeline = order_of(strategy), strategy.pipeline
    stages, sizes = _predicted(context, strategy)
    crews = tuple(tuple(dict.fromkeys(action.mesh for action in line)) for line in lines)
    found = timed_order(lines, stages, pipeline.num_microbatches, crews, sizes)
    return None if found == lines else _ordered(strategy, found, f"{pipeline.schedule} by times")


def searched(context: Context, strategy: Strategy, name: str) -> Strategy:
    """Return a pipeline of one mesh a device in the order that is searched for what its F, I and W are predicted to
    take (``zb-1p``, ``zb-2p``): every stage keeps at most so many times what the first one does under 1F1B. Raises ValueError where it is illegal."""
    stages, (kept, left) = _predicted(context, strategy)
    most = SCHEDULES[name].searched * len(stages)
    room = Room(limits=[most * one for one in kept], kept=kept, left=left)
    lines = search_order(stages, strategy.pipeline.num_microbatches, room)
    assert lines is not None  # there is room for several forwards
    return _ordered(strategy, lines, name)


def _predicted(
    context: Context, strategy: Strategy
) -> tuple[list[StageTimes], tuple[list[float], list[float]]]:
    """Return what actions take, and what they keep."""
    program, prices = priced(context, strategy)
    timeline, _ = evaluate_program(context, program, prices, float("nan"))
    return stage_times(program, prices, timeline), stage_bytes(program)


def _ordered(strategy: Strategy, lines: Sequence[Line], name: str) -> Strategy:
    """Return a strategy in an order of its own, by a name."""
    order = tuple(" ".join(map(str, line)) for line in lines)
    pipeline = strategy.pipeline
    written = Pipeline(schedule="custom", num_microbatches=pipeline.num_microbatches, order=order)
    return replace(
        strategy, pipeline=written, label=strategy.label.replace(pipeline.schedule, name, 1)
    )


def stage_times(program: Program, prices: Prices, timeline: Timeline) -> list[StageTimes]:
    """Return what F, I and W of a microbatch take on every mesh, from where the first part of one starts to where
    the last ends: of the microbatch that waits least in between."""
    shape = (len(program.meshes), 3, program.strategy.pipeline.num_microbatches)
    index, place = _phases(program)
    start, end = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(start, place, timeline.start[index])
    np.maximum.at(end, place, timeline.end[index])
    # A phase without any work takes no time.
    seconds = np.where(np.isfinite(start), end - start, 0.0).min(axis=2)
    receive = _receiving(program, prices)
    return [
        StageTimes(forward=f, backward=i, weight=w, receive=receive[mesh])
        for mesh, (f, i, w) in enumerate(seconds.tolist())
    ]


def stage_bytes(program: Program) -> tuple[list[float], list[float]]:
    """Return what every mesh keeps of a microbatch from F to I, and of that to W."""
    shape = (len(program.meshes), 3, program.strategy.pipeline.num_microbatches)
    index, place = _phases(program)
    grown = np.zeros(shape)
    np.add.at(grown, place, (program.allocated - program.freed)[index].astype(np.float64))
    # Gradients of parameters appear with the first microbatch and go with the last.
    some = shape[2] // 2
    kept = np.maximum(grown[:, 0, some], 0.0)
    return kept.tolist(), np.clip(-grown[:, 2, some], 0.0, kept).tolist()


def _phases(program: Program) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], ...]]:
    """Return what runs segments for microbatches, and of each its mesh, phase and microbatch."""
    phase = np.full(len(Kind), -1)
    for number, kinds in enumerate(PHASES):
        phase[list(kinds)] = number
    index = np.flatnonzero((phase[program.kind] >= 0) & (program.microbatch >= 0))
    where = (program.group[index], phase[program.kind[index]], program.microbatch[index])
    return index, tuple(one.astype(np.int64) for one in where)


def _receiving(program: Program, prices: Prices) -> list[float]:
    """Return what it takes until what a mesh reads of the one before has come, or its gradient has gone back."""
    found = [0.0] * len(program.meshes)
    for index in np.flatnonzero(program.kind == Kind.SEND):
        message = program.messages[int(program.item[index])]
        later = max(message.mesh, message.destination)
        found[later] = max(found[later], float(prices.seconds[index]))
    return found
