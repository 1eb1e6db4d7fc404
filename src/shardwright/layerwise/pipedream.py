"""PipeDream's own planner, and the exact one for workers in groups of groups (hosts of devices).

A level has ``count`` groups, each a unit of the level below, joined at ``bandwidth``. With
T[i, j] the seconds of the layers between two cuts on one unit, a level's best pipeline is

    A[i, j, m] = min over cuts k and r < m of max(A[i, k, m - r], stage(k, j, r), transfers)
    stage(k, j, r) = (T[k, j] + 4 (r-1) w / (r B)) / r               ("code")
                   = max(T[k, j], 2 (r-1) w / B) / r                 ("paper")

and A[i, j, count] is T of the next level. That is what PipeDream's published optimizer computes,
with these habits: it uses every unit, its first stage's weights travel at B times the units of the
level below, and unless told otherwise it does not count transfers. Quantities are those of
Narayanan et al., SOSP 2019, section 3.1; see docs/papers.md for what differs in print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.core.profile import CostFormula, PipelinePlan, PipelineStage, per_second
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise.cuts import Cuts
from shardwright.layerwise.problem import (
    Crew,
    PipelineProblem,
    Placed,
    in_flight,
    measure,
    memory_bytes,
)

Floats = NDArray[np.float64]
Table = tuple[Floats, NDArray[np.int64], NDArray[np.int64]]
# A stage's cuts, and for each level its copies and what divides their message.
Nested = tuple[int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """``count`` units of the level below, each with ``bandwidth`` bytes per second to the rest."""

    count: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.count < 1 or not (self.bandwidth > 0 and math.isfinite(self.bandwidth)):
            raise InputError(
                "a level of workers needs at least one unit and a positive bandwidth, not "
                f"{self.count} at {self.bandwidth} bytes/s; give both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the recursion counts. The defaults are the published optimizer's."""

    counts_transfers: bool = False
    may_idle: bool = False
    memory_bytes: float = math.inf
    formula: CostFormula = "code"


