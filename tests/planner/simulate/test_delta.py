"""Simulating a changed Program from where the change is felt: equal to the full simulation."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.simulate import DeltaSimulator, simulate
from shardwright.planner.simulate.plain import relax_plain
from shardwright.planner.simulate.queue import queue_ends
from tests.planner.programs import Row, build_program, row_lists

SLOWDOWNS = st.sampled_from([1.0, 1.2, 1.5, 2.0])


@st.composite
def changed(draw, rows):
    """Draw a Program like another: a duration, an order, a new or a lost instruction."""
    what = draw(st.sampled_from(["duration", "insert", "remove", "wait", "resource"]))
    place = draw(st.integers(0, max(0, len(rows) - 1)))
    if not rows:
        return rows
    if what == "duration":
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
        return [*rows[:place], replace(rows[place], seconds=seconds), *rows[place + 1 :]]
    if what == "insert":
        new = replace(rows[place], after=rows[place].after, seconds=draw(st.floats(0, 2)))
        rest = [
            replace(row, after=tuple(a + (a >= place) for a in row.after)) for row in rows[place:]
        ]
        return [*rows[:place], new, *rest]
    if what == "remove":
        rest = [
            replace(row, after=tuple(a - (a > place) for a in row.after if a != place))
            for row in rows[place + 1 :]
        ]
        return [*rows[:place], *rest]
    if what == "wait" and place:
        after = tuple(sorted({*rows[place].after, draw(st.integers(0, place - 1))}))
        return [*rows[:place], replace(rows[place], after=after), *rows[place + 1 :]]
    other = draw(st.integers(0, len(rows) - 1))
    mine = rows[place]
    moved = replace(mine, resource=rows[other].resource, group=rows[other].group)
    return [*rows[:place], moved, *rows[place + 1 :]]


@st.composite
def histories(draw):
    """Draw a Program and what it is changed to, again and again."""
    many = draw(row_lists(max_size=12))
    copies = draw(st.integers(1, 12))
    rows = [
        replace(row, after=tuple(a + number * len(many) for a in row.after))
        for number in range(copies)
        for row in many
    ]
    history = [rows]
    for _ in range(draw(st.integers(1, 4))):
        history.append(draw(changed(draw(st.sampled_from(history)))))
    return history


@given(histories(), SLOWDOWNS)
@settings(max_examples=400, deadline=None)
def test_delta_and_full_simulation_are_equal_to_the_last_bit(history, slowdown):
    simulator = DeltaSimulator(overlap_slowdown=slowdown, spacing=2)
    for rows in history:
        program, seconds = build_program(rows)
        got, want = (
            simulator.simulate(program, seconds),
            simulate(program, seconds, overlap_slowdown=slowdown),
        )
        assert got.start.tobytes() == want.start.tobytes()
        assert got.end.tobytes() == want.end.tobytes()
        assert got.critical == want.critical
        assert [rows.tolist() for rows in got.memory] == [rows.tolist() for rows in want.memory]


@pytest.mark.parametrize("hidden", [True, False])
def test_only_what_a_change_reaches_is_simulated_again(hidden):
    rows = two_links(400)
    simulator = DeltaSimulator(overlap_slowdown=1.5, spacing=20)
    simulator.simulate(*build_program(rows))
    assert simulator.visited == 1200
    rows[601] = replace(rows[601], seconds=0.375 if hidden else 2.0)
    program, seconds = build_program(rows)
    got = simulator.simulate(program, seconds)
    assert got.end.tobytes() == simulate(program, seconds, overlap_slowdown=1.5).end.tobytes()
    assert simulator.visited <= (110 if hidden else 660)


@pytest.mark.parametrize(("slowdown", "spacing"), [(1.0, 20), (1.5, 2000)])
def test_what_is_soon_simulated_is_simulated_whole(slowdown, spacing):
    rows = two_links(400)
    simulator = DeltaSimulator(overlap_slowdown=slowdown, spacing=spacing)
    for length in (0.25, 0.375):
        rows[601] = replace(rows[601], seconds=length)
        program, seconds = build_program(rows)
        got = simulator.simulate(program, seconds)
        assert simulator.visited == 1200
        want = simulate(program, seconds, overlap_slowdown=slowdown)
        assert got.end.tobytes() == want.end.tobytes()


def two_links(steps):
    """Compute step after step, each followed by a message on either of two links."""
    rows = []
    for step in range(steps):
        waits = (3 * step - 2, 3 * step - 1) if step else ()
        rows.append(Row(resource="compute:0", seconds=1.0, after=waits))
        for queue, length in (("link:0", 0.25), ("send:0-1", 0.5)):
            rows.append(Row(resource=queue, seconds=length, after=(3 * step,)))
    return rows


@given(row_lists(max_size=25))
def test_the_published_queue_in_program_order_gives_the_same_times(rows):
    program, seconds = build_program(rows)
    ends = queue_ends(program, seconds, in_program_order=True)
    assert ends.tobytes() == relax_plain(program, seconds)[1].tobytes()


@given(row_lists(max_size=25))
def test_the_published_queue_lets_nothing_begin_before_what_it_waits_for(rows):
    program, seconds = build_program(rows)
    ends = queue_ends(program, seconds)
    for index, row in enumerate(rows):
        assert ends[index] - row.seconds >= max((ends[a] for a in row.after), default=0) - 1e-9
    for name in program.resource_names:
        mine = [i for i, row in enumerate(rows) if row.resource == name and row.seconds > 1e-6]
        times = sorted((ends[index] - rows[index].seconds, ends[index]) for index in mine)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(times))


def test_the_published_queue_runs_what_is_ready_first_whatever_its_index():
    rows = [
        Row(resource="compute:0", seconds=2.0),
        Row(resource="link:0", seconds=1.0, after=(0,)),
        Row(resource="link:0", seconds=1.0),
    ]
    program, seconds = build_program(rows)
    assert queue_ends(program, seconds).tolist() == [2.0, 3.0, 1.0]
    assert simulate(program, seconds).end.tolist() == [2.0, 3.0, 4.0]
