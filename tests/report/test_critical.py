"""The critical path by operator and link adds up to the step and names what is there."""

from __future__ import annotations

import pytest

from shardwright.planner.space import Seed
from shardwright.report.critical import critical_rows
from tests.report.test_contrast import DATA, GRAPH, MACHINE, PIPELINE, ZERO, story


@pytest.mark.parametrize("seed", [DATA, ZERO, PIPELINE, Seed()])
def test_the_rows_add_up_to_the_step(seed: Seed) -> None:
    one = story(seed)
    rows = critical_rows(one, GRAPH, MACHINE)
    assert sum(row.seconds for row in rows) == pytest.approx(one.predicted.step_seconds)
    assert list(rows) == sorted(rows, key=lambda row: -row.seconds)


def test_messages_are_found_under_their_links() -> None:
    rows = critical_rows(story(DATA), GRAPH, MACHINE)
    assert any("over data" in row.where and "within a host" in row.where for row in rows)
    rows = critical_rows(story(PIPELINE), GRAPH, MACHINE)
    assert any("next stage" in row.where for row in rows)
