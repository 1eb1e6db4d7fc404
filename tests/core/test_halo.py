"""Halos: shapes, neighbours, and how much travels."""

from __future__ import annotations

import pytest

from shardwright.core.halo import (
    Halo,
    check_reach,
    extended_shape,
    most_moved,
    neighbours,
    own_shape,
)
from shardwright.core.strategy import Mesh

ROWS = Halo(dim=2, axes=(1,), before=3, after=2)
COLUMNS = Halo(dim=3, axes=(0,), before=1, after=1)


def test_a_shard_is_extended_on_both_sides_and_cut_again() -> None:
    shape = (4, 8, 16, 10)
    assert extended_shape(shape, (ROWS, COLUMNS)) == (4, 8, 21, 12)
    assert own_shape((4, 8, 21, 12), (ROWS, COLUMNS)) == shape


def test_the_middle_device_sends_both_ways() -> None:
    row = 4 * 8 * 10
    assert most_moved((4, 8, 16, 10), ROWS, (1, 4)) == 5 * row
    assert most_moved((4, 8, 16, 10), ROWS, (1, 2)) == 3 * row


def test_neighbours_are_those_along_the_axes() -> None:
    mesh = Mesh(axes=("data", "height"), sizes=(2, 3), devices=(5, 1, 3, 0, 4, 2))
    assert [neighbours(mesh, device, (1,)) for device in (5, 1, 3)] == [(-1, 1), (5, 3), (1, -1)]
    assert neighbours(mesh, 4, (1,)) == (0, 2)
    assert neighbours(mesh, 0, (0, 1)) == (3, 4)


def test_a_shard_smaller_than_its_halo_is_refused() -> None:
    check_reach((4, 8, 3, 10), ROWS)
    with pytest.raises(ValueError, match=r"as many rows as the halo.*fewer pieces"):
        check_reach((4, 8, 2, 10), ROWS)
