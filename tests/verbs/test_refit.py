"""Costs fitted to plans that ran: what a hidden factor did to step times is found again."""

from dataclasses import replace

import pytest

from shardwright.core.costs import CostTable
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from shardwright.verbs.refit import refit
from tests.planner.search.models import cluster, mlp

SEEDS = (
    Seed(data=4),
    Seed(data=4, num_microbatches=2),
    Seed(data=4, zero=3),
    Seed(data=2, tensor=2),
)


def context(table: CostTable) -> Context:
    where = cluster(1, 4, flops=1e10, near=1e9, far=1e8)
    kind = replace(
        where.kinds[0], backend="cpu"
    )  # on GPUs starting kernels outweighs such small ones
    return Context.of(mlp(), replace(where, kinds=(kind,)), table, Training())


@pytest.mark.parametrize(
    "factors",
    [
        (("all_gather", 1.0), ("all_reduce", 1.0), ("compute", 1.3), ("reduce_scatter", 1.0)),
        (("all_gather", 4.0), ("all_reduce", 1.5), ("compute", 1.1), ("reduce_scatter", 3.0)),
        (("all_gather", 1.0), ("all_reduce", 0.5), ("compute", 0.9), ("reduce_scatter", 1.0)),
    ],
)
def test_refitted_costs_give_the_step_times_of_a_machine_that_differs(factors) -> None:
    here, there = context(CostTable()), context(CostTable(factors=factors))
    strategies = [as_strategy(here, seed) for seed in SEEDS]
    ran = {strategy: evaluate(there, strategy).seconds for strategy in strategies}
    before = max(abs(evaluate(here, one).seconds / seconds - 1) for one, seconds in ran.items())
    fitted = context(refit(here, ran))
    after = max(abs(evaluate(fitted, one).seconds / seconds - 1) for one, seconds in ran.items())
    assert after < 0.03 < before


def test_costs_that_were_right_are_left_alone() -> None:
    here = context(CostTable())
    strategies = [as_strategy(here, seed) for seed in SEEDS]
    table = refit(here, {one: evaluate(here, one).seconds for one in strategies})
    assert dict(table.factors) == pytest.approx(dict.fromkeys(dict(table.factors), 1.0), abs=1e-6)
    assert refit(here, {}) is here.table
