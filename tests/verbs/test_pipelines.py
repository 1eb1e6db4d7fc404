"""A profile is planned with split stages where that is asked for, and the table says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.errors import InputError, NoPlan
from shardwright.report.pipelines import pipeline_tables, pipeline_values
from shardwright.verbs.pipelines import PipelineRequest, draw_plan, plan_profile
from shardwright.verbs.request import Request
from shardwright.verbs.study import study

LINE = "{} -- Linear -- forward_compute_time={}, backward_compute_time=0.0, activation_size={}, parameter_size={}"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A small layer before one of 100 MB that takes eight times as long."""
    path = tmp_path / "graph.txt"
    first, second = LINE.format("a", 1.0, 1e3, 1e3), LINE.format("b", 8.0, 1e3, 1e8)
    path.write_text(f"{first}\n{second}\n\ta -- b\n")
    return path


def test_a_large_layer_is_split_only_where_that_is_asked_for(profile: Path) -> None:
    whole = PipelineRequest(workers="5", bandwidth="1e9")
    _, study = plan_profile(profile, whole)
    assert {stage.shards for stage in study.best.stages} == {1}
    _, split = plan_profile(profile, PipelineRequest(workers="5", bandwidth="1e9", shards=4))
    assert split.best.stages[-1].shards == 4
    assert split.best.seconds < study.best.seconds


def test_the_table_and_the_values_name_the_shards(profile: Path) -> None:
    request = PipelineRequest(workers="5", bandwidth="1e9", shards=4)
    graph, study = plan_profile(profile, request)
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(pipeline_tables(graph, study))
    assert "4 (1 x 4 shards)" in captured.get()
    last = pipeline_values(graph, study)["plan"]["stages"][-1]
    assert (last["workers"], last["num_replicas"], last["shards"]) == ([4], 1, 4)


def test_levels_cannot_be_split(profile: Path) -> None:
    request = PipelineRequest(workers="2x2", bandwidth="1e9,1e10", shards=2)
    with pytest.raises(InputError, match="leave kinds, --shards"):
        plan_profile(profile, request)
    with pytest.raises(InputError, match="shards must be 1 to"):
        PipelineRequest(workers="2", bandwidth="1e9", shards=0)


ORDER = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1\n"
NO_ORDERS = [
    (ORDER.replace(" 1W1", ""), r"line 3: .*lacks actions: 1W1; correct it"),
    (ORDER.replace("0F1", "0F1 0F1"), r"line 2: .*lists actions twice: 0F1; correct it"),
    (ORDER.replace("1F1", "2F1"), r"line 3: .*actions that there are not: 2F1|lacks actions: 1F1.*; correct it"),
    (ORDER.replace("1F0 1I0", "1I0 1F0"), r"line 3: .*wait for each other.* 1I0 .* reorder them"),
    (ORDER.replace("0I0 0W0", "0W0 0I0"), r"line 2: .*wait for each other.* 0W0 .* W\(s, m\) follows I"),
    ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n", r"line 2: .*wait for each other: .* 0B0 1F1 .* reorder them"),
    ("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n", r"line 3: .*in one order.* 1,0; make them equal"),
    (ORDER.replace("0F0", "0Q0"), r"line 2: .*not '0Q0'; correct it"),
    (ORDER.replace("0F1", "0F-1"), r"line 2: .*not '0F-1'; correct it"),
    (ORDER.replace("0F1", "0F\u0661"), r"line 2: .*not '0F.*'; correct it"),
    (ORDER + "2F0 2B0 2F1 2B1\n", r"has 3 \(the last in line 4\); give"),
]  # fmt: skip


def test_an_order_in_a_file_is_planned_for_as_many_workers_as_it_has_rows(
    profile: Path, tmp_path: Path
) -> None:
    path = tmp_path / "order.txt"
    path.write_text(ORDER)
    request = PipelineRequest(workers="2", bandwidth="1e9", order=str(path))
    graph, study = plan_profile(profile, request)
    assert study.best.schedule == "custom"
    assert pipeline_values(graph, study)["plan"]["stages"][1]["worker"] == 1
    lanes = draw_plan(study.best, "text").splitlines()
    assert lanes[0].startswith("  0 F0")
    assert len(lanes) == 3
    picture = tmp_path / "order.svg"
    assert "Wrote" in draw_plan(study.best, str(picture))
    assert picture.read_text().startswith("<svg")
    path.write_text(f"# two workers\n{ORDER}")
    with pytest.raises(NoPlan, match=r"order\.txt, line 3: schedule custom takes .* on worker 1"):
        plan_profile(profile, replace(request, memory_limit="1 B"))


def test_what_is_no_order_is_told_with_file_line_value_and_remedy(
    profile: Path, tmp_path: Path
) -> None:
    """Also where it is of a model's parts, before the model is looked at."""
    path, parts = tmp_path / "order.txt", tmp_path / "parts.toml"
    parts.write_text("".join(f'[[part]]\nmodules = ["{k}"]\ndevices = [{k}]\n' for k in (0, 1)))
    for text, said in NO_ORDERS:
        path.write_text(f"# as many workers as rows\n{text}")
        with pytest.raises(InputError, match=rf"order\.txt(, |: .*){said}"):
            plan_profile(profile, PipelineRequest(workers="2", bandwidth="1e9", order=str(path)))
        request = Request(seed_plan=str(parts), order=str(path))
        with pytest.raises(InputError, match=rf"order\.txt(, |: .*){said}"):
            study("not_there.py:build", "1x2xA100", request)


def test_an_order_and_a_schedule_exclude_each_other(profile: Path) -> None:
    with pytest.raises(InputError, match="leave --schedule"):
        PipelineRequest(workers="2", bandwidth="1e9", order="o.txt", microbatches=4)
    with pytest.raises(InputError, match="give --microbatches"):
        plan_profile(profile, PipelineRequest(workers="2", bandwidth="1e9", schedule="zb-h1"))
    _, study = plan_profile(profile, PipelineRequest(workers="2", bandwidth="1e9"))
    with pytest.raises(InputError, match="nothing to draw"):
        draw_plan(study.best, "text")


def test_a_step_whose_replay_takes_minutes_is_refused(profile: Path) -> None:
    for schedule, microbatches in (("auto", 2**20), ("gpipe", 2**20), ("interleaved", 2**12)):
        request = PipelineRequest(
            workers="2", bandwidth="1e9", schedule=schedule, microbatches=microbatches
        )
        with pytest.raises(InputError, match=r"forwards, workers times .*; give fewer --microb"):
            plan_profile(profile, request)
