"""On how many cores ranks compute, told from what each had computed at which moment."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwright.runtime.profile.crowds import cores_of, waited


def one_round(
    *ranks: tuple[list[float], list[float]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return moments and threads' times of ranks that compute once."""
    moments, own = np.array(ranks).swapaxes(0, 1)
    return moments[:, None, :], own[:, None, :]


def test_four_ranks_that_take_turns_on_two_cores_have_two() -> None:
    """Two compute for a second while two stand still, and again."""
    first = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 2.0, 2.0]
    other = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 1.0, 2.0]
    assert cores_of(*one_round(first, first, other, other)) == pytest.approx(2.0)


def test_who_is_alone_before_others_begin_or_behind_their_end_does_not_count() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 4.0]
    late = [1.0, 2.0, 3.0, 4.0, 5.0]
    # From 1 to 4 s each has half a core; the second has a whole one behind that.
    shared = [0.0, 1.0, 1.5, 2.0, 2.5], [0.0, 0.5, 1.0, 1.5, 2.5]
    assert cores_of(*one_round((steps, shared[0]), (late, shared[1]))) == pytest.approx(1.0)


def test_ranks_that_only_compute_one_after_another_have_one_core() -> None:
    steps = [0.0, 1.0, 2.0]
    assert cores_of(*one_round((steps, steps), ([2.0, 3.0, 4.0], steps))) == pytest.approx(1.0)


def test_rounds_in_which_ranks_did_not_meet_tell_nothing() -> None:
    steps = np.array([0.0, 1.0, 2.0])
    moments = np.stack([np.stack([steps, steps]), np.stack([steps, steps + 100])])
    own = np.stack([np.stack([steps, steps])] * 2)
    assert cores_of(moments, own) == pytest.approx(2.0)


def rounds(*each: tuple[float, float, float]) -> list[NDArray[np.float64]]:
    """Return when messages began, all had computed, and they ended."""
    return list(np.array(each, dtype=np.float64).T)


def test_a_message_that_ends_beneath_computation_waits_for_what_it_took_longer() -> None:
    assert waited(1.0, *rounds((0.0, 10.0, 4.0), (2.0, 12.0, 6.0))) == pytest.approx(3.0)


def test_what_was_left_when_all_had_computed_took_as_long_as_alone() -> None:
    """A quarter of it was done in four seconds: all of it would have taken sixteen."""
    assert waited(1.0, *rounds((0.0, 4.0, 4.75))) == pytest.approx(3.0 * 5)


def test_what_came_nowhere_goes_at_the_least_pace_and_what_is_not_slowed_does_not_wait() -> None:
    assert waited(1.0, *rounds((0.0, 4.0, 5.5))) == pytest.approx(49.0)
    assert waited(1.0, *rounds((0.0, 4.0, 0.9))) == 0.0
    assert waited(1.0, *rounds((5.0, 4.0, 6.0))) == 0.0
