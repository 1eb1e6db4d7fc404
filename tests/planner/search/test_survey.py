"""What a survey lays beside the plans found."""

from __future__ import annotations

from shardwright.core.costs import CostTable, link_label
from shardwright.planner.search import Limits, Training, survey
from tests.planner.search.models import cluster, mlp


def test_gradients_of_plain_data_parallelism_travel_in_the_dtype_asked_for() -> None:
    training = Training(gradient_dtype="bfloat16", error_feedback=True)
    found = survey(
        mlp(), cluster(1, 2), CostTable(), training=training, limits=Limits(max_candidates=2)
    )
    assert found.plain
    for plan in found.plain:
        sync = plan.strategy.gradient_sync
        assert (sync.dtype, sync.error_feedback) == ("bfloat16", True)


def test_a_device_alone_is_laid_beside_what_was_found_unless_it_cannot_be_as_fast() -> None:
    """Of two devices with slow links between them; of operators that take much longer than all messages; and of a
    device that is too small."""
    graph = mlp(batch=4096, width=1024)
    few = Limits(max_candidates=2)
    near = survey(graph, cluster(1, 2, near=1e8), CostTable(), limits=few)
    (alone,) = near.alone
    assert alone.devices == (0,)
    assert near.settled().frontier.best.strategy.devices == (0,)
    far = survey(graph, cluster(1, 2, near=1e12, flops=1e12), CostTable(), limits=few)
    assert not far.alone
    bytes_alone = near.weighed(alone).bytes
    small = survey(graph, cluster(1, 2, near=1e8, memory=0.9 * bytes_alone), CostTable())
    assert not small.alone


def test_plain_data_parallelism_of_deep_graphs_sends_buckets_where_starting_messages_is_felt() -> (
    None
):
    """As torch does, of two ranks on which it was measured; blocks are small, there are many, and all fill one bucket."""
    graph, two = mlp(depth=40), cluster(1, 2)
    group = f"1x2|{link_label(two, (0, 1))}"
    held = tuple(
        (f"{what}|all_reduce|{group}", ((1.0, seconds, 0.0), (1e9, seconds, 0.0)))
        for what, seconds in (
            ("collective", 1e-4),
            ("held", 1e-4),
            ("stolen", 0.0),
            ("waited", 1e-4),
        )
    )
    for table, count in ((CostTable(), 41), (CostTable(collectives=held), 1)):
        found = survey(graph, two, table, limits=Limits(max_candidates=2))
        assert found.context.facts.folder.is_long
        assert {len(plan.strategy.gradient_sync.buckets) for plan in found.plain} == {count}
