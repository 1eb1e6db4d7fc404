"""Where no pipeline fits: the smallest changes under which the exact planner finds one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from shardwright.core.counts import GIB
from shardwright.core.explanation import Relaxation
from shardwright.core.profile import PipelinePlan, WorkerKind
from shardwright.core.schedules import PLANNED, SCHEDULES, ScheduleKind
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise.exact import plan_exact
from shardwright.layerwise.problem import PipelineProblem

# Memory is found to one part in a thousand; workers are added up to so many times as many.
CLOSE, MOST_TIMES = 1e-3, 16


def relaxations(
    problem: PipelineProblem, schedules: Sequence[ScheduleKind]
) -> tuple[Relaxation, ...]:
    """Return what helps: more memory, more workers of the last kind, another schedule.

    Under each change a pipeline was found, and memory and workers are the least that do.
    """

    def solved(other: PipelineProblem) -> PipelinePlan | None:
        best: PipelinePlan | None = None
        for schedule in schedules:
            best = _better(best, _plan(dataclasses.replace(other, schedule=schedule)))
        return best

    found = (_memory(problem, solved), _workers(problem, solved), *_schedules(problem, schedules))
    return tuple(one for one in found if one is not None)


def _plan(problem: PipelineProblem) -> PipelinePlan | None:
    try:
        return plan_exact(problem)
    except NoPlan:
        return None


def _better(one: PipelinePlan | None, other: PipelinePlan | None) -> PipelinePlan | None:
    plans = [plan for plan in (one, other) if plan is not None]
    return min(plans, key=lambda plan: plan.seconds, default=None)


Solver = Callable[[PipelineProblem], PipelinePlan | None]


def _memory(problem: PipelineProblem, solved: Solver) -> Relaxation | None:
    """Multiply the memory of all workers, by bisection, until a pipeline just fits."""

    def scaled(times: float) -> PipelinePlan | None:
        workers = tuple(
            dataclasses.replace(kind, memory_bytes=kind.memory_bytes * times)
            for kind in problem.workers
        )
        return solved(dataclasses.replace(problem, workers=workers))

    low, high, plan = 1.0, 2.0, scaled(2.0)
    while plan is None and high < 2**20:
        low, high, plan = high, 2 * high, scaled(2 * high)
    if plan is None:
        return None
    while high / low > 1 + CLOSE:
        middle = math.sqrt(low * high)
        tried = scaled(middle)
        low, high, plan = (middle, high, plan) if tried is None else (low, middle, tried)
    room = max(kind.memory_bytes for kind in problem.workers)
    needed = math.ceil(room * high / GIB * 1e4) / 1e4
    is_uniform = len(problem.workers) == 1
    return _said(
        f"{high:.4g} times the memory, {needed:.10g} GiB per worker",
        f'--memory-limit "{needed:.10g} GiB"' if is_uniform else "", plan,
    )  # fmt: skip


def _workers(problem: PipelineProblem, solved: Solver) -> Relaxation | None:
    """Add workers of the last kind: double, then bisect."""
    *others, last = problem.workers

    def grown(count: int) -> PipelinePlan | None:
        kind: WorkerKind = dataclasses.replace(last, count=count)
        try:
            return solved(dataclasses.replace(problem, workers=(*others, kind)))
        except InputError:  # too many mixtures of workers
            return None

    low, high, plan = last.count, last.count, None
    while plan is None and high < MOST_TIMES * last.count:
        low, high = high, 2 * high
        plan = grown(high)
    if plan is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        tried = grown(middle)
        low, high, plan = (middle, high, plan) if tried is None else (low, middle, tried)
    total = problem.num_workers - last.count + high
    option = f"--workers {total}" if not others and last.speed == 1.0 else ""
    what = f"{total} workers instead of {problem.num_workers}"
    return _said(what, option, plan)


def _schedules(
    problem: PipelineProblem, tried: Sequence[ScheduleKind]
) -> Iterator[Relaxation | None]:
    """Try the schedules that were not asked for, with as many microbatches."""
    for schedule in PLANNED:
        if schedule in tried or SCHEDULES[schedule].flushes != (problem.microbatches > 0):
            continue
        plan = _plan(dataclasses.replace(problem, schedule=schedule))
        yield _said(f"schedule {schedule}", f"--schedule {schedule}", plan)


def _said(what: str, option: str, plan: PipelinePlan | None) -> Relaxation | None:
    if plan is None:
        return None
    return Relaxation(
        what=what,
        option=option,
        label=f"{len(plan.stages)} stages on {plan.num_workers} workers",
        step_seconds=plan.seconds,
        peak_bytes=max(stage.memory_bytes for stage in plan.stages),
    )
