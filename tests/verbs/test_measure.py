"""Planning and measuring in turns, where every operator shard is known to take the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardwright import api
from shardwright.core.cluster import Cluster
from shardwright.core.costs import Record
from shardwright.files.clusterfile import read_cluster
from shardwright.operators.counting.work import has_backward
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import Captured
from shardwright.runtime.profile import Wanted
from shardwright.verbs import measure
from shardwright.verbs.narrate import run_of
from shardwright.verbs.request import Request, Watch
from tests.zoo import mlp

THERE = "where all takes long"
SECONDS = 0.1  # what a model would say takes microseconds

pytestmark = pytest.mark.torch


def taken(
    captured: Captured, wanted: Wanted, _: Cluster, request: Request, __: Watch
) -> list[Record]:
    """Return records of all that is asked for and runs: not of the backward of what has none."""
    graph = captured.graph
    there = {
        key
        for run in wanted.runs
        for shard in run
        for key, runs in zip(
            measure.keys_of(graph, shard, request.precision),
            (True, has_backward(graph, graph.operators[shard[0]])),
            strict=True,
        )
        if runs
    }
    when = datetime.now(UTC).isoformat()
    return [
        Record(
            key=key, seconds=SECONDS, spread=0.0, count=1, environment=THERE, measured_at=when
        )
        for key in sorted(wanted.keys & there)
    ]  # fmt: skip


def test_what_is_chosen_was_measured_however_fast_models_say_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard that is measured turns out to be slow, so that a search goes on to one that is only modelled:
    after four searches it still had done so."""
    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "records.sqlite"))
    module, batch = mlp()
    asked: list[Wanted] = []

    def noted(captured: Captured, wanted: Wanted, *rest: object) -> list[Record]:
        asked.append(wanted)
        return taken(captured, wanted, *rest)  # type: ignore[arg-type]

    bench = measure.Bench(environment=THERE, measure=noted)
    study = api.study(module, "1x4xA100", batch=batch, bench=bench)
    best = study.frontier.best.strategy
    run = run_of(best, study.graph)
    keys = {key for shard in run for key in measure.keys_of(study.graph, shard, best.precision)}
    known = study.costs.operator_map.keys()
    assert keys
    assert {key for key in keys - known if "|forward|" in key} == set()
    asked.clear()
    assert api.study(module, "1x4xA100", batch=batch, bench=bench).num_measured == 0
    assert asked == []  # also nothing that has no backward


def test_a_device_alone_that_models_call_a_little_slower_than_what_is_chosen_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a batch takes all as long as a whole one would, which the model of operators cannot know: a device alone
    was never measured, and lost to data parallelism."""
    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "records.sqlite"))
    module, batch = mlp()
    cluster = read_cluster(
        '[kind.c]\npeak = {float32 = "1 GFLOP/s"}\nmemory = "1 GB"\nmemory_bandwidth = "1 GB/s"\n'
        'backend = "cpu"\n[[host]]\nkind = "c"\ndevices = 2\nlink = "10 MB/s"\n'
    )

    def quick(*given: object) -> list[Record]:
        return [replace(record, seconds=1e-3) for record in taken(*given)]  # type: ignore[arg-type]

    bench = measure.Bench(environment=THERE, measure=quick)
    study = api.study(module, cluster, batch=batch, bench=bench)
    plain = study.plain[0].predicted.step_seconds
    run = run_of(seed_strategy(study.graph, Seed()), study.graph)
    keys = {key for shard in run for key in measure.keys_of(study.graph, shard, "float32")}
    assert {key for key in keys - study.costs.operator_map.keys() if "|forward|" in key} == set()
    assert study.frontier.best.predicted.step_seconds < plain
