"""The noise scale against a quadratic whose gradient and noise are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwright.core.noise import NoiseScale, Tradeoff


def norms_of_a_quadratic(steps, ranks, samples, seed=3):
    """Squared norms (mean over ranks, and of their mean) of gradients of |x - c|^2 / 2 at a fixed x: g and Sigma
    are known."""
    draw = np.random.default_rng(seed)
    gradient, deviation = np.linspace(-1, 1, 20), np.linspace(0.5, 3, 20)
    noise = draw.standard_normal((steps, ranks, 20)) * deviation / math.sqrt(samples)
    local = gradient + noise
    small = (local**2).sum(-1).mean(1)
    large = (local.mean(1) ** 2).sum(-1)
    return small, large, float((deviation**2).sum()), float((gradient**2).sum())


@pytest.mark.parametrize(("ranks", "samples"), [(2, 4), (8, 4), (4, 32)])
def test_the_noise_scale_of_a_quadratic_is_found(ranks, samples):
    small, large, variance, square = norms_of_a_quadratic(10_000, ranks, samples)
    found = NoiseScale(decay=1)
    for one, other in zip(small, large, strict=True):
        found.update(one, other, samples, ranks * samples)
    assert found.steps == 10_000
    assert found.variance == pytest.approx(variance, rel=0.05)
    assert found.gradient_square == pytest.approx(square, rel=0.05)
    assert found.scale == pytest.approx(variance / square, rel=0.05)


def test_an_exponential_average_forgets_and_is_not_drawn_to_zero():
    found = NoiseScale(decay=0.9)
    found.update(11.0, 2.0, 1, 10)  # |g|^2 = 1, tr(Sigma) = 10
    assert (found.gradient_square, found.variance, found.scale) == pytest.approx((1, 10, 10))
    for _ in range(200):
        found.update(34.0, 7.0, 1, 10)  # |g|^2 = 4, tr(Sigma) = 30
    assert found.scale == pytest.approx(7.5)


def test_a_scale_is_not_told_where_no_gradient_stands_out():
    found = NoiseScale()
    assert math.isnan(found.scale)
    found.update(10.0, 0.5, 1, 10)  # less than noise alone makes
    assert math.isnan(found.scale)


def test_a_step_that_overflowed_is_passed_over():
    found = NoiseScale()
    found.update(math.inf, math.inf, 1, 10)
    found.update(11.0, 2.0, 1, 10)
    assert (found.steps, found.scale) == (1, pytest.approx(10))


def test_at_the_noise_scale_steps_and_samples_are_twice_the_least():
    one = Tradeoff(noise_scale=500, least_steps=1000)
    assert one.steps(500) == pytest.approx(2 * 1000)
    assert one.samples(500) == pytest.approx(2 * 500 * 1000)
    for batch in (1, 32, 500, 1e5):
        steps, samples = one.steps(batch) / 1000, one.samples(batch) / 500_000
        assert (steps - 1) * (samples - 1) == pytest.approx(1)
