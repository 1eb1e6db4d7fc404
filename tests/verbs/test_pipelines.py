"""A profile is planned with split stages where that is asked for, and the table says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from shardwright.errors import InputError
from shardwright.report.pipelines import pipeline_tables, pipeline_values
from shardwright.verbs.pipelines import PipelineRequest, plan_profile

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
