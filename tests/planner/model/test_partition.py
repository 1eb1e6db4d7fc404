"""The partition program against all cuts tried one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.schedules import in_flight
from shardwright.planner.model.partition import Chain, measure, partition
from tests.planner.solve import exhaustive


def random_chain(seed: int) -> Chain:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    transfer = rng.random(count) * 0.2
    transfer[0] = 0.0
    columns = [rng.integers(0, 6, count) * 1.0 for _ in range(5)]
    return Chain(columns[0], columns[1], columns[2], columns[3], columns[4], transfer)


def uniform(count: int) -> Chain:
    ones, zeros = np.ones(count), np.zeros(count)
    return Chain(ones, zeros, ones, ones, zeros, zeros)


@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b"]),
    st.floats(0.0, 120.0),
)
def test_partition_has_the_least_bottleneck_of_all_cuts(
    seed: int, stages: int, microbatches: int, schedule: str, limit: float
) -> None:
    chain = random_chain(seed)
    found = partition(chain, stages, microbatches, schedule, limit)
    expected = exhaustive.best_partition(chain, stages, microbatches, schedule, limit)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.bottleneck == pytest.approx(expected.bottleneck, rel=1e-12)
    assert max(found.stage_bytes) <= limit
    assert len(found.starts) == stages
    assert found == measure(chain, found.starts, microbatches, schedule)


def test_equal_blocks_are_cut_into_equal_stages() -> None:
    assert partition(uniform(8), 4, 8, "1f1b", np.inf).starts == (0, 2, 4, 6)


def test_early_stages_of_1f1b_get_fewer_blocks_when_memory_is_short() -> None:
    chain = uniform(8)
    free = partition(chain, 2, 8, "1f1b", np.inf)
    tight = partition(chain, 2, 8, "1f1b", 10.0)
    assert free.starts == (0, 4)
    assert free.stage_bytes == (12.0, 8.0)
    assert tight.starts == (0, 3)
    assert max(tight.stage_bytes) <= 10.0


def test_the_time_of_an_equal_pipeline_is_the_textbook_formula() -> None:
    stages, microbatches = 4, 12
    cut = partition(uniform(4), stages, microbatches, "gpipe", np.inf)
    assert cut.step_seconds == pytest.approx(microbatches + stages - 1)


@pytest.mark.parametrize(("stage", "held"), [(0, 4), (1, 3), (3, 1)])
def test_1f1b_holds_one_microbatch_per_stage_still_to_come(stage: int, held: int) -> None:
    assert in_flight("1f1b", 3 - stage, 16) == held
    assert in_flight("gpipe", 3 - stage, 16) == 16


def test_more_stages_than_blocks_is_no_partition() -> None:
    assert partition(uniform(3), 4, 8, "1f1b", np.inf) is None
