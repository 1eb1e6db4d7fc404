"""From arrangements to candidates: the additive model's best plans, and its bound.

Per arrangement: solve the intra-stage problem for its hull, cut the blocks into stages, and, where
two neighbouring hull points lie on both sides of the memory limit, mix them block by block so that
the limit is just met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedules import SCHEDULES, in_flight
from shardwright.core.strategy import OperatorConfig, Pipeline, Strategy
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.domains import takes_at_least
from shardwright.planner.model.modes import in_modes
from shardwright.planner.model.partition import Chain, measure, partition
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import (
    EACH,
    FLIGHT,
    GATHER,
    KEPT,
    ONCE,
    SYNC,
    TRANSIENT,
    Weights,
)
from shardwright.planner.search.labels import describe
from shardwright.planner.search.steering import BACKWARD, CLOSE, HIDDEN, MEANS, POINTS, ROOMY
from shardwright.planner.solve.frontier import Hull, Point, hull, nearest_within

# Which shares of gathers and of gradient synchronisation are taken to remain exposed, in turn.
WEIGHINGS = ((HIDDEN, HIDDEN), (1.0, HIDDEN), (1.0, 1.0))

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
    """What one arrangement gave: candidates, the bound within the memory limit, the seconds of its
    fastest point if memory did not matter, and whether that point fits with room to spare.
    """

    candidates: tuple[Candidate, ...]
    bound: float
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


def explore(
    context: Context, arrangement: Arrangement, limit: float, best: float, bound: float
) -> Explored:
    """Solve one arrangement.

    ``best`` is the fastest step known so far and ``bound`` the least bound; both only save work: a
    bound of the arrangement above ``bound`` need not be tight, and one above ``best`` ends it.
    """
    return solve(Problem.of(context, arrangement.mesh(0), arrangement.microbatches), arrangement,
                 limit, (best, best), bound)  # fmt: skip


def is_outdone(context: Context, arrangement: Arrangement, seconds: float) -> bool:
    """Whether the operators' seconds alone make an arrangement take so long, or longer."""
    rounds = least_rounds(arrangement.stages, arrangement.microbatches, arrangement.schedule)
    return takes_at_least(context, arrangement.mesh(0), arrangement.microbatches, rounds, seconds)


def least_work(problem: Problem, arrangement: Arrangement) -> float:
    """Bound an arrangement's step from below by the operators' seconds alone, without tables."""
    rounds, share = least_rounds(arrangement.stages, arrangement.microbatches, arrangement.schedule)
    each, once = problem.least_work
    return rounds * each + share * once


def solve(
    problem: Problem, arrangement: Arrangement, limit: float, known: tuple[float, float],
    bound: float,
) -> Explored:  # fmt: skip
    """Solve one arrangement, given its problem; see ``explore``.

    ``known`` are the fastest step simulated and the fastest promised so far.
    """
    best, promised = known
    least = exposed_share(problem.context, len(problem.mesh.sizes))
    found: dict[tuple[object, ...], Candidate] = {}
    fastest, is_free = math.inf, False
    for hidden, synced in WEIGHINGS[: 1 if problem.is_wide else None]:
        shares = (max(least, hidden), max(least, synced))
        view = problem.elimination(search_weights(arrangement, *shares))
        curve = hull(view, POINTS, limit, CLOSE * best)
        own = curve.bound(limit)
        if not found:
            fastest = curve.points[0].seconds if curve.points else math.inf
            is_free = bool(curve.points) and curve.points[0].bytes <= ROOMY * limit
            bound = min(bound, _relaxed_bound(problem, arrangement, curve, limit, bound))
        for candidate in _from_hull(problem, arrangement, curve, limit, own < min(promised, best)):
            found.setdefault(candidate.identity, candidate)
        near = nearest_within(view, curve, limit) if problem.is_wide else None
        for candidate in from_points(problem, arrangement, [near] if near else [], limit):
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


