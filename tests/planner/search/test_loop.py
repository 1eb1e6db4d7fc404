"""The loop: the least bound first, nothing that cannot win, proposers learn what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from shardwright.core.costs import CostTable
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.loop import Proposal, Proposals, run
from shardwright.planner.search.named import as_strategy
from shardwright.planner.search.pool import Pool
from shardwright.planner.space import Seed
from tests.planner.search.models import cluster, mlp

HERE = Context.of(mlp(), cluster(1, 2, flops=1e10, near=1e9), CostTable(), Training())
PLAIN = as_strategy(HERE, Seed(data=2))


def pool_for(stop: bool = False) -> Pool:
    return Pool(HERE, math.inf, stop=lambda: stop)


def proposer(
    name: str, bounds: list[float], tried: list[str], learnt: list[bool], pool: Pool
) -> Proposals:
    """Proposes plain data parallelism again and again, whatever it claims of it."""

    def trial(bound: float) -> Evaluation | None:
        tried.append(f"{name}{bound:g}")
        return pool.try_out(PLAIN)

    for bound in bounds:
        learnt.append((yield Proposal(bound, partial(trial, bound))) is not None)


def test_the_least_bound_is_tried_first_and_of_equals_the_one_named_first() -> None:
    seconds = evaluate(HERE, PLAIN).seconds
    tried: list[str] = []
    learnt: list[bool] = []
    first = partial(proposer, "a", [0.0, 0.2 * seconds], tried, learnt)
    second = partial(proposer, "b", [0.0, 0.1 * seconds, 2 * seconds], tried, learnt)
    run(pool_for(), first, second)
    assert [name[0] for name in tried] == ["a", "b", "b", "a"]
    assert sorted(learnt) == [
        False,
        True,
        True,
        True,
        True,
    ]  # twice as slow as the best is not tried


def test_a_stopped_search_tries_until_it_has_one_plan() -> None:
    tried: list[str] = []
    run(pool_for(stop=True), partial(proposer, "a", [0.0, 0.0, 0.0], tried, []))
    assert tried == ["a0"]


def test_a_stopped_search_asks_nobody_for_more_than_one_plan_takes() -> None:
    asked: list[str] = []

    def asks(name: str, trial: Callable[[Pool], Evaluation | None], pool: Pool) -> Proposals:
        for number in range(2):
            asked.append(f"{name}{number}")
            yield Proposal(0.0, partial(trial, pool))

    refused, legal = partial(asks, "a", lambda _: None), lambda pool: pool.try_out(PLAIN)
    run(pool_for(stop=True), refused, partial(asks, "b", legal), partial(asks, "c", legal))
    assert asked == ["a0", "a1", "b0"]


def test_what_is_the_same_follows_from_the_half_width_of_the_prediction() -> None:
    pool = pool_for()
    assert pool.are_same(1.0, 1.0)
    assert not pool.are_same(1.0, 1.0 + 1e-9)
    evaluation = pool.weigh(PLAIN)
    assert evaluation is not None
    assert evaluation.objective == evaluate(HERE, PLAIN).objective
    # A fiftieth of what does not cancel in the difference of like plans, a fifth of the half-width.
    share = 0.02 * 0.2 * sum(evaluation.doubts.values()) / evaluation.seconds
    assert math.isclose(pool.same, share)
    assert pool.are_same(1.0, 1.0 + 0.9 * share)
    assert not pool.are_same(1.0, 1.0 + 1.1 * share)
