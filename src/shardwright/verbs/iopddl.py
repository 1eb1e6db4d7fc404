"""What ``api.iopddl`` is made of: a contest problem to the solver, and its answer back.

The clock is here, because the planner may not look at one.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import InputError
from shardwright.files.iopddl import FORBIDDEN, ContestProblem, read_iopddl
from shardwright.planner.solve.wide import Standing, WideProblem, solve
from shardwright.verbs.request import Watch
from shardwright.verbs.results import ContestAnswer

# What is left of the time: for starting Python, which on a busy machine takes seconds, and for reading
# the answer off and writing it. At most a tenth of all.
LEFT_SECONDS, LEFT_SHARE, MOST_LEFT = 2.0, 0.03, 0.1
# Integers below it are floats, and so are their sums.
EXACT = 2**53
Floats = NDArray[np.float64]


def answer(path: str | Path, seconds: float, seed: int, watch: Watch) -> ContestAnswer:
    """Read and solve a problem within a time. Raises InputError for a file that is wrong."""
    if not seconds > 0:
        raise InputError(f"a search needs time, not {seconds:g} seconds; give --seconds 60")
    begin = time.monotonic()
    used = seconds - min(LEFT_SECONDS + LEFT_SHARE * seconds, MOST_LEFT * seconds)
    watch.tell("reading the problem", 0.0)
    problem = read_iopddl(path)

    def spent(num_rounds: int) -> float:
        del num_rounds
        return 1.0 if watch.stop() else (time.monotonic() - begin) / used

    def tell(standing: Standing) -> None:
        watch.tell(_standing_text(standing), (time.monotonic() - begin) / seconds)

    watch.tell("making the problem smaller", 0.0)
    found = solve(wide_problem(problem), spent, tell, seed)
    choice = tuple(found.choice.tolist())
    return ContestAnswer(
        name=problem.name or Path(path).name,
        num_nodes=len(problem.intervals),
        num_edges=len(problem.ends),
        choice=choice,
        cost=problem.evaluate(choice),
        bound=found.bound,
        peak=problem.peak(choice),
        limit=problem.limit,
        seconds=time.monotonic() - begin,
        is_complete=not watch.stop(),
    )


def _standing_text(standing: Standing) -> str:
    bound = f"bound {standing.bound:,.0f}" if np.isfinite(standing.bound) else "no bound yet"
    if not np.isfinite(standing.cost):
        return f"{standing.stage}: nothing fits yet, {bound}"
    gap = max(0.0, 1 - standing.bound / standing.cost) if standing.cost > 0 else 0.0
    return f"{standing.stage}: best {standing.cost:,.0f}, {bound}, gap {gap:.2%}"


def wide_problem(problem: ContestProblem) -> WideProblem:
    """Return the planner's form of a contest problem. Raises InputError where floats would decide
    other than the problem's integers which choices keep the limit."""
    usage, base, limit = _memory(problem)
    return WideProblem(
        first=problem.first,
        cost=_costs(problem.cost),
        usage=usage,
        begin=problem.intervals[:, 0],
        end=problem.intervals[:, 1],
        ends=problem.ends,
        table=problem.table,
        cells=_costs(problem.cells),
        limit=limit,
        base=base,
    )


def _memory(problem: ContestProblem) -> tuple[Floats, Floats, float]:
    """Return usages, what is taken already at every time, and the limit, all exact as floats.

    Where sums of usages are no floats, every node's least usage is taken from its others and from
    the limit, and a limit beyond all that the nodes could use there is lowered to that.
    """
    first, usage = problem.first[:-1], problem.usage
    times = int(problem.intervals.max()) + 1
    most = np.maximum.reduceat(usage, first)
    if problem.limit is None or sum(most.tolist()) < EXACT:
        limit = np.inf if problem.limit is None else float(problem.limit)
        return usage.astype(np.float64), np.zeros(times), limit
    least = np.minimum.reduceat(usage, first)
    more = usage - np.repeat(least, np.diff(problem.first))
    could = problem.over_time(most - least)[:times].astype(object)
    if max(could) >= EXACT:
        raise InputError(
            f"usages must add up to less than 2^53 beyond each node's least, but {problem.name!r} "
            f"has {max(could):.3g}; divide all usages and the limit by a common number"
        )
    left = problem.limit - problem.over_time(least)[:times].astype(object)
    room = np.maximum(np.minimum(left, could), -1)  # below 0 nothing fits, however far
    limit = int(max(room))
    return more.astype(np.float64), (limit - room).astype(np.float64), float(limit)


def _costs(values: np.ndarray) -> np.ndarray:
    return np.where(values >= FORBIDDEN, np.inf, values.astype(np.float64))
