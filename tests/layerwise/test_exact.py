"""The exact planner against every pipeline of small random graphs, tried one by one."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.core.schedules import EXPLORED, PLANNED
from shardwright.errors import InputError, NoPlan
from shardwright.layerwise import (
    Level,
    PipelineProblem,
    find_cuts,
    lower_bound,
    plan_bapipe,
    plan_exact,
    plan_pipedream,
    study_levels,
    study_pipelines,
)
from tests.layerwise.oracle import best_price, price, random_problem


def seconds_or_inf(problem):
    try:
        return plan_exact(problem).seconds
    except NoPlan:
        return math.inf


@pytest.mark.parametrize("chain", [True, False])
def test_it_finds_the_best_of_all_pipelines_of_random_graphs(chain):
    infeasible = 0
    for seed in range(500):
        rng = random.Random(f"{seed} {chain}")
        graph, problem = random_problem(rng, most_layers=5, chain=chain)
        best = best_price(graph, problem)
        infeasible += best == math.inf
        assert seconds_or_inf(problem) == pytest.approx(best, rel=1e-9, abs=1e-12), seed
    assert infeasible >= 10


def test_it_finds_the_best_as_the_published_optimizer_counts():
    for seed in range(150):
        rng = random.Random(f"published {seed}")
        graph, problem = random_problem(rng, most_layers=5)
        problem = dataclasses.replace(
            problem, schedule="pipedream", microbatches=0, formula="published"
        )
        assert seconds_or_inf(problem) == pytest.approx(best_price(graph, problem), rel=1e-9), seed


def test_it_finds_the_best_where_layers_and_weights_may_be_split():
    infeasible, split_layers, split_weights = 0, 0, 0
    for seed in range(700):
        rng = random.Random(f"shards {seed}")
        graph, problem = random_problem(rng, most_layers=4, chain=seed % 2 == 0, most_shards=4)
        best = best_price(graph, problem)
        infeasible += best == math.inf
        try:
            plan = plan_exact(problem)
        except NoPlan:
            assert best == math.inf, seed
            continue
        assert plan.seconds == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        assert plan.bound == plan.seconds
        split_layers += any(stage.shards > 1 for stage in plan.stages)
        split_weights += any(stage.splits_weights for stage in plan.stages)
    assert infeasible >= 10
    assert split_layers >= 50
    assert split_weights >= 1


@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_more_shards_never_make_it_slower(rng, shards):
    _, problem = random_problem(rng, most_layers=8, most_workers=10)
    narrow = seconds_or_inf(problem)
    wide = dataclasses.replace(problem, shards=shards)
    assert seconds_or_inf(wide) <= narrow * (1 + 1e-9)


@given(st.randoms(use_true_random=False))
def test_it_finds_the_best_of_all_pipelines(rng):
    graph, problem = random_problem(rng, most_layers=5, most_workers=4, most_shards=3)
    assert seconds_or_inf(problem) == pytest.approx(best_price(graph, problem), rel=1e-9, abs=1e-12)


def test_it_finds_the_best_where_memory_depends_on_how_later_stages_are_split():
    infeasible = 0
    for seed in range(300):  # in a few of them replicas have to be counted to find the optimum
        rng = random.Random(f"tight {seed}")
        graph, problem = random_problem(rng, most_layers=4, chain=True)
        size = sum(layer.activation_bytes + 2 * layer.parameter_bytes for layer in graph.layers)
        room = max(size, 1) * rng.uniform(0.3, 1.5)
        problem = dataclasses.replace(
            problem, workers=(WorkerKind(count=rng.randint(4, 6), memory_bytes=room),),
            shards=rng.choice((2, 3, 6)), schedule=rng.choice(("1f1b-so", "1f1b-sno")),
            microbatches=8, bandwidth=rng.choice((2.0, 10.0, 1e6)),
        )  # fmt: skip
        best = best_price(graph, problem)
        infeasible += best == math.inf
        assert seconds_or_inf(problem) == pytest.approx(best, rel=1e-9, abs=1e-12), seed
    assert infeasible >= 5


def test_weights_are_split_where_replicas_would_not_fit():
    """Eight layers of 1 s, 10 B of weights and 5 B of outputs, 4 microbatches, 1,000 B/s."""
    layers = tuple(
        Layer(name=f"l{i}", forward_seconds=1.0, parameter_bytes=10.0, activation_bytes=5.0)
        for i in range(8)
    )
    edges = tuple((i, i + 1) for i in range(7))
    cuts = find_cuts(LayerGraph(name="chain", layers=layers, edges=edges))
    found = {}
    for room in (1000.0, 95.0):
        problem = PipelineProblem(
            cuts=cuts, workers=(WorkerKind(count=4, memory_bytes=room),), bandwidth=1e3,
            schedule="gpipe", microbatches=4, shards=4,
        )  # fmt: skip
        (stage,) = plan_exact(problem).stages
        found[room] = (stage.shards, stage.splits_weights, stage.memory_bytes, stage.seconds)
    assert found[1000.0] == (1, False, 2 * 80 + 40, pytest.approx(8 + 3 * 80 / 1e3))
    assert found[95.0] == (1, True, 2 * 80 / 4 + 10 + 40, pytest.approx(8 + 1.5 * 3 * 80 / 1e3))


def test_a_layer_with_large_weights_is_split_and_the_rest_is_not():
    """Krizhevsky's one weird trick: only what is fully connected is divided among workers."""
    convolutions = [
        Layer(name=f"c{i}", forward_seconds=1.0, activation_bytes=40.0, parameter_bytes=1.0)
        for i in range(4)
    ]
    linear = Layer(name="f", forward_seconds=4.0, activation_bytes=1.0, parameter_bytes=2000.0)
    edges = tuple((i, i + 1) for i in range(4))
    graph = LayerGraph(name="weird", layers=(*convolutions, linear), edges=edges)
    problem = PipelineProblem(
        cuts=find_cuts(graph), workers=(WorkerKind(count=8),), bandwidth=200.0, shards=8
    )
    *first, last = plan_exact(problem).stages
    assert {stage.shards for stage in first} == {1}
    assert last.shards == last.num_workers > 1


