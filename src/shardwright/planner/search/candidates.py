"""From arrangements to candidates: the additive model's best plans, and its bound.

Per arrangement: solve the intra-stage problem for its hull, cut the blocks into stages, and, where
two neighbouring hull points lie on both sides of the memory limit, mix them block by block so that
the limit is just met.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import in_flight
from shardwright.core.strategy import OperatorConfig, Pipeline, Strategy
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.decisions import work_alone
from shardwright.planner.model.modes import in_modes
from shardwright.planner.model.partition import Chain, measure, partition
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import (
    EACH,
    FLIGHT,
    GATHER,
    KEPT,
    NUM_COLUMNS,
    ONCE,
    SYNC,
    TRANSIENT,
    Weights,
)
from shardwright.planner.search.bounds import Least, least_rounds, own_rounds
from shardwright.planner.search.labels import describe
from shardwright.planner.search.steering import CANDIDATES, CLOSE, HIDDEN
from shardwright.planner.solve.frontier import Hull, Point, hull, nearest_within
from shardwright.planner.solve.network import Elimination
from shardwright.planner.solve.strongest import strongest

Assignment = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Candidate:
    """A plan of the additive model. ``assignments`` has one entry per block; ``starts`` are the blocks at
    which stages begin, or chunks of stages that come by turns.

    ``least_seconds`` charges nothing that computation could hide, ``seconds`` some of it.
    """

    arrangement: Arrangement
    problem: Problem
    assignments: tuple[Assignment, ...]
    starts: tuple[int, ...]
    seconds: float
    least_seconds: float
    bytes: float

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two candidates the same plan."""
        return (self.arrangement, self.assignments, self.starts)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Explored:
    """What one arrangement gave: candidates, its bound within the memory limit (not tight where it would set
    no new one), the seconds of its fastest point if memory did not matter, and whether that point fits with
    room to spare.
    """

    candidates: tuple[Candidate, ...]
    bound: Least
    fastest: float
    is_free: bool


def exposed_share(context: Context, num_axes: int) -> float:
    """Return the share of gradient synchronisation and parameter gathers that nothing can hide.

    While computing and communicating at once both stretch by the factor s, so A seconds of one and
    H of the other take at least A + (s - 1) H for 1 <= s <= 2. Messages over different axes (one,
    the other, both) may overlap one another.
    """
    return min(max(context.cluster.overlap_slowdown - 1.0, 0.0), 1.0) / channels(num_axes)


def channels(num_axes: int) -> int:
    """Return how many kinds of message groups a mesh has: non-empty sets of axes."""
    return 2**num_axes - 1


def least_even(context: Context, arrangement: Arrangement, enough: float) -> float:
    """Bound an arrangement's step from below by the operators' seconds alone, as well as ``enough`` asks
    for, before anything is solved."""
    rounds = least_rounds(arrangement.stages, arrangement.microbatches, arrangement.schedule)
    return work_alone(context, arrangement.mesh(0), arrangement.microbatches, rounds, enough)


def least_work(problem: Problem, rounds: tuple[float, float]) -> float:
    """Bound an arrangement's step from below by the operators' seconds alone, without tables."""
    each, once = problem.least_work
    return rounds[0] * each + rounds[1] * once


def least_of(context: Context, arrangement: Arrangement, whole: float, own: float = 0.0) -> Least:
    """Return what an arrangement takes at least; where ``whole`` is all that is known, that says what devices
    do of their own."""
    p, m = arrangement.stages, arrangement.microbatches
    own = max(own, whole * own_rounds(p, m)[0] / least_rounds(p, m)[0])
    blocks = len(context.facts.ties.ranges)
    return Least(arrangement=arrangement, blocks=blocks, whole=whole, own=own)


