"""Two plans side by side: numbers that add up, and the sentence that decides."""

from __future__ import annotations

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.plan import Objective, Plan
from shardwright.core.strategy import Strategy
from shardwright.planner.search import search
from shardwright.planner.space import Seed, seed_strategy
from shardwright.report.contrast import contrast, critical_seconds
from shardwright.report.story import PlanStory
from shardwright.verbs.narrate import tell
from tests.planner.search.models import cluster, residual

GRAPH = residual(batch=64, width=64, depth=3, classes=16)
MACHINE = cluster(1, 4, flops=1e10, near=1e9, far=1e8)


def story(seed: Seed | Strategy) -> PlanStory:
    plan = search(GRAPH, MACHINE, CostTable(), seed_plan="megatron:4x1").best
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    fields["strategy"] = seed_strategy(GRAPH, seed) if isinstance(seed, Seed) else seed
    fields["predicted"] = Objective(step_seconds=0.0, peak_bytes=0.0)
    return tell(Plan(**fields), GRAPH, MACHINE, CostTable())


DATA, ZERO, PIPELINE = Seed(data=4), Seed(data=4, zero=3), Seed(stages=4, num_microbatches=4)


@pytest.mark.parametrize("seed", [DATA, ZERO, PIPELINE, Seed()])
def test_the_work_on_the_critical_chain_adds_up_to_the_step(seed: Seed) -> None:
    one = story(seed)
    assert sum(critical_seconds(one).values()) == pytest.approx(one.predicted.step_seconds)


def test_the_rows_of_two_plans_explain_their_difference() -> None:
    one, other = story(DATA), story(PIPELINE)
    found = contrast(one, other)
    step, *rest = found.rows
    parts = [row for row in rest if row.name.startswith("critical ")]
    assert sum(row.other - row.one for row in parts) == pytest.approx(step.other - step.one)
    peak = next(row for row in rest if row.name == "peak memory")
    sizes = [row for row in rest if row.unit == "bytes" and row is not peak]
    assert sum(row.one for row in sizes) == pytest.approx(peak.one)
    assert sum(row.other for row in sizes) == pytest.approx(peak.other)


def test_the_sentence_names_the_largest_difference_in_the_right_direction() -> None:
    one, other = story(DATA), story(PIPELINE)
    found = contrast(one, other)
    gaps = {
        row.name.removeprefix("critical "): row.other - row.one
        for row in found.rows
        if row.name.startswith("critical ")
    }
    slower = other.predicted.step_seconds > one.predicted.step_seconds
    largest = max(gaps, key=lambda name: gaps[name] if slower else -gaps[name])
    direction = "slower" if slower else "faster"
    assert f"% {direction} than" in found.sentence
    assert f"on its critical path {largest} takes" in found.sentence
    assert found.sentence.split(f"{largest} takes", 1)[1].split()[2] == (
        "more" if slower else "less"
    )


def test_what_does_not_fit_is_said_first() -> None:
    one, other = story(ZERO), story(DATA)
    room = (one.predicted.worst_peak_bytes + other.predicted.worst_peak_bytes) / 2
    found = contrast(one, other, room)
    assert "does not fit" in found.sentence
    assert "more than the" in found.sentence
    assert "does not fit" not in contrast(other, one, room).sentence


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    found = contrast(story(DATA), story(DATA))
    assert all(row.one == row.other for row in found.rows)
    assert found.facts == ()
    assert "is as fast as" in found.sentence
