"""Run a Program with a clock: when does every instruction start and end, and what is alive then?

Every resource runs its instructions in index order; an instruction starts when its resource is free
and all its predecessors have ended. Nothing else is modelled here: durations are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.completion import meets_at_end
from shardwright.core.costs import CostTable
from shardwright.core.program import Program
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.feed import Feeding, input_bytes, input_seconds
from shardwright.planner.simulate.columns import ALIKE, Ways, ranks_of_groups, shared_groups
from shardwright.planner.simulate.flushless import in_periods
from shardwright.planner.simulate.memory import memory_over_time
from shardwright.planner.simulate.steps import Clock, in_a_row
from shardwright.planner.simulate.ways import ways_of

if TYPE_CHECKING:
    from shardwright.planner.simulate.full import Times, Wiring


def simulate(
    program: Program,
    seconds: NDArray[np.float64],
    *,
    overlap_slowdown: float = 1.0,
    cores: float = math.inf,
    ways: Ways = ALIKE,
    scatter_copies: float = 0.0,
    meets: bool = True,
) -> Timeline:
    """Predict the timeline of one step from the duration of every instruction.

    Where devices do not meet at the end of a step (``meets``) its seconds are those to the next one's end, while the
    timeline shows a step that all begin together (``planner.simulate.steps``). Of a pipeline that is never flushed it is that of one minibatch on its way; the seconds of a step are those of a
    period, and memory is that of many (``planner.simulate.flushless``).

    ``overlap_slowdown`` is the factor by which the instructions of a group of devices stretch while it
    computes and communicates at once (``Cluster.overlap_slowdown``), as the classes of resources say. ``cores``: how
    many ranks can compute at once; while more do, each has its share of these. ``ways``: the resources whose messages
    share what a group can send between hosts, and by how many seconds the messages of each take longer while ranks
    crowd on cores. ``scatter_copies``: see
    ``Cluster.scatter_copies``. Deterministic. Takes O(n) time where nothing is slowed down or shared, else
    O(n log resources).
    """
    seconds = _checked(program, seconds, overlap_slowdown, cores)
    wiring, clock = _wiring(program), _clock(program, overlap_slowdown, cores, ways)

    def play(many: Program, seconds: NDArray[np.float64]) -> Timeline:
        return _timeline(many, clock(_wiring(many), seconds), scatter_copies)

    timeline = _timeline(program, clock(wiring, seconds), scatter_copies)
    if program.shift is not None and program.shift.max(initial=0) > 0:
        return in_periods(program, seconds, timeline, play)
    if meets or len(program.meshes) == 1:
        return timeline
    return in_a_row(program, wiring, seconds, timeline, clock)


def simulate_on(
    cluster: Cluster,
    table: CostTable,
    program: Program,
    seconds: NDArray[np.float64],
) -> Timeline:
    """Simulate with the overlap, the copies and the uplinks of a cluster, and the cores that its ranks were seen to have."""
    return simulate(
        program,
        seconds,
        overlap_slowdown=cluster.overlap_slowdown,
        cores=table.overhead_map.get("cores", math.inf),
        ways=ways_of(program, cluster, table),
        scatter_copies=cluster.scatter_copies,
        meets=meets_at_end(program, on_host=cluster.has_cpus),
    )


def with_input(program: Program, timeline: Timeline, feeding: Sequence[Feeding]) -> Timeline:
    """Return the timeline of a step that is given its input while others run.

    Such a step takes the longest of its own and of each of ``feeding``, as playing many steps of it
    finds; the next one's shards are there all the time.
    """
    if not feeding:
        return timeline
    meshes = {mesh for one in feeding for mesh in one.meshes}
    ahead = [
        input_bytes(program, mesh) if mesh in meshes else 0 for mesh in range(len(program.meshes))
    ]
    memory = [
        rows + np.array([0.0, size]) for rows, size in zip(timeline.memory, ahead, strict=True)
    ]
    return replace(
        timeline,
        step_seconds=max(timeline.step_seconds, input_seconds(feeding)),
        memory=tuple(memory),
        peak_bytes=tuple(
            peak + size for peak, size in zip(timeline.peak_bytes, ahead, strict=True)
        ),
    )


def _timeline(program: Program, times: Times, scatter_copies: float) -> Timeline:
    start, end, cause = times
    memory = memory_over_time(program, (start, end), scatter_copies)
    return Timeline(
        source="simulated",
        start=start,
        end=end,
        group=program.group,
        memory=memory,
        peak_bytes=tuple(float(rows[:, 1].max()) for rows in memory),
        step_seconds=float(end.max(initial=0.0)),
        critical=_critical_chain(end, cause),
    )


def _checked(
    program: Program, seconds: NDArray[np.float64], overlap_slowdown: float, cores: float
) -> NDArray[np.float64]:
    """Return the durations as a plain column, or refuse what is not a duration."""
    seconds = np.require(seconds, np.float64, ["C", "W"])
    if seconds.shape != (program.num_instructions,):
        raise ValueError(
            f"a simulation needs one duration per instruction, but there are "
            f"{program.num_instructions} instructions and durations of shape {seconds.shape}"
        )
    wrong = np.flatnonzero(~((seconds >= 0) & np.isfinite(seconds)))
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"a duration must be finite and 0 or more, but {program.describe(index)!r} takes "
            f"{seconds[index]} seconds; correct its cost"
        )
    if not 1.0 <= overlap_slowdown < np.inf:
        raise ValueError(
            f"overlap_slowdown must be finite and at least 1 (1: free overlap), "
            f"not {overlap_slowdown}"
        )
    if not cores > 0:
        raise ValueError(f"ranks compute on more than 0 cores, not on {cores}")
    return seconds


def _clock(program: Program, overlap_slowdown: float, cores: float, ways: Ways) -> Clock:
    """Return what times instructions on the resources and the devices of a Program."""
    # Late, because importing Numba takes longer than planning a small model.
    from shardwright.planner.simulate import full

    ranks, count = ranks_of_groups(program), len(program.resource_names)
    if overlap_slowdown == 1.0 and cores >= ranks.sum() and ways.far is None:
        return lambda wiring, seconds: full.relax(wiring, seconds, count)
    classes = np.require(program.resource_class, np.int8, ["C", "W"])
    how = classes, ranks, float(overlap_slowdown), float(cores), ways
    return lambda wiring, seconds: full.share(wiring, seconds, *how)


def _wiring(program: Program) -> Wiring:
    """Return columns of one type each, whoever made the Program: Numba compiles once for each."""
    from shardwright.planner.simulate import full

    return full.Wiring(
        resource=np.require(program.resource, np.int32, ["C", "W"]),
        group=np.require(shared_groups(program), np.int32, ["C", "W"]),
        offset=np.require(program.offset, np.int64, ["C", "W"]),
        predecessor=np.require(program.predecessor, np.int32, ["C", "W"]),
    )


def _critical_chain(end: NDArray[np.float64], cause: NDArray[np.int64]) -> tuple[int, ...]:
    """Follow causes back from the first instruction that ends last: a chain without slack."""
    chain: list[int] = []
    before = cause.data  # a view whose elements are read faster than the array's
    index = int(end.argmax()) if len(end) else -1
    while index >= 0:
        chain.append(index)
        index = before[index]
    return tuple(chain)
