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
