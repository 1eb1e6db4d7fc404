import itertools
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import Kind
from shardwright.planner.simulate import simulate
from shardwright.planner.simulate.columns import Ways
from tests.planner.programs import Row, build_program, row_lists
from tests.planner.simulate.plain import simulate_plain
from tests.planner.simulate.statistics import program_statistics

SLOWDOWNS = st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.7])
CORES = st.sampled_from([0.5, 1.0, 1.5, 2.0, math.inf])
FAR = st.sampled_from(["", "link", "link send"])  # resources that send between hosts
WAITS = st.sampled_from(
    [{}, {"link": 0.5}, {"link": 3.0, "send": 1.0}]
)  # for a core, of their messages


def far_of(program, sorts):
    """Return which resources are of these sorts."""
    return np.array([name.split(":")[0] in sorts.split() for name in program.resource_names])


def waits_of(program, sorts):
    """Return by how much messages of each resource take longer while ranks crowd on cores."""
    return np.array([sorts.get(name.split(":")[0], 0.0) for name in program.resource_names])


def simpy_ends(rows):
    """A process per queue: wait for the predecessors' events, then for the duration."""
    environment = simpy.Environment()
    events = [environment.event() for _ in rows]
    ends = [0.0] * len(rows)

    def queue(name):
        for index, row in enumerate(rows):
            if row.resource == name:
                yield environment.all_of([events[other] for other in row.after])
                yield environment.timeout(row.seconds)
                ends[index] = environment.now
                events[index].succeed()

    for name in {row.resource for row in rows}:
        environment.process(queue(name))
    environment.run()
    return ends


def fluid_ends(rows, slowdown, cores=math.inf, far="", waits=None):
    """Processor sharing in exact fractions: advance everything to the next completion, repeat."""
    left = [Fraction(row.seconds) for row in rows]
    ends = [None] * len(rows)
    now = Fraction(0)
    while None in ends:
        heads = {}
        for index, row in enumerate(rows):
            if ends[index] is None and row.resource not in heads:
                heads[row.resource] = index
        active = [i for i in heads.values() if all(ends[j] is not None for j in rows[i].after)]
        instant = [i for i in active if left[i] == 0]
        if instant:
            for index in instant:
                ends[index] = now
            continue
        speed = {}
        computing = {rows[i].group for i in active if rows[i].resource.startswith("compute")}
        share = 1 if cores == math.inf else min(1, Fraction(cores) / max(len(computing), 1))
        for index in active:
            works = {"compute": "computes", "link": "sends", "send": "sends"}
            mates = {works.get(rows[j].resource.split(":")[0]) for j in active
                     if rows[j].group == rows[index].group}  # fmt: skip
            is_slow = mates >= {"computes", "sends"}
            is_slow &= rows[index].resource.split(":")[0] in works  # input works beside both
            speed[index] = 1 / Fraction(slowdown) if is_slow else Fraction(1)
            if rows[index].resource.startswith("compute"):
                speed[index] *= share
            wait = Fraction((waits or {}).get(rows[index].resource.split(":")[0], 0))
            if len(computing) > cores and rows[index].seconds:
                speed[index] /= 1 + wait / Fraction(rows[index].seconds)
            if rows[index].resource.split(":")[0] in far.split():
                others = [rows[j].resource for j in active if rows[j].group == rows[index].group]
                speed[index] /= sum(name.split(":")[0] in far.split() for name in others)
        step = min(left[index] / speed[index] for index in active)
        now += step
        for index in active:
            left[index] -= step * speed[index]
    return [float(end) for end in ends]


def longest_path(rows):
    ends = []
    for row in rows:
        ends.append(max((ends[other] for other in row.after), default=0.0) + row.seconds)
    return max(ends, default=0.0)


@given(row_lists(max_size=25), SLOWDOWNS, CORES, FAR, WAITS)
def test_kernel_and_plain_twin_are_equal_to_the_last_bit(rows, slowdown, cores, far, waits):
    program, seconds = build_program(rows)
    how = {
        "overlap_slowdown": slowdown,
        "cores": cores,
        "ways": Ways(far_of(program, far), waits_of(program, waits)),
    }
    fast = simulate(program, seconds, **how)
    (start, end, cause), memory = simulate_plain(program, seconds, **how)
    assert fast.start.tobytes() == start.tobytes()
    assert fast.end.tobytes() == end.tobytes()
    assert [cause[index] for index in fast.critical] == [*fast.critical[1:], *[-1][: len(rows)]]
    assert [rows.tobytes() for rows in fast.memory] == [rows.tobytes() for rows in memory]


