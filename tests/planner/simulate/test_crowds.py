"""Messages whose threads wait for a core while more ranks compute than there are cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.core.costs import CostTable, link_label, meeting_name
from shardwright.core.program import Program, ResourceClass
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate_on
from shardwright.planner.simulate.ways import waits_for_cores
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like
from tests.planner.search.models import cluster

HOSTS = cluster(4, 1)
LINK = link_label(HOSTS, (0, 1, 2, 3))
CROWDED = CostTable(
    overheads=(
        ("cores", 2.0),
        (meeting_name("crowding", 4, 4, LINK), 0.02),
        (meeting_name("crowding", 2, 2, LINK), 0.004),
    )
)


def program_of(seed: Seed) -> Program:
    """Lower a small transformer."""
    graph = transformer_like()
    return lower(graph, seed_strategy(graph, seed))


def test_each_resource_waits_as_a_message_of_its_group_was_seen_to() -> None:
    for seed, seconds in (
        (Seed(data=4), {0.02}),
        (Seed(data=2, tensor=2), {0.004}),
        (Seed(stages=4, num_microbatches=2), {0.004}),
        (Seed(data=2, stages=2, num_microbatches=2), {0.004}),
        (Seed(data=2, stages=2, chunks=2, num_microbatches=4, schedule="zb-v"), {0.004}),
    ):
        program = program_of(seed)
        found = waits_for_cores(program, HOSTS, CROWDED)
        assert found is not None
        classes = np.array(program.resource_class)
        assert set(found[found > 0].tolist()) == seconds
        assert (found[classes == ResourceClass.COMPUTE] == 0).all()


def test_nobody_waits_where_each_rank_has_a_core() -> None:
    program = program_of(Seed(data=4))
    assert waits_for_cores(program, HOSTS, CostTable()) is None
    own = replace(CROWDED, overheads=(("cores", 4.0), *CROWDED.overheads[1:]))
    assert waits_for_cores(program, HOSTS, own) is None


def test_gradients_that_wait_for_cores_make_steps_longer_by_no_more_than_they_are_hidden() -> None:
    program = program_of(Seed(data=4))
    seconds = np.where(program.computes, 0.002, 0.01)
    bare = replace(CROWDED, overheads=CROWDED.overheads[:1])
    waits, goes = (
        simulate_on(HOSTS, table, program, seconds).step_seconds for table in (CROWDED, bare)
    )
    computing, sent = (seconds[program.computes == which].sum() for which in (True, False))
    assert goes < waits <= 2 * computing + sent
