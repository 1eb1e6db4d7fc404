"""Which cluster a plan is looked at on, and when it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright
from shardwright import api
from shardwright.core.plan import Frontier
from shardwright.errors import InputError, PlanMismatch
from shardwright.files.clusterfile import parse_cluster
from shardwright.files.planfile import write_plan
from tests.zoo import mlp

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    module, batch = mlp()
    wish = {"precision": "float64", "seed_plan": "megatron:2x1"}
    return shardwright.plan(module, "1x2xV100", batch=batch, **wish)


def test_a_file_of_before_is_looked_at_on_the_cluster_that_came_with_it(
    tmp_path: Path, frontier: Frontier
) -> None:
    """Digests of clusters once covered measured rates, so none of them is found again."""
    module, batch = mlp()
    old = tuple(replace(plan, cluster_fingerprint="0" * 16) for plan in frontier.plans)
    file = tmp_path / "plan.json"
    write_plan(file, replace(frontier, plans=old), cluster=parse_cluster("1x2xV100"))
    story = api.simulate(file, module, batch=batch)
    assert story.predicted.step_seconds == frontier.best.predicted.step_seconds
    with pytest.raises(PlanMismatch, match=r"plan\.json: .*differs in cluster"):
        api.simulate(file, module, "1x2xA100", batch=batch)


def test_a_file_whose_cluster_lacks_a_device_of_its_plan_is_refused(
    tmp_path: Path, frontier: Frontier
) -> None:
    file = tmp_path / "plan.json"
    write_plan(file, frontier, cluster=parse_cluster("1x1xV100"))
    with pytest.raises(InputError, match="device 1 is not among the 1 of the file's cluster"):
        api.read_frontier(file)
