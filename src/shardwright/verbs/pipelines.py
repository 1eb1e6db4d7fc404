"""Planning a pipeline from a profile: no model and no cluster file, only layers and workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from shardwright.core.profile import CostFormula, LayerGraph, PipelineStudy
from shardwright.core.schedules import PLANNED, ScheduleKind
from shardwright.errors import InputError, NoPlan
from shardwright.files.layergraph import read_layer_graph
from shardwright.files.workers import read_bandwidths, read_levels, read_workers
from shardwright.verbs.options import options_of
from shardwright.verbs.request import PipelineRequest

AUTO = "auto"
MOST_NESTED_CUTS = 450
PROFILE_OPTIONS = frozenset({"profile", *options_of(PipelineRequest)})
SHARED_OPTIONS = frozenset({"memory_limit", "json"})


def is_of_profile(given: Mapping[str, str]) -> bool:
    """Tell from the options given whether a profile is to be planned, not a model.

    ``given`` is how each is written on the command line, by its name. Raises InputError for both, neither, or options of the other.
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
        EXPLORED,
        Level,
        PipelineProblem,
        find_cuts,
        relaxations,
        study_levels,
        study_pipelines,
    )

    graph = read_layer_graph(path)
    counts, bandwidths = read_levels(request.workers), read_bandwidths(request.bandwidth)
    is_nested = len(counts) > 1
    if len(bandwidths) != max(len(counts), 1):
        raise InputError(
            f"workers {request.workers!r} and bandwidth {request.bandwidth!r} must have equally "
            "many levels, outermost first; write for example 2x8 and '1 GB/s,10 GB/s'"
        )
    if request.schedule not in (AUTO, *PLANNED):
        raise InputError(
            f"schedule {request.schedule[:40]!r} is unknown; choose {AUTO}, {', '.join(PLANNED)}"
        )
    schedules = (cast(ScheduleKind, request.schedule),)
    if request.schedule == AUTO:
        schedules = EXPLORED if request.microbatches else (PLANNED[0],)
    workers = "1" if is_nested else request.workers
    problem = PipelineProblem(
        cuts=find_cuts(graph, MOST_NESTED_CUTS) if is_nested else find_cuts(graph),
        workers=read_workers(workers, request.memory_bytes),
        bandwidth=bandwidths[0],
        schedule=schedules[0],
        microbatches=request.microbatches,
        formula=cast(CostFormula, request.formula),
        shards=request.shards,
    )
    if is_nested:
        levels = [Level(count=n, bandwidth=b) for n, b in zip(counts, bandwidths, strict=True)]
        return graph, study_levels(problem, levels[::-1])
    try:
        return graph, study_pipelines(problem, schedules)
    except NoPlan as refused:
        from shardwright.report.reasons import relaxations_text

        found = relaxations(problem, schedules)
        remedy = relaxations_text(found) if found else refused.remedy
        raise NoPlan(refused.problem, remedy=remedy, relaxations=found) from refused
