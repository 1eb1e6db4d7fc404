"""What ``api.iopddl`` is made of: a contest problem to the solver, and its answer back.

The clock is here, because the planner may not look at one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.contest import Standing, WideSolution, solve
from shardwright.errors import InputError
from shardwright.files.iopddl import FORBIDDEN, ContestProblem, read_iopddl
from shardwright.planner.solve.wide.problem import WideProblem
from shardwright.verbs.request import Watch
from shardwright.verbs.results import ContestAnswer

# What is left of the time: for starting Python, which on a busy machine takes seconds, and for reading
# the answer off and writing it. At most a tenth of all.
LEFT_SECONDS, LEFT_SHARE, MOST_LEFT = 2.0, 0.03, 0.1
# Integers below it are floats, and so are their sums.
EXACT = 2**53
# Sums of costs stay exact below two to this, and below what stands for "forbidden" in the planner.
EXACT_COSTS = 49
FINER = 256  # how much cheaper a choice must be, for finer units
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def answer(path: str | Path, seconds: float, seed: int, watch: Watch) -> ContestAnswer:
    """Read and solve a problem within a time. Raises InputError for a file that is wrong."""
    if not seconds > 0:
        raise InputError(f"a search needs time, not {seconds:g} seconds; give --seconds 60")
    begin = time.monotonic()
    used = seconds - min(LEFT_SECONDS + LEFT_SHARE * seconds, MOST_LEFT * seconds)
    watch.tell("reading the problem", 0.0)
    problem = read_iopddl(path)

    def spent() -> float:
        return 1.0 if watch.stop() else (time.monotonic() - begin) / used

    def tell(text: str) -> None:
        watch.tell(text, (time.monotonic() - begin) / seconds)

    tell("making the problem smaller")
    try:
        choice, bound, is_impossible = search(problem, spent, tell, seed)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return ContestAnswer(
        name=problem.name or Path(path).name,
        num_nodes=len(problem.intervals),
        num_edges=len(problem.ends),
        choice=choice,
        cost=problem.evaluate(choice),
        bound=max(0.0, bound),  # costs are not negative
        peak=problem.peak(choice),
        limit=problem.limit,
        seconds=time.monotonic() - begin,
        is_complete=not watch.stop(),
        is_allowed=problem.is_allowed(choice),
        is_impossible=is_impossible,
    )


def search(
    problem: ContestProblem,
    spent: Callable[[], float],
    tell: Callable[[str], None] = lambda text: None,
    seed: int = 0,
) -> tuple[tuple[int, ...], float, bool]:
    """Return a choice, a bound of all choices' costs, and whether none is legal, proved.

    The planner adds costs up as floats. Where sums of them may not be exact, a first legal choice is
    found in coarser units; what costs more than all of it is then out of the question, and what is
    left is searched in units as fine as floats allow. ``spent`` is the share of the time used up.
    """
    total = _most(problem)
    choice: tuple[int, ...] | None = None
    most = FORBIDDEN - 1
    shift = max(0, total.bit_length() - EXACT_COSTS)
    enough = float(total)  # a cost at which it is worth while to begin again in finer units
    while True:
        coarse = Units(problem, shift, most, enough)
        found = coarse.solve(spent, tell, seed)
        last = tuple(found.choice.tolist())
        is_better = _is_legal(problem, last) and (
            choice is None or problem.evaluate(last) < problem.evaluate(choice)
        )
        if choice is None or is_better:
            choice = last
        if not (coarse.is_enough and is_better) or spent() >= 1:
            break
        most = problem.evaluate(choice)
        shift = min(shift, max(0, most.bit_length() - EXACT_COSTS))
        enough = most / FINER
    unit = 2**shift
    if not _is_legal(problem, choice):
        return choice, found.bound * unit, found.is_impossible
    # What was forbidden for its cost is no better than what is known.
    return choice, min(found.bound * unit, float(problem.evaluate(choice))), False


class Units:
    """A search in units of ``2**shift`` among what costs ``most`` at most; it ends where a choice
    costs no more than ``enough`` and the units are coarse."""

    def __init__(self, problem: ContestProblem, shift: int, most: int, enough: float) -> None:
        self.wide = wide_problem(problem, shift, most)
        self.unit, self.enough = 2**shift, enough
        self.is_enough = False

    def solve(
        self, spent: Callable[[], float], tell: Callable[[str], None], seed: int
    ) -> WideSolution:
        """Search until ``spent`` says 1."""

        def note(standing: Standing) -> None:
            self.is_enough = self.unit > 1 and standing.cost * self.unit <= self.enough
            tell(_standing_text(standing, self.unit))

        return solve(self.wide, lambda num: 1.0 if self.is_enough else spent(), note, seed)


def _most(problem: ContestProblem) -> int:
    """Return what a choice without anything forbidden costs at most."""
    cost = np.where(problem.cost < FORBIDDEN, problem.cost, 0)
    own = np.maximum.reduceat(cost, problem.first[:-1])
    sizes = np.diff(problem.first)[problem.ends].prod(axis=1)
    starts, place = np.unique(problem.table, return_inverse=True)
    if not len(starts):
        return sum(own.tolist())
    lengths = np.zeros(len(starts), dtype=np.int64)
    lengths[place.ravel()] = sizes
    tables = [problem.cells[a : a + n] for a, n in zip(starts, lengths, strict=True)]
    largest = [int(one.max(initial=0, where=one < FORBIDDEN)) for one in tables]
    return sum(own.tolist()) + sum(largest[i] for i in place.ravel().tolist())


def _is_legal(problem: ContestProblem, choice: tuple[int, ...]) -> bool:
    fits = problem.limit is None or problem.peak(choice) <= problem.limit
    return fits and problem.is_allowed(choice)


def _standing_text(standing: Standing, unit: int) -> str:
    bound = f"bound {standing.bound * unit:,.0f}" if np.isfinite(standing.bound) else "no bound yet"
    if not np.isfinite(standing.cost):
        return f"{standing.stage}: nothing fits yet, {bound}"
    gap = max(0.0, 1 - standing.bound / standing.cost) if standing.cost > 0 else 0.0
    return f"{standing.stage}: best {standing.cost * unit:,.0f}, {bound}, gap {gap:.2%}"


def wide_problem(problem: ContestProblem, shift: int = 0, most: int = FORBIDDEN - 1) -> WideProblem:
    """Return the planner's form of a contest problem, in which costs are in units of ``2**shift``,
    rounded down, and those above ``most`` forbidden. Raises InputError where floats would decide other
    than the problem's integers which choices keep the limit."""
    usage, base, limit = _memory(problem)
    return WideProblem(
        first=problem.first,
        cost=_costs(problem.cost, shift, most),
        usage=usage,
        begin=problem.intervals[:, 0],
        end=problem.intervals[:, 1],
        ends=problem.ends,
        table=problem.table,
        cells=_costs(problem.cells, shift, most),
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


def _costs(values: Ints, shift: int, most: int) -> Floats:
    found = (values >> shift if shift else values).astype(np.float64)
    found[values > most] = np.inf
    return found
