import pytest

from shardwright.planner.schedule import global_order, pipeline_order
from shardwright.planner.schedule.pipeline import written

# Written by hand from the DAPPLE / PipeDream-Flush drawing: 4 stages, 8 microbatches.
ONE_F_ONE_B = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""
GPIPE = """
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
"""
SHAPES = [(stages, count) for stages in range(1, 7) for count in (1, 2, 3, 5, 8, 13)]


def as_table(orders):
    lines = [" ".join(f"{phase}{microbatch}" for _, phase, microbatch in order) for order in orders]
    return "\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(("schedule", "table"), [("1f1b", ONE_F_ONE_B), ("gpipe", GPIPE)])
def test_four_stages_and_eight_microbatches_give_the_table_written_by_hand(schedule, table):
    assert as_table(pipeline_order(schedule, 4, 8)) == table


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_every_stage_runs_each_action_once_and_forward_before_backward(
    schedule, num_stages, num_microbatches
):
    for stage, order in enumerate(pipeline_order(schedule, num_stages, num_microbatches)):
        assert len(order) == len(set(order)) == 2 * num_microbatches
        for microbatch in range(num_microbatches):
            assert order.index((stage, "F", microbatch)) < order.index((stage, "B", microbatch))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_1f1b_keeps_p_minus_k_microbatches_alive_at_stage_k(num_stages, num_microbatches):
    for stage, order in enumerate(pipeline_order("1f1b", num_stages, num_microbatches)):
        alive, most = 0, 0
        for _, phase, _ in order:
            alive += 1 if phase == "F" else -1
            most = max(most, alive)
        assert most == min(num_stages - stage, num_microbatches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_the_global_order_keeps_stage_orders_and_dependencies(
    schedule, num_stages, num_microbatches
):
    orders = pipeline_order(schedule, num_stages, num_microbatches)
    merged = global_order(orders)
    place = {action: index for index, action in enumerate(merged)}
    assert len(place) == len(merged) == 2 * num_stages * num_microbatches
    for stage, order in enumerate(orders):
        assert [action for action in merged if action.mesh == stage] == list(order)
    for stage in range(1, num_stages):
        for microbatch in range(num_microbatches):
            assert place[stage - 1, "F", microbatch] < place[stage, "F", microbatch]
            assert place[stage, "B", microbatch] < place[stage - 1, "B", microbatch]


def test_orders_that_wait_for_each_other_are_refused():
    orders = written(["0F0 0F1 0B0 0B1", "1F1 1B0 1F0 1B1"])
    with pytest.raises(ValueError, match=r"wait for each other.* 1B0 "):
        global_order(orders)


def test_a_backward_without_its_forward_is_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        global_order(written(["0B0 0F0"]))


def test_an_unknown_schedule_or_an_empty_pipeline_is_refused():
    with pytest.raises(ValueError, match="choose '1f1b-so', '1f1b-sno'"):
        pipeline_order("zero-bubble", 2, 2)
    with pytest.raises(ValueError, match="at least one stage and one microbatch"):
        pipeline_order("gpipe", 0, 4)
