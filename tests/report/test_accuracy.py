"""Statistics of predicted against published, worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from shardwright.core.accuracy import Case
from shardwright.report.accuracy import accuracy, order, regret, summary, validation


def case(number: int, published: float | None, predicted: float | None, **other: object) -> Case:
    given: dict[str, object] = {
        "id": str(number), "row": number, "source": "s", "model": "M", "hardware": "8 A",
        "layout": f"tp {number}", "group": "g", "work": 1.0, "published_seconds": published,
        "published_bytes": None, "predicted_seconds": predicted,
    }  # fmt: skip
    return Case(**(given | other))  # type: ignore[arg-type]


def test_errors_add_up_to_medians_and_a_percentile() -> None:
    found = accuracy([-0.1, 0.2, None, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert found.count == 10
    assert found.median == pytest.approx(0.55)
    assert found.bias == pytest.approx(0.55)
    assert found.p90 == 0.9  # nine of ten are no larger


def test_tau_is_kendalls_where_nothing_ties() -> None:
    draw = random.Random(1)
    times = [(draw.random(), draw.random()) for _ in range(12)]
    found = order([case(i, *pair) for i, pair in enumerate(times)], lambda c: c.predicted_seconds)
    assert found.pairs == 66
    swaps = exchanges([predicted for _, predicted in sorted(times)])
    assert found.tau == pytest.approx(1 - 2 * swaps / 66)


def exchanges(values: list[float]) -> int:
    """Count the exchanges of neighbours that sorting takes: Kendall's distance."""
    count = 0
    for end in range(len(values), 1, -1):
        for i in range(end - 1):
            if values[i] > values[i + 1]:
                values[i], values[i + 1] = values[i + 1], values[i]
                count += 1
    return count


def test_pairs_that_are_near_each_other_count_in_one_tau_only() -> None:
    cases = [case(1, 1.0, 2.0), case(2, 1.04, 1.0), case(3, 2.0, 3.0)]
    found = order(cases, lambda c: c.predicted_seconds)
    assert (found.pairs, found.pairs_apart) == (3, 2)
    assert found.tau == pytest.approx(1 / 3)
    assert found.tau_apart == 1.0


def test_layouts_of_different_groups_are_not_compared_and_repeats_count_once() -> None:
    cases = [case(1, 1.0, 1.0), case(2, 2.0, 2.0, group="h"), case(3, 9.0, 1.0, layout="tp 1")]
    found = order(cases, lambda c: c.predicted_seconds)
    assert (found.groups, found.pairs) == (0, 0)
    assert math.isnan(found.tau)


def test_steps_of_different_batches_are_compared_per_token() -> None:
    cases = [case(1, 1.0, 1.0, work=1.0), case(2, 3.0, 5.0, work=4.0)]
    found = order(cases, lambda c: c.predicted_seconds)
    assert found.tau == -1.0  # 1 and 0.75 seconds a token, predicted 1 and 1.25
    assert found.mean_regret == pytest.approx(1 / 3)


def test_regret_is_what_the_layout_predicted_best_loses() -> None:
    assert regret([(1.0, 5.0), (1.2, 4.0), (3.0, 6.0)]) == pytest.approx(0.2)


def test_memory_is_judged_by_what_fits() -> None:
    lost = {"published_seconds": None, "is_out_of_memory": True}
    cases = [
        case(1, 1.0, 1.0, predicted_bytes=8.0, fits=True, published_bytes=10.0),
        case(2, 1.0, 1.0, predicted_bytes=12.0),
        case(3, None, 1.0, predicted_bytes=12.0, **lost),
        case(4, None, 1.0, predicted_bytes=9.0, fits=True, **lost),
        case(5, None, None, reason="interleaved schedule"),
    ]
    found = summary("s", cases)
    assert (found.cases, found.expressed) == (5, 4)
    assert (found.foretold, found.out_of_memory) == (1, 2)
    assert (found.refused, found.fitted) == (1, 2)
    assert found.memory.median == pytest.approx(0.2)


def test_a_half_width_covers_what_lies_within_it() -> None:
    cases = [case(1, 1.0, 1.2, half_width=0.2001), case(2, 1.0, 1.2, half_width=0.19)]
    assert summary("s", cases).coverage == 0.5


def test_sources_weigh_alike_and_reasons_are_counted() -> None:
    cases = [case(i, 1.0, 1.1) for i in range(4)]
    cases += [case(9, 1.0, 1.3, source="t"), case(10, 1.0, None, source="t", reason="x")]
    found = validation(cases, "runs.csv")
    assert [one.name for one in found.sources] == ["s", "t"]
    assert found.source_median == pytest.approx(0.2)
    assert found.overall.time.median == pytest.approx(0.1)
    assert found.reasons == (("x", 1),)
