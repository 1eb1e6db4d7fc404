"""Layouts: where shards lie, by cutting an array step by step as the definition says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardwright.core.layout import (
    PARTIAL,
    REPLICATE,
    inner,
    is_innermost,
    layout_text,
    local_shape,
    normal,
    shard_offsets,
)

SIZES = (2, 3, 2)
PLACEMENTS = (REPLICATE, 0, 1, inner(0), inner(1))
LAYOUTS = list(itertools.product(PLACEMENTS, repeat=3))


def cut(layout: tuple[int, ...], coordinate: tuple[int, ...]) -> np.ndarray:
    """Cut a whole matrix: plain shards axis by axis, then inner ones from the last axis back."""
    piece = np.arange(24 * 36).reshape(24, 36)
    order = [a for a in range(3) if layout[a] >= 0]
    order += [a for a in reversed(range(3)) if layout[a] < PARTIAL]
    for axis in order:
        dim = layout[axis] if layout[axis] >= 0 else [inner(0), inner(1)].index(layout[axis])
        piece = np.split(piece, SIZES[axis], axis=dim)[coordinate[axis]]
    return piece


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_lies_where_cutting_step_by_step_puts_it(layout: tuple[int, ...]) -> None:
    for coordinate in np.ndindex(*SIZES):
        piece = cut(layout, coordinate)
        assert local_shape((24, 36), layout, SIZES) == piece.shape
        row, column = shard_offsets((24, 36), layout, SIZES, coordinate)
        assert piece[0, 0] == row * 36 + column


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_normal_form_means_the_same_and_is_unique(layout: tuple[int, ...]) -> None:
    same = normal(layout, SIZES)
    assert normal(same, SIZES) == same
    places = list(np.ndindex(*SIZES))
    assert all(np.array_equal(cut(layout, c), cut(same, c)) for c in places)
    equal = [
        other
        for other in LAYOUTS
        if all(np.array_equal(cut(layout, c), cut(other, c)) for c in places)
    ]
    assert {normal(other, SIZES) for other in equal} == {same}


def test_an_axis_of_one_device_holds_a_full_copy() -> None:
    assert normal((inner(1), 0, 1), (2, 2, 1)) == (1, 0, REPLICATE)


def test_only_the_axis_that_splits_last_is_innermost() -> None:
    assert is_innermost((inner(0), 0, 1), 0)
    assert not is_innermost((inner(0), 0, 1), 1)
    assert is_innermost((0, 0, 1), 1)


def test_an_inner_shard_is_written_with_a_prime() -> None:
    assert layout_text((inner(0), 0, 1, REPLICATE, PARTIAL)) == "S0'·S0·S1·R·P"
