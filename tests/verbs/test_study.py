"""A study of this machine, its measurements given: what is planned is what is told of the plan."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardwright import api
from shardwright.core.costs import Record
from shardwright.core.graph import OperatorGraph
from shardwright.errors import NoPlan, StoreError
from shardwright.store import Store
from shardwright.verbs import measure, stalls, trials
from shardwright.verbs.narrate import plain_strategies, run_of, tell
from tests.zoo import mlp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("short_climbs")]


def note(seconds: dict[str, float], when: str = "") -> None:
    with Store() as store:
        store.put(
            Record(
                key=key, seconds=value, spread=0.0, count=1, environment=measure.environment(),
                measured_at=when or datetime.now(UTC).isoformat(),
            )
            for key, value in seconds.items()
        )  # fmt: skip


def note_all(graph: OperatorGraph, operator_seconds: float, when: str = "") -> None:
    """Give all that a study would measure, each operator the same."""
    devices = measure.num_local_devices()
    runs = [run_of(strategy, graph) for strategy in plain_strategies(graph, devices)]
    keys = {key for run in runs for one in run for key in measure.keys_of(graph, one, "float32")}
    note(dict.fromkeys(keys, operator_seconds), when)
    note({"overhead|peak_flops": 1e10, "overhead|memory_bandwidth": 1e9})
    note({f"overhead|{name}": 1e-5 for name in ("segment_seconds", "message_seconds")})
    for size in range(2, devices + 1):
        note({f"held|all_reduce|1x{size}|loopback|{b}": 0.0 for b in (1024, 65536)})
        for primitive in ("all_reduce", "all_gather", "reduce_scatter"):
            note({f"collective|{primitive}|1x{size}|loopback|{b}": 1e-4 for b in (1024, 65536)})


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "records.sqlite"))
    monkeypatch.setattr(measure, "ROUNDS", 0)


@pytest.mark.parametrize(("when", "is_told"), [("2020-02-29T12:00:00+00:00", True), ("", False)])
def test_measurements_of_long_ago_that_no_longer_hold_are_told_and_planned_as_now(
    when: str, is_told: bool
) -> None:
    """No operator takes a nanosecond: what was just measured is believed, what is old is looked at."""
    module, batch = mlp()
    note_all(api.capture(module, batch, precision="float32").graph, 1e-9, when)
    study = api.study(module, "local", api.Request(), batch=batch)
    assert study.num_measured == 0
    assert [when in told and "--measure always" in told for told in study.notes] == [True] * is_told
    assert (study.costs.factor_map.get("compute", 1.0) > 100) == is_told
    assert study.origin.factors == dict(study.costs.factors)
    best = study.frontier.best
    again = tell(best, study.graph, study.cluster, study.costs).predicted.step_seconds
    assert again == pytest.approx(best.predicted.step_seconds)


OLD = "2020-02-29T12:00:00+00:00"


@pytest.mark.parametrize(("when", "is_heeded"), [(OLD, True), ("2020-02-29T12:11:00+00:00", False)])
def test_trials_of_another_hour_have_a_pace_of_their_own(when: str, is_heeded: bool) -> None:
    """Twice as slow in trials right behind measuring is the model's doing; in later ones it may be the machine's,
    which the records' pace would count again."""
    module, batch = mlp()
    graph = api.capture(module, batch, precision="float32").graph
    note_all(graph, 1e-9, OLD)
    note({f"factor|{graph.fingerprint}|compute": 2.0}, when)
    study = api.study(module, "local", api.Request(), batch=batch)
    factor = study.costs.factor_map["compute"]
    assert len([told for told in study.notes if "now take" in told and OLD in told]) == 1
    assert (factor > 200) == is_heeded
    assert (factor == 2.0) != is_heeded


