"""Terminal tables: everything is there, and no name is read as markup."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from shardwright.core.plan import STALE, Frontier, digest_of
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.report.comparison import comparison_notes, differences
from shardwright.report.html import page_data
from shardwright.report.story import Story, wire_text
from shardwright.report.text import (
    chosen_lines,
    difference_table,
    frontier_table,
    memory_table,
    operator_table,
    plan_tables,
)
from shardwright.report.units import bytes_text
from tests.planner.search.models import residual


def written(*parts: object) -> str:
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


def test_the_frontier_shows_every_plan_and_marks_the_chosen_one(story: Story) -> None:
    frontier = Frontier(plans=tuple(item.plan for item in story.plans), chosen=1)
    text = written(frontier_table(frontier, (0.2, 0.2), 16 * 2**20))
    assert "5.00 s ±4.0 %" in text
    assert "9.00 MiB (56%)" in text
    assert "measured 80%, modelled 20%" in text
    assert next(line for line in text.splitlines() if "▸" in line).split()[1:4] == [
        "model",
        "plan",
        "1",
    ]


def test_the_chosen_plan_comes_with_reason_bound_and_notes(story: Story) -> None:
    text = written(chosen_lines(Frontier(plans=(story.plans[0].plan,))))
    for words in ("Because of model.", "4.00 s (gap 20.0%; without overlap)", "a note about model"):
        assert words in text


def test_tables_of_a_plan_name_devices_time_and_memory(story: Story) -> None:
    text = written(plan_tables(story.plans[0]), operator_table(story.plans[0].operators))
    for words in (
        "data 2",
        "2, 3",
        "gradient synchronisation",
        "activations and gradients",
        "h.2.up",
    ):
        assert words in text


def test_what_the_driver_sees_comes_behind_the_peak(story: Story) -> None:
    plan = story.plans[0]
    beside = (("allocator's slack", 2.0**20), ("NCCL's buffers", 3.0 * 2**20))
    assert "driver" not in written(memory_table(plan))
    lines = written(memory_table(replace(plan, beside=beside))).splitlines()
    peak = plan.predicted.worst_peak_bytes
    assert bytes_text(peak + 4 * 2**20) in next(one for one in lines if "seen by the driver" in one)
    assert bytes_text(peak) in next(one for one in lines if one.strip().startswith("peak"))


def test_the_comparison_shows_both_numbers_and_their_difference(story: Story) -> None:
    plan = story.plans[0]
    text = written(difference_table(differences(plan)))
    assert "5.00 s" in text
    assert "5.50 s" in text
    assert "-9.1 %" in text


def test_square_brackets_in_names_are_text(bracket_story: Story) -> None:
    plan = bracket_story.plans[0]
    frontier = Frontier(plans=(plan.plan,))
    text = written(frontier_table(frontier), chosen_lines(frontier), operator_table(plan.operators))
    assert text.count("[bold red]layer") >= 3


def test_figures_of_another_strategy_are_marked_wherever_they_are_shown(story: Story) -> None:
    said = STALE.split(":", maxsplit=1)[0].lower()
    for is_changed in (False, True):
        item = story.plans[0]
        plan = replace(item.plan, predicted_for=digest_of(item.plan.strategy))
        if is_changed:
            plan = replace(plan, strategy=replace(plan.strategy, clips=True))
        frontier = Frontier(plans=(plan,))
        found = replace(item, plan=plan)
        page = page_data(replace(story, plans=(found,)))
        assert ("stale: another strategy" in written(frontier_table(frontier))) == is_changed
        assert (said in written(chosen_lines(frontier)).lower()) == is_changed
        assert ("No plan of the searched space" in written(chosen_lines(frontier))) != is_changed
        assert (said in " ".join(comparison_notes(found)).lower()) == is_changed
        assert (said in " ".join(page["notes"]).lower()) == is_changed


def test_how_many_gradients_are_compressed_is_said() -> None:
    graph = residual(width=32)
    for seed, count in ((Seed(data=2), 7), (Seed(data=2, zero=3), 0), (Seed(stages=2), 0)):
        strategy = seed_strategy(graph, seed)
        sync = replace(strategy.gradient_sync, compressor="int8")
        program = lower(graph, replace(strategy, gradient_sync=sync))
        assert wire_text(program).startswith(f"gradients of {count} of {len(graph.parameters)} ")
