"""Trials: plans run in turns on real ranks; the fastest measured is chosen, simple wins ties."""

import json
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.plan import Measured
from shardwright.core.strategy import Strategy
from shardwright.files.planfile import write_plan
from shardwright.planner.search import Limits, Survey, as_strategy, survey
from shardwright.planner.space import Seed
from shardwright.verbs.racing import Entry, Task, trial_rank
from shardwright.verbs.request import Watch
from shardwright.verbs.trials import first_tried, tried, with_measured
from tests.command import shardwright
from tests.planner.search.models import cluster, residual

FEW = Limits(max_candidates=2)
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)

def build():
    return Net()

def example_batch(batch_size=8):
    return {"x": torch.randn(batch_size, 16), "y": torch.zeros(batch_size, dtype=torch.int64)}
"""


@pytest.fixture(scope="module")
def found(short_climbs) -> Survey:
    where = cluster(1, 4, flops=1e10, near=1e9, far=1e8)
    graph = residual(batch=16, width=64, depth=1, classes=16)
    return survey(graph, where, CostTable(), limits=FEW).settled()


def steps(seconds: float, spread: float = 0.0) -> Measured:
    return Measured(step_seconds=seconds, spread_seconds=spread, num_steps=20)


def test_the_fastest_measured_plan_is_chosen_whatever_was_predicted(found: Survey) -> None:
    plain, other = found.plain[0], found.findings.fitting[0].strategy
    ran = {plain.strategy: steps(0.5), other: steps(0.8)}
    frontier = with_measured(found, ran)
    assert frontier.best.strategy == plain.strategy
    assert frontier.best.objective.step_seconds == 0.5
    frontier = with_measured(found, {plain.strategy: steps(0.8), other: steps(0.5)})
    assert frontier.best.strategy == other
    assert frontier.best.measured is not None
    assert frontier.best.measured.plain_seconds == 0.8
    assert "1.60x" in frontier.best.reason


def test_of_plans_that_the_machine_moves_more_than_they_differ_the_simplest_is_chosen(
    found: Survey,
) -> None:
    plain, other = found.plain[0], found.findings.fitting[0].strategy
    for spread, chosen in ((0.02, plain.strategy), (0.0, other)):
        ran = {plain.strategy: steps(0.52, spread), other: steps(0.5, spread)}
        frontier = with_measured(found, ran)
        assert frontier.best.strategy == chosen
    assert not steps(1.0).told_apart(steps(1.019))
    assert steps(1.0).told_apart(steps(1.021))


def test_what_is_shown_beside_the_chosen_plan_needs_less_memory_or_is_the_frontiers(
    found: Survey,
) -> None:
    plain = found.plain[0]
    frontier = with_measured(found, {plain.strategy: steps(plain.predicted.step_seconds)})
    for plan in frontier.plans:
        if plan is not frontier.best:
            here, there = plan.objective, frontier.best.objective
            assert here.peak_bytes < 0.95 * there.peak_bytes or here.dollars < 0.95 * there.dollars


class Certain(Survey):
    """Costs that are known exactly."""

    def half_width(self, one: Strategy, other: Strategy) -> float:
        del one, other
        return 0.0


def test_microbatches_are_tried_first_only_where_they_may_be_the_fastest(found: Survey) -> None:
    """Else they take the place of plans that are predicted faster."""
    best, microbatches = found.frontier.best.strategy, {one.strategy for one in found.plain[1:]}
    certain = Certain(**{one.name: getattr(found, one.name) for one in fields(found)})
    assert microbatches <= {one.strategy for one in first_tried(found, 4)}  # modelled: nobody knows
    first = [one.strategy for one in first_tried(certain, 4)]
    assert first[0] == best
    assert first[1:] == [one.strategy for one in found.fastest(5) if one.strategy != best][:3]
    assert not microbatches & set(first)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_trials_run_plans_beside_data_parallelism_and_never_twice(
    tmp_path: Path, monkeypatch
) -> None:
    from shardwright.verbs.subject import capture, find_cluster

    monkeypatch.setenv("SHARDWRIGHT_STORE", str(tmp_path / "records.sqlite"))
    (tmp_path / "net.py").write_text(MODEL)
    model = f"{tmp_path}/net.py:build"
    graph = capture(model, global_batch=8, precision="float32").graph
    searched = survey(graph, find_cluster("1x2xV100")[0], CostTable(), limits=FEW).settled()
    entry = Entry(model=model, seq=None, optimizer="adamw", environment="here", count=1)
    told: list[str] = []
    watch = Watch(tell=lambda text, _: told.append(text))
    first = tried(searched, entry, lambda: searched, watch)[1]
    assert first.best.measured is not None
    assert first.best.measured.num_steps >= 5
    assert first.best.measured.plain_seconds > 0
    assert any("trying plans" in text for text in told)
    told.clear()
    second = tried(searched, entry, lambda: searched, watch)[1]
    assert second == first
    assert not told
    # An hour later the best of it runs again, ten times as fast as the store says.
    with sqlite3.connect(tmp_path / "records.sqlite") as store:
        store.execute(
            "UPDATE record SET measured_at = '2026-01-01T00:00:00+00:00', seconds = 10 * seconds"
        )
    store.close()
    third = tried(searched, entry, lambda: searched, watch)[1]
    assert [text for text in told if "trying plans" in text]
    assert third.best.measured is not None
    assert third.best.measured.step_seconds < 5 * first.best.measured.step_seconds
    told.clear()
    assert tried(searched, entry, lambda: searched, watch)[1] == third
    assert not told


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_plan_of_one_device_has_its_turns_beside_those_of_two(tmp_path: Path) -> None:
    from shardwright.runtime.launch import launch
    from shardwright.runtime.profile import local_backend
    from shardwright.verbs.subject import capture, find_cluster

    (tmp_path / "net.py").write_text(MODEL)
    model = f"{tmp_path}/net.py:build"
    graph = capture(model, global_batch=8, precision="float32").graph
    searched = survey(graph, find_cluster("1x2xV100")[0], CostTable(), limits=FEW).settled()
    seeds = (Seed(data=2), Seed())
    plans = [searched.plan(as_strategy(searched.context, seed)) for seed in seeds]
    for number, plan in enumerate(plans):
        write_plan(tmp_path / f"{number}.json", plan)
    task = Task(
        model=model, seq=None, optimizer="adamw", folder=str(tmp_path), plans=("0.json", "1.json"),
        turns=3, steps=2, budget_seconds=60.0,
    )  # fmt: skip
    first, second = launch(trial_rank, 2, (task,), backend=local_backend())
    assert [len(plan.strategy.devices) for plan in plans] == [2, 1]
    assert [one.num_steps for one in first] == [one.num_steps for one in second] == [6, 6]
    # Its turns are not those of a rank that stands by.
    assert first[1].seconds > 2 * second[1].seconds > 0.0


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_tuning_writes_what_ran_and_what_was_fitted_for_the_next_planning(tmp_path: Path) -> None:
    from shardwright.files.planfile import read_plan_file
    from shardwright.runtime.launch import launch
    from shardwright.verbs.tuning import tune

    (tmp_path / "net.py").write_text(MODEL)
    words = ("plan", "net.py:build", "-b", "8", "-c", "1x2xV100", "--precision", "float32")
    done = shardwright(*words, "--seed-plan", "megatron:1x2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    plan, model = str(tmp_path / "plan.json"), f"{tmp_path}/net.py:build"
    first, _ = launch(tune, 2, (plan, model))
    document = read_plan_file(plan)
    assert document.frontier == first.frontier
    best = document.frontier.best
    assert best.measured is not None
    assert best.measured.num_steps >= 5
    assert document.origin.factors == dict(first.factors)
    assert "compute" in document.origin.factors
    again = shardwright(*words, "--costs", "plan.json", "-o", "again.json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert read_plan_file(tmp_path / "again.json").origin.factors == document.origin.factors
    told = shardwright("simulate", "again.json", "net.py:build", "--json", folder=tmp_path)
    chosen = read_plan_file(tmp_path / "again.json").frontier.best
    assert json.loads(told.stdout)["step_seconds"] == chosen.predicted.step_seconds
    bare = shardwright(*words, "--costs", "again.json", folder=tmp_path)
    assert bare.returncode == 0
    # Refused before the model is looked for or this machine is measured, which takes half a minute.
    local = shardwright("plan", "none.py:build", "--costs", "plan.json", folder=tmp_path)
    assert local.returncode == 2
    assert "leave out the costs" in local.stderr
