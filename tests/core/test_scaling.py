"""Numbers of devices and servers: identities of the lemmas, and their examples worked out by hand."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.scaling import Exchanged, Overhead, fit_overhead, largest_ratio

SECONDS = st.floats(1e-3, 1e3)
ALEXNET = {"bytes": 61e6 * 4, "workers": 8, "bandwidth": 1.25e9, "worker_bandwidth": 1.25e9}


def of_ratio(ratio: float) -> Overhead:
    return Overhead(compute_seconds=1.0, overhead_seconds=ratio)


@given(
    compute=SECONDS, overhead=SECONDS, counts=st.sets(st.integers(1, 64), min_size=2, max_size=3)
)
def test_the_parts_of_a_step_come_back_from_measured_counts(compute, overhead, counts):
    points = [(devices, compute / devices + overhead) for devices in sorted(counts)]
    found = fit_overhead(points)
    scale = compute + overhead
    assert found.compute_seconds == pytest.approx(compute, rel=1e-6, abs=1e-9 * scale * 64**2)
    assert found.overhead_seconds == pytest.approx(overhead, rel=1e-6, abs=1e-9 * scale * 64**2)


def test_the_papers_quotients_of_two_measurements_are_what_is_fitted():
    found = fit_overhead([(1, 10.0), (2, 5.4)])
    assert found.ratio == pytest.approx((2 * 5.4 - 10) / (2 * (10 - 5.4)))
    found = fit_overhead([(2, 5.4), (4, 3.2)])
    assert found.compute_seconds == pytest.approx(4 * (5.4 - 3.2))
    assert found.overhead_seconds == pytest.approx(2 * 3.2 - 5.4)


def test_what_is_known_of_a_count_is_taken_off_before():
    points = [(devices, 8 / devices + 0.5 + 0.1 * devices) for devices in (1, 2, 4)]
    found = fit_overhead(points, lambda devices: 0.1 * devices)
    assert (found.compute_seconds, found.overhead_seconds) == pytest.approx((8, 0.5))


def test_no_part_of_a_step_is_negative():
    slower = fit_overhead([(1, 1.0), (2, 1.1)])
    assert slower.compute_seconds == 0
    assert (slower.most_devices(0.8), slower.limit, slower.ratio) == (1, 1, math.inf)
    faster = fit_overhead([(1, 1.0), (2, 0.4)])
    assert faster.overhead_seconds == 0
    assert faster.most_devices(0.8) is None


def test_efficiency_is_one_on_one_device_and_falls_with_devices_and_overhead():
    ratios, counts = (0.0, 0.01, 0.1, 1.0), (1, 2, 4, 8, 64)
    table = [[of_ratio(ratio).efficiency(devices) for devices in counts] for ratio in ratios]
    assert {row[0] for row in table} == {1.0}
    assert all(a > b for row in table[1:] for a, b in itertools.pairwise(row))
    assert all(
        a > b for one, other in itertools.pairwise(table) for a, b in zip(one[1:], other[1:])
    )


def test_the_examples_of_the_lemma():
    assert largest_ratio(4, 0.8) == pytest.approx(0.0909, abs=5e-5)
    assert largest_ratio(8, 0.8) == pytest.approx(0.0370, abs=5e-5)
    one = of_ratio(0.1)
    assert (one.efficiency(4), one.speedup(4)) == pytest.approx((0.7857, 3.143), abs=5e-4)
    assert (one.efficiency(8), one.speedup(8)) == pytest.approx((0.6111, 4.889), abs=5e-4)
    assert one.limit == pytest.approx(11)


@given(ratio=st.floats(1e-4, 10), alpha=st.floats(0.05, 0.99))
def test_the_most_devices_reach_the_efficiency_and_one_more_does_not(ratio, alpha):
    most = of_ratio(ratio).most_devices(alpha)
    assert most is not None
    assert of_ratio(ratio).efficiency(most) >= alpha * (1 - 1e-8)
    assert of_ratio(ratio).efficiency(most + 1) < alpha


@given(devices=st.integers(2, 1000), alpha=st.floats(0.6, 0.99))
def test_on_its_boundary_a_ratio_allows_just_so_many_devices(devices, alpha):
    ratio = largest_ratio(devices, alpha)
    assert of_ratio(ratio).most_devices(alpha) == devices


def test_servers_of_the_example_and_half_as_many_bytes_in_full_duplex():
    one = Exchanged(**ALEXNET, compute_seconds=1.0)
    assert (one.servers(full_duplex=False), one.servers(full_duplex=True)) == (4, 2)
    assert one.worker_seconds(full_duplex=False) == 2 * one.worker_seconds(full_duplex=True)


@given(servers=st.integers(1, 200), workers=st.integers(1, 999), tenths=st.integers(1, 99))
def test_exactly_on_the_boundary_no_further_server_is_asked_for(servers, workers, tenths):
    """The bytes of which so many servers are just enough, in numbers that binary floats round."""
    exact = Fraction(servers) * Fraction(tenths, 10) * 10**9 / (2 * workers)
    one = Exchanged(
        bytes=float(exact), workers=workers, bandwidth=1e9, worker_bandwidth=1e9,
        compute_seconds=tenths / 10,
    )  # fmt: skip
    assert one.servers(full_duplex=False) == servers
    more = Exchanged(
        bytes=float(exact) * 1.0001, workers=workers, bandwidth=1e9, worker_bandwidth=1e9,
        compute_seconds=tenths / 10,
    )  # fmt: skip
    assert more.servers(full_duplex=False) == servers + 1


def test_the_largest_tensor_bounds_what_more_servers_gain():
    one = Exchanged(**ALEXNET, compute_seconds=1.0, largest=151e6)  # the first of its classifier
    assert one.server_seconds(1, full_duplex=True) == pytest.approx(244e6 * 8 / 1.25e9)
    for count in (2, 4, 100):
        assert one.server_seconds(count, full_duplex=True) == pytest.approx(151e6 * 8 / 1.25e9)


def test_a_ring_moves_what_its_formula_says():
    one = Exchanged(**ALEXNET, compute_seconds=1.0)
    assert one.all_reduce_seconds() == pytest.approx(2 * 0.244 * 7 / 8 / 1.25)