def test_what_it_says_of_its_pipeline_is_what_the_oracle_says():
    for seed in range(200):
        graph, problem = random_problem(
            random.Random(seed), most_layers=8, most_workers=8, most_shards=8
        )
        try:
            plan = plan_exact(problem)
        except NoPlan:
            continue
        done, stages = frozenset(), []
        for stage in plan.stages:
            done |= frozenset(stage.layers)
            stages.append((done, stage.workers, stage.shards, stage.splits_weights))
        assert price(graph, problem, stages) == pytest.approx(plan.seconds)
        assert plan.fits
        assert lower_bound(problem) <= plan.seconds * (1 + 1e-12)
        assert plan.bound == pytest.approx(plan.seconds)


def test_no_published_planner_beats_it():
    compared = 0
    for seed in range(300):
        _, problem = random_problem(
            random.Random(seed), most_layers=10, most_workers=12, most_shards=3
        )
        try:
            best = plan_exact(problem)
        except NoPlan:
            continue
        for planner in (plan_pipedream, plan_bapipe):
            try:
                rival = planner(problem)
            except NoPlan:
                continue
            if rival.fits:
                compared += 1
                assert best.seconds <= rival.seconds * (1 + 1e-12), (seed, planner)
    assert compared > 300


def chain_of(*seconds, activation=0.0):
    layers = tuple(
        Layer(name=f"layer{i}", forward_seconds=each, activation_bytes=activation)
        for i, each in enumerate(seconds)
    )
    edges = tuple((i, i + 1) for i in range(len(seconds) - 1))
    return LayerGraph(name="chain", layers=layers, edges=edges)


