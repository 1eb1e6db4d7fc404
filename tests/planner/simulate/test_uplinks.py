"""Which messages share a host's uplink with others of their devices."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate, simulate_on
from shardwright.planner.simulate.columns import Ways
from shardwright.planner.simulate.ways import far_resources
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like
from tests.planner.programs import Row, build_program
from tests.planner.search.models import cluster


def far_names(seed: Seed, on: Cluster) -> set[str]:
    """Return the resources that share an uplink; none where no two do."""
    program = lower(graph := transformer_like(), seed_strategy(graph, seed))
    found = far_resources(program, on)
    names = np.array(program.resource_names)
    return set() if found is None else set(names[found].tolist())


@pytest.mark.parametrize(
    ("seed", "hosts", "each", "names"),
    [
        (Seed(data=2, tensor=2), 4, 1, {"link:0:data", "link:0:tensor"}),
        # What devices cut out of their own copy along an axis between hosts is computed, not sent.
        (
            Seed(data=2, tensor=2, sequence=True),
            4,
            1,
            {"link:0:data", "link:0:tensor", "link:0:data.tensor"},
        ),
        (Seed(data=2, tensor=2), 2, 2, set()),  # the second axis stays within hosts
        (Seed(data=2, tensor=2), 1, 4, set()),
        (Seed(data=4), 4, 1, set()),
        (Seed(data=2, stages=2, num_microbatches=2), 4, 1, set()),
    ],
)
def test_collectives_over_two_axes_between_hosts_share(
    seed: Seed, hosts: int, each: int, names: set[str]
) -> None:
    assert far_names(seed, cluster(hosts, each)) == names


def test_stages_of_grids_share_with_what_they_send() -> None:
    seed = Seed(data=2, tensor=2, stages=2, num_microbatches=2)
    found = far_names(seed, cluster(8, 1))
    assert {name for name in found if name.startswith("link:")} == {
        f"link:{mesh}:{axis}" for mesh in (0, 1) for axis in ("data", "tensor")
    }
    assert {name for name in found if name.startswith("send:")}


def test_sums_over_two_axes_at_once_take_as_long_as_one_after_the_other() -> None:
    # Measured between 2 x 2 hosts at 1 Gbit/s: 34 ms at once, 17 ms each alone.
    rows = [Row(resource=f"link:0:{axis}", seconds=0.017) for axis in range(2)]
    program, seconds = build_program(rows)
    assert simulate(program, seconds, ways=Ways(far=np.array([True, True]))).step_seconds == 0.034
    assert simulate(program, seconds).step_seconds == 0.017


def test_a_step_between_hosts_is_no_shorter_than_with_uplinks_of_their_own() -> None:
    program = lower(graph := transformer_like(), seed_strategy(graph, Seed(data=2, tensor=2)))
    seconds = np.ones(program.num_instructions)
    shared = simulate_on(cluster(4, 1), CostTable(), program, seconds).step_seconds
    apart = simulate_on(cluster(2, 2), CostTable(), program, seconds).step_seconds
    assert shared > apart
