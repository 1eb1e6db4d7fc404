"""The best pipeline of profiled layers under the cost model, with a proof.

``solve`` (kernel.py) tries every pipeline of the kept cuts that takes at most a limit. Whatever it
finds is the optimum among all, since every better one is within the limit too. So the limit is what
simpler problems attain (workers in lots, or in powers of two): most of the table is never filled.

Where layers may be split, the memory of a stage depends on how many replicas the later ones have.
Counting them multiplies the table, so first they are taken for as many as the workers, which gives
a pipeline that fits, then for as few as the workers can make, which is the optimum where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.profile import PipelinePlan
from shardwright.core.schedules import SCHEDULES
from shardwright.errors import NoPlan
from shardwright.layerwise.crews import Crews, tabulate_crews
from shardwright.layerwise.problem import (
    Crew,
    PipelineProblem,
    Placed,
    measure,
    memory_bytes,
)

if TYPE_CHECKING:
    from shardwright.layerwise.kernel import Columns, Pools, Rules, Table

PLANNER = "exact"
SLACK = 1 + 1e-12
FEW_WORKERS = 16
FIRST_LIMIT, GROWTH, NUM_LIMITS = 1.1, 1.6, 6  # up to 11 times the bound
MOST_CELLS = 2 * 10**6  # of a table that counts replicas: half a minute


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """The problem as the kernel takes it."""

    rules: Rules
    columns: Columns
    pools: Pools
    crews: Crews


def plan_exact(problem: PipelineProblem) -> PipelinePlan:
    """Return the best pipeline; ``bound`` is below every pipeline of the graph, and equal to its
    seconds when all cuts were tried.

    Ties: fewest workers, then the earliest cuts. Raises NoPlan when no pipeline fits the memory.
    """
    tables = _prepare(problem)
    most = math.inf
    for simpler in _simpler(problem, tables):
        found = _run(problem, simpler, most)
        most = found.seconds * SLACK if found is not None else most
    best, bound = _grow(problem, tables, most), 0.0
    if _counts_replicas(problem):
        best, bound = _count(problem, tables, best)
    if best is None:
        raise _why_nothing_fits(problem)
    is_limited = any(kind.memory_bytes < math.inf for kind in problem.workers)
    if not (problem.cuts.is_complete or (problem.cuts.has_least_crossing and not is_limited)):
        bound = lower_bound(problem, tables.crews)
    return replace(best, bound=bound or best.seconds)


def _grow(
    problem: PipelineProblem, tables: _Tables, most: float, least: float = 0.0
) -> PipelinePlan | None:
    """Solve under ``most``. Where that is infinite, or ``least`` is known to be close, limits grow
    from there: a low one prunes most, and whatever it lets through contains the optimum."""
    limit = (least or lower_bound(problem, tables.crews)) * FIRST_LIMIT
    for _ in range(NUM_LIMITS if least or most == math.inf else 0):
        if not 0 < limit < most:
            break
        found = _run(problem, tables, limit)
        if found is not None:
            return found
        limit *= GROWTH
    return _run(problem, tables, most)


def lower_bound(problem: PipelineProblem, crews: Crews | None = None) -> float:
    """Return seconds that no pipeline of the graph beats, whatever its cuts.

    All compute spread as evenly as any mixture of workers can, without a message; with a flush also
    a microbatch's way through the fastest replica.
    """
    crews = crews or tabulate_crews(problem)
    work = problem.cuts.work
    busiest = work / float(crews.capacity[-1])
    fastest = float((crews.speed * crews.shards).max())
    return max(busiest, work / fastest if problem.microbatches else 0.0)


def _counts_replicas(problem: PipelineProblem) -> bool:
    """Whether what fits depends on how many replicas the workers of later stages make."""
    is_limited = any(kind.memory_bytes < math.inf for kind in problem.workers)
    return problem.shards > 1 and is_limited and SCHEDULES[problem.schedule].per_stage is not None


def _count(
    problem: PipelineProblem, tables: _Tables, known: PipelinePlan | None
) -> tuple[PipelinePlan | None, float]:
    """Return the best pipeline and the bound (0: it is the optimum), from one that fits."""
    from shardwright.layerwise.kernel import AT_LEAST, COUNTED

    most = known.seconds * SLACK if known is not None else math.inf
    relaxed = _grow(problem, _counting(tables, AT_LEAST), most)
    if relaxed is None or relaxed.fits:
        return relaxed, 0.0
    crews, cuts = tables.crews, problem.cuts.num_cuts
    if len(crews.vectors) * cuts * (problem.num_workers + 1) > MOST_CELLS:
        return known, relaxed.seconds
    return _grow(problem, _counting(tables, COUNTED), most, relaxed.seconds), 0.0


def _counting(tables: _Tables, counting: int) -> _Tables:
    return replace(tables, rules=tables.rules._replace(counting=counting))


def _prepare(problem: PipelineProblem) -> _Tables:
    from shardwright.layerwise.kernel import AT_MOST, OVERLAPS, Columns, Pools, Rules

    cuts, crews = problem.cuts, tabulate_crews(problem)
    schedule = SCHEDULES[problem.schedule]
    rules = Rules(
        limit=math.inf,
        bandwidth=problem.bandwidth,
        microbatches=problem.microbatches,
        is_paper=problem.formula == "paper",
        forgets_first=problem.formula == "published",
        overlap=OVERLAPS.index(schedule.executes),
        flushes=schedule.flushes,
        per_stage=schedule.per_stage or 0,
        at_end=problem.microbatches if schedule.per_stage is None else schedule.at_end,
        counting=AT_MOST,
        fastest=float((crews.speed * crews.shards).max()),
        shards=problem.shards,
        most_gathered=cuts.most_gathered,
        most_parameter=cuts.most_parameter,
    )
    columns = Columns(
        cuts.forward, cuts.backward, cuts.activation, cuts.parameter, cuts.crossing,
        cuts.gathered, cuts.offset, cuts.larger, *map(_floor, (cuts.activation, cuts.parameter, cuts.gathered)),
    )  # fmt: skip
    pools = Pools(
        crews.workers, crews.capacity, crews.part_offset, crews.part, crews.mixture, crews.shards,
        crews.replicas, crews.splits, crews.speed, crews.memory, crews.unit, crews.collective,
        crews.message,
    )  # fmt: skip
    return _Tables(rules, columns, pools, crews)


def _floor(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least value from each place on."""
    return np.minimum.accumulate(column[::-1])[::-1].copy()


