"""What pipelines of several chunks a device take at least, since every device has whole blocks and keeps what is under way.

In every order of chunks whose backwards are whole a device holds, when its first backward begins, as many
microbatches of each chunk but its last as there are stages, or all there are; of their last chunks the last devices
hold fewer. A cut that gives these most of the work keeps less, but waits longer: both count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.model.arrangements import Arrangement
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
    network,
)
from shardwright.planner.search.bounds import (
    hidden_from_memory,
    least_alike_rounds,
    least_looped_rounds,
)
from shardwright.planner.search.candidates import channels, exposed_share
from shardwright.planner.search.pool import Pool
from shardwright.planner.solve.network import Network
from shardwright.planner.solve.wide.dual import SLIGHT

Floats = NDArray[np.float64]


def tighten(pool: Pool) -> None:
    """Prove more of the arrangements that set the bound of the fastest plan, the weakest first, as long as that
    raises it and the gap is more than the doubt about the plan. Arrangements without stages, and what is too wide to be solved exactly, stay as they are."""
    fitting = [one for one in pool.fitting if not one.strategy.pipeline.splits_backward]
    chunks = max(fitting[0].strategy.chunks, 2) if fitting else 0
    enough = pool.fastest * (1 - pool.apart)
    useful = _useful(pool, chunks, enough)
    while chunks and not pool.stopped():
        one = pool.bounds.weakest(chunks)
        if one is None or one.is_tight(chunks) or one.seconds(chunks) >= enough:
            return
        arrangement, most = one.arrangement, one.chunks(chunks)
        problem = Problem.of(pool.context, arrangement.mesh(0), arrangement.microbatches)
        ends = pool.same, min(useful, one.whole)
        seconds = least_looped(problem, arrangement, most, pool.room, ends)
        pool.bounds.note(replace(one, looped=seconds, most=most))
        pool.tell(0.9, "proving")


def _useful(pool: Pool, chunks: int, enough: float) -> float:
    """Return which seconds set no bound: those of an arrangement that takes enough and stays as it is, with the
    fewest chunks."""
    rest = [one.seconds(2) for one in pool.bounds if one.seconds(chunks) >= enough]
    return min(rest, default=math.inf)


def least_looped(
    problem: Problem, arrangement: Arrangement, chunks: int, limit: float,
    ends: tuple[float, float] = (0.0, math.inf),
) -> float:  # fmt: skip
    """Bound an arrangement's seconds from below where devices have at least two chunks and at most so many, within a
    memory limit: what can be proved so but for a share, or as many as are useful (``ends``)."""
    most = frozenset(max(problem.context.facts.ties.classes.values(), key=len))
    ways = np.stack(
        [
            np.stack([*seconds, memory])
            for held in (min(arrangement.stages, arrangement.microbatches), 1)
            for seconds, memory in [_counted(problem, arrangement, chunks, most, held)]
        ]
    )
    seconds = 0.0
    for statement in problem.statements():
        kinds = network(tuple(statement.sizes), statement.terms, most)
        if not kinds.is_wide:
            seconds = max(seconds, _strongest(kinds, ways, limit, ends))
        if seconds >= ends[1]:
            break
    return seconds


def _counted(
    problem: Problem, arrangement: Arrangement, chunks: int, most: frozenset[int], held: int
) -> tuple[list[Floats], Floats]:
    """Return how often every kind of costs counts in what bounds the seconds of a step, and in a device's bytes on average,
    where so many microbatches are held of the largest class of equal blocks. Those are kinds of their own, the last.

    With x the seconds of a microbatch through these L blocks, y through all others, and o, u theirs once a step:

    * T >= a x / L as ``least_alike_rounds`` has it, and T >= a (x + y) as ``least_looped_rounds`` has it.
    * Some device has L / p of the blocks, rounded up: T >= (m x + o) / L times so many. On average devices have
      1 / p of everything: T >= (m (x + y) + o + u) / p.
    * T >= x (1 + Z / L / slope), where Z microbatches of a block less are held than if all devices held min(p, m)
      of all of their blocks (``hidden_from_memory``). This, and the bytes, are linear in Z, so for any mean of these bounds
      and any price of memory the least lies where none is hidden or where one microbatch is held of every block.
    * Messages that could hide take their time on one of the channels: m / p of a microbatch's, 1 / p of a step's.
    """
    p, m, count = arrangement.stages, arrangement.microbatches, len(most)
    ahead = [sum(block < stage for block in most) for stage in range(p)]
    axes, ties = len(problem.mesh.sizes), problem.context.facts.ties
    share, slope = exposed_share(problem.context, axes), hidden_from_memory(p, m)
    hidden = (min(p, m) - held) / slope if slope else 0.0
    looped, full = least_looped_rounds(p, m, chunks), -(-count // p) / count

    def counts(others: tuple[float, float], own: tuple[float, float]) -> Floats:
        """Count so often what is done for a microbatch, and what is done once, by others and by these blocks."""
        parts = np.zeros((2, NUM_COLUMNS))
        for part, (each, once) in zip(parts, (others, own), strict=True):
            part[[EACH, ONCE, GATHER, SYNC]] = each, once, each * share, once * share
        return parts.reshape(-1)

    hideable, memory = np.zeros((2, NUM_COLUMNS)), np.zeros((2, NUM_COLUMNS))
    hideable[:, GATHER], hideable[:, SYNC] = m / p / channels(axes), 1 / p / channels(axes)
    memory[:, KEPT], memory[:, FLIGHT] = 1 / p, np.array([1, held]) / p
    memory[:, TRANSIENT] = 1 / (p * len(ties.classes))
    if p > (rest := len(ties.ranges) - count):
        # So many devices have one of most blocks at least, and what it needs while it runs.
        memory[:, TRANSIENT] = 0.0, 1 - rest / p
    seconds = [
        counts((0.0, 0.0), (least_alike_rounds(ahead, m, count) / count, 0.0)),
        counts((looped, 0.0), (looped, 0.0)),
        counts((0.0, 0.0), (m * full, full)),
        counts((m / p, 1 / p), (m / p, 1 / p)),
        counts((0.0, 0.0), (1 + hidden, 0.0)),
        hideable.reshape(-1),
    ]
    return seconds, memory.reshape(-1)


def _strongest(kinds: Network, ways: Floats, limit: float, ends: tuple[float, float]) -> float:
    """Return the most seconds, but for a share or as many as are useful, that a mean of bounds proves within a limit of bytes.

    Of every way, ``ways`` has what each bound counts of every kind, and the bytes last. Any mean of the bounds, with any
    price of memory, is a bound: the least of any choices, in any way (Lagrangian duality). The strongest is found by
    cutting planes (Kelley, 1960): a linear program over the choices met so far says which could be the strongest, and the
    network which choices that did not know of.
    """
    bounds = ways.shape[1] - 1
    mix: Floats = np.append(np.full(bounds, 1 / bounds), 0.0)
    best = float(kinds.solve(mix @ ways).values.min())  # whatever memory allows
    return best if best >= ends[1] else _strengthened(kinds, ways, limit, ends, (mix, best))


def _strengthened(
    kinds: Network,
    ways: Floats,
    limit: float,
    ends: tuple[float, float],
    start: tuple[Floats, float],
) -> float:
    """Return what cutting planes prove, from a mean and its bound on."""
    # Late: few searches have more to prove.
    import highspy

    (mix, best), (share, useful), bounds = start, ends, ways.shape[1] - 1
    program = cast("Any", highspy).Highs()
    program.silent()
    means: list[Any] = [program.addVariable(0.0, 1.0) for _ in range(bounds)]
    price, seconds = program.addVariable(0.0), program.addVariable(0.0)
    program.addConstr(sum(means) == 1)

    def met(mix: Floats) -> float:
        """Find the least of a mix; what was found bounds all others."""
        nonlocal unit
        found = kinds.solve(mix @ ways)
        cuts = (ways @ found.totals[..., None])[..., 0]
        unit = unit or float(cuts[:, :-1].max(initial=math.ulp(0.0)))
        for cut in cuts:
            factors = [*(cut[:-1] / unit).tolist(), float(cut[-1] / limit - 1)]
            # HiGHS refuses smaller ones. Without them it may mean otherwise, and any mean is a bound.
            terms = zip(factors, [*means, price], strict=True)
            program.addConstr(sum(by * one for by, one in terms if abs(by) > 1e-9) >= seconds)
        return float(found.values.min())

    unit = 0.0  # of the seconds that HiGHS is told of: it takes numbers near one
    smallest = met(np.append(np.zeros(bounds), 1.0))
    if not smallest < limit:
        return math.inf
    while (best := max(best, met(mix) - float(mix[-1]) * limit)) < useful:
        program.maximize(seconds)
        if program.val(seconds) * unit <= best * (1 + max(share, SLIGHT)):
            break
        mix = np.array([*program.vals(means), program.val(price) * unit / limit])
    return best
