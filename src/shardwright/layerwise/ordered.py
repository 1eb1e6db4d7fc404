"""Pipelines whose time follows from their order only: chunks, split backwards, orders of one's own.

Equal workers get equal parts of the layers, ``chunks`` each, and the order is replayed; nothing is
proved. A profile does not tell the halves of a backward apart: where a part has weights, I and W are
taken to be as long as each other. What W still needs is what layers with weights read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from shardwright.core.profile import (
    Bar,
    PipelinePlan,
    PipelineStage,
    PipelineStudy,
    WorkerKind,
    per_second,
)
from shardwright.core.schedules import EXPLORED, REPLAYED, SCHEDULES, ScheduleKind
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise.problem import Crew, Load, PipelineProblem, load
from shardwright.planner.schedule import (
    Crews,
    Line,
    Replay,
    Room,
    StageTimes,
    check_order,
    folded,
    held,
    meshes_of,
    most_bytes,
    pipeline_order,
    replay,
    search_order,
    timed_order,
)

PLANNER = "balanced"
# More chunks of a worker than four gained less than 1 % where they were tried, and double transfers.
CHUNKS = (2, 3, 4)
# What is shown beside an order: the schedules that any other is compared with.
BESIDE: tuple[ScheduleKind, ...] = (*EXPLORED, *REPLAYED)


class NoRoom(NoPlan):
    """An order keeps more than the memory of a ``worker``, the row of the order."""

    def __init__(self, schedule: str, kind: WorkerKind, memory: Sequence[float]) -> None:
        self.most = max(memory)
        self.worker = list(memory).index(self.most)
        super().__init__(
            f"schedule {schedule} takes {self.most / 2**30:.4g} GiB on worker {self.worker} "
            f"(row of the order), which has {kind.memory_bytes / 2**30:.4g} GiB",
            remedy="give more memory or workers, run fewer forwards ahead, or choose zb-1p, v-half or v-min",
        )


def study_orders(
    problem: PipelineProblem, schedule: ScheduleKind, lines: Sequence[Line] = ()
) -> PipelineStudy:
    """Return the pipeline of a schedule, or of an order of one's own, beside those of the others.

    Raises NoPlan where it does not fit, InputError where workers differ or split layers.
    """
    best = plan_order(problem, schedule, lines)
    rivals: list[PipelinePlan] = []
    refusals: list[tuple[str, str]] = []
    for other in BESIDE:
        if other == schedule:
            continue
        try:
            rivals.append(replace(plan_order(problem, other), timeline=()))
        except NoPlan as error:
            refusals.append((other, str(error)))
    return PipelineStudy(best=best, rivals=tuple(rivals), refusals=tuple(refusals))


def plan_order(
    problem: PipelineProblem, schedule: ScheduleKind, lines: Sequence[Line] = ()
) -> PipelinePlan:
    """Return the fastest pipeline of a schedule: cut by compute or by compute and transfers, with 2
    to 4 chunks where it has any. ``lines``: an order of one's own (``custom``), a line per worker.

    Raises NoPlan where none fits, ValueError where ``lines`` are no order.
    """
    if len(problem.workers) > 1 or problem.shards > 1:
        raise InputError(
            f"schedule {schedule} is planned for equal workers that split nothing; leave kinds of "
            "workers and --shards out"
        )
    plans, refused = list[PipelinePlan](), list[NoRoom]()
    if lines:
        check_order(lines, (), problem.microbatches)
    ways = [meshes_of(lines)] if lines else _crews(schedule, problem.num_workers)
    for crews, counts_transfers in product(ways, (False, True)):
        ends = balanced(problem, sum(map(len, crews)), counts_transfers)
        try:
            plans += [_placed(problem, schedule, crews, ends, lines)] if ends else []
        except NoRoom as error:
            refused.append(error)
    if not plans:
        if refused:
            raise min(refused, key=lambda one: one.most)
        parts = sum(map(len, ways[-1]))
        raise NoPlan(
            f"schedule {schedule} on {problem.num_workers} workers needs at least {parts} parts, and the profile "
            f"cannot be cut into so many",
            remedy="take fewer workers, or a schedule with one part each, such as 1f1b-sno",
        )
    return min(plans, key=lambda plan: (not plan.fits, plan.seconds))


def _crews(schedule: ScheduleKind, count: int) -> list[Crews]:
    """Return the meshes of each worker, for every number of chunks that a schedule is tried with."""
    entry = SCHEDULES[schedule]
    if entry.folds:
        return [folded(2 * count)]
    return [
        tuple(tuple(range(k, count * chunks, count)) for k in range(count))
        for chunks in (CHUNKS if entry.chunks else (1,))
    ]


def balanced(problem: PipelineProblem, parts: int, counts_transfers: bool) -> list[int]:
    """Return the cuts at which so many parts end whose longest compute, or compute and transfers, is
    as short as it can be; nothing where there are too few cuts.

    O(parts * pairs of cuts).
    """
    cuts = problem.cuts
    work, speed = cuts.forward + cuts.backward, problem.workers[0].speed
    sent = 2 * cuts.crossing / problem.bandwidth if counts_transfers else 0 * work
    best = np.full((parts + 1, cuts.num_cuts), np.inf)
    before = np.zeros((parts + 1, cuts.num_cuts), dtype=np.int64)
    best[0, 0] = 0.0
    for part in range(parts):
        for start in np.flatnonzero(np.isfinite(best[part])):
            stops = cuts.larger[cuts.offset[start] : cuts.offset[start + 1]]
            longest = np.maximum(
                best[part, start], (work[stops] - work[start]) / speed + sent[stops]
            )
            is_less = longest < best[part + 1, stops]
            best[part + 1, stops[is_less]] = longest[is_less]
            before[part + 1, stops[is_less]] = start
    ends, stop = list[int](), cuts.num_cuts - 1
    if not math.isfinite(best[parts, stop]):
        return []
    for part in range(parts, 0, -1):
        ends.append(stop)
        stop = int(before[part, stop])
    return ends[::-1]


@dataclass(frozen=True, slots=True)
class _Part:
    """What lies between two cuts on one worker: its load, what it keeps of a microbatch from F on,
    what of that until W, and its weights."""

    start: int
    stop: int
    load: Load
    kept: float
    left: float
    weights: float

    def times(self, receive: float) -> StageTimes:
        backward = self.load.backward
        weight = backward / 2 if self.weights else 0.0
        return StageTimes(
            forward=self.load.forward, backward=backward - weight, weight=weight, receive=receive
        )


def _parts(problem: PipelineProblem, ends: Sequence[int]) -> list[_Part]:
    cuts, parts, start = problem.cuts, list[_Part](), 0
    for stop in ends:
        kept = float(cuts.activation[stop] - cuts.activation[start] + cuts.crossing[start])
        read = float(cuts.gathered[stop] - cuts.gathered[start])
        weights = float(cuts.parameter[stop] - cuts.parameter[start])
        one = load(problem, start, stop, Crew((1,)))
        parts.append(_Part(start, stop, one, kept, min(kept, read), weights))
        start = stop
    return parts


def _placed(
    problem: PipelineProblem,
    schedule: ScheduleKind,
    crews: Crews,
    ends: Sequence[int],
    lines: Sequence[Line],
) -> PipelinePlan:
    parts, entry, kind = _parts(problem, ends), SCHEDULES[schedule], problem.workers[0]
    stages = [
        part.times(float(problem.cuts.crossing[part.start]) / problem.bandwidth) for part in parts
    ]
    weights = [2 * sum(parts[mesh].weights for mesh in own) for own in crews]
    kept, left = [part.kept for part in parts], [part.left for part in parts]
    if entry.searched:
        own_limits = [entry.searched * len(crews) * size for size in kept]
        limits = [min(kind.memory_bytes - w, most)
                  for w, most in zip(weights, own_limits, strict=True)]  # fmt: skip
        room = Room(limits=limits, kept=kept, left=left)
        lines = search_order(stages, problem.microbatches, room) or ()
        if not lines:
            raise NoRoom(schedule, kind, [w + k for w, k in zip(weights, kept, strict=True)])
    elif not lines:
        lines = pipeline_order(schedule, len(parts), problem.microbatches, crews)
        if entry.chunks and entry.splits:
            lines = timed_order(lines, stages, problem.microbatches, crews, (kept, left))
    found = replay(lines, stages, has_own_links=False)
    activations = most_bytes(lines, kept, left)
    memory = [w + a for w, a in zip(weights, activations, strict=True)]
    if max(memory) > kind.memory_bytes:
        raise NoRoom(schedule, kind, memory)
    return _plan(problem, schedule, crews, parts, found, memory)


def _plan(
    problem: PipelineProblem,
    schedule: ScheduleKind,
    crews: Crews,
    parts: Sequence[_Part],
    found: Replay,
    memory: Sequence[float],
) -> PipelinePlan:
    """Return a replayed order as a plan; the step is the longest span where nothing splits it from
    the next, which the backward split in two is for."""
    home = {mesh: worker for worker, own in enumerate(crews) for mesh in own}
    is_split = any(action.phase in "IW" for line in found.lines for action in line)
    seconds = found.span if is_split else found.seconds
    most, rounds = held(found.lines), problem.microbatches
    stages: list[PipelineStage] = []
    for mesh, part in enumerate(parts):
        stages.append(
            PipelineStage(
                layers=problem.cuts.layers(part.start, part.stop),
                workers=(1,),
                seconds=rounds * part.load.compute,
                compute_seconds=part.load.compute,
                forward_seconds=part.load.forward,
                receive_bytes=float(problem.cuts.crossing[part.start]),
                parameter_bytes=part.weights,
                memory_bytes=memory[home[mesh]],
                in_flight=most[mesh],
                worker=home[mesh],
            )
        )
    busiest = max(rounds * sum(parts[mesh].load.compute for mesh in own) for own in crews)
    return PipelinePlan(
        planner=PLANNER,
        schedule=schedule,
        stages=tuple(stages),
        seconds=seconds,
        bottleneck=busiest,
        inputs_per_second=per_second(rounds, seconds),
        simulated_seconds=seconds,
        note="without a barrier between steps" if is_split else "",
        timeline=bars(found),
    )


def bars(found: Replay) -> tuple[tuple[Bar, ...], ...]:
    """Return what every worker runs when, by its start."""
    return tuple(
        tuple(Bar(a.mesh, a.phase, a.microbatch, found.start[a], found.end[a]) for a in line)
        for line in found.lines
    )