def _simpler(problem: PipelineProblem, tables: _Tables) -> Iterator[_Tables]:
    """Yield problems that have fewer choices, so that what they attain bounds the whole one: whole
    lots of workers for each stage, then powers of two (of each kind)."""
    if problem.num_workers < FEW_WORKERS:
        return
    vectors = tables.crews.vectors
    size = np.array([max(1, kind.count // 8) for kind in problem.workers])
    whole = (vectors % size == 0).all(axis=1)
    yield _restricted(tables, whole, whole)
    powers = (vectors & (vectors - 1) == 0).all(axis=1)
    yield _restricted(tables, powers, np.ones(len(powers), dtype=np.bool_))


def _restricted(tables: _Tables, parts: NDArray[np.bool_], mixtures: NDArray[np.bool_]) -> _Tables:
    """Allow only some mixtures for stages, and some for what is left."""
    pools = tables.pools
    mixture = np.repeat(np.arange(len(mixtures)), np.diff(pools.part_offset))
    kept = parts[pools.mixture[pools.part]] & mixtures[mixture]
    offset = np.concatenate(([0], np.cumsum(kept)))[pools.part_offset]
    return replace(tables, pools=pools._replace(part_offset=offset, part=pools.part[kept]))


def _run(problem: PipelineProblem, tables: _Tables, limit: float) -> PipelinePlan | None:
    """Solve under a limit and read the stages off the tables."""
    from shardwright.layerwise.kernel import AT_LEAST, COUNTED, solve

    rules = tables.rules._replace(limit=limit)
    floor = np.zeros((len(tables.crews.vectors), problem.cuts.num_cuts))
    if rules.counting == COUNTED:  # the same with the fewest replicas never takes longer
        relaxed = rules._replace(counting=AT_LEAST)
        floor = solve(relaxed, tables.columns, tables.pools, floor)[0][:, :, 0].copy()
    table: Table = solve(rules, tables.columns, tables.pools, floor)
    best, ends, uses = table
    lane = best.shape[2] - 1
    order = np.lexsort((tables.crews.workers[1:], best[1:, 0, lane]))
    mixture = int(order[0]) + 1
    if not np.isfinite(best[mixture, 0, lane]):
        return None
    stages: list[Placed] = []
    cut = 0
    while mixture:
        while lane and best[mixture, cut, lane - 1] == best[mixture, cut, lane]:
            lane -= 1  # the same with fewer replicas: those whose memory was checked
        used, stop = int(uses[mixture, cut, lane]), int(ends[mixture, cut, lane])
        crew = tables.crews.crews[used]
        stages.append((stop, crew))
        mixture, cut = mixture - int(tables.crews.mixture[used]), stop
        lane = max(0, lane - crew.replicas)
    return measure(problem, stages, PLANNER)


def _why_nothing_fits(problem: PipelineProblem) -> NoPlan:
    """Name the layer that needs most, alone on a worker with nobody behind it."""
    cuts = problem.cuts
    alone = Crew((problem.num_workers,))
    sizes = [
        memory_bytes(problem, start, int(stop), alone, problem.num_workers)
        for start in range(cuts.num_cuts - 1)
        for stop in cuts.larger[cuts.offset[start] : cuts.offset[start] + 1]
    ]
    room = max(kind.memory_bytes for kind in problem.workers)
    return NoPlan(
        f"no pipeline of {problem.num_workers} workers fits {room / 2**30:.4g} GiB each with "
        f"schedule {problem.schedule!r}; a single step of the cuts needs up to "
        f"{max(sizes) / 2**30:.4g} GiB",
        remedy="give more memory or more workers, or choose a schedule that keeps less, such as "
        "--microbatches 8 --schedule 1f1b-sno",
    )
