"""What pipelines of several chunks a device take at least, since every device keeps what is under way.

In every order of chunks whose backwards are whole a device holds, when its first backward begins, as many
microbatches of each chunk but its last as there are stages, or all there are; of their last chunks the last devices
hold fewer. A cut that gives these most of the work keeps less, but waits longer: both count.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import NUM_COLUMNS, TRANSIENT, network
from shardwright.planner.search.bounds import least_steep_rounds
from shardwright.planner.search.candidates import bound_weights
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import BACKWARD, MEANS
from shardwright.planner.solve.elimination import Cheapest, Elimination
from shardwright.planner.solve.frontier import hull
from shardwright.planner.solve.network import Network


def tighten(pool: Pool) -> None:
    """Prove more of the arrangements that set the bound of the fastest plan, the weakest first, as long as that
    raises it and the gap is more than the doubt about the plan. Arrangements without stages, and what is too wide to be solved exactly, stay as they are."""
    fitting = [one for one in pool.fitting if not one.strategy.pipeline.splits_backward]
    chunks = max(fitting[0].strategy.chunks, 2) if fitting else 0
    enough = pool.fastest * (1 - pool.apart)
    while chunks and not pool.stopped():
        one = pool.bounds.weakest(chunks)
        if one is None or one.is_tight(chunks) or one.seconds(chunks) >= enough:
            return
        arrangement, most = one.arrangement, one.chunks(chunks)
        problem = Problem.of(pool.context, arrangement.mesh(0), arrangement.microbatches)
        seconds = least_looped(problem, arrangement, most, pool.room)
        pool.bounds.note(replace(one, looped=seconds, most=most))
        pool.tell(0.9, "proving")


def least_looped(problem: Problem, arrangement: Arrangement, chunks: int, limit: float) -> float:
    """Bound an arrangement's seconds from below where devices have at least two chunks and at most so many, within a
    memory limit."""
    if problem.is_wide:
        return 0.0
    most = _most_blocks(problem)
    kinds = network(problem.sizes, problem.statement.terms, most)
    p, m = arrangement.stages, arrangement.microbatches
    best = 0.0
    # Keeping less is worth what running forward again adds, none of it, half or all.
    for part in (0.0, 0.5, 1.0):
        steep = 1.0 + part * (1.0 - BACKWARD)
        rounds = least_steep_rounds(p, m, chunks, steep)
        if rounds <= 0:
            continue
        # Where most is held, and where least is; all else lies between them.
        ways = (rounds, min(m, p)), (steep * rounds, 1)
        for mean in MEANS:
            view = Cheapest(
                [_view(kinds, problem, arrangement, mean, (rounds, way)) for way in ways]
            )
            best = max(best, hull(view, 2, limit).bound(limit))
    return best


def _most_blocks(problem: Problem) -> frozenset[int]:
    """Return the largest class of equal blocks."""
    return frozenset(max(problem.context.facts.ties.classes.values(), key=len))


def _view(
    kinds: Network, problem: Problem, arrangement: Arrangement, mean: float, rounds: tuple[float, tuple[float, int]],
) -> Elimination:  # fmt: skip
    """Return a mean of bounds where most blocks lie in a way: how often their seconds count, and how many microbatches
    devices hold of them. Of all others nothing is said: they count as little as they can."""
    least, (own, held) = rounds
    parts = [
        bound_weights(problem, arrangement, (each, 0.0), mean, many).views()
        for each, many in ((least, 1), (own, held))
    ]
    seconds, memory = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    rest = len(problem.context.facts.ties.ranges) - len(_most_blocks(problem))
    if (
        arrangement.stages > rest
    ):  # so many devices have one of most blocks at least, and what it needs while it runs
        memory[TRANSIENT], memory[NUM_COLUMNS + TRANSIENT] = 0.0, 1 - rest / arrangement.stages
    return Elimination(kinds, seconds, memory)
