"""Orders of crews: complete, free of deadlocks, bounded; receives posted between send and use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.schedules import NAMED, SCHEDULES, ScheduleKind, ScheduleName, in_flight
from shardwright.core.strategy import Mesh, Pipeline, Strategy
from shardwright.errors import InputError
from shardwright.planner.schedule import (
    Action,
    StageTimes,
    check_order,
    held,
    most_bytes,
    order_of,
    pipeline_order,
    program_order,
    replay,
    timed_order,
    written,
)
from shardwright.planner.schedule.pipeline import halved
from shardwright.planner.schedule.program import AHEAD, Entry, with_receives

# Written by hand: two forwards more ahead per stage behind, and Megatron-LM's drawing of two devices
# with two chunks each.
DOUBLED = """
F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
"""
INTERLEAVED = """
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""


def placed(
    schedule: ScheduleName, crews: int, chunks: int, pieces: int, order: tuple[str, ...] = ()
):
    """Return a strategy without operators whose mesh k lies on device k mod crews, or on a V."""
    places = [*range(crews)] * chunks
    if SCHEDULES[schedule].folds:
        places = [*range(crews), *reversed(range(crews))]
    meshes = tuple(Mesh(axes=("data",), sizes=(1,), devices=(k,)) for k in places)
    pipeline = Pipeline(schedule=schedule, num_microbatches=pieces, order=order)
    return Strategy(meshes=meshes, configs=(), parameters=(), pipeline=pipeline)


@st.composite
def strategies(draw):
    schedule = draw(st.sampled_from(NAMED))
    crews, pieces = draw(st.integers(1, 5)), draw(st.integers(1, 11))
    chunks = draw(st.integers(1, 4)) if SCHEDULES[schedule].chunks else 1
    return placed(schedule, crews, chunks, pieces)


def text_of(lines):
    return "\n" + "\n".join(" ".join(map(str, line)) for line in lines) + "\n"


def test_orders_are_those_written_by_hand():
    lines = pipeline_order("1f1b-so", 3, 5)
    shown = [" ".join(f"{phase}{m}" for _, phase, m in line) for line in lines]
    assert "\n" + "\n".join(shown) + "\n" == DOUBLED
    assert text_of(order_of(placed("interleaved", 2, 2, 4))) == INTERLEAVED


@pytest.mark.torch
@pytest.mark.parametrize(
    ("crews", "chunks", "pieces"), [(2, 3, 6), (4, 2, 8), (3, 2, 3), (2, 4, 2)]
)
def test_interleaved_orders_are_those_of_torch(crews, chunks, pieces):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    theirs = get_schedule_ops("Interleaved1F1B", crews, pieces, chunks)
    for mine, line in zip(
        order_of(placed("interleaved", crews, chunks, pieces)), theirs, strict=True
    ):
        names = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        acts = [a for a in line if a is not None and a.computation_type.name in names]
        assert list(mine) == [
            (a.stage_index, names[a.computation_type.name], a.microbatch_index) for a in acts
        ]


TORCHS = {"zb-v": "ZBVZeroBubble", "zb-interleaved": "InterleavedZeroBubble"}