def test_a_graph_with_too_many_cuts_is_planned_on_some_of_them_and_bounded():
    branches = 12
    layers = [Layer(name=f"layer{i}", forward_seconds=1.0) for i in range(2 * branches)]
    edges = tuple((2 * i, 2 * i + 1) for i in range(branches))
    cuts = find_cuts(LayerGraph(name="wide", layers=tuple(layers), edges=edges), 100)
    assert not cuts.is_complete
    assert cuts.num_cuts <= 300
    plan = plan_exact(PipelineProblem(cuts=cuts, workers=(WorkerKind(count=8),), bandwidth=1.0))
    assert plan.bound == 3.0 == plan.seconds


def test_idle_workers_stay_idle_when_their_weights_message_costs_more():
    layers = (Layer(name="a", forward_seconds=1.0, parameter_bytes=100.0),)
    cuts = find_cuts(LayerGraph(name="one", layers=layers, edges=()))
    problem = PipelineProblem(cuts=cuts, workers=(WorkerKind(count=4),), bandwidth=1.0)
    assert plan_exact(problem).num_workers == 1
    assert plan_pipedream(problem).num_workers == 4


def test_a_step_with_the_best_schedule_is_never_slower_than_with_one_of_them():
    rng = random.Random(3)
    for _ in range(20):
        _, problem = random_problem(rng, most_layers=7, most_workers=6)
        problem = dataclasses.replace(problem, schedule="gpipe", microbatches=5)
        alone = [
            seconds_or_inf(dataclasses.replace(problem, schedule=schedule)) for schedule in EXPLORED
        ]
        if min(alone) < math.inf:
            assert study_pipelines(problem, EXPLORED).best.seconds == min(alone)


def test_nothing_fits_is_said_with_the_remedy():
    layers = (Layer(name="a", forward_seconds=1.0, activation_bytes=100.0),)
    cuts = find_cuts(LayerGraph(name="one", layers=layers, edges=()))
    workers = (WorkerKind(count=2, memory_bytes=10.0),)
    with pytest.raises(NoPlan, match=r"give more memory or more workers"):
        plan_exact(PipelineProblem(cuts=cuts, workers=workers, bandwidth=1.0))


@pytest.mark.parametrize("schedule", PLANNED)
def test_a_schedule_and_its_microbatches_must_fit_together(schedule):
    cuts = find_cuts(chain_of(1.0))
    wrong = 4 if schedule == "pipedream" else 0
    with pytest.raises(InputError, match="only 'pipedream' runs without a flush"):
        PipelineProblem(
            cuts=cuts, workers=(WorkerKind(count=1),), bandwidth=1.0, schedule=schedule,
            microbatches=wrong,
        )  # fmt: skip


def test_levels_are_never_worse_than_the_published_recursion():
    rng = random.Random(5)
    for _ in range(30):
        _, problem = random_problem(rng, most_layers=7)
        problem = dataclasses.replace(
            problem, schedule="pipedream", microbatches=0, workers=(WorkerKind(count=1),)
        )
        levels = (Level(count=rng.randint(1, 3), bandwidth=5.0), Level(count=2, bandwidth=1.0))
        study = study_levels(problem, levels)
        assert study.best.seconds <= study.rivals[0].seconds


def test_one_level_is_the_flat_problem_without_the_first_output():
    cuts = find_cuts(chain_of(3.0, 1.0, 2.0, 2.0, 4.0))
    problem = PipelineProblem(cuts=cuts, workers=(WorkerKind(count=3),), bandwidth=1.0)
    levels = study_levels(problem, [Level(count=3, bandwidth=1.0)])
    assert levels.best.seconds == plan_exact(problem).seconds == 4.0


def test_equal_problems_give_equal_pipelines():
    _, problem = random_problem(random.Random(8), most_layers=9, most_workers=9)
    assert plan_exact(problem) == plan_exact(problem)