def test_a_plan_of_this_machine_is_predicted_alike_by_all_who_tell_of_it(tmp_path: Path) -> None:
    """The slow-down of overlap becomes known after the study began, as from an empty store."""
    module, batch = mlp()
    note_all(api.capture(module, batch, precision="float32").graph, 1e-4)

    def tell_step(what: str, _fraction: float) -> None:
        if what == "capturing the model":
            note({"overhead|overlap_slowdown": 2.0})

    study = api.study(module, "local", api.Request(), api.Watch(tell=tell_step), batch=batch)
    assert study.cluster.overlap_slowdown == 2.0
    for plan in study.frontier.plans:
        story = tell(plan, study.graph, study.cluster, study.costs)
        assert story.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds)
        assert story.predicted.worst_peak_bytes == pytest.approx(plan.predicted.peak_bytes)
    file = api.save_plan(study, tmp_path / "plan.json")
    again = api.simulate(file, module, batch=batch)
    assert again.predicted.step_seconds == pytest.approx(again.plan.predicted.step_seconds)


def test_an_exact_search_ends_with_its_seconds_and_says_so() -> None:
    module, batch = mlp()
    how = {"global_batch": 2**20, "seconds": 1e-6}
    study = api.study(module, "1x4xA100", api.Request(**how), batch=batch)
    assert not study.is_complete
    assert len(study.frontier.best.strategy.devices) == 4
    assert any("no time was left to search: give --seconds more" in note for note in study.notes)
    with pytest.raises(NoPlan, match=r"before the search was stopped; give it more time"):
        api.study(module, "1x4xA100", api.Request(**how, memory_limit="1 KiB"), batch=batch)


def test_a_capture_tells_how_far_it_is() -> None:
    module, batch = mlp()
    told: list[tuple[str, float]] = []
    watch = api.Watch(tell=lambda what, share: told.append((what, share)))
    study = api.study(module, "1x2xA100", api.Request(seed_plan="megatron"), watch, batch=batch)
    shares = [share for what, share in told if what == "capturing the model"]
    assert (shares[0], max(shares)) == (0.0, 1.0)
    assert len({*shares}) > len(module.layers)  # type: ignore[arg-type]
    assert not study.notes


def test_a_batch_of_many_samples_is_not_cut_into_millions() -> None:
    module, batch = mlp()
    study = api.study(module, "1x2xA100", api.Request(global_batch=2**31), batch=batch)
    counts = [plan.strategy.pipeline.num_microbatches for plan in study.frontier.plans]
    assert max(counts) <= 4096


@pytest.mark.parametrize("rate", [0.0, 1e-300, 1e30])
def test_a_rate_that_no_machine_has_is_refused_with_where_it_was_recorded(
    rate: float, tmp_path: Path
) -> None:
    module, batch = mlp()
    note({"overhead|peak_flops": 1e10, "overhead|memory_bandwidth": rate})
    with pytest.raises(StoreError, match=r"records\.sqlite: memory_bandwidth.*move the file away"):
        api.study(module, "local", api.Request(measure="never"), batch=batch)


@pytest.mark.parametrize("method", ["exact", "mcmc"])
def test_once_the_seconds_are_over_nothing_is_measured_and_the_best_so_far_is_the_answer(
    method: str,
) -> None:
    module, batch = mlp()
    note({"overhead|peak_flops": 1e10, "overhead|memory_bandwidth": 1e9})
    request = api.Request(seconds=1e-3, method=method)
    study = api.study(module, "local", request, batch=batch)
    assert study.num_measured == 0
    assert study.frontier.best.predicted.step_seconds > 0
    assert study.is_complete == (method == "mcmc")  # chains end with their time


def test_a_study_of_this_machine_knows_a_loader_and_tries_no_plan_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole batches after 5 ms each, which no step beneath them changes."""
    (tmp_path / "net.py").write_text(LOADED)
    loader, model = f"{tmp_path}/net.py:loader", f"{tmp_path}/net.py:build"
    note_all(api.capture(model, global_batch=8, precision="float32").graph, 1e-6)
    monkeypatch.setattr(trials, "run_trial", refuse)
    monkeypatch.setattr(stalls, "LOADER_SECONDS", 0.2)
    best = api.study(model, "local", api.Request(loader=loader, global_batch=8)).frontier.best
    assert best.objective.step_seconds >= 0.005
    assert "input binds" in best.notes[-1]


def refuse(*given: object, **more: object) -> None:
    raise AssertionError("a trial has no loader")


LOADED = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(16, 8)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(x), y)

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.randn(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}

def loader():
    for _ in range(10):
        time.sleep(0.005)
        yield example_batch()
"""
