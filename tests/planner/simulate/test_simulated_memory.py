import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.costs import CostTable
from shardwright.core.program import Kind
from shardwright.planner.cost import price
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.search import Training
from shardwright.planner.search.named import named_strategies
from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program, row_lists
from tests.planner.search.models import cluster, residual
from tests.planner.simulate.plain import simulate_plain


def replayed_peaks(rows, base):
    """Walk through the instructions in order; at each let go of what it waits for, then do it."""
    alive, peaks, under_way = list(base), list(base), {}
    for index, row in enumerate(rows):
        for other in [i for i in under_way if i in row.after and rows[i].group == row.group]:
            alive[row.group] -= under_way.pop(other)
        alive[row.group] += row.allocated + row.temporary
        peaks[row.group] = max(peaks[row.group], alive[row.group])
        if row.kind == Kind.MESSAGE:
            under_way[index] = row.temporary
            alive[row.group] -= row.freed
        elif row.kind != Kind.SEND:
            alive[row.group] -= row.freed + row.temporary
    # No receive belongs to these sends: they are completed at the end of the step.
    for index, row in enumerate(rows):
        alive[row.group] -= row.freed + row.temporary if row.kind == Kind.SEND else 0
        alive[row.group] -= under_way.get(index, 0)
    return alive, peaks


@given(row_lists(), st.sampled_from([1.0, 2.0]))
def test_peaks_and_last_rows_equal_a_replay_in_the_order_of_the_host(rows, slowdown):
    base = (5, 0, 11)
    program, seconds = build_program(rows, base_bytes=base)
    timeline = simulate(program, seconds, overlap_slowdown=slowdown)
    alive, peaks = replayed_peaks(rows, base)
    assert timeline.peak_bytes == tuple(peaks)
    assert [rows_[-1, 1] for rows_ in timeline.memory] == alive


@given(row_lists())
def test_rows_start_with_the_base_and_never_go_back_in_time(rows):
    program, seconds = build_program(rows, base_bytes=(5, 0, 11))
    for memory, base in zip(simulate(program, seconds).memory, (5, 0, 11), strict=True):
        assert memory[0].tolist() == [0.0, base]
        assert (memory[1:, 0] >= memory[:-1, 0]).all()


@pytest.mark.parametrize("scatter_copies", [0.0, 1.0])
def test_kernel_and_twin_agree_on_programs_of_named_strategies(scatter_copies):
    graph, where = residual(), cluster(2, 4)
    seen = set()
    for named in named_strategies(Context.of(graph, where, CostTable(), Training())):
        program = lower(graph, named.many)
        seconds = price(program, graph, where, CostTable()).seconds
        fast = simulate(program, seconds, scatter_copies=scatter_copies).memory
        slow = simulate_plain(program, seconds, scatter_copies=scatter_copies)[1]
        assert [rows.tobytes() for rows in fast] == [rows.tobytes() for rows in slow]
        seen |= {message.primitive for message in program.messages}
    assert {"all_reduce", "reduce_scatter", "all_gather", "transfer"} <= seen


def test_allocation_and_temporary_coexist_and_the_temporary_goes_at_the_end():
    row = Row(resource="compute:0", seconds=2.0, allocated=10, temporary=4, freed=1)
    program, seconds = build_program([row], base_bytes=(100,))
    timeline = simulate(program, seconds)
    assert timeline.memory[0].tolist() == [[0.0, 100.0], [0.0, 114.0], [2.0, 109.0]]
    assert timeline.peak_bytes == (114.0,)
    assert timeline.worst_peak_bytes == 114.0


def test_what_ends_is_gone_before_what_starts_at_that_instant_appears():
    rows = [
        Row(resource="compute:0", seconds=1.0, allocated=8, freed=8),
        Row(resource="compute:0", seconds=1.0, allocated=8),
    ]
    program, seconds = build_program(rows)
    assert simulate(program, seconds).peak_bytes == (8.0,)


def test_an_instruction_that_takes_no_time_still_needs_its_temporary():
    rows = [
        Row(resource="compute:0", temporary=9),
        Row(resource="compute:0", temporary=5, allocated=1),
    ]
    program, seconds = build_program(rows)
    assert simulate(program, seconds).peak_bytes == (9.0,)


@pytest.mark.parametrize("bytes_alive", [2**52 + 1])
def test_large_byte_counts_stay_exact(bytes_alive):
    rows = [Row(resource="compute:0", seconds=1.0, allocated=bytes_alive, temporary=1)]
    program, seconds = build_program(rows)
    assert simulate(program, seconds).peak_bytes == (bytes_alive + 1,)
