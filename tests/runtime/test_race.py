"""Races: what the machine did to a turn of everybody is taken off, what a contestant did is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.runtime.race import Laps, PlainData, Rules, race, steadied
from tests.runtime.world import run_ranks

SECONDS = st.floats(0.01, 10.0)


def laps_of(plans: list[float], paces: list[float]) -> list[Laps]:
    return [Laps(turns=tuple((own * pace,) * 2 for pace in paces)) for own in plans]


@given(st.lists(SECONDS, min_size=3, max_size=6), st.lists(SECONDS, min_size=2, max_size=9))
def test_turns_that_were_slower_for_everybody_leave_no_spread(
    plans: list[float], paces: list[float]
) -> None:
    raw = laps_of(plans, paces)
    found = steadied(raw)
    for own, one, before in zip(plans, found, raw, strict=True):
        assert one.spread == pytest.approx(0.0, abs=1e-9 * own * max(paces))
        assert one.seconds / found[0].seconds == pytest.approx(own / plans[0])
        assert one.seconds == pytest.approx(before.seconds)  # of the machine as it usually was


def test_what_befell_one_contestant_alone_stays_with_it() -> None:
    raw = laps_of([1.0, 2.0, 3.0], [1.0] * 5)
    slow = Laps(turns=((1.0,), (1.5,), (1.0,), (1.5,), (1.5,)))
    found = steadied([slow, *raw])
    assert found[0] == slow
    assert found[1:] == tuple(raw)


def test_two_contestants_are_left_as_they_are() -> None:
    raw = laps_of([1.0, 2.0], [1.0, 2.0, 1.0])
    assert steadied(raw) == tuple(raw)


@pytest.mark.parametrize(("steps", "run"), [(1, 1), (2, 3)])
def test_a_first_step_settles_and_does_not_count(steps: int, run: int) -> None:
    taken = [0, 0]

    def contestant(which: int) -> float:
        taken[which] += 1
        return 0.0

    rules = Rules(turns=3, steps=steps)
    found = race([lambda _: contestant(0), lambda _: contestant(1)], [{}], rules)
    assert [one.num_steps for one in found] == [3 * steps] * 2
    assert taken == [2 + 3 * run] * 2


class Unread(nn.Module):
    """A map, and one that nothing is asked of."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.spare = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.map(x).square().mean()}


def train_plainly(steps: int) -> list[float]:
    torch.manual_seed(0)
    one = PlainData(Unread().double(), lambda named: torch.optim.SGD([p for _, p in named], 0.1))
    batch = {"x": torch.arange(12, dtype=torch.float64).reshape(4, 3) / 12}
    return [float(one.step(batch)) for _ in range(steps)]


@pytest.mark.ranks
def test_torchs_own_trains_models_with_parameters_that_nothing_reads() -> None:
    halves = run_ranks(2, train_plainly, 3)
    means = [sum(both) / 2 for both in zip(*halves, strict=True)]
    assert means == pytest.approx(train_plainly(3), rel=1e-12)
    assert means[2] < means[0]