def explore(
    context: Context, arrangement: Arrangement, limit: float,
    known: tuple[float, float] = (math.inf, math.inf),
    enough: tuple[float, float] = (math.inf, math.inf),
    stopped: Callable[[], bool] = lambda: False,
) -> Explored:  # fmt: skip
    """Solve one arrangement. Raises InputError where its graph is too wide.

    What is known saves work: of the fastest steps simulated and promised so far, ``known``, the first ends an arrangement
    whose bound lies above it; ``enough`` is what its whole stages, and what its devices' own work, need not take for more
    than to set no new bound, so no more is proved. Once ``stopped`` it makes do with what it has.
    """
    problem = Problem.of(context, arrangement.mesh(0), arrangement.microbatches)
    best, promised = known
    least = exposed_share(context, len(problem.mesh.sizes))
    found: dict[tuple[object, ...], Candidate] = {}
    bound, fastest, is_free = least_of(context, arrangement, math.inf), math.inf, False
    # Which shares of gathers and of gradient synchronisation are taken to remain exposed, in turn.
    weighings = ((HIDDEN, HIDDEN), (1.0, HIDDEN), (1.0, 1.0))
    for hidden, synced in weighings[: 1 if problem.is_wide else None]:
        shares = (max(least, hidden), max(least, synced))
        view = problem.elimination(search_weights(arrangement, *shares))
        curve = hull(view, CANDIDATES // 2, limit, CLOSE * best, stopped)
        own = curve.bound(limit)
        if not found:
            fastest = curve.points[0].seconds if curve.points else math.inf
            is_free = bool(curve.points) and CLOSE * curve.points[0].bytes <= limit
            bound = _relaxed(problem, arrangement, curve, limit, enough, stopped)
        mixes = own < min(promised, best)
        for candidate in _from_hull(problem, arrangement, view, curve, limit, mixes):
            found.setdefault(candidate.identity, candidate)
        if own >= best or not found:
            break
    problem.forget_terms()
    return Explored(candidates=tuple(found.values()), bound=bound, fastest=fastest, is_free=is_free)


def search_weights(arrangement: Arrangement, exposed: float, synced: float) -> Weights:
    """Weigh one stage of equal stages, the first one's memory."""
    p, m = arrangement.stages, arrangement.microbatches
    held = in_flight(arrangement.schedule, p - 1, m)
    return Weights(
        each=(m + p - 1) / p, once=1 / p, exposed=exposed, synced=synced, kept=1 / p,
        flight=held / p,
    )  # fmt: skip


def likely_weights(problem: Problem, arrangement: Arrangement) -> Weights:
    """Weigh as ``search_weights`` with the share of messages that is likely to stay exposed."""
    least = exposed_share(problem.context, len(problem.mesh.sizes))
    share = max(least + HIDDEN * (1 - least), 0.02)
    return search_weights(arrangement, share, share)


def _relaxed(
    problem: Problem,
    arrangement: Arrangement,
    curve: Hull,
    limit: float,
    enough: tuple[float, float],
    stopped: Callable[[], bool],
) -> Least:
    """Bound what an arrangement takes, as well as is asked for: the devices' own work where whole stages alone
    might set a new bound. Once ``stopped`` their work alone bounds it."""
    context, p, m = problem.context, arrangement.stages, arrangement.microbatches
    whole, own = least_rounds(p, m, arrangement.schedule), own_rounds(p, m)
    if not curve.points:
        seconds = max(least_work(problem, whole), enough[0])
        return least_of(context, arrangement, seconds, enough[1])
    price = curve.price(limit)
    seconds = _relaxed_bound(problem, arrangement, whole, price, limit, enough[0], stopped)
    if seconds >= enough[0] or whole == own:
        return least_of(context, arrangement, seconds)
    busy = _relaxed_bound(problem, arrangement, own, price, limit, enough[1], stopped)
    return least_of(context, arrangement, seconds, busy)


def _relaxed_bound(
    problem: Problem, arrangement: Arrangement, rounds: tuple[float, float], price: float,
    limit: float, enough: float, stopped: Callable[[], bool],
) -> float:  # fmt: skip
    """Bound this arrangement's seconds from below, whatever the cuts, as well as ``enough`` asks for.

    With A the seconds on the compute stream's path and H those of messages that could hide, a step
    takes at least A + e H (``exposed_share``) and at least H / ``channels``; so it takes any mean
    of the two. Stages hold one microbatch at least. A is tried first, at a ``price`` of memory.
    ``rounds``: how often a microbatch's seconds and a step's own count in A.
    """
    best = least_work(problem, rounds)
    if best >= enough or stopped():
        return best
    p, m = arrangement.stages, arrangement.microbatches
    axes, sorts = len(problem.mesh.sizes), len(problem.context.facts.ties.classes)
    path, hideable, memory = np.zeros((3, NUM_COLUMNS))
    path[[EACH, ONCE]] = rounds
    path[[GATHER, SYNC]] = exposed_share(problem.context, axes) * path[[EACH, ONCE]]
    hideable[[GATHER, SYNC]] = m / p / channels(axes), 1 / p / channels(axes)
    memory[[KEPT, FLIGHT, TRANSIENT]] = 1 / p, 1 / p, 1 / (p * sorts)
    ways, mix = np.stack([path, hideable, memory])[None], np.array([1.0, 0.0, price])
    proved = strongest(problem.network, ways, limit, mix, useful=enough, stopped=stopped)
    return max(best, proved)


def _from_hull(
    problem: Problem, arrangement: Arrangement, view: Elimination, found: Hull, limit: float,
    mixes: bool,
) -> Iterator[Candidate]:  # fmt: skip
    yield from from_points(problem, arrangement, found.points, limit)
    for fast, small in pairwise(found.points) if mixes else ():
        yield from _mix(problem, arrangement, fast.assignment, small.assignment, limit)
    near = nearest_within(view, found, limit) if problem.is_wide else None
    yield from from_points(problem, arrangement, [near] if near else [], limit)


def from_points(
    problem: Problem, arrangement: Arrangement, points: Iterable[Point], limit: float
) -> Iterator[Candidate]:
    """Yield the candidates of some points of an arrangement, whatever they were found by."""
    blocks = len(problem.context.facts.ties.ranges)
    for point in points:
        yield from _cut(problem, arrangement, (point.assignment,) * blocks, limit)


def _mix(
    problem: Problem, arrangement: Arrangement, fast: Assignment, small: Assignment, limit: float
) -> Iterator[Candidate]:
    """Use the smaller assignment in as few leading blocks as fit the limit, if neither end does it."""
    count = len(problem.context.facts.ties.ranges)

    def led(lead: int) -> list[Candidate]:
        assignments = (small,) * lead + (fast,) * (count - lead)
        return list(_cut(problem, arrangement, assignments, limit))

    def fits(lead: int) -> bool:
        return any(one.bytes <= limit for one in led(lead))

    if fits(0) or not fits(count):
        return
    fewest = bisect_left(range(count), True, key=fits)
    if fewest < count:
        yield from led(fewest)


def _cut(
    problem: Problem, arrangement: Arrangement, assignments: tuple[Assignment, ...], limit: float
) -> Iterator[Candidate]:
    """Cut the blocks into stages, with and without the limit."""
    p, m = arrangement.stages, arrangement.microbatches
    ranked, hidden = chains(problem, arrangement, assignments)
    seen: set[tuple[int, ...]] = set()
    for ceiling in (math.inf, limit) if p > 1 else (math.inf,):
        cut = partition(ranked, p, m, arrangement.schedule, ceiling)
        if cut is None or cut.starts in seen:
            continue
        seen.add(cut.starts)
        yield Candidate(
            arrangement=arrangement,
            problem=problem,
            assignments=assignments,
            starts=cut.starts,
            seconds=cut.step_seconds,
            least_seconds=measure(hidden, cut.starts, m, arrangement.schedule).step_seconds,
            bytes=max(cut.stage_bytes),
        )


def chains(
    problem: Problem, arrangement: Arrangement, assignments: tuple[Assignment, ...]
) -> tuple[Chain, Chain]:
    """Return the blocks of a pipeline as cuts rank them, and with all hidden that can be."""
    pieces = {one: problem.per_block(one) for one in dict.fromkeys(assignments)}
    columns = np.stack([pieces[one][:, block] for block, one in enumerate(assignments)], axis=1)
    transfer = _transfers(problem, arrangement, assignments)
    least = exposed_share(problem.context, len(problem.mesh.sizes))
    return (
        _chain(columns, transfer, *_exposed(columns, least)),
        _chain(columns, transfer * 0, least, least),
    )


def _exposed(columns: NDArray[np.float64], least: float) -> tuple[float, float]:
    """Estimate which shares of gathers and of gradient synchronisation computation cannot hide.

    Gathers hide behind the microbatch they serve, gradients behind the last one's backward: two products of three.
    """
    compute, gather, sync = (float(columns[kind].sum()) for kind in (EACH, GATHER, SYNC))
    unlucky = least + HIDDEN * (1 - least)
    behind = compute * 2 / 3
    return (
        max(unlucky, 1 - compute / gather) if gather > 0 else unlucky,
        max(unlucky, 1 - behind / sync) if sync > 0 else unlucky,
    )


def _chain(
    columns: NDArray[np.float64], transfer: NDArray[np.float64], exposed: float, synced: float
) -> Chain:
    """Return the chain of blocks which the partition cuts, of such columns block by block."""
    return Chain(
        seconds=columns[EACH] + exposed * columns[GATHER],
        once=columns[ONCE] + synced * columns[SYNC],
        kept=columns[KEPT],
        in_flight=columns[FLIGHT],
        transient=columns[TRANSIENT],
        transfer=transfer,
    )


def _transfers(
    problem: Problem, arrangement: Arrangement, assignments: tuple[Assignment, ...]
) -> NDArray[np.float64]:
    """Return, per block, the seconds of receiving what crosses into it if a stage begins there."""
    result = np.zeros(len(problem.context.facts.ties.ranges))
    if arrangement.stages == 1:
        return result
    for crossing in problem.crossings:
        choice = assignments[crossing.first][crossing.variable]
        result[crossing.first + 1 : crossing.last + 1] += crossing.seconds[choice]
    return result


def to_strategy(context: Context, candidate: Candidate) -> Strategy:
    """Write a candidate as a strategy."""
    problem, arrangement, ties = candidate.problem, candidate.arrangement, context.facts.ties
    count = len(candidate.starts)
    stage_of = np.zeros(len(ties.ranges), dtype=int)
    for start in candidate.starts[1:]:
        stage_of[start:] += 1
    dims = problem.dims(candidate.assignments)
    configs = tuple(
        OperatorConfig(mesh=int(stage_of[ties.block[index]]), dims=names)
        for index, names in enumerate(dims)
    )
    strategy = Strategy(
        meshes=tuple(arrangement.mesh(arrangement.place(chunk)) for chunk in range(count)),
        configs=configs,
        parameters=problem.parameters(
            candidate.assignments,
            keeps=arrangement.stages == 1 and arrangement.schedule == "1f1b",
        ),
        pipeline=Pipeline(schedule=arrangement.schedule, num_microbatches=arrangement.microbatches),
        label=describe(problem, arrangement, candidate.assignments, count),
    )
    trained = context.training.applied(strategy)
    return in_modes(context, trained, problem.chosen_modes(candidate.assignments))
