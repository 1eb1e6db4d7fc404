"""The exact planner beside PipeDream's and BaPipe's, all judged by one cost model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardwright.core.profile import PipelinePlan, PipelineStage, PipelineStudy
from shardwright.core.schedules import SCHEDULES, ScheduleKind, in_flight
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise.bapipe import plan_bapipe
from shardwright.layerwise.exact import plan_exact
from shardwright.layerwise.ordered import bars
from shardwright.layerwise.pipedream import (
    OURS,
    Habits,
    Level,
    plan_levels,
    plan_pipedream,
)
from shardwright.layerwise.problem import (
    IN_FORWARD,
    Crew,
    PipelineProblem,
    Placed,
    all_reduce,
    measure,
)
from shardwright.planner.schedule import Action, Line, Replay, StageTimes, pipeline_order, replay

ROUNDING = 1e-9  # of sums in another order


def replayed(problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    """Add the seconds of a replayed step, where the schedule has a flush; what streams costs nothing
    there."""
    schedule = SCHEDULES[plan.schedule]
    if not schedule.flushes:
        return plan
    before = [1, *(stage.shards for stage in plan.stages)]
    stages = [
        StageTimes(
            forward=stage.forward_seconds + IN_FORWARD * stage.collective_seconds,
            backward=stage.compute_seconds
            - stage.forward_seconds
            + (1 - IN_FORWARD) * stage.collective_seconds,
            receive=0.0
            if schedule.streams
            else stage.receive_bytes / (min(shards, stage.shards) * problem.bandwidth),
            message=_message(problem, stage),
        )
        for stage, shards in zip(plan.stages, before, strict=False)
    ]
    replicas = [stage.num_replicas for stage in plan.stages]
    found = step_of(plan.schedule, stages, replicas, problem.microbatches)
    return dataclasses.replace(plan, simulated_seconds=found.seconds, timeline=bars(found))


def side_by_side(
    schedule: str, replicas: Sequence[int], num_microbatches: int
) -> tuple[tuple[Line, ...], tuple[int, ...], dict[Action, tuple[Action, ...]]]:
    """Return lines of forwards and of backwards, two to a device, the device of each, and which
    backward every forward waits for, since a device holds no more than the table says (FBP-AS)."""
    lines, devices, after = list[Line](), list[int](), dict[Action, tuple[Action, ...]]()
    for stage, count in enumerate(replicas):
        behind = (sum(replicas[stage:]) - 1) // count
        for replica in range(count):
            mine = range(replica, num_microbatches, count)
            held = in_flight(schedule, behind, len(mine))
            for phase in ("F", "B"):
                lines.append(tuple(Action(stage, phase, m) for m in mine))
                devices.append(sum(replicas[:stage]) + replica)
            for first, later in zip(mine, mine[held:], strict=False):
                after[Action(stage, "F", later)] = (Action(stage, "B", first),)
    return tuple(lines), tuple(devices), after


def step_of(
    schedule: ScheduleKind,
    stages: Sequence[StageTimes],
    replicas: Sequence[int],
    num_microbatches: int,
    *,
    has_own_links: bool = False,
) -> Replay:
    """Replay a step of a schedule whose order follows from its name."""
    if SCHEDULES[schedule].at_end == 1:
        lines = pipeline_order(schedule, len(stages), num_microbatches, replicas=replicas)
        return replay(lines, stages, has_own_links=has_own_links)
    lines, devices, after = side_by_side(schedule, replicas, num_microbatches)
    return replay(lines, stages, devices=devices, after=after, has_own_links=has_own_links)


def _message(problem: PipelineProblem, stage: PipelineStage) -> float:
    """Seconds of the gradients' message at the end of a step."""
    if stage.splits_weights:
        return 0.0
    return all_reduce(problem, stage.num_replicas, stage.parameter_bytes / stage.shards)