@given(row_lists())
def test_without_slowdown_ends_equal_a_simpy_model(rows):
    program, seconds = build_program(rows)
    np.testing.assert_allclose(simulate(program, seconds).end, simpy_ends(rows), rtol=1e-12)


@given(row_lists(), SLOWDOWNS, CORES, FAR, WAITS)
def test_ends_under_sharing_equal_an_exact_fluid_model(rows, slowdown, cores, far, waits):
    program, seconds = build_program(rows)
    ways = Ways(far_of(program, far), waits_of(program, waits))
    end = simulate(program, seconds, overlap_slowdown=slowdown, cores=cores, ways=ways).end
    expected = fluid_ends(rows, slowdown, cores, far, waits)
    np.testing.assert_allclose(end, expected, rtol=1e-9, atol=1e-9)


def test_ranks_share_cores_while_more_of_them_compute_than_there_are():
    rows = [Row(resource=f"compute:{rank}", group=rank, seconds=2.0) for rank in range(3)]
    rows.append(Row(resource="compute:0", group=0, seconds=2.0))
    program, seconds = build_program(rows)
    # Three get 2/3 of a core each until 3 s; then the first has one of its own.
    assert simulate(program, seconds, cores=2.0).end.tolist() == [3.0, 3.0, 3.0, 5.0]
    assert simulate(program, seconds, cores=3.0).end.tolist() == [2.0, 2.0, 2.0, 4.0]


def test_messages_wait_for_a_core_while_ranks_crowd_on_them() -> None:
    rows = [Row(resource=f"compute:{rank}", group=rank, seconds=2.0) for rank in range(3)]
    rows.append(Row(resource="link:0", group=0, seconds=1.5))
    program, seconds = build_program(rows)
    ways = Ways(waits=waits_of(program, {"link": 3.0}))
    # In 3 s of crowd it comes as far as in one alone, and has half a second left.
    assert simulate(program, seconds, cores=2.0, ways=ways).end.tolist() == [3.0, 3.0, 3.0, 3.5]
    assert simulate(program, seconds, cores=3.0, ways=ways).end.tolist() == [2.0, 2.0, 2.0, 1.5]


@given(row_lists(), SLOWDOWNS)
def test_every_instruction_waits_for_its_queue_and_its_predecessors(rows, slowdown):
    program, seconds = build_program(rows)
    timeline = simulate(program, seconds, overlap_slowdown=slowdown)
    previous = {}
    for index, row in enumerate(rows):
        waits = [timeline.end[other] for other in row.after]
        waits += [timeline.end[previous[row.resource]]] if row.resource in previous else []
        assert timeline.start[index] == max(waits, default=0.0)
        previous[row.resource] = index


@given(row_lists(), SLOWDOWNS)
def test_the_step_is_no_shorter_than_the_longest_path_or_the_busiest_resource(rows, slowdown):
    program, seconds = build_program(rows)
    step = simulate(program, seconds, overlap_slowdown=slowdown).step_seconds
    busiest = max((sum(r.seconds for r in rows if r.resource == name)
                   for name in program.resource_names), default=0.0)  # fmt: skip
    assert step >= max(longest_path(rows), busiest) * (1 - 1e-12)


@given(row_lists(), SLOWDOWNS)
def test_slowdown_stretches_every_end_at_least_by_one_and_at_most_by_itself(rows, slowdown):
    program, seconds = build_program(rows)
    free = simulate(program, seconds).end
    shared = simulate(program, seconds, overlap_slowdown=slowdown).end
    assert (shared >= free * (1 - 1e-9)).all()
    assert (shared <= free * slowdown * (1 + 1e-9)).all()


@given(row_lists(), st.data())
def test_without_slowdown_a_longer_duration_never_makes_anything_earlier(rows, data):
    program, seconds = build_program(rows)
    longer = seconds.copy()
    if rows:
        longer[data.draw(st.integers(0, len(rows) - 1))] += data.draw(st.floats(0, 5))
    assert (simulate(program, longer).end >= simulate(program, seconds).end).all()


@given(row_lists(), SLOWDOWNS)
def test_the_critical_chain_leads_without_a_gap_from_zero_to_the_end(rows, slowdown):
    program, seconds = build_program(rows)
    timeline = simulate(program, seconds, overlap_slowdown=slowdown)
    chain = timeline.critical
    assert bool(chain) == bool(rows)
    if chain:
        assert timeline.end[chain[0]] == timeline.step_seconds
        assert timeline.start[chain[-1]] == 0.0
    for later, earlier in itertools.pairwise(chain):
        assert timeline.start[later] == timeline.end[earlier]
        linked = earlier in rows[later].after or rows[earlier].resource == rows[later].resource
        assert linked
        assert earlier < later


