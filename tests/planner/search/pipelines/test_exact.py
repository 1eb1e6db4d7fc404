"""The exact planner against every pipeline of small random graphs, tried one by one."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.profile import Layer, LayerGraph, WorkerKind
from shardwright.errors import InputError, NoPlan
from shardwright.planner.search.pipelines import (
    EXPLORED,
    SCHEDULES,
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
from tests.planner.search.pipelines.oracle import best_price, price, random_problem


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


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_it_finds_the_best_of_all_pipelines(rng):
    graph, problem = random_problem(rng, most_layers=6, most_workers=4)
    assert seconds_or_inf(problem) == pytest.approx(best_price(graph, problem), rel=1e-9, abs=1e-12)


def test_what_it_says_of_its_pipeline_is_what_the_oracle_says():
    for seed in range(200):
        graph, problem = random_problem(random.Random(seed), most_layers=8, most_workers=8)
        try:
            plan = plan_exact(problem)
        except NoPlan:
            continue
        done, stages = frozenset(), []
        for stage in plan.stages:
            done |= frozenset(stage.layers)
            stages.append((done, stage.replicas))
        assert price(graph, problem, stages) == pytest.approx(plan.seconds)
        assert plan.fits
        assert lower_bound(problem) <= plan.seconds * (1 + 1e-12)
        assert plan.bound == pytest.approx(plan.seconds)


def test_no_published_planner_beats_it():
    compared = 0
    for seed in range(300):
        _, problem = random_problem(random.Random(seed), most_layers=10, most_workers=12)
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


@pytest.mark.parametrize("schedule", SCHEDULES)
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
