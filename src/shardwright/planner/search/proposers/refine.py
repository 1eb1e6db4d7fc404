"""Small changes of the fastest plans, where the simulator says that they help."""

from __future__ import annotations

from functools import partial

from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.search.local.refinement import PATIENCE, improve
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool

# So many of the fastest plans are refined (twice as many where moves are cheap, so that there are more
# than so many; of larger graphs the fastest alone), each by moves that simulate about so many
# operators; not at all where those would be too few to find anything.
REFINED, CHEAP_MOVES = 2, 100
MOVED, LEAST_MOVES, MOST_MOVES = 20_000, 20, 400
# Where the bound is so far below the fastest plan, there may be more to gain: twice as many plans, so
# many times as many moves, and more patience.
OPEN, OPENED, OPEN_PATIENCE = 0.75, 3, 100


def refined(pool: Pool) -> Proposals:
    """Propose to refine the plans that are fastest."""
    is_open = pool.bound < OPEN * pool.fastest
    moved = MOVED * (OPENED if is_open else 1)
    moves = min(moved // len(pool.context.graph.operators), MOST_MOVES)
    if moves < LEAST_MOVES:
        return
    # Those equally fast are mostly the same on another mesh.
    unlike = {f"{one.seconds:.4g}": one for one in reversed(pool.fitting)}
    is_cheap = len(pool.context.graph.operators) < MOVED / CHEAP_MOVES
    count = 2 * REFINED if is_cheap or is_open else REFINED
    fastest = sorted(unlike.values(), key=lambda one: one.seconds)[:count]
    patience = OPEN_PATIENCE if is_open else PATIENCE
    for evaluation in fastest if pool.is_small else fastest[:1]:
        yield Proposal(0.0, partial(_refined, pool, evaluation, moves, patience))
        pool.tell(1.0, "refining")


def _refined(pool: Pool, evaluation: Evaluation, moves: int, patience: int) -> Evaluation:
    better = improve(
        pool.context, evaluation, pool.limit, moves, patience=patience,
        evaluator=pool.evaluator.run, stop=pool.stopped,
    )  # fmt: skip
    if better is not evaluation:
        pool.evaluations.append(better)
    return better
