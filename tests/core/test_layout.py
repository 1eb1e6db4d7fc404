"""Layouts: where shards lie, by cutting an array step by step as the definition says."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest

from shardwright.core.layout import (
    FLAT,
    PARTIAL,
    REPLICATE,
    inner,
    is_innermost,
    layout_text,
    local_shape,
    normal,
    shard_boxes,
    shard_offsets,
)
from shardwright.planner.space.rest import shard_further

SIZES = (2, 3, 2)
PLACEMENTS = (REPLICATE, 0, 1, inner(0), inner(1))
LAYOUTS = list(itertools.product(PLACEMENTS, repeat=3))


@cache
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


@pytest.mark.parametrize("layout", [(FLAT,), (FLAT, FLAT), (0, FLAT), (FLAT, 1), (REPLICATE, FLAT)])
def test_the_boxes_of_flat_shards_hold_a_row_cut_into_padded_pieces(
    layout: tuple[int, ...],
) -> None:
    sizes, shape = (2, 3)[: len(layout)], (4, 3, 5)
    whole = np.arange(60).reshape(shape)
    seen = np.zeros(shape, dtype=int)
    for place in np.ndindex(*sizes):
        row = whole
        for placement, size, at in zip(layout, sizes, place, strict=True):
            row = np.split(row, size, axis=placement)[at] if placement >= 0 else row
        row = row.reshape(-1)
        for placement, size, at in zip(layout, sizes, place, strict=True):
            if placement == FLAT:
                row = np.split(np.append(row, [-1] * (-row.size % size)), size)[at]
        assert local_shape(shape, layout, sizes) == row.shape
        found = [-1] * row.size
        for box in shard_boxes(shape, layout, sizes, place):
            window = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            seen[window] += 1
            taken = whole[window].reshape(-1)
            found[box.first : box.first + taken.size] = taken
        assert found == row.tolist()
    assert (seen == (2 if REPLICATE in layout else 1)).all()


@pytest.mark.parametrize("count", [6, 12, 24, 48, 96])
def test_what_no_dim_lets_divide_is_cut_flat(count: int) -> None:
    assert shard_further((4096, 4096), (REPLICATE,), (count,)) == (FLAT,)
    assert local_shape((4096, 4096), (FLAT,), (count,)) == (math.ceil(2**24 / count),)
    assert shard_further((4096, 96), (REPLICATE,), (count,)) == (1,)
    assert shard_further((count - 1,), (REPLICATE,), (count,)) == (REPLICATE,)