def test_a_send_overlapping_compute_stretches_both_until_one_ends():
    rows = [Row(resource="compute:0", seconds=4.0), Row(resource="link:0", seconds=1.0)]
    program, seconds = build_program(rows)
    timeline = simulate(program, seconds, overlap_slowdown=1.5)
    # The message takes 1.5 s, in which 1 s of compute is done; 3 s of it are left.
    assert timeline.end.tolist() == [4.5, 1.5]


def test_two_links_do_not_slow_each_other_nor_another_group():
    rows = [
        Row(resource="link:0", seconds=1.0),
        Row(resource="send:0-1", seconds=2.0),
        Row(resource="compute:1", seconds=3.0, group=1),
    ]
    program, seconds = build_program(rows)
    assert simulate(program, seconds, overlap_slowdown=2.0).end.tolist() == [1.0, 2.0, 3.0]


def test_without_overlap_slowdown_changes_no_bit():
    rows = [Row(resource="compute:0", seconds=0.1)]
    for index in range(20):
        queue = "link:0" if index % 2 else "compute:0"
        rows.append(Row(resource=queue, seconds=0.1 * index, after=(index,)))
    program, seconds = build_program(rows)
    shared = simulate(program, seconds, overlap_slowdown=1.7)
    assert shared.end.tobytes() == simulate(program, seconds).end.tobytes()


def test_an_empty_program_takes_no_time():
    program, seconds = build_program([], base_bytes=(7,))
    for slowdown in (1.0, 2.0):
        timeline = simulate(program, seconds, overlap_slowdown=slowdown)
        assert (timeline.step_seconds, timeline.critical) == (0.0, ())
        assert timeline.peak_bytes == (7.0,)


def test_wrong_durations_and_slowdowns_are_refused():
    rows = [Row(resource=queue, kind=Kind.UPDATE) for queue in ("compute:0", "link:0")]
    program, seconds = build_program(rows)
    with pytest.raises(ValueError, match="2 instructions and durations of shape"):
        simulate(program, seconds[:1])
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"finite and 0 or more.*'stage 0 update' takes"):
            simulate(program, np.array([0.0, wrong]))
    for wrong in (0.9, np.nan, np.inf):
        with pytest.raises(ValueError, match="at least 1"):
            simulate(program, seconds, overlap_slowdown=wrong)
    for wrong in (0.0, np.nan):
        with pytest.raises(ValueError, match="more than 0 cores"):
            simulate(program, seconds, cores=wrong)


def test_the_arguments_are_not_changed():
    program, seconds = build_program([Row(resource="compute:0", seconds=1.0)])
    for array in (seconds, program.resource, program.group, program.offset, program.predecessor):
        array.flags.writeable = False
    assert simulate(program, seconds, overlap_slowdown=2.0).step_seconds == 1.0
    assert simulate(program, seconds).step_seconds == 1.0


def test_importing_the_simulator_does_not_import_numba_or_torch():
    code = (
        "import sys, shardwright.planner.simulate, shardwright.planner.schedule;"
        "sys.exit(bool({'numba', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(row_lists(), SLOWDOWNS)
def test_statistics_share_out_the_whole_step(rows, slowdown):
    program, seconds = build_program(rows)
    timeline = simulate(program, seconds, overlap_slowdown=slowdown)
    statistics = program_statistics(timeline, program)
    parts = zip(
        statistics.compute_seconds,
        statistics.exposed_seconds,
        statistics.idle_seconds,
        strict=True,
    )
    for compute, exposed, idle in parts:
        assert min(compute, exposed, idle) >= 0
        assert compute + exposed + idle == pytest.approx(timeline.step_seconds, abs=1e-9)
    for name, busy in zip(program.resource_names, statistics.busy_seconds, strict=True):
        own = program.resource == program.resource_names.index(name)
        assert busy == pytest.approx((timeline.end - timeline.start)[own].sum(), abs=1e-9)


def test_exposed_seconds_count_only_communication_without_computation():
    rows = [
        Row(resource="compute:0", seconds=2.0),
        Row(resource="link:0", seconds=3.0),
        Row(resource="send:0-1", seconds=1.0, after=(1,)),
        Row(resource="compute:0", seconds=1.0, after=(2,)),
        Row(resource="compute:1", seconds=6.0, group=1),
    ]
    program, seconds = build_program(rows)
    statistics = program_statistics(simulate(program, seconds), program)
    assert statistics.compute_seconds == (3.0, 6.0)
    assert statistics.exposed_seconds == (2.0, 0.0)
    assert statistics.idle_seconds == (1.0, 0.0)
    assert statistics.busy_seconds == (3.0, 3.0, 1.0, 6.0)
