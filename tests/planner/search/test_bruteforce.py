"""Every objective of small random problems against trying all plans; `benchmarks/exhaustive.py` tries
a thousand."""

from __future__ import annotations

import random

import pytest

from tests.planner.solve.bruteforce import (
    MOST_PLANS,
    mismatches,
    random_model,
    random_tables,
)


@pytest.mark.parametrize("seed", range(30))
def test_no_objective_of_random_tables_is_missed(seed: int) -> None:
    rng = random.Random(seed)
    instance = random_tables(rng)
    assert instance.num_plans <= MOST_PLANS
    assert mismatches(instance, rng) == []


@pytest.mark.parametrize("seed", range(6))
def test_no_objective_of_a_small_model_on_unequal_devices_is_missed(seed: int) -> None:
    rng = random.Random(seed)
    instance = random_model(rng)
    assert instance.num_plans <= MOST_PLANS
    assert mismatches(instance, rng) == []
