"""What a report reads off plans: sums that add up, and names as people say them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.strategy import ParameterConfig
from shardwright.report.comparison import comparison_notes, differences
from shardwright.report.story import (
    Story,
    group_rows,
    lane_text,
    memory_by_part,
    parameter_lines,
    seconds_by_work,
    split_text,
)
from shardwright.report.units import bytes_text, count_text, dollars_text, seconds_text

MIB = 2**20


def test_seconds_by_work_are_those_of_the_busiest_stage(story: Story) -> None:
    plan = story.plans[0]
    found = dict(seconds_by_work(plan.program, plan.predicted))
    assert found == pytest.approx(
        {
            "forward": 1.0,
            "backward": 2.0,
            "transfer": 0.2,
            "gradient synchronisation": 0.3,
            "update": 0.5,
        }
    )


def test_memory_parts_add_up_to_the_peak(story: Story) -> None:
    plan = replace(story.plans[0], process_bytes=2.0**20)
    for mesh in range(2):
        total = sum(size for _, size in memory_by_part(plan, mesh))
        assert total == plan.predicted.peak_bytes[mesh]


def test_a_measured_step_ten_percent_longer_differs_by_ten_percent(story: Story) -> None:
    plan = story.plans[0]
    rows = {row.name: row for row in differences(plan)}
    assert rows["step time"].ratio == pytest.approx(1 / 1.1 - 1)
    assert rows["peak memory"].ratio == 0
    assert rows["backward"].ratio == pytest.approx(1 / 1.1 - 1)


def test_waiting_for_another_stage_and_the_transfer_itself_stand_in_rows_of_their_own(
    story: Story,
) -> None:
    """Stage 1 is the busiest: it needs what stage 0 sends from 1.0 s on, and itself sends nothing
    to another stage."""
    rows = {row.name: row for row in differences(story.plans[0])}
    assert rows["waiting for a rank: transfer"].predicted == pytest.approx(1.0)
    assert rows["waiting for a rank: transfer"].measured == pytest.approx(1.1)


def test_a_message_that_waited_for_the_last_rank_has_sent_for_less_time(story: Story) -> None:
    plan = story.plans[0]
    assert plan.measured is not None
    late = np.where(np.arange(8) == 6, plan.measured.end - 0.1, plan.measured.start)
    waited = np.where(np.arange(8) == 6, 0.2, 0.0)
    seen = replace(plan.measured, begun=late, waited=waited)
    rows = {row.name: row.measured for row in differences(replace(plan, measured=seen))}
    assert rows["gradient synchronisation"] == pytest.approx(0.1)
    assert rows["waiting for a rank: gradient synchronisation"] == pytest.approx(0.2)


def test_a_message_that_takes_long_beneath_computation_is_explained(story: Story) -> None:
    plan = story.plans[0]
    assert plan.measured is not None
    assert comparison_notes(plan) == ()
    (message,) = (row for row in differences(plan) if row.name == "gradient synchronisation")
    long = np.where(np.arange(8) == 6, 1.2 * message.predicted, 0.0)
    (note,) = comparison_notes(
        replace(plan, measured=replace(plan.measured, end=plan.measured.end + long))
    )
    assert note.startswith("A message counts from when all ranks have come")


def test_steps_that_measuring_makes_longer_stand_beside_those_before(story: Story) -> None:
    plan = story.plans[0]
    assert plan.measured is not None
    usual = plan.measured.step_seconds
    assert comparison_notes(replace(plan, usual_seconds=usual)) == ()
    (note,) = comparison_notes(replace(plan, usual_seconds=usual / 2))
    assert note.startswith(f"Steps took {usual / 2:.2f} s before, where 5.00 s are predicted")


def test_the_peak_compared_is_the_one_of_all_tables_and_tensors_alone_stand_below(
    story: Story,
) -> None:
    plan = replace(story.plans[0], process_bytes=3.0 * MIB)
    rows = {row.name: row.predicted for row in differences(plan) if row.unit == "bytes"}
    assert rows == {"peak memory": plan.plan.predicted.peak_bytes, "of it tensors": 6.0 * MIB}
    assert "3.00 MiB that a process occupies" in comparison_notes(plan)[0]


def test_a_prediction_made_with_other_measurements_than_the_plan_files_says_so(
    story: Story,
) -> None:
    """The second plan's file says 6 MiB, and 9 MiB are predicted now."""
    assert comparison_notes(story.plans[0]) == ()
    (note,) = comparison_notes(story.plans[1])
    assert "The plan file predicts 7.50 s and 6.00 MiB" in note


def test_instructions_nobody_measured_are_not_held_against_the_prediction(story: Story) -> None:
    plan = story.plans[0]
    assert plan.measured is not None
    blind = np.where(np.arange(len(plan.measured.start)) == 5, np.nan, plan.measured.start)
    seen = replace(plan.measured, start=blind)
    names = [row.name for row in differences(replace(plan, measured=seen))]
    assert "backward" not in names


def test_equal_operators_of_repeated_layers_become_one_row(story: Story) -> None:
    (row,) = group_rows(story.plans[0].operators)
    assert (row.name, row.count) == ("model.h.*.up", 3)
    assert row.forward_seconds == pytest.approx(0.2)


def test_weights_that_are_kept_are_told_from_those_gathered_again(story: Story) -> None:
    again = ParameterConfig(rest=(0,), optimizer=(0,))
    parameters = (again, replace(again, keeps=True), replace(again, keeps=True))
    plan = story.plans[0].plan
    plan = replace(plan, strategy=replace(plan.strategy, parameters=parameters))
    assert parameter_lines(plan) == (
        ("S0", "S0", "step", 1),
        ("S0, kept for backward", "S0", "step", 2),
    )


def test_splits_and_lanes_are_written_as_people_read_them() -> None:
    assert (
        split_text(("data", "tensor"), (2, 4), ("b", "n")) == "b over data (2), n over tensor (4)"
    )
    assert split_text(("data",), (2,), ("+",)) == "partial sums over data (2)"
    assert split_text(("data",), (1,), ("b",)) == "whole"
    assert lane_text("link:0:data.tensor") == "link data.tensor"
    assert lane_text("send:0-1") == "send 0-1"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (seconds_text(0), "0 s"),
        (seconds_text(8.12e-4), "812 us"),
        (seconds_text(0.04131), "41.3 ms"),
        (seconds_text(0.99999), "1.00 s"),
        (seconds_text(200), "3 min 20 s"),
        (seconds_text(float("inf")), "-"),
        (bytes_text(512), "512 B"),
        (bytes_text(17.2 * 2**30), "17.2 GiB"),
        (count_text(8.03e9), "8.03 G"),
        (dollars_text(0), "-"),
        (dollars_text(0.00234), "$0.0023"),
    ],
)
def test_quantities_are_written_with_three_digits(written: str, expected: str) -> None:
    assert written == expected
