import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program, row_lists


def replayed_peaks(rows, timeline, base):
    """Walk through the instants; at each let go of what ends, then begin one after another."""
    alive, peaks = list(base), list(base)
    for now in sorted({*timeline.start.tolist(), *timeline.end.tolist()}):
        begun = [i for i in range(len(rows)) if timeline.start[i] == now]
        ended = [i for i in range(len(rows)) if timeline.end[i] == now and i not in begun]
        for index in ended:
            alive[rows[index].group] -= rows[index].temporary + rows[index].freed
        for index in begun:
            row = rows[index]
            alive[row.group] += row.allocated + row.temporary
            peaks[row.group] = max(peaks[row.group], alive[row.group])
            if timeline.end[index] == now:
                alive[row.group] -= row.temporary + row.freed
    return alive, peaks


@given(row_lists(), st.sampled_from([1.0, 2.0]))
def test_peaks_and_last_rows_equal_a_replay_instant_by_instant(rows, slowdown):
    base = (5, 0, 11)
    program, seconds = build_program(rows, base_bytes=base)
    timeline = simulate(program, seconds, overlap_slowdown=slowdown)
    alive, peaks = replayed_peaks(rows, timeline, base)
    assert timeline.peak_bytes == tuple(peaks)
    assert [rows_[-1, 1] for rows_ in timeline.memory] == alive


@given(row_lists())
def test_rows_start_with_the_base_and_never_go_back_in_time(rows):
    program, seconds = build_program(rows, base_bytes=(5, 0, 11))
    for memory, base in zip(simulate(program, seconds).memory, (5, 0, 11), strict=True):
        assert memory[0].tolist() == [0.0, base]
        assert (memory[1:, 0] >= memory[:-1, 0]).all()


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
