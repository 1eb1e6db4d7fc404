"""The loss that a model tolerates, of models whose answer is known."""

import math

import pytest

from shardwright.errors import InputError
from shardwright.lossy import calibrate


def test_the_largest_bound_within_the_seeds_spread_is_found_and_no_larger_one_is_tried():
    """Losses 1, 2, 3 over seeds: a spread of 1, which four times 0.3 exceeds."""
    tried = []

    def train(bound, seed):
        tried.append(bound)
        return 1 + seed + 4 * bound

    found = calibrate(train, bounds=(0.1, 0.2, 0.3, 0.4))
    assert (found.tolerated, found.spread) == (0.2, 1.0)
    assert sorted(set(tried)) == [0.0, 0.1, 0.2, 0.3]


def test_what_diverges_is_not_tolerated_and_what_never_converges_is_refused():
    found = calibrate(lambda bound, seed: math.nan if bound else seed, bounds=(0.1,))
    assert found.tolerated == 0
    with pytest.raises(InputError, match="finite loss"):
        calibrate(lambda bound, seed: math.inf)
    for wrong in ({"seeds": 1}, {"seeds": "3"}, {"bounds": 0.1}, {"bounds": ["some"]}):
        with pytest.raises(InputError, match="two seeds"):
            calibrate(lambda bound, seed: 1.0, **wrong)


def test_what_returns_no_loss_is_told_to():
    with pytest.raises(InputError, match="not None; let it return"):
        calibrate(lambda bound, seed: None)  # type: ignore[arg-type, return-value]
