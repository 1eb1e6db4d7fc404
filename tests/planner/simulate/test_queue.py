"""FlexFlow's full simulation, a queue by ready time, beside ours."""

import itertools

from hypothesis import given

from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program, row_lists
from tests.planner.simulate.plain import relax_plain
from tests.planner.simulate.queue import queue_ends


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