def _relaxed_bound(
    problem: Problem, arrangement: Arrangement, curve: Hull, limit: float, known: float
) -> float:
    """Bound this arrangement's seconds from below, whatever the cuts; give up once above ``known``.

    With A the seconds on the compute stream's path and H those of messages that could hide, a step
    takes at least A + e H (``exposed_share``) and at least H / ``channels``; so it takes any mean
    of the two. Stages hold one microbatch at least. Each mean's hull, read at the limit, is a bound
    (Lagrangian duality); so is the value at any one price of memory, which is tried first. As the
    same stages may run interleaved, which waits less, the bound shrinks by as much.
    """
    p, m = arrangement.stages, arrangement.microbatches
    looped = least_looped_rounds(p, m) / least_rounds(p, m, arrangement.schedule)[0]
    known /= looped
    best = least_work(problem, arrangement)
    if not curve.points or best >= known:
        return known * looped
    means = MEANS[: 1 if problem.is_wide else None]  # where every answer takes seconds
    views = [problem.elimination(_bound_weights(problem, arrangement, mean)) for mean in means]
    price = curve.price(limit)
    for view in views:
        best = max(best, float(view.solve(np.array([[1.0, price]])).values[0]) - price * limit)
        if best >= known:
            return known * looped
    for view in views:
        best = max(best, hull(view, 2, limit).bound(limit))
        if best >= known:
            return known * looped
    return best * looped


def _bound_weights(problem: Problem, arrangement: Arrangement, mean: float) -> Weights:
    p, m = arrangement.stages, arrangement.microbatches
    rounds, once = least_rounds(p, m, arrangement.schedule)
    axes, sorts = len(problem.mesh.sizes), len(problem.context.facts.ties.classes)
    exposed = exposed_share(problem.context, axes)
    exposed += (1 - mean) / mean / channels(axes) * m / p / rounds
    return Weights(
        each=mean * rounds, once=mean * once, exposed=exposed, synced=exposed,
        kept=1 / p, flight=1 / p, transient=1 / (p * sorts),
    )  # fmt: skip


def least_rounds(stages: int, microbatches: int, schedule: str = "1f1b") -> tuple[float, float]:
    """Return (a, b) such that any pipeline takes at least a * (seconds of one microbatch through
    all stages) + b * (seconds once per step of all stages), however the work is cut.

    Stage s can neither start before nor end after the stages ahead of it have had their part of the
    first and the last microbatch, so T >= m t_s + sum of t before s. The weights of these that make
    every t_s count alike give a = 1 / (1 - (1 - 1/m)^p). What a stage does once per step may hide
    behind the backward of the stages ahead, so with several stages it counts nothing: b = 0.

    Where devices hold several chunks, ``stages`` are the devices and the first chunk may be next to
    nothing; where backward is split, next to nothing of it may be on the way back; without a flush
    nothing is filled. Then only the devices' own share is certain: T >= m t_s, a = m / p.
    """
    if stages == 1:
        return float(microbatches), 1.0
    order = SCHEDULES[schedule]
    if order.chunks or order.splits or not order.flushes:
        return microbatches / stages, 0.0
    return 1.0 / (1.0 - (1.0 - 1.0 / microbatches) ** stages), 0.0


def least_looped_rounds(stages: int, microbatches: int) -> float:
    """Return the a of ``least_rounds`` where each of so many devices has two chunks, by turns.

    Besides T >= m (x_s + y_s) + sum of x before s, for chunks x and y of device s, the second ones
    wait for all first ones: T >= m y_s + sum of all x + sum of y before s. What fills a time of 1
    with both tight everywhere is most, by linear programming: of it second chunks have ``second``,
    first ones the rest.
    """
    if stages == 1:
        return float(microbatches)
    lost = 1.0 - 1.0 / microbatches
    second = lost**stages / (1.0 - stages / microbatches * lost ** (stages - 1))
    return 1.0 / (1.0 - second * lost**stages)


