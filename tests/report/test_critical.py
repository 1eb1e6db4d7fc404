"""The critical path by operator and link adds up to the step and names what is there."""

from __future__ import annotations

import pytest

from shardwright.planner.space import Seed, seed_strategy
from shardwright.planner.space.servers import with_servers
from shardwright.report.critical import critical_rows
from tests.report.test_contrast import DATA, GRAPH, MACHINE, PIPELINE, ZERO, story

SPLIT = Seed(stages=4, num_microbatches=4, schedule="zb-h1")


@pytest.mark.parametrize("seed", [DATA, ZERO, PIPELINE, SPLIT, Seed()])
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


def test_what_is_pulled_and_pushed_goes_from_and_to_the_servers() -> None:
    served = with_servers(seed_strategy(GRAPH, Seed(data=2)), (2, 3), (0, 1))
    rows = critical_rows(story(served), GRAPH, MACHINE)
    ends = {row.where.rsplit(", ", 1)[-1] for row in rows if "within a host" in row.where}
    assert {
        "from the devices that keep the parameters",
        "to the devices that keep the parameters",
    } <= ends
    assert not any("stage" in end for end in ends)


def test_only_products_take_time_for_gradients_of_weights() -> None:
    """Elementwise operators have no weights; all other backward is I's."""
    rows = critical_rows(story(SPLIT), GRAPH, MACHINE)
    kinds = {phase: {row.what.split("(")[-1].rstrip(")") for row in rows if row.where == phase}
             for phase in ("input gradient", "weight gradient")}  # fmt: skip
    assert kinds["weight gradient"] == {"linear"}
    assert len(kinds["input gradient"]) > 1
