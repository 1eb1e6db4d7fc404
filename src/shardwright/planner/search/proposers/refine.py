"""Small changes of the fastest plans, where the simulator says that they help."""

from __future__ import annotations

from functools import partial

from shardwright.planner.judge.evaluate import Evaluation
from shardwright.planner.search.local.refinement import Effort, improve, is_gain
from shardwright.planner.search.loop import Proposal, Proposals
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.steering import (
    BUDGET,
    LEAST_MOVES,
    MOVES,
    PATIENCE,
)


def refined(pool: Pool) -> Proposals:
    """Propose to refine the plans that are fastest, more of them where more can be gained; none that is far
    behind."""
    close = pool.close()
    operators = len(pool.context.graph.operators)
    if not close:
        return
    is_open = pool.bounds.least() < close[0].seconds - sum(close[0].doubts.values())
    twice = 2 if is_open else 1
    effort = Effort(moves=min(BUDGET * twice // operators, MOVES), patience=PATIENCE * twice)
    if effort.moves < LEAST_MOVES:
        return
    # Where patience ends most climbs, there is time for more.
    is_cheap = operators * 2 * PATIENCE <= BUDGET
    count = pool.further * (2 if pool.is_small and (is_open or is_cheap) else 1)
    few = [] if pool.is_small else _of_another_schedule(close, count)
    for evaluation in [*close[:count], *few]:
        yield Proposal(0.0, partial(_refined, pool, evaluation, effort))
        pool.tell(1.0, "refining")


def _of_another_schedule(close: list[Evaluation], count: int) -> list[Evaluation]:
    """Return the fastest behind the first so many whose schedule none of these has: a climb changes no
    schedule for one that is slower at first."""
    schedules = {one.strategy.pipeline.schedule for one in close[:count]}
    return [one for one in close[count:] if one.strategy.pipeline.schedule not in schedules][:1]


def _refined(pool: Pool, evaluation: Evaluation, effort: Effort) -> Evaluation:
    better = improve(pool, evaluation, effort)
    if is_gain(better, evaluation, pool.same):
        pool.evaluations.append(better)
    return better
