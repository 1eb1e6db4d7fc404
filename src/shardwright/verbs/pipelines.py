"""Planning a pipeline from a profile: no model and no cluster file, only layers and workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwright.core.legality import MOST_FORWARDS
from shardwright.core.profile import CostFormula, LayerGraph, PipelinePlan, PipelineStudy
from shardwright.core.schedules import EXPLORED, PLANNED, REPLAYED, SCHEDULES, ScheduleKind
from shardwright.errors import InputError, NoPlan
from shardwright.files.layergraph import read_layer_graph
from shardwright.files.workers import read_bandwidths, read_levels, read_workers
from shardwright.verbs.options import options_of
from shardwright.verbs.orders import read_lines
from shardwright.verbs.request import PipelineRequest

if TYPE_CHECKING:
    from shardwright.files.orderfile import OrderFile
    from shardwright.layerwise import PipelineProblem
    from shardwright.planner.schedule import Line

AUTO = "auto"
MOST_NESTED_CUTS = 450
# Forwards of a step where the order is replayed beside a dozen others, some of them searched for.
MOST_REPLAYED = 4096
PROFILE_OPTIONS = frozenset({"profile", "draw", *options_of(PipelineRequest)})
SHARED_OPTIONS = frozenset({"memory_limit", "json", "order"})


def is_of_profile(given: Mapping[str, str]) -> bool:
    """Tell from the options given whether a profile is to be planned, not a model.

    ``given`` is how each is written on the command line, by its name. Raises InputError for both,
    neither, or options of the other.
    """
    if ("model" in given) == ("profile" in given):
        both = ", not both" if "model" in given else ""
        raise InputError(
            f"plan needs either a MODEL or --profile graph.txt{both}; give one of them"
        )
    chosen, other = ("--profile", "a MODEL") if "profile" in given else ("a MODEL", "--profile")
    own = PROFILE_OPTIONS if "profile" in given else set(given) - PROFILE_OPTIONS
    strays = sorted(set(given) - own - SHARED_OPTIONS)
    if strays:
        names = ", ".join(given[stray] for stray in strays)
        raise InputError(f"{names} goes with {other}, not with {chosen}; leave it out")
    return "profile" in given


def plan_profile(path: str | Path, request: PipelineRequest) -> tuple[LayerGraph, PipelineStudy]:
    """Read a profile and plan it with every planner.

    Raises InputError for a malformed profile or request, NoPlan when nothing fits.
    """
    from shardwright.layerwise import (
        Level,
        PipelineProblem,
        find_cuts,
        study_levels,
    )

    graph = read_layer_graph(path)
    counts, bandwidths = read_levels(request.workers), read_bandwidths(request.bandwidth)
    if len(bandwidths) != max(len(counts), 1):
        raise InputError(
            f"workers {request.workers!r} and bandwidth {request.bandwidth!r} must have equally "
            "many levels, outermost first; write for example 2x8 and '1 GB/s,10 GB/s'"
        )
    is_nested = len(counts) > 1
    file, lines = _order(request)
    microbatches = file.microbatches if file else request.microbatches
    schedules = _schedules(request, microbatches)
    is_replayed = bool(lines) or schedules[0] in REPLAYED
    if is_replayed and (is_nested or not microbatches):
        raise InputError(
            f"schedule {request.schedule} has a flush and one level of workers; give --microbatches, "
            "and --workers as one number"
        )
    workers = "1" if is_nested else request.workers
    problem = PipelineProblem(
        cuts=find_cuts(graph, MOST_NESTED_CUTS) if is_nested else find_cuts(graph),
        workers=read_workers(workers, request.memory_bytes),
        bandwidth=bandwidths[0],
        schedule=EXPLORED[0] if is_replayed else schedules[0],
        microbatches=microbatches,
        formula=cast(CostFormula, request.formula),
        shards=request.shards,
    )
    _check_size(problem.num_workers, microbatches, MOST_REPLAYED if is_replayed else MOST_FORWARDS)
    if is_nested:
        levels = [Level(count=n, bandwidth=b) for n, b in zip(counts, bandwidths, strict=True)]
        return graph, study_levels(problem, levels[::-1])
    if is_replayed:
        return graph, _by_order(problem, schedules[0], file, lines)
    return graph, _by_planners(problem, schedules)


def _schedules(request: PipelineRequest, microbatches: int) -> tuple[ScheduleKind, ...]:
    """Return the schedules asked for: one by its name, or all that are explored. Raises InputError."""
    known = (*PLANNED, *REPLAYED)
    if request.schedule == AUTO:
        return EXPLORED if microbatches else (PLANNED[0],)
    if request.schedule not in known:
        raise InputError(
            f"schedule {request.schedule[:40]!r} is unknown; choose {AUTO}, {', '.join(known)}"
        )
    return (cast(ScheduleKind, request.schedule),)


def _by_planners(problem: PipelineProblem, schedules: tuple[ScheduleKind, ...]) -> PipelineStudy:
    """Plan with every planner; where nothing fits, say which changes would help."""
    from shardwright.layerwise import relaxations, study_pipelines

    try:
        return study_pipelines(problem, schedules)
    except NoPlan as refused:
        from shardwright.report.reasons import relaxations_text

        found = relaxations(problem, schedules)
        remedy = relaxations_text(found) if found else refused.remedy
        raise NoPlan(refused.problem, remedy=remedy, relaxations=found) from refused


def _check_size(workers: int, microbatches: int, most: int) -> None:
    """Refuse a step whose replay would take minutes."""
    if workers * microbatches > most:
        raise InputError(
            f"a step of this schedule has at most {most:,} forwards, workers times microbatches, but "
            f"there are {workers:,} and {microbatches:,}; give fewer --microbatches"
        )


def _order(request: PipelineRequest) -> tuple[OrderFile | None, tuple[Line, ...]]:
    """Return the request's order, its file and its lines, none where no file is named."""
    if not request.order:
        return None, ()
    levels = read_levels(request.workers)
    workers = (
        math.prod(levels) if levels else sum(one.count for one in read_workers(request.workers))
    )
    return read_lines(request.order, workers, "give as many --workers")


def _by_order(
    problem: PipelineProblem,
    schedule: ScheduleKind,
    file: OrderFile | None,
    lines: tuple[Line, ...],
) -> PipelineStudy:
    from shardwright.layerwise import NoRoom, study_orders

    try:
        return study_orders(problem, "custom" if file else schedule, lines)
    except NoRoom as error:
        if file is None:
            raise
        at = f"{file.path}, line {file.lines[error.worker]}"
        raise NoPlan(f"{at}: {error.problem}", remedy=error.remedy) from error
    except ValueError as error:
        raise InputError(str(error)) from error


def draw_plan(plan: PipelinePlan, where: str) -> str:
    """Return the lanes of a plan as text (``where`` is text), or write their picture and say so.

    Raises InputError where the plan was not replayed, or the file cannot be written.
    """
    from shardwright.report.lanes import lanes_svg, lanes_text

    if not plan.timeline:
        raise InputError(
            f"schedule {plan.schedule} has no end, so that there is nothing to draw; give "
            "--microbatches, or leave --draw out"
        )
    # A device that runs a forward and a backward at once has a line for each.
    beside = SCHEDULES[plan.schedule].at_end
    if where == "text":
        return lanes_text(plan.timeline, beside=beside)
    if not where.endswith(".svg"):
        raise InputError(
            f"--draw takes text or a file that ends in .svg, not {where[:80]!r}; name one of these"
        )
    try:
        Path(where).write_text(lanes_svg(plan.timeline, beside), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {where}: {error.strerror}; name another file") from None
    return f"Wrote {where}."
