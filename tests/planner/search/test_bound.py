"""The pipeline's lower bound against exact schedules of uneven stages."""

import itertools

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.schedules import SCHEDULES
from shardwright.planner.schedule import (
    StageTimes,
    folded,
    global_order,
    pipeline_order,
    replay,
)
from shardwright.planner.schedule.generators import GENERATED
from shardwright.planner.search.bounds import (
    held_of_last,
    least_looped_rounds,
    least_rounds,
    least_steep_rounds,
)


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


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(GENERATED), st.integers(2, 4), st.integers(1, 7))
def test_the_bound_holds_for_every_schedule_of_the_table(data, schedule, devices, m) -> None:
    """Whatever is cut how: chunks next to empty, backwards that are all W, or none of it."""
    entry = SCHEDULES[schedule]
    chunks = 2 if entry.folds else data.draw(st.integers(1, 3)) if entry.chunks else 1
    count = devices * chunks
    some = st.sampled_from([0.0, 0.0, 1.0, 2.0]) | st.floats(0.0, 4.0)
    stages = [
        StageTimes(forward=data.draw(some), backward=data.draw(some), weight=data.draw(some))
        for _ in range(count)
    ]
    crews = tuple(tuple(range(k, count, devices)) for k in range(devices))
    lines = pipeline_order(schedule, count, m, folded(count) if entry.folds else crews)
    rounds, _ = least_rounds(devices, m, schedule)
    if schedule in ("interleaved", "looped-bfs"):
        rounds = least_looped_rounds(devices, m, chunks)
    work = sum(stage.forward + stage.backward + stage.weight for stage in stages)
    found = replay(lines, stages)
    assert (found.span if entry.splits else found.seconds) >= rounds * work * (1 - 1e-9)


def test_what_holds_for_1f1b_does_not_for_chunks_and_split_backwards() -> None:
    """All of the work in the last chunks: two devices begin at once, where stages would wait."""
    rounds, _ = least_rounds(2, 1)
    parts = [StageTimes(forward=t, backward=t) for t in (0.0, 0.0, 1.0, 1.0)]
    lines = pipeline_order("interleaved", 4, 1, ((0, 2), (1, 3)))
    assert replay(lines, parts).seconds == rounds * 4.0 == 4.0
    stages = [StageTimes(forward=0.0, backward=0.0, weight=1.0)] * 2
    assert replay(pipeline_order("zb-h1", 2, 1), stages).span == 1.0 < rounds * 2.0


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize(("devices", "m"), [(2, 2), (3, 7), (4, 3), (8, 8)])
def test_chunks_are_bounded_as_tightly_as_their_waits_allow(devices, m, chunks) -> None:
    """The most work within a time of 1 that the waits of every device leave, as a linear program."""
    program = highspy.Highs()
    program.silent()
    work = [program.addVariable(0.0, 1.0) for _ in range(devices * chunks)]
    for place in range(devices * chunks):
        program.addConstr(sum(work[:place]) + m * sum(work[place::devices]) <= 1)
    program.maximize(sum(work))
    rounds = least_looped_rounds(devices, m, chunks)
    assert rounds == pytest.approx(1 / program.getObjectiveValue())
    assert chunks > 1 or rounds == pytest.approx(least_rounds(devices, m)[0])


def counts(devices: int, m: int, chunks: int, steep: float) -> list[float]:
    """What the work of every chunk counts: as much as lies on the line from a full round to one microbatch."""
    most = min(devices, m)
    last = [min(most, 2 * (devices - 1 - k) + 1) for k in range(devices)]
    return [1.0] * devices * (chunks - 1) + [
        1 + (steep - 1) * (most - one) / max(most - 1, 1) for one in last
    ]


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize(("devices", "m"), [(2, 2), (3, 7), (4, 4), (8, 8)])
def test_last_chunks_that_count_more_are_bounded_as_tightly_as_waits_allow(
    devices, m, chunks
) -> None:
    """As a linear program, whose optimum every bound is below, and these equal."""
    known = 0
    for steep in (1.0, 1.1, 1.35):
        rounds = least_steep_rounds(devices, m, chunks, steep)
        program = highspy.Highs()
        program.silent()
        work = [program.addVariable(0.0, 1.0) for _ in range(devices * chunks)]
        for place in range(devices * chunks):
            program.addConstr(sum(work[:place]) + m * sum(work[place::devices]) <= 1)
        program.maximize(
            sum(c * w for c, w in zip(counts(devices, m, chunks, steep), work, strict=True))
        )
        if rounds:
            assert rounds == pytest.approx(1 / program.getObjectiveValue())
        known += rounds > 0
    assert known
    assert least_steep_rounds(devices, m, chunks, 1.0) == pytest.approx(
        least_looped_rounds(devices, m, chunks)
    )


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 7), st.integers(2, 3))
def test_no_order_of_chunks_beats_the_bound_where_what_is_held_less_counts_more(
    data, devices, m, chunks
) -> None:
    count = devices * chunks
    some = st.sampled_from([0.0, 0.0, 1.0, 2.0]) | st.floats(0.0, 4.0)
    stages = [StageTimes(forward=data.draw(some), backward=data.draw(some)) for _ in range(count)]
    crews = tuple(tuple(range(k, count, devices)) for k in range(devices))
    work = [stage.forward + stage.backward for stage in stages]
    for schedule in ("interleaved", "looped-bfs"):
        found = replay(pipeline_order(schedule, count, m, crews), stages).seconds
        for steep in (1.0, 1.1, 1.35):
            weighed = sum(
                c * w for c, w in zip(counts(devices, m, chunks, steep), work, strict=True)
            )
            rounds = least_steep_rounds(devices, m, chunks, steep)
            assert found >= rounds * weighed * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
def test_before_its_first_backward_a_device_holds_a_round_of_all_chunks_but_the_last(
    schedule,
) -> None:
    """What the bound of several chunks says that devices keep, counted in the orders themselves."""
    for devices, m, chunks in itertools.product((2, 3, 4, 8), (1, 2, 4, 5, 8, 11), (2, 3, 5)):
        count = devices * chunks
        crews = tuple(tuple(range(k, count, devices)) for k in range(devices))
        for line, last in zip(
            pipeline_order(schedule, count, m, crews), held_of_last(devices, m), strict=True
        ):
            first = next(place for place, action in enumerate(line) if action.phase == "B")
            begun = [action.mesh for action in line[:first]]
            held = [begun.count(mesh) for mesh in sorted({action.mesh for action in line})]
            assert min(held[:-1]) >= min(devices, m)
            assert held[-1] >= last >= 1
