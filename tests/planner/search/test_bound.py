"""The pipeline's lower bound against exact schedules of uneven stages."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.schedule import global_order, pipeline_order
from shardwright.planner.search.candidates import least_rounds


def finish(
    forward: list[float], backward: list[float], once: list[float], schedule: str, m: int
) -> float:
    """Play a schedule with free transfers; every stage runs its own order."""
    stages = len(forward)
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    for stage, phase, micro in global_order(pipeline_order(schedule, stages, m)):
        if phase == "F":
            ready = done.get((stage - 1, "F", micro), 0.0)
        else:
            ready = done.get((stage + 1, "B", micro), 0.0)
        free[stage] = max(free[stage], ready) + (forward if phase == "F" else backward)[stage]
        done[stage, phase, micro] = free[stage]
    return max(end + extra for end, extra in zip(free, once, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["gpipe", "1f1b"]))
def test_no_schedule_beats_the_bound_however_the_work_is_cut(data, stages, m, schedule) -> None:
    numbers = st.lists(st.floats(0.0, 4.0), min_size=stages, max_size=stages)
    forward, backward, once = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    rounds, share = least_rounds(stages, m)
    bound = rounds * (sum(forward) + sum(backward)) + share * sum(once)
    assert finish(forward, backward, once, schedule, m) >= bound * (1 - 1e-9)


def test_work_once_per_step_may_hide_behind_the_backward_of_earlier_stages() -> None:
    rounds, share = least_rounds(2, 2)
    seconds = finish([1.0, 0.0], [3.0, 2.0], [0.0, 4.0], "1f1b", 2)
    assert seconds == 9.0
    assert rounds * 6.0 + share * 4.0 <= seconds


@pytest.mark.parametrize(("stages", "m"), list(itertools.product([2, 3, 4], [2, 4, 8])))
def test_the_bound_lies_just_below_equal_stages(stages: int, m: int) -> None:
    rounds, _ = least_rounds(stages, m)
    equal = (m + stages - 1) / stages
    assert 0.8 * equal < rounds <= equal
