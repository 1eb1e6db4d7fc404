"""What a survey lays beside the plans found."""

from __future__ import annotations

from shardwright.core.costs import CostTable
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