def judged_as(problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    """Return the same stages on the same workers as this problem's model counts them."""
    place = {mask: cut for cut, mask in enumerate(problem.cuts.masks)}
    done, stages = 0, list[Placed]()
    for stage in plan.stages:
        done |= sum(1 << layer for layer in stage.layers)
        stages.append((place[done], Crew(stage.workers, stage.shards, stage.splits_weights)))
    return measure(problem, stages, plan.planner)


def _with_published_count(
    problem: PipelineProblem, best: PipelinePlan, rivals: list[PipelinePlan]
) -> tuple[PipelinePlan, list[PipelinePlan]]:
    """Add what PipeDream's published optimizer takes each pipeline for.

    It leaves out what the first stage sends, so that what it prints may be less than any pipeline
    takes. Where a rival beats ours by that count, the best by it joins them.
    """
    published = dataclasses.replace(problem, formula="published")

    def counted(plan: PipelinePlan) -> PipelinePlan:
        return dataclasses.replace(plan, published_seconds=judged_as(published, plan).seconds)

    best, rivals = counted(best), [counted(rival) for rival in rivals]
    shortest = min((rival.published_seconds or 0.0 for rival in rivals), default=math.inf)
    if shortest < (best.published_seconds or 0.0) * (1 - ROUNDING):
        ours = judged_as(problem, plan_exact(published))
        rivals.insert(0, counted(dataclasses.replace(ours, planner="exact, by PipeDream's count")))
    return best, rivals


def _fastest(problem: PipelineProblem, schedules: tuple[ScheduleKind, ...]) -> PipelinePlan:
    found: list[PipelinePlan] = []
    refused = NoPlan("no schedule was named")
    for schedule in schedules:
        try:
            found.append(plan_exact(dataclasses.replace(problem, schedule=schedule)))
        except NoPlan as error:
            refused = error
    if not found:
        raise refused
    return min(found, key=lambda plan: plan.seconds)


def study_pipelines(
    problem: PipelineProblem, schedules: tuple[ScheduleKind, ...] = ()
) -> PipelineStudy:
    """Plan with all planners; of ``schedules`` (none: the problem's) each takes its fastest.

    Equal times: the earlier schedule. Raises NoPlan when nothing fits under any schedule.
    """
    schedules = schedules or (problem.schedule,)
    best = _fastest(problem, schedules)
    judged = dataclasses.replace(problem, schedule=best.schedule)
    rivals: list[PipelinePlan] = []
    refusals: list[tuple[str, str]] = []
    # BaPipe knows 1F1B in its forms, with a flush.
    known: list[ScheduleKind] = [
        s for s in schedules if SCHEDULES[s].flushes and SCHEDULES[s].per_stage
    ]
    bapipe = tuple(known) or (best.schedule,)
    for name, plan in (
        ("pipedream", lambda: plan_pipedream(judged, counts_transfers=True)),
        ("pipedream, transfers ignored", lambda: plan_pipedream(judged)),
        ("bapipe", lambda: plan_bapipe(judged, bapipe)),
    ):
        try:
            rivals.append(replayed(judged, dataclasses.replace(plan(), planner=name)))
        except NoPlan as error:
            refusals.append((name, str(error)))
    best = replayed(judged, best)
    if judged.schedule == "pipedream" and judged.formula == "code":
        best, rivals = _with_published_count(judged, best, rivals)
    return PipelineStudy(best=best, rivals=tuple(rivals), refusals=tuple(refusals))


def study_levels(problem: PipelineProblem, levels: Sequence[Level]) -> PipelineStudy:
    """Plan for workers in groups of groups, innermost level first, by PipeDream's recursion.

    Raises InputError for what the recursion cannot express: kinds of workers, shards, a flush.
    """
    if len(problem.workers) > 1 or problem.microbatches or problem.shards > 1:
        raise InputError(
            "workers in levels must be equal, replicate their stages and run without a flush; give "
            "one number of workers and one bandwidth, or leave kinds, --shards and --microbatches "
            "out"
        )
    memory = min(kind.memory_bytes for kind in problem.workers)
    common = Habits(counts_transfers=True, memory_bytes=memory, formula=problem.formula)
    ours = dataclasses.replace(OURS, memory_bytes=memory, formula=problem.formula)
    best = plan_levels(problem, levels, ours, "exact")
    if problem.cuts.is_complete:
        best = dataclasses.replace(best, bound=best.seconds)
    try:
        rival = plan_levels(problem, levels, common, "pipedream")
    except NoPlan as error:
        return PipelineStudy(best=best, rivals=(), refusals=(("pipedream", str(error)),))
    return PipelineStudy(best=best, rivals=(rival,), refusals=())
