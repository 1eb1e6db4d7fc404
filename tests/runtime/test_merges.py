"""What two selections come to is what NumPy finds by sorting all of it."""

import numpy as np
import pytest

from shardwright.runtime.merges import merge_units

pytestmark = pytest.mark.torch


def by_sorting(one, other, count):
    """Return what is kept and what is left of one unit, each in the order of places."""
    places = np.union1d(one[0], other[0])
    sums = np.zeros(len(places), one[1].dtype)
    for at, values in (one, other):
        sums[np.searchsorted(places, at)] += values
    sizes = np.where(np.isnan(sums), np.inf, np.abs(sums))
    kept = np.sort(np.argsort(-sizes, kind="stable")[:count])
    left = np.setdiff1d(np.arange(len(places)), kept)
    return (places[kept], sums[kept]), (places[left], sums[left])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_of_sums_are_kept_of_equal_ones_the_first_and_what_is_no_number(dtype):
    draw = np.random.default_rng(0)
    for case in range(400):
        count = int(draw.integers(1, 40))

        def selection(count=count, case=case):
            places = draw.permutation(3 * count)[:count]
            values = draw.integers(-3, 4, count) if case % 2 else draw.normal(size=count)
            values = values.astype(dtype)
            if case % 5 == 0:
                values[draw.integers(count)] = draw.choice([np.nan, np.inf, -np.inf])
            return places, values

        one, other = selection(), selection()
        kept, rest = ((np.empty(count, np.int64), np.empty(count, dtype)) for _ in range(2))
        (left,) = merge_units(one, other, np.array([count]), kept, rest)
        with np.errstate(invalid="ignore"):
            for found, expected in zip(
                (kept, [part[:left] for part in rest]), by_sorting(one, other, count), strict=True
            ):
                assert all(map(np.array_equal, found, expected, (False, True))), case


def test_sums_that_ascend_and_descend_take_no_square_of_their_number():
    """The middle of such a row is its largest: ten minutes by pivots from there."""
    count = 500_000
    slope = np.arange(count, dtype=np.float32)
    one = (np.arange(count), slope)
    other = (np.arange(count, 2 * count), slope[::-1].copy())
    kept, rest = ((np.empty(count, np.int64), np.empty(count, np.float32)) for _ in range(2))
    assert merge_units(one, other, np.array([count]), kept, rest) == [count]
    assert kept[1].min() == count / 2
    assert rest[1].max() <= count / 2
