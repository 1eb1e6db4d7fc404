"""The best pipeline of profiled layers under the cost model, with a proof.

``solve`` (kernel.py) tries every pipeline of the kept cuts that takes at most a limit. Whatever it
finds is the optimum among all, since every better one is within the limit too. So the limit is what
simpler problems attain (workers in lots, or in powers of two): most of the table is never filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardwright.core.profile import PipelinePlan, ScheduleKind
from shardwright.errors import NoPlan
from shardwright.planner.search.pipelines.problem import (
    Mixtures,
    PipelineProblem,
    Placed,
    measure,
    memory_bytes,
    tabulate_mixtures,
)

if TYPE_CHECKING:
    from shardwright.planner.search.pipelines.kernel import Columns, Pools, Rules, Table

PLANNER = "exact"
SLACK = 1 + 1e-12
FEW_WORKERS = 16
KEEPS: dict[ScheduleKind, int] = {
    "pipedream": 0, "gpipe": 1, "1f1b-so": 2, "fbp-as": 3, "1f1b-sno": 4, "1f1b-as": 4,
}  # fmt: skip
OVERLAPS: dict[ScheduleKind, int] = {"1f1b-sno": 1, "1f1b-as": 2}


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """The problem as the kernel takes it."""

    rules: Rules
    columns: Columns
    pools: Pools
    mixtures: Mixtures


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
    best = _run(problem, tables, most)
    if best is None:
        raise _why_nothing_fits(problem)
    if problem.cuts.is_complete:
        return replace(best, bound=best.seconds)
    return replace(best, bound=lower_bound(problem, tables.mixtures))


def lower_bound(problem: PipelineProblem, mixtures: Mixtures | None = None) -> float:
    """Return seconds that no pipeline of the graph beats, whatever its cuts.

    All compute spread as evenly as any mixture of workers can, without a message; with a flush also
    a microbatch's way through the fastest worker.
    """
    mixtures = mixtures or tabulate_mixtures(problem)
    work = problem.cuts.work
    busiest = work / float(mixtures.capacity[-1])
    passing = work / float(mixtures.speed[1:].max()) if problem.microbatches else 0.0
    return max(busiest, passing)


def _prepare(problem: PipelineProblem) -> _Tables:
    from shardwright.planner.search.pipelines.kernel import Columns, Pools, Rules

    cuts, mixtures = problem.cuts, tabulate_mixtures(problem)
    rules = Rules(
        limit=math.inf,
        bandwidth=problem.bandwidth,
        microbatches=problem.microbatches,
        is_paper=problem.formula == "paper",
        overlap=OVERLAPS.get(problem.schedule, 0),
        keeps=KEEPS[problem.schedule],
        fastest=float(mixtures.speed[1:].max()),
    )
    columns = Columns(
        cuts.forward, cuts.backward, cuts.activation, cuts.parameter, cuts.crossing,
        cuts.offset, cuts.larger,
    )  # fmt: skip
    pools = Pools(
        mixtures.replicas, mixtures.speed, mixtures.memory, mixtures.unit, mixtures.capacity,
        mixtures.part_offset, mixtures.part,
    )  # fmt: skip
    return _Tables(rules, columns, pools, mixtures)


def _simpler(problem: PipelineProblem, tables: _Tables) -> Iterator[_Tables]:
    """Yield problems that have fewer choices, so that what they attain bounds the whole one: whole
    lots of workers for each stage, then powers of two (of each kind)."""
    if problem.num_workers < FEW_WORKERS:
        return
    vectors = tables.mixtures.vectors
    size = np.array([max(1, kind.count // 8) for kind in problem.workers])
    whole = (vectors % size == 0).all(axis=1)
    yield _restricted(tables, whole, whole)
    powers = (vectors & (vectors - 1) == 0).all(axis=1)
    yield _restricted(tables, powers, np.ones(len(powers), dtype=np.bool_))


def _restricted(tables: _Tables, parts: NDArray[np.bool_], mixtures: NDArray[np.bool_]) -> _Tables:
    """Allow only some mixtures for stages, and some for what is left."""
    pools = tables.pools
    mixture = np.repeat(np.arange(len(mixtures)), np.diff(pools.part_offset))
    kept = parts[pools.part] & mixtures[mixture]
    offset = np.concatenate(([0], np.cumsum(kept)))[pools.part_offset]
    return replace(tables, pools=pools._replace(part_offset=offset, part=pools.part[kept]))


def _run(problem: PipelineProblem, tables: _Tables, limit: float) -> PipelinePlan | None:
    """Solve under a limit and read the stages off the tables."""
    from shardwright.planner.search.pipelines.kernel import solve

    rules = tables.rules._replace(limit=limit)
    table: Table = solve(rules, tables.columns, tables.pools)
    best, ends, uses = table
    order = np.lexsort((tables.mixtures.replicas[1:], best[1:, 0]))
    mixture = int(order[0]) + 1
    if not np.isfinite(best[mixture, 0]):
        return None
    stages: list[Placed] = []
    cut = 0
    while mixture:
        used, stop = int(uses[mixture, cut]), int(ends[mixture, cut])
        stages.append((stop, tuple(int(n) for n in tables.mixtures.vectors[used])))
        mixture, cut = mixture - used, stop
    return measure(problem, stages, PLANNER)


def _why_nothing_fits(problem: PipelineProblem) -> NoPlan:
    """Name the layer that needs most, alone on a worker with nobody behind it."""
    cuts = problem.cuts
    sizes = [
        memory_bytes(problem, start, int(stop), problem.num_workers, problem.num_workers)
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
