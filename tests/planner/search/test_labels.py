"""What plans are called: by what their axes really split, and no two of a frontier alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.layout import REPLICATE
from shardwright.core.plan import Objective, Plan
from shardwright.core.strategy import ParameterConfig, Strategy
from shardwright.planner.model.arrangements import Arrangement
from shardwright.planner.model.context import Context
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.training import Training
from shardwright.planner.search.labels import describe, relabelled, told_apart
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from tests.planner.search.models import cluster, opaque, residual


def described(graph: OperatorGraph, arrangement: Arrangement, wanted: str) -> str:
    """Describe the assignment in which every operator has a dim of this name on the last axis, where
    it may, and no parameter is sharded."""
    context = Context.of(graph, cluster(1, arrangement.num_devices), CostTable(), Training())
    problem = Problem.of(context, arrangement.mesh(0), 1)
    assert problem.statement.terms
    assignment = [0] * len(problem.sizes)
    for root in problem.roots:
        names = [dims[-1] for dims in problem.domains[root]]
        assignment[problem.config_of[root]] = names.index(wanted) if wanted in names else 0
    assignments = (tuple(assignment),) * len(context.facts.ties.ranges)
    return describe(problem, arrangement, assignments, arrangement.stages)


@pytest.mark.parametrize(
    ("wanted", "label"),
    [
        ("b", "data parallel x 2"),
        ("s", "sequence parallel x 2"),
        ("n", "tensor parallel x 2"),
        ("k", "tensor parallel x 2"),
        ("", "replicated x 2"),
    ],
)
def test_a_plan_is_called_by_what_its_axis_splits(wanted: str, label: str) -> None:
    assert (
        described(residual(), Arrangement(stages=1, data=1, tensor=2, microbatches=1), wanted)
        == label
    )


def test_a_label_names_a_compressor_only_where_gradients_are_summed() -> None:
    training = Training(compressor="top-k", density=0.01)
    context = Context.of(residual(), cluster(1, 2), CostTable(), training)
    said = ", summed gradients in top-k of 0.01"
    assert as_strategy(context, Seed(data=2)).label == f"data parallel x 2{said}"
    for seed in (Seed(tensor=2), Seed(stages=2)):
        assert "gradients" not in as_strategy(context, seed).label


def test_what_cannot_be_split_is_not_data_parallel() -> None:
    two = Arrangement(stages=1, data=2, tensor=1, microbatches=1)
    assert described(opaque(), two, "") == "replicated x 2"
    context = Context.of(opaque(), cluster(1, 2), CostTable(), Training())
    assert as_strategy(context, Seed(data=2)).label == "replicated x 2"
    assert as_strategy(context, Seed(tensor=2)).label == "replicated x 2"
    both = Seed(data=2, tensor=2, sequence=True, zero=1)
    assert as_strategy(context, both).label == "replicated x 2 x 2, ZeRO-1"


def plan_of(strategy: Strategy) -> Plan:
    return Plan(
        strategy=strategy, predicted=Objective(step_seconds=1.0, peak_bytes=1.0), model="",
        graph_fingerprint="", cluster_name="", cluster_fingerprint="", costs_fingerprint="",
        global_batch=8, method="", seed=0, version="",
    )  # fmt: skip


def test_stages_of_one_device_each_are_no_single_device() -> None:
    context = Context.of(residual(), cluster(1, 2), CostTable(), Training())
    strategy = as_strategy(context, Seed(stages=2, num_microbatches=2))
    assert relabelled(context, strategy) == strategy.label == "2 stages 1f1b, 2 microbatches"
    merged = replace(strategy, meshes=(strategy.meshes[0],) * 2)
    assert relabelled(context, merged) == "single device, 2 microbatches"


def test_plans_of_one_label_are_told_apart_by_what_differs() -> None:
    context = Context.of(residual(), cluster(1, 2), CostTable(), Training())
    whole = as_strategy(context, Seed(data=2))
    row = ParameterConfig(rest=(0,), optimizer=(0,))
    sharded = replace(whole, parameters=(row, *whole.parameters[1:]))
    other = replace(whole, label="another")
    found = [one.strategy.label for one in told_apart([*map(plan_of, (whole, sharded, other))])]
    assert whole.parameters[0].rest == (REPLICATE,)
    assert found == [
        "data parallel x 2, parameters sharded: 0",
        "data parallel x 2, parameters sharded: 1",
        "another",
    ]
    same = [one.strategy.label for one in told_apart([plan_of(whole), plan_of(whole)])]
    assert same == ["data parallel x 2, variant 1", "data parallel x 2, variant 2"]