def _from_hull(
    problem: Problem, arrangement: Arrangement, found: Hull, limit: float, mixes: bool
) -> Iterator[Candidate]:
    pieces = [problem.per_block(point.assignment) for point in found.points]
    for point, columns in zip(found.points, pieces, strict=True):
        yield from _cut(problem, arrangement, [(point.assignment, columns)], 0, limit)
    for i in range(len(pieces) - 1 if mixes else 0):
        fast = (found.points[i].assignment, pieces[i])
        small = (found.points[i + 1].assignment, pieces[i + 1])
        yield from _mix(problem, arrangement, [fast, small], limit)


def from_points(
    problem: Problem, arrangement: Arrangement, points: list[Point], limit: float
) -> Iterator[Candidate]:
    """Yield the candidates of some points of an arrangement, whatever they were found by."""
    for point in points:
        columns = problem.per_block(point.assignment)
        yield from _cut(problem, arrangement, [(point.assignment, columns)], 0, limit)


Choice = tuple[Assignment, NDArray[np.float64]]


def _mix(
    problem: Problem, arrangement: Arrangement, ends: list[Choice], limit: float
) -> Iterator[Candidate]:
    """Use the smaller point in as few leading blocks as fit the limit, if neither end does it."""
    count = ends[0][1].shape[1]

    def fits(lead: int) -> bool:
        return any(c.bytes <= limit for c in _cut(problem, arrangement, ends, lead, limit))

    if fits(0) or not fits(count):
        return
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    if high < count:
        yield from _cut(problem, arrangement, ends, high, limit)


def _cut(
    problem: Problem, arrangement: Arrangement, ends: list[Choice], lead: int, limit: float
) -> Iterator[Candidate]:
    """Cut the blocks into stages, with and without the limit; ``lead`` blocks use the last end."""
    count = ends[0][1].shape[1]
    columns = np.concatenate([ends[-1][1][:, :lead], ends[0][1][:, lead:]], axis=1)
    assignments = (ends[-1][0],) * lead + (ends[0][0],) * (count - lead)
    transfer = transfers(problem, arrangement, assignments)
    p, m = arrangement.stages, arrangement.microbatches
    least = exposed_share(problem.context, len(problem.mesh.sizes))
    ranked = chain(columns, transfer, *exposed(columns, least))
    seen: set[tuple[int, ...]] = set()
    for ceiling in (math.inf, limit) if p > 1 else (math.inf,):
        cut = partition(ranked, p, m, arrangement.schedule, ceiling)
        if cut is None or cut.starts in seen:
            continue
        seen.add(cut.starts)
        hidden = chain(columns, transfer * 0, least, least)
        yield Candidate(
            arrangement=arrangement,
            problem=problem,
            assignments=assignments,
            starts=cut.starts,
            seconds=cut.step_seconds,
            least_seconds=measure(hidden, cut.starts, m, arrangement.schedule).step_seconds,
            bytes=max(cut.stage_bytes),
        )


def exposed(columns: NDArray[np.float64], least: float) -> tuple[float, float]:
    """Estimate which shares of gathers and of gradient synchronisation computation cannot hide.

    Gathers hide behind the microbatch they serve, gradients behind the last one's backward.
    """
    compute, gather, sync = (float(columns[kind].sum()) for kind in (EACH, GATHER, SYNC))
    unlucky = least + HIDDEN * (1 - least)
    behind = compute * BACKWARD
    return (
        max(unlucky, 1 - compute / gather) if gather > 0 else unlucky,
        max(unlucky, 1 - behind / sync) if sync > 0 else unlucky,
    )


def chain(
    columns: NDArray[np.float64], transfer: NDArray[np.float64], exposed: float, synced: float
) -> Chain:
    """Return the chain of blocks which the partition cuts."""
    return Chain(
        seconds=columns[EACH] + exposed * columns[GATHER],
        once=columns[ONCE] + synced * columns[SYNC],
        kept=columns[KEPT],
        in_flight=columns[FLIGHT],
        transient=columns[TRANSIENT],
        transfer=transfer,
    )


def transfers(
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
        label=describe(problem, arrangement, candidate.assignments),
    )
    trained = context.training.applied(strategy)
    return in_modes(context, trained, problem.chosen_modes(candidate.assignments))
