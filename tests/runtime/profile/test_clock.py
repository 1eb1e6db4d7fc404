"""Sampling: medians and quartiles, when to stop, and clocks that are given."""

from __future__ import annotations

import pytest

from shardwright.runtime.profile.clock import MAX_SAMPLES, measure, middle_of, summarise

pytestmark = pytest.mark.torch


class Fake:
    """A clock that work moves: each unit takes what the list says next."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.units = 0

    def run(self, number: int) -> None:
        for _ in range(number):
            self.now += self.seconds[self.units % len(self.seconds)]
            self.units += 1

    def read(self) -> float:
        return self.now


def test_median_and_half_interquartile_distance():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.seconds, timing.spread, timing.count) == (3.0, 1.0, 5)


def test_steady_work_is_measured_exactly_with_few_runs():
    fake = Fake([0.01])
    timing = measure(fake.run, budget_seconds=1.0, clock=fake.read)
    assert timing.seconds == pytest.approx(0.01)
    assert timing.spread == pytest.approx(0, abs=1e-9)
    assert fake.units < 12


def test_short_work_is_repeated_within_a_sample():
    fake = Fake([1e-7])
    timing = measure(fake.run, budget_seconds=1.0, clock=fake.read)
    assert timing.seconds == pytest.approx(1e-7)
    assert timing.count > 1000


def test_unsteady_work_stops_at_the_largest_number_of_samples():
    fake = Fake([0.01, 0.02, 0.03, 0.05])
    measure(fake.run, budget_seconds=60.0, clock=fake.read)
    assert fake.units == MAX_SAMPLES + 2


def test_what_disturbs_one_round_of_three_does_not_count():
    calm, disturbed, short = (summarise([seconds]) for seconds in (1.0, 9.0, 0.5))
    rounds = [{"a": disturbed, "b": calm}, {"a": calm}, {"a": short, "b": disturbed}]
    assert middle_of(rounds) == {"a": calm, "b": calm}
