"""Whether there is anything to compress for."""

from __future__ import annotations

from shardwright.core.costs import CostTable, beneath_key, collective_key
from shardwright.planner.judge.compress import free_seconds, unburdened
from shardwright.planner.judge.evaluate import evaluate
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.search.models import cluster, residual


def test_what_sums_take_from_computation_is_no_reason_to_send_them_whole() -> None:
    graph, where = residual(batch=16, width=64, depth=3), cluster(2, 1, flops=1e10, far=1e8)
    ends = (2, 2, "0.8Gbit/s")
    alone = {collective_key("all_reduce", *ends): 1e-3}
    beneath = {
        beneath_key(what, "all_reduce", *ends): 2e-3 for what in ("held", "stolen", "waited")
    }
    quiet, loud = (
        CostTable(
            collectives=tuple(
                (key, ((1.0, one, 0.0), (1e6, one, 0.0))) for key, one in known.items()
            )
        )
        for known in (alone, alone | beneath)
    )
    strategy = seed_strategy(graph, Seed(data=2))
    training = Training()
    found = []
    for table in (quiet, loud):
        context = Context.of(graph, where, table, training)
        whole = evaluate(context, strategy)
        found.append((whole.seconds, free_seconds(unburdened(context), whole)))
    assert found[0][0] < found[1][0]  # messages are felt
    assert found[0][1] == found[1][1] < found[0][0]
