import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.schedule import finish_time, merge_gradients

METHODS = ("optimal", "mgwfbp", "wfbp", "single")
amounts = st.floats(0, 100) | st.integers(0, 20).map(float)


@st.composite
def instances(draw, max_size=8):
    gaps = draw(st.lists(amounts, min_size=1, max_size=max_size))
    sizes = draw(st.lists(amounts, min_size=len(gaps), max_size=len(gaps)))
    return list(itertools.accumulate(gaps)), sizes


@st.composite
def costs(draw):
    """A straight line, steps as of an algorithm switch, or a root: the DP must not care."""
    latency, slope = draw(st.floats(0, 30)), draw(st.floats(0, 3))
    shape = draw(st.sampled_from(["line", "step", "root"]))
    if shape == "line":
        return lambda size: latency + slope * size
    if shape == "step":
        return lambda size: latency + slope * size + 9.0 * (size > 40 - 1e-9)
    return lambda size: latency + slope * size**0.5


def every_grouping(count):
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), count]
        yield tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))


def replay(buckets, ready, sizes, cost, hidden=0.0, held=(0.0, 0.0)):
    """The model itself, message by message: ``hidden`` of its seconds a message has behind it while it waits, and
    what computes stands still for ``held`` of each."""
    free = stood = 0.0
    for bucket in buckets:
        size = math.fsum(sizes[i] for i in bucket)
        seconds, begins = cost(size), max(ready[i] for i in bucket) + stood
        free = max(begins + seconds, free + seconds - min(hidden, seconds))
        stood += held[0] + held[1] * size
    return free


@given(instances(), costs())
def test_optimal_equals_brute_force_over_all_groupings(instance, cost):
    ready, sizes = instance
    buckets = merge_gradients(ready, sizes, cost)
    best = min(replay(groups, ready, sizes, cost) for groups in every_grouping(len(sizes)))
    assert replay(buckets, ready, sizes, cost) == pytest.approx(best, rel=1e-12)


@given(instances(), costs(), st.floats(0, 40))
def test_messages_that_wait_cost_less_and_optimal_equals_brute_force(instance, cost, hidden):
    ready, sizes = instance

    def queued(size):
        return cost(size) - np.minimum(hidden, cost(size))

    buckets = merge_gradients(ready, sizes, cost, queued=queued)
    ends = [
        replay(groups, ready, sizes, cost, hidden=hidden) for groups in every_grouping(len(sizes))
    ]
    assert replay(buckets, ready, sizes, cost, hidden=hidden) == pytest.approx(min(ends), rel=1e-12)
    found = finish_time(buckets, ready, sizes, cost, queued=queued)
    assert found == pytest.approx(min(ends), rel=1e-12)


@given(instances(), costs(), st.floats(0, 40), st.tuples(st.floats(0, 10), st.floats(0, 2)))
def test_messages_that_hold_what_computes_are_merged_as_brute_force_does(
    instance, cost, hidden, held
):
    ready, sizes = instance

    def queued(size):
        return cost(size) - np.minimum(hidden, cost(size))

    buckets = merge_gradients(ready, sizes, cost, queued=queued, held=held)
    ends = [
        replay(groups, ready, sizes, cost, hidden, held) for groups in every_grouping(len(sizes))
    ]
    found = finish_time(buckets, ready, sizes, cost, queued=queued, held=held)
    assert found == pytest.approx(replay(buckets, ready, sizes, cost, hidden, held), rel=1e-9)
    assert found == pytest.approx(min(ends), rel=1e-9)


@given(instances(max_size=30), costs())
def test_optimal_is_never_worse_than_the_rule_wfbp_or_single(instance, cost):
    ready, sizes = instance
    finish = {
        method: replay(merge_gradients(ready, sizes, cost, method), ready, sizes, cost)
        for method in METHODS
    }
    assert finish["optimal"] <= min(finish.values()) * (1 + 1e-12)


@given(instances(max_size=30), costs(), st.sampled_from(METHODS))
def test_buckets_cover_the_gradients_once_and_in_order(instance, cost, method):
    ready, sizes = instance
    buckets = merge_gradients(ready, sizes, cost, method)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    assert all(buckets)


@given(instances(), costs(), st.sampled_from(METHODS))
def test_finish_time_replays_the_messages(instance, cost, method):
    ready, sizes = instance
    buckets = merge_gradients(ready, sizes, cost, method)
    finish = finish_time(buckets, ready, sizes, cost)
    assert finish == pytest.approx(replay(buckets, ready, sizes, cost), rel=1e-12)


def test_free_messages_are_sent_together_when_that_is_no_later():
    assert merge_gradients([1.0, 1.0, 1.0], [5, 5, 5], lambda size: 0 * size) == ((0, 1, 2),)


def test_gradients_wait_for_each_other_where_messages_hold_what_computes() -> None:
    ready, sizes = [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]

    def cost(size):
        return 0.5 + 0 * size

    assert len(merge_gradients(ready, sizes, cost)) == 1  # the last one is ready at 4 in any case
    assert len(merge_gradients(ready, sizes, lambda size: size)) > 2
    assert merge_gradients(ready, sizes, lambda size: size, held=(1.0, 0.0)) == ((0, 1), (2, 3))


def test_a_late_gradient_keeps_the_earlier_ready_times_from_falling():
    ready, sizes = [5.0, 1.0], [1.0, 1.0]
    assert finish_time(((0,), (1,)), ready, sizes, lambda size: size) == 7.0


def test_the_rule_takes_its_latency_from_the_line_through_smallest_and_whole():
    # 2 + 3 M: merging at a wait of 1.9 saves more than it costs, at 2.1 it does not.
    assert merge_gradients([0.0, 1.9], [1, 4], lambda size: 2 + 3 * size, "mgwfbp") == ((0, 1),)
    assert merge_gradients([0.0, 2.1], [1, 4], lambda size: 2 + 3 * size, "mgwfbp") == ((0,), (1,))


@pytest.mark.parametrize("method", METHODS)
def test_no_gradients_make_no_buckets(method):
    assert merge_gradients([], [], float, method) == ()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="1 times and 2 sizes"):
        merge_gradients([0.0], [1, 2], float)
    with pytest.raises(ValueError, match="not NaN"):
        merge_gradients([math.nan], [1], float)
    with pytest.raises(ValueError, match="choose 'optimal'"):
        merge_gradients([0.0], [1], float, "fastest")