@pytest.mark.torch
@pytest.mark.parametrize("schedule", TORCHS)
def test_orders_by_times_are_no_longer_than_named_ones_or_torchs(schedule):
    """Of unequal times, with transfers or not; and they keep no more than the named order does."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    names = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    # Of the last two torch's had less of a warm-up, and W later, and were up to 4.5 % shorter.
    cases = [(2, 4, 2, 5), (3, 6, 2, 6), (4, 8, 2, 7), (5, 10, 2, 8), (3, 3, 2, 4), (5, 5, 3, 13)]
    for crews, pieces, chunks, seed in cases[: 5 if schedule == "zb-v" else None]:
        drawn, count = random.Random(seed), chunks * crews
        receive = drawn.choice((0.0, 0.2))
        stages = [
            StageTimes(
                forward=drawn.uniform(0.5, 1.5),
                backward=drawn.uniform(0.5, 1.5),
                weight=drawn.uniform(0.3, 1.5),
                receive=receive,
            )
            for _ in range(count)
        ]
        lines, sizes = (
            order_of(placed(schedule, crews, chunks, pieces)),
            ([1.0] * count, [0.5] * count),
        )
        meshes = tuple(tuple(dict.fromkeys(one.mesh for one in line)) for line in lines)
        timed = timed_order(lines, stages, pieces, meshes, sizes)
        check_order(timed, meshes, pieces)
        assert max(most_bytes(timed, *sizes)) <= max(most_bytes(lines, *sizes))
        theirs = [
            halved(
                [
                    Action(a.stage_index, names[a.computation_type.name], a.microbatch_index)
                    for a in line
                    if a is not None and a.computation_type.name in names
                ]
            )
            for line in get_schedule_ops(TORCHS[schedule], crews, pieces, chunks)
        ]
        spans = [replay(one, stages, has_own_links=False).span for one in (timed, lines, theirs)]
        assert spans[0] <= min(spans) * (1 + 1e-9)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(strategies())
def test_every_order_is_complete_and_crews_that_block_come_to_its_end(strategy):
    lines, count = order_of(strategy), len(strategy.meshes)
    pieces = strategy.pipeline.num_microbatches
    phases = "FIW" if SCHEDULES[strategy.pipeline.schedule].splits else "FB"
    for phase in phases:
        for mesh in range(count):
            own = [a.microbatch for line in lines for a in line if a[:2] == (mesh, phase)]
            assert own == list(range(pieces))
    # Every crew runs its own list and waits for what it reads, whatever the others do.
    done, at = set(), [0] * len(lines)
    while len(done) < len(phases) * count * pieces:
        before = len(done)
        for crew, line in enumerate(lines):
            while at[crew] < len(line):
                mesh, phase, m = action = line[at[crew]]
                reads = {
                    "F": [(mesh - 1, "F", m)],
                    "W": [(mesh, "I", m)],
                }.get(phase, [(mesh + 1, phase, m), (mesh, "F", m)])
                if not all(r in done for r in reads if 0 <= r[0] < count):
                    break
                done.add(tuple(action))
                at[crew] += 1
        assert len(done) > before, "crews wait for each other"


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(strategies())
def test_what_is_in_flight_is_what_the_table_or_the_paper_says(strategy):
    lines, count = order_of(strategy), len(strategy.meshes)
    most, schedule = held(lines), strategy.pipeline.schedule
    pieces = strategy.pipeline.num_microbatches
    crews = len(lines)
    for mesh in range(count):
        if SCHEDULES[schedule].splits:
            continue  # see test_zero_bubble
        if schedule != "looped-bfs" and (not SCHEDULES[schedule].chunks or count == crews):
            name = schedule if count > crews or not SCHEDULES[schedule].chunks else "1f1b"
            assert most[mesh] == in_flight(name, count - 1 - mesh, pieces)
    if schedule == "looped-bfs":
        assert most == dict.fromkeys(range(count), pieces)
    elif schedule == "interleaved" and count > crews and pieces % crews == 0:
        for place, line in enumerate(lines):
            alive = peak = 0
            for action in line:
                alive += 1 if action.phase == "F" else -1
                peak = max(peak, alive)
            # Narayanan et al.: warm-up 2 (p-1-k) + (v-1) p, and one more.
            wanted = 2 * (crews - 1 - place) + (count // crews - 1) * crews + 1
            assert peak == min(wanted, pieces * count // crews)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(strategies())
def test_receives_are_posted_behind_their_send_ahead_of_their_use_and_in_order(strategy):
    order = with_receives(order_of(strategy), len(strategy.meshes))
    assert (order == program_order(strategy)) is (
        SCHEDULES[strategy.pipeline.schedule].posts or len(strategy.meshes) == 1
    )
    place = {entry: number for number, entry in enumerate(order)}
    posted = [entry.action for entry in order if entry.posts]
    wanted = {a for a, posts in order if not posts and a.phase != "W"
              and (a.mesh > 0 if a.phase == "F" else a.mesh < len(strategy.meshes) - 1)}  # fmt: skip
    assert set(posted) == wanted
    assert len(posted) == len(wanted)
    crew = [mesh.devices for mesh in strategy.meshes]
    for action in posted:
        mesh, phase, _ = action
        sender = action._replace(mesh=mesh - 1 if phase == "F" else mesh + 1)
        assert place[Entry(sender)] < place[Entry(action, True)] < place[Entry(action)]
        between = [a for a, posts in order[place[Entry(action, True)] : place[Entry(action)]]
                   if not posts and crew[a.mesh] == crew[mesh]]  # fmt: skip
        assert len(between) <= AHEAD
        later = [a.microbatch for a in posted if (a.mesh, a.phase) == (mesh, phase)]
        assert later == sorted(later)


def test_a_doubled_warm_up_leaves_every_transfer_an_action():
    """In the steady state: with 1F1B receives can only be posted when they are used at once."""
    counts = {}
    for schedule in ("1f1b", "1f1b-so"):
        order = with_receives(order_of(placed(schedule, 4, 1, 16)), 4)
        place = {entry: number for number, entry in enumerate(order)}
        steady = [a for a, posts in order if posts and 8 <= a.microbatch < 12 and a.mesh in (1, 2)]
        counts[schedule] = [
            sum(not posts and b.mesh == a.mesh
                for b, posts in order[place[Entry(a, True)] : place[Entry(a)]])
            for a in steady
        ]  # fmt: skip
    assert min(counts["1f1b-so"]) >= 1
    assert min(counts["1f1b"]) == 0


CREWS = "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((CREWS, "1F0 1B0 1F1"), "lacks actions: 1B1"),
        ((CREWS, "1F0 1B0 1F1 1B1 1B1"), "lists actions twice: 1B1"),
        ((CREWS, "1F0 1B0 1F1 1B1 2F0"), "names actions that there are not: 2F0"),
        ((CREWS + " 1F0 1B0 1F1 1B1",), r"one line per crew.*\[\[0\], \[1\]\]"),
        ((CREWS, "1F1 1F0 1B0 1B1"), "forwards of microbatches in one order.*mesh 1 1,0"),
        ((CREWS, "1F0 1F1 1B1 1B0"), "backwards of microbatches in one order"),
        ((CREWS, "1F0 1B0 1B1 1F1"), "wait for each other"),
        ((CREWS, "1F0 1X0"), "such as 2F0 or 1B3, not '1X0'"),
        ((CREWS, "1F0 1I0 1F1 1B1"), r"lacks actions: 1W0 \(row 1\)"),
        ((CREWS, "1F0 1W0 1F1 1I0 1B1"), r"wait for each other.* 1W0 .*\(row 1\); reorder"),
        ((CREWS, "1F0 1I0 1F1 1W0 1B1 1W1"), r"has B beside I or W: 1B1 \(row 1\)"),
        (("0F0 0B0 0B1", "1F0 1B0 1F1 1B1 0F1"), r"mesh 0 stand in several \(row 1\); join them"),
    ],
)
def test_an_order_that_cannot_run_is_refused(order, said):
    with pytest.raises(InputError, match=said):
        order_of(placed("custom", 2, 1, 2, order))


def test_a_stage_that_an_order_skips_is_named():
    with pytest.raises(ValueError, match=r"3 meshes.* lacks actions: 1F0 1B0"):
        check_order(written(["0F0 0B0", "2F0 2B0"]), (), 1)


def test_what_an_order_lacks_is_told_at_once_however_many_microbatches_were_said():
    with pytest.raises(
        ValueError, match=r"10000000000 microbatches.* lacks actions: 0F1 0B1 .* \.\.\. \(row 0\)"
    ):
        check_order(written(["0F0 0B0"]), ((0,),), 10**10)


def test_an_order_of_ones_own_may_run_backwards_backwards():
    order = ("1F0 1F1 1F2 1B2 1B1 1B0", "0F0 0F1 0F2 0B2 0B1 0B0")
    assert held(order_of(placed("custom", 2, 1, 3, order))) == {0: 3, 1: 3}


def test_crews_share_all_devices_or_none():
    meshes = tuple(Mesh(axes=("data",), sizes=(len(d),), devices=d) for d in ((0, 1), (1,)))
    strategy = Strategy(
        meshes=meshes, configs=(), parameters=(), pipeline=Pipeline(schedule="interleaved")
    )
    with pytest.raises(InputError, match="device 1 belongs to"):
        order_of(strategy)


def test_names_of_the_table_are_those_of_the_types():
    from typing import get_args

    from shardwright.core.schedules import EXPLORED, PLANNED, REPLAYED, refusal

    assert {s.program for s in SCHEDULES.values()} - {""} == {*NAMED, "custom"}
    assert {name for name, s in SCHEDULES.items() if s.profile} == set(get_args(ScheduleKind))
    assert {*PLANNED, *REPLAYED, "custom"} == set(get_args(ScheduleKind))
    # Which comes first decides between equals, and is what is told.
    assert PLANNED == ("pipedream", "1f1b-so", "1f1b-sno", "gpipe", "1f1b-as", "fbp-as")
    assert EXPLORED == ("1f1b-so", "1f1b-sno", "gpipe")
    for name, schedule in SCHEDULES.items():
        assert bool(refusal(name)) is not bool(schedule.program or schedule.searched)
