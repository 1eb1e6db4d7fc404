"""Closed forms of GPipe and 1F1B (DAPPLE, PipeDream-Flush), with and without transfers.

Model: a transfer takes ``transfer`` seconds after its producer ends, on a channel of its own.
"""

import math

import pytest

from shardwright.core.program import Kind
from shardwright.planner.schedule import StageTimes, global_order, pipeline_order, replay
from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program
from tests.planner.simulate.statistics import program_statistics

SHAPES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 8, 12)]
FORWARD, BACKWARD = 1.0, 2.5
TOTAL = FORWARD + BACKWARD


def pipeline_rows(schedule, num_stages, num_microbatches, transfer=0.0, *, shared_channels=False):
    """One F and one B per stage and microbatch; between stages a SEND and its RECEIVE."""
    rows, arrived = [], {}
    for stage, phase, microbatch in global_order(
        pipeline_order(schedule, num_stages, num_microbatches)
    ):
        forward = phase == "F"
        rows.append(Row(
            resource=f"compute:{stage}", group=stage, microbatch=microbatch,
            kind=Kind.FORWARD if forward else Kind.BACKWARD,
            seconds=FORWARD if forward else BACKWARD,
            after=arrived.pop((stage, phase, microbatch), ()),
            allocated=int(forward), freed=int(not forward),
        ))  # fmt: skip
        target = stage + 1 if forward else stage - 1
        if 0 <= target < num_stages:
            own = "" if shared_channels else f" {phase}{microbatch}"
            sent = len(rows)
            rows.append(Row(resource=f"send:{stage}-{target}{own}", group=stage, kind=Kind.SEND,
                            seconds=transfer, after=(sent - 1,)))  # fmt: skip
            rows.append(Row(resource=f"receive:{stage}-{target}{own}", group=target,
                            kind=Kind.RECEIVE, after=(sent,)))  # fmt: skip
            arrived[target, phase, microbatch] = (sent + 1,)
    return rows


def gpipe_seconds(p, m, transfer):
    return (m + p - 1) * TOTAL + 2 * (p - 1) * transfer


def one_f_one_b_seconds(p, m, transfer):
    return (m + p - 1) * TOTAL + 2 * transfer * (m + p - 2 - math.ceil((m - 1) / p))


CLOSED_FORMS = [("gpipe", gpipe_seconds), ("1f1b", one_f_one_b_seconds)]


@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS)
@pytest.mark.parametrize("transfer", [0.0, 0.125, 1.0])
def test_step_seconds_equal_the_closed_form(schedule, closed_form, transfer):
    for p, m in SHAPES:
        program, seconds = build_program(pipeline_rows(schedule, p, m, transfer))
        step = simulate(program, seconds).step_seconds
        assert step == pytest.approx(closed_form(p, m, transfer), rel=1e-12), (p, m)
        one = StageTimes(forward=FORWARD, backward=BACKWARD, receive=transfer)
        clock = replay(pipeline_order(schedule, p, m), [one] * p).seconds
        assert clock == pytest.approx(step, rel=1e-12), (p, m)


@pytest.mark.parametrize(("schedule", "closed_form"), CLOSED_FORMS)
def test_one_channel_per_direction_is_enough_while_transfers_are_short(schedule, closed_form):
    for p, m in SHAPES:
        rows = pipeline_rows(schedule, p, m, 0.5, shared_channels=True)
        program, seconds = build_program(rows)
        step = simulate(program, seconds).step_seconds
        assert step == pytest.approx(closed_form(p, m, 0.5), rel=1e-12), (p, m)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_stage_idles_p_minus_1_microbatches_without_transfers(schedule):
    for p, m in SHAPES:
        program, seconds = build_program(pipeline_rows(schedule, p, m))
        statistics = program_statistics(simulate(program, seconds), program)
        assert statistics.compute_seconds == pytest.approx([m * TOTAL] * p), (p, m)
        assert statistics.idle_seconds == pytest.approx([(p - 1) * TOTAL] * p), (p, m)


@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_1f1b_keeps_p_minus_k_activations_and_gpipe_all(transfer):
    for p, m in SHAPES:
        one_f_one_b = simulate(*build_program(pipeline_rows("1f1b", p, m, transfer)))
        assert one_f_one_b.peak_bytes == tuple(min(m, p - k) for k in range(p)), (p, m)
        gpipe = simulate(*build_program(pipeline_rows("gpipe", p, m, transfer)))
        assert gpipe.peak_bytes == (m,) * p, (p, m)
