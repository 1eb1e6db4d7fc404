"""MG-WFBP (Shi, Chu, Li, INFOCOM 2019): merging gradients against wait-free backpropagation."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.program import Kind
from shardwright.planner.schedule import finish_time, merge_gradients
from shardwright.planner.simulate import simulate
from tests.planner.programs import Row, build_program

METHODS = ("optimal", "mgwfbp", "wfbp", "single")
# Latency and seconds per byte that the authors fitted to their 10 Gbit/s Ethernet, by GPUs.
TEN_GIGABIT = {4: (4.20e-5, 2.06e-10), 8: (5.23e-4, 8.57e-10), 16: (9.08e-4, 7.40e-10)}


def line(latency, slope):
    return lambda size: latency + slope * size


def papers_rule(backward, sizes, latency, slope):
    """The published pseudo-steps, layers L..1, recomputing all communication starts each time."""
    count = len(sizes)
    seconds, sizes = [latency + slope * size for size in sizes], list(sizes)
    ready = list(itertools.accumulate(backward))
    closed = []

    def starts():
        begin = [ready[0]]
        for i in range(1, count):
            begin.append(max(begin[-1] + seconds[i - 1], ready[i]))
        return begin

    for i in range(count - 1):
        begin = starts()
        in_time = ready[i + 1] < begin[i] + seconds[i]
        if in_time and (begin[i] > ready[i + 1] or ready[i + 1] - begin[i] < latency):
            seconds[i], sizes[i + 1] = 0.0, sizes[i + 1] + sizes[i]
            seconds[i + 1] = latency + slope * sizes[i + 1]
        else:
            closed.append(i)
    edges = [0, *(i + 1 for i in closed), count]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))


def test_the_rule_is_not_optimal_on_the_counter_example():
    ready, sizes, cost = [1, 2, 3], [10, 10, 10], line(1.5, 1.0)
    by_rule = merge_gradients(ready, sizes, cost, "mgwfbp")
    optimal = merge_gradients(ready, sizes, cost, "optimal")
    assert by_rule == ((0, 1, 2),)
    assert finish_time(by_rule, ready, sizes, cost) == 34.5
    assert optimal == ((0,), (1, 2))
    assert finish_time(optimal, ready, sizes, cost) == 34.0


whole = st.integers(1, 40)
layers = st.lists(st.tuples(whole, whole), min_size=1, max_size=12)


@given(layers, st.integers(1, 20), st.integers(1, 3))
def test_the_rule_makes_the_papers_groups(backward_and_sizes, latency, slope):
    # Whole numbers are exact in floating point; half a second keeps comparisons off ties.
    backward = [seconds for seconds, _ in backward_and_sizes]
    sizes = [size for _, size in backward_and_sizes]
    cost = line(latency + 0.5, slope)
    groups = merge_gradients(list(itertools.accumulate(backward)), sizes, cost, "mgwfbp")
    assert groups == papers_rule(backward, sizes, latency + 0.5, slope)


@given(layers, st.integers(1, 3))
def test_rule_and_optimum_finish_together_when_the_latency_is_tiny(backward_and_sizes, slope):
    ready = list(itertools.accumulate(seconds for seconds, _ in backward_and_sizes))
    sizes = [size for _, size in backward_and_sizes]
    cost = line(1e-9, slope)
    finish = [
        finish_time(merge_gradients(ready, sizes, cost, method), ready, sizes, cost)
        for method in ("optimal", "mgwfbp")
    ]
    assert finish[0] == pytest.approx(finish[1], abs=1e-7)


@given(layers, st.sampled_from(METHODS), st.sampled_from(sorted(TEN_GIGABIT)))
def test_simulating_the_messages_gives_the_finish_time(backward_and_sizes, method, gpus):
    cost = line(*TEN_GIGABIT[gpus])
    sizes = [1e5 * size for _, size in backward_and_sizes]
    rows = [
        Row(resource="compute:0", seconds=1e-3 * seconds, kind=Kind.BACKWARD)
        for seconds, _ in backward_and_sizes
    ]
    ready = list(itertools.accumulate(row.seconds for row in rows))
    buckets = merge_gradients(ready, sizes, cost, method)
    rows += [
        Row(resource="link:0", seconds=cost(sum(sizes[i] for i in bucket)), after=(bucket[-1],),
            kind=Kind.MESSAGE)
        for bucket in buckets
    ]  # fmt: skip
    program, seconds = build_program(rows)
    finish = finish_time(buckets, ready, sizes, cost)
    assert simulate(program, seconds).step_seconds == pytest.approx(finish, rel=1e-12)
