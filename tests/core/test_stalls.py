"""The model of an input: closed forms, and laws over drawn rates."""

import heapq
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.stalls import InputRates, Stalls

RATE = st.floats(1.0, 1e5)


def test_speed_is_that_of_the_slowest_part():
    # Equation 2 by hand: half of it cached at 1,000, half at 100 samples a second.
    rates = InputRates(compute=500.0, prepare=400.0, storage=100.0, cache=1000.0)
    assert rates.fetch(0.5) == pytest.approx(1 / (0.5 / 1000 + 0.5 / 100))
    assert rates.speed(0.5) == rates.fetch(0.5)
    assert rates.speed(1.0) == 400.0
    assert (rates.binding(0.5), rates.binding(1.0)) == ("fetching", "preparation")
    fast = InputRates(compute=10.0, prepare=400.0, storage=100.0)
    assert (fast.speed(0.0), fast.binding(0.0)) == (10.0, "computation")


def test_a_worker_does_one_after_the_other_and_without_workers_the_step_waits():
    rates = InputRates(compute=100.0, prepare=200.0, storage=200.0, crowd=1.0)
    assert rates.load(0.0) == pytest.approx(100.0)
    inline = InputRates(compute=100.0, prepare=200.0, storage=200.0, crowd=1.0, is_ahead=False)
    assert inline.speed(0.0) == pytest.approx(50.0)


@given(RATE, RATE, RATE, RATE, st.sampled_from([1.0, 1.5, 4.0, math.inf]), st.booleans())
def test_least_cache_is_where_the_curve_becomes_flat(
    compute, prepare, storage, cache, crowd, ahead
):
    rates = InputRates(
        compute=compute,
        prepare=prepare,
        storage=storage,
        cache=max(cache, storage),
        crowd=crowd,
        is_ahead=ahead,
    )
    least = rates.least_cache()
    curve = [rates.speed(place / 50) for place in range(51)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(curve))
    if least is not None:
        assert rates.speed(least) == pytest.approx(curve[-1], rel=1e-9)
        if least > 0.01 and rates.cache > storage * 1.01:
            assert rates.speed(least * 0.9) < curve[-1]


def simulated(fetch, prepare, workers, cores, samples=2000):
    """Return samples per second of workers that wait to fetch, then queue for a core to prepare."""
    fetched, free = [fetch * (1 + worker / workers) for worker in range(workers)], [0.0] * cores
    heapq.heapify(fetched)
    for _ in range(samples):
        done = max(heapq.heappop(fetched), heapq.heappop(free)) + prepare
        heapq.heappush(free, done)
        heapq.heappush(fetched, done + fetch)
    return samples / max(free)


@pytest.mark.parametrize(("fetch", "prepare"), [(4e-3, 1e-3), (1e-3, 4e-3), (2e-3, 2e-3)])
@pytest.mark.parametrize(("workers", "cores"), [(1, 2), (2, 2), (4, 2), (7, 2), (3, 1)])
def test_more_workers_than_cores_fetch_while_others_prepare(fetch, prepare, workers, cores):
    expected = simulated(fetch, prepare, workers, cores)
    rates = InputRates(
        compute=math.inf,
        prepare=min(workers, cores) / prepare,
        storage=workers / fetch,
        crowd=max(1.0, workers / cores),
    )
    assert rates.load(0.0) == pytest.approx(expected, rel=0.01)
    # What binds is what made cheaper gains most.
    gains = {
        "fetching": simulated(fetch * 0.9, prepare, workers, cores),
        "preparation": simulated(fetch, prepare * 0.9, workers, cores),
    }
    if max(gains.values()) > min(gains.values()) * 1.01:
        assert rates.binding(0.0) == max(gains, key=lambda name: gains[name])
    one = InputRates(compute=math.inf, prepare=1 / prepare, storage=1 / fetch, crowd=1.0)
    assert one.with_workers(1, workers, cores) == rates
    assert rates.core_seconds(workers) == pytest.approx(prepare)


@given(st.floats(1.0, 1e4), st.floats(1.0, 1e4), st.integers(0, 4), st.integers(1, 8))
def test_workers_wait_beside_each_other_but_share_the_cores(prepare, storage, now, cores):
    rates = InputRates(
        compute=math.inf, prepare=prepare, storage=storage, crowd=1.0, is_ahead=now > 0
    )
    seconds = max(1, now) / prepare  # of a core, a sample
    for count in (1, 2, 8, 64):
        expected = min(count / (seconds + max(1, now) / storage), cores / seconds)
        assert rates.with_workers(now, count, cores).speed(0.0) == pytest.approx(expected)


def found(**rates: float) -> Stalls:
    return Stalls(
        ranks=1,
        workers=1,
        cores=4,
        batch_samples=10,
        steps=50,
        resident_seconds=0.01,
        cached_seconds=0.02,
        cold_seconds=0.05,
        usual_seconds=0.06,
        rates=InputRates(crowd=1.0, **rates),
        dataset_samples=1000,
        dataset_bytes=10**6,
    )


def test_a_loader_gives_what_it_gave_in_the_mean_of_turns():
    assert found(compute=math.inf, prepare=500.0).given == pytest.approx(10 / 0.06)
    assert found(compute=math.inf, prepare=100.0).given == pytest.approx(100.0)


def test_stalls_are_differences_of_phases():
    stalls = found(compute=1000.0, prepare=500.0, storage=200.0)
    assert stalls.prep_stall == pytest.approx(0.01)
    assert stalls.fetch_stall == pytest.approx(0.03)
    assert stalls.speed == pytest.approx(200.0)


def test_what_helps_depends_on_what_binds():
    fetching = found(compute=1000.0, prepare=1e5, storage=100.0).knobs()
    assert fetching[0].name in {"cache", "storage", "workers"}
    assert "cheaper preparation" not in [knob.name for knob in fetching]
    preparing = [knob.name for knob in found(compute=1e4, prepare=100.0, storage=1e6).knobs()]
    assert preparing[0] in {"cores", "cheaper preparation"}
    assert "storage" not in preparing
    assert found(compute=10.0, prepare=500.0, storage=500.0).knobs() == ()


def test_a_longer_queue_helps_where_steps_take_longer_than_the_rates_allow():
    """Of 10 samples in 0.05 s, where rates allow 500 in a second."""
    fits = replace(found(compute=500.0, prepare=5000.0, storage=5000.0), prefetch=2)
    (knob,) = fits.knobs()
    assert (knob.name, knob.speed, knob.gain) == ("prefetch", 500.0, pytest.approx(2.5))
    assert "prefetch_factor=4" in knob.change
    assert not replace(fits, prefetch=0).knobs()
    assert not replace(fits, cold_seconds=0.021).knobs()


def test_pinning_helps_as_far_as_copying_takes_the_steps_time():
    """A step of 10 ms, 4 of which pinned memory would save: 1,667 samples a second of 10 a step."""
    bound = replace(found(compute=1000.0, prepare=1e5), pinning_seconds=0.004)
    (knob,) = [knob for knob in bound.knobs() if knob.name == "pinning"]
    assert knob.speed == pytest.approx(10 / 0.006)
    assert "pin_memory=True" in knob.change
    # Not where input binds, nor where copying would be all of the step.
    for other in (found(compute=1000.0, prepare=500.0), replace(bound, resident_seconds=0.003)):
        knobs = replace(other, pinning_seconds=0.004).knobs()
        assert "pinning" not in [knob.name for knob in knobs]
