"""Whether a machine that was measured some time ago is as fast as then, in words."""

import pytest

from shardwright.core.costs import CostTable, Record
from shardwright.verbs.pace import Pace, ratio


@pytest.mark.parametrize(
    ("times", "spread", "within", "is_said"),
    [
        (1.08, 0.02, 0.1, False),
        (1.08, 0.02, 0.06, True),  # the prediction claims to be nearer
        (0.93, 0.02, 0.06, True),
        (1.08, 0.09, 0.06, False),  # what was measured may be off by as much
        (1.12, 0.02, 0.1, True),
    ],
)
def test_a_note_says_what_is_beyond_what_a_prediction_claims(
    times: float, spread: float, within: float, is_said: bool
) -> None:
    pace = Pace(ratio=times, spread=spread, measured_at="then", within=within)
    assert (f"take {times:.2f} times" in pace.note) == is_said
    assert bool(pace.note) == is_said
    assert pace.holds != is_said


def test_records_are_compared_by_their_seconds() -> None:
    def record(key: str, seconds: float, spread: float, when: str) -> Record:
        return Record(
            key=key, seconds=seconds, spread=spread, count=5, environment="here", measured_at=when
        )

    known = {"a": record("a", 3.0, 0.3, "1"), "b": record("b", 1.0, 0.1, "2")}
    again = [record("a", 3.0, 0.0, "3"), record("b", 2.0, 0.2, "3"), record("c", 9.0, 0.0, "3")]
    found = ratio(known, again)
    assert found is not None
    assert found.ratio == 1.25
    assert found.spread == pytest.approx(1.25 * 0.1 + 0.05)
    assert found.measured_at == "2"
    assert ratio(known, []) is None


def test_costs_that_heed_a_pace_have_operators_take_as_many_times_as_long() -> None:
    pace = Pace(ratio=0.5, spread=0.02, measured_at="then")
    assert pace.heeded(CostTable()).factor_map == {"compute": 0.5}
    fitted = CostTable(factors=(("all_reduce", 2.0), ("compute", 1.2)))
    assert pace.heeded(fitted).factor_map == {"all_reduce": 2.0, "compute": 0.6}
    assert "take 0.50 times" in pace.heeds
