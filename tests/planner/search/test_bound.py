"""The pipeline's lower bound against exact schedules of uneven stages."""

import itertools

import highspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.schedules import SCHEDULES
from shardwright.planner.schedule import (
    StageTimes,
    global_order,
    pipeline_order,
    replay,
)
from shardwright.planner.schedule.generators import GENERATED
from shardwright.planner.search.bounds import (
    held_of_last,
    hidden_from_memory,
    least_alike_rounds,
    least_looped_rounds,
    least_rounds,
)
from tests.planner.schedule.drawn import draw_pipeline


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


@given(st.data(), st.sampled_from(GENERATED), st.integers(2, 4), st.integers(1, 7))
def test_the_bound_holds_for_every_schedule_of_the_table(data, schedule, devices, m) -> None:
    """Whatever is cut how."""
    lines, stages, least, _ = draw_pipeline(data, schedule, devices, m, most_chunks=3)
    found = replay(lines, stages)
    took = found.span if SCHEDULES[schedule].splits else found.seconds
    assert took >= least * (1 - 1e-9)


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


@pytest.mark.parametrize(("devices", "m", "count"), [(2, 2, 5), (3, 2, 7), (3, 4, 8), (4, 5, 9)])
def test_equal_blocks_count_as_often_as_the_best_way_to_deal_them_out(devices, m, count) -> None:
    """By brute force over how many of them every device has, given what lies ahead of it at least."""
    for first in range(devices):  # one other block, in front or further behind
        ahead = [device - (device > first) for device in range(devices)]
        least = min(
            max(one + m * own for one, own in zip(ahead, dealt, strict=True) if own)
            for dealt in itertools.product(range(count + 1), repeat=devices)
            if sum(dealt) == count
        )
        assert least_alike_rounds(ahead, m, count) == least


@given(st.data(), st.integers(2, 4), st.integers(1, 7), st.integers(1, 3))
def test_no_cut_of_equal_blocks_into_chunks_beats_what_they_count(data, devices, m, chunks) -> None:
    """Beside others, that take little or long, and however much is held of devices' last chunks."""
    parts = devices * chunks
    kinds = data.draw(
        st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.5, 3.0]), min_size=parts, max_size=20)
    )
    cuts = data.draw(
        st.lists(
            st.integers(1, len(kinds) - 1), unique=True, min_size=parts - 1, max_size=parts - 1
        )
    )
    share = data.draw(st.floats(0.0, 1.0))
    places = [0, *sorted(cuts), len(kinds)]
    blocks = [kinds[a:b] for a, b in itertools.pairwise(places)]
    stages = [
        StageTimes(forward=share * sum(own), backward=(1 - share) * sum(own)) for own in blocks
    ]
    count = kinds.count(1.0)
    ahead = [kinds[:device].count(1.0) for device in range(devices)]
    least = least_alike_rounds(ahead, m, count)
    crews = tuple(tuple(range(k, parts, devices)) for k in range(devices))
    orders = ("interleaved", "looped-bfs") if chunks > 1 else ("1f1b", "gpipe")
    for schedule in orders:
        found = replay(pipeline_order(schedule, parts, m, crews), stages).seconds
        assert found >= least * (1 - 1e-9)
        if chunks > 1:
            most = min(devices, m)
            fewer = sum(
                (most - held) * own.count(1.0)
                for held, own in zip(held_of_last(devices, m), blocks[-devices:], strict=True)
            )
            assert fewer <= hidden_from_memory(devices, m) * (found - count) + 1e-9


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("devices", "m"), [(2, 2), (3, 7), (4, 3), (8, 8)])
def test_no_more_hides_from_memory_than_waits_allow(devices, m, chunks) -> None:
    """As a linear program of all waits, for several seconds beyond those of one microbatch."""
    slope, held = hidden_from_memory(devices, m), held_of_last(devices, m)
    count = 40.0
    for more in (1.3 * m / devices, 2.0 * m, 1.5 * m):
        seconds = count * max(more, 1.05)
        program = highspy.Highs()
        program.silent()
        work = [program.addVariable(0.0, count) for _ in range(devices * chunks)]
        program.addConstr(sum(work) == count)
        for place in range(devices * chunks):
            program.addConstr(sum(work[:place]) + m * sum(work[place::devices]) <= seconds)
        last = work[-devices:]
        program.maximize(
            sum((min(devices, m) - int(h)) * w for h, w in zip(held, last, strict=True))
        )
        if program.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            assert program.getObjectiveValue() <= slope * (seconds - count) + 1e-6