OURS = Habits(counts_transfers=True, may_idle=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedPipeline:
    """Stages, and the bottleneck that the recursion gives them."""

    stages: tuple[Nested, ...]
    seconds: float


def plan_pipedream(problem: PipelineProblem, *, counts_transfers: bool = False) -> PipelinePlan:
    """Plan as PipeDream's optimizer does and judge the result by the problem's model.

    It takes workers for equal; kinds are handed out in the order given. A limited memory switches
    its own estimate on: ceil((n - m) / r) times the stage's outputs and weights. Raises NoPlan when
    it finds nothing.
    """
    habits = Habits(
        counts_transfers=counts_transfers or problem.formula != "code",
        memory_bytes=min(kind.memory_bytes for kind in problem.workers),
        formula=problem.formula,
    )
    levels = (Level(count=problem.num_workers, bandwidth=problem.bandwidth),)
    found = nest(problem.cuts, levels, habits)
    pool = [k for k, kind in enumerate(problem.workers) for _ in range(kind.count)]
    stages: list[Placed] = []
    for _, stop, ((replicas, _),) in found.stages:
        used, pool = pool[:replicas], pool[replicas:]
        stages.append((stop, Crew(tuple(used.count(k) for k in range(len(problem.workers))))))
    note = "" if habits.counts_transfers else "its planner ignores transfers"
    return replace(measure(problem, stages, "pipedream"), note=note)


def plan_levels(
    problem: PipelineProblem, levels: Sequence[Level], habits: Habits, planner: str
) -> PipelinePlan:
    """Return the best pipeline of several levels, as the recursion counts.

    With ``OURS`` it is the optimum of the published recursion with transfers counted and idle units
    allowed. Memory is the recursion's own estimate.
    """
    cuts = problem.cuts
    found = nest(cuts, levels, habits)
    stages: list[PipelineStage] = []
    behind = sum(math.prod(r for r, _ in copies) for _, _, copies in found.stages)
    for start, stop, copies in found.stages:
        ends = (start, stop) if start else (stop,)
        flat = measure(problem, [(end, Crew((1,))) for end in ends], "")
        alone, replicas = flat.stages[-1], math.prod(r for r, _ in copies)
        seconds = alone.compute_seconds
        for level, (r, divisor) in zip(levels, copies, strict=True):
            weights = alone.parameter_bytes / divisor
            seconds = _with_message(habits, seconds, weights, level, r)
        stages.append(
            replace(
                alone,
                workers=(replicas,),
                seconds=seconds,
                in_flight=in_flight("pipedream", replicas, behind),
                memory_bytes=memory_bytes(problem, start, stop, Crew((replicas,)), behind),
            )
        )
        behind -= replicas
    return PipelinePlan(
        planner=planner,
        schedule="pipedream",
        stages=tuple(stages),
        seconds=found.seconds,
        bottleneck=found.seconds,
        inputs_per_second=per_second(1, found.seconds),
    )


def _with_message(
    habits: Habits, seconds: float, weights: float, level: Level, replicas: int
) -> float:
    """Add the weights' message of a stage of several units to its seconds on one."""
    if habits.formula == "paper":
        return max(seconds, 2 * (replicas - 1) * weights / level.bandwidth) / replicas
    return (seconds + 4 * (replicas - 1) * weights / (level.bandwidth * replicas)) / replicas


def nest(cuts: Cuts, levels: Sequence[Level], habits: Habits) -> NestedPipeline:
    """Run the recursion over the levels, innermost first, and read the stages off its tables.

    O(cuts^2 * units^2) for the last level, times the cuts for each level inside.
    """
    from shardwright.layerwise.recursion import Level as Scalars
    from shardwright.layerwise.recursion import pipeline_level

    count = cuts.num_cuts
    inside = np.zeros((count, count), dtype=np.bool_)
    inside[np.repeat(np.arange(count), np.diff(cuts.offset)), cuts.larger] = True
    work = cuts.forward + cuts.backward
    seconds: Floats = np.where(inside, work[None, :] - work[:, None], np.inf)
    tables: list[Table] = []
    units = 1
    for number, level in enumerate(levels):
        is_last = number == len(levels) - 1
        scalars = Scalars(
            units=level.count,
            bandwidth=level.bandwidth,
            inner=units,
            rows=1 if is_last else count,
            is_paper=habits.formula == "paper",
            counts_transfers=habits.counts_transfers,
            may_idle=habits.may_idle,
            memory=habits.memory_bytes,
        )
        found = pipeline_level(
            scalars, seconds, inside, cuts.parameter, cuts.activation, cuts.crossing
        )
        tables.append(found)
        seconds = np.ascontiguousarray(found[0][:, :, -1])  # else compiled once more, for views
        units = level.count
    best = float(tables[-1][0][0, -1, -1])
    if not math.isfinite(best):
        raise NoPlan("PipeDream's planner finds no pipeline whose estimated stash fits the memory")
    inner = [1, *(level.count for level in levels[:-1])]
    return NestedPipeline(stages=tuple(_read(tables, inner, 0, count - 1)), seconds=best)


def _read(tables: list[Table], inner: list[int], start: int, stop: int) -> list[Nested]:
    """Read the stages between two cuts from the tables of a level and those inside it."""
    if not tables:
        return [(start, stop, ())]
    _, split, used = tables[-1]
    radix = used.shape[2] + 1
    stages: list[Nested] = []
    left = used.shape[2]
    while left:
        begin = int(split[start, stop, left - 1])
        replicas, left = divmod(int(used[start, stop, left - 1]), radix)
        first = start if begin < 0 else begin
        here = (replicas, inner[-1] if begin < 0 else 1)
        within = _read(tables[:-1], inner[:-1], first, stop)
        stages = [(a, b, (*copies, here)) for a, b, copies in within] + stages
        stop = first
    return stages
