"""The stated problem against the definition of its costs, and its optimum against brute force."""

import itertools
import math
import random

import numpy as np
import pytest

from shardwright.core.compression import WHOLE_BELOW
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Mesh
from shardwright.planner.model.context import Context
from shardwright.planner.model.parameters import num_levels
from shardwright.planner.model.problem import Problem
from shardwright.planner.model.terms import KEPT, Weights
from shardwright.planner.model.training import Training
from shardwright.planner.solve.frontier import hull
from shardwright.reasons.factors import FactorGraph, factor_graph
from tests.planner.model.oracle import Additive
from tests.planner.search.models import begun, cluster, images, mlp, residual, squares
from tests.planner.solve import exhaustive

# Levels and recomputation with transients left out, which the oracle does not know.
WEIGHTS = Weights(each=2.0, once=1.0, exposed=0.5, synced=0.25, transient=0.0)


def problem_of(graph: OperatorGraph, sizes: tuple[int, ...], microbatches: int) -> Problem:
    axes = ("data", "tensor") if len(sizes) == 2 else ("tensor",)
    count = math.prod(sizes)
    context = Context.of(graph, cluster(2, count // 2), CostTable(), Training())
    mesh = Mesh(axes=axes, sizes=sizes, devices=tuple(range(count)))
    return Problem.of(context, mesh, microbatches)


def weigh(columns: list[float]) -> tuple[float, float]:
    each, once, gather, sync, kept, flight = columns
    seconds = WEIGHTS.each * (each + WEIGHTS.exposed * gather)
    return seconds + once + WEIGHTS.synced * sync, kept + flight


def pinned(graph: FactorGraph, choices: dict[int, int]) -> tuple[float, float]:
    """Return the cost of fixed choices with the cheapest copies."""
    allowed = [
        np.array([choices[variable]]) if variable in choices else np.arange(size)
        for variable, size in enumerate(graph.sizes)
    ]
    solved = graph.restrict(allowed).elimination().solve(np.array([(1.0, 0.0)]))
    return float(solved.seconds[0]), float(solved.bytes[0])


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("build", [mlp, residual, images, squares, begun])
def test_terms_add_up_to_the_definition_for_random_choices(build, sizes, microbatches) -> None:
    graph = build()
    problem = problem_of(graph, sizes, microbatches)
    ties, rng = problem.context.facts.ties, random.Random(3)
    oracle = Additive(problem.context, problem.mesh, microbatches)
    tables, finite = factor_graph(problem, WEIGHTS), 0
    for _ in range(60):
        config = {root: rng.randrange(len(problem.domains[root])) for root in problem.roots}
        level = {tensor: rng.randrange(num_levels(problem, tensor)) for tensor in problem.level_of}
        again = {lead: rng.randrange(len(problem.modes)) for lead in problem.mode_of}
        choices = {problem.config_of[root]: choice for root, choice in config.items()}
        choices |= {problem.level_of[tensor]: choice for tensor, choice in level.items()}
        choices |= {problem.mode_of[lead]: choice for lead, choice in again.items()}
        dims = tuple(problem.domains[root][config[root]] for root in ties.root)
        tied = {t: level[_root_parameter(problem, t)] for t in graph.parameters}
        modes = {b: problem.modes[on] for lead, on in again.items() for b in ties.classes[lead]}
        seconds, memory = weigh(oracle.cost(dims, tied, modes))
        found = pinned(tables, choices)
        assert found[0] == pytest.approx(seconds, rel=1e-9)
        if math.isfinite(seconds):
            finite += 1
            assert found[1] == pytest.approx(memory, rel=1e-9)
    assert finite > 0


def _root_parameter(problem: Problem, tensor: int) -> int:
    graph, ties = problem.context.graph, problem.context.facts.ties
    reader = graph.consumers[tensor][0]
    return graph.operators[ties.root[reader]].inputs[graph.operators[reader].inputs.index(tensor)]


@pytest.mark.parametrize("levels", [(0,), (0, 1, 2, 3, 4)])
def test_the_optimum_and_the_hull_equal_brute_force_over_all_strategies(levels) -> None:
    graph = mlp(batch=256, width=256, depth=1, classes=64)
    problem = problem_of(graph, (4,), 1)
    oracle = Additive(problem.context, problem.mesh, 1)
    weights = list(problem.level_of)[:2]  # the first layer's weight and bias take every level
    points = []
    for choice in itertools.product(*(problem.domains[root] for root in problem.roots)):
        for chosen in itertools.product(levels, repeat=2):
            point = weigh(oracle.cost(choice, dict(zip(weights, chosen, strict=True))))
            if math.isfinite(point[0]):
                points.append(point)
    frontier = []
    for seconds, memory in sorted(set(points)):
        if not frontier or memory < frontier[-1][1]:
            frontier.append((seconds, memory))
    factors = factor_graph(problem, WEIGHTS)
    allowed = [np.arange(size) for size in factors.sizes]
    for tensor, variable in problem.level_of.items():
        allowed[variable] = np.array(levels if tensor in weights else (0,))
    found = hull(factors.restrict(allowed).elimination())
    expected = exhaustive.hull(frontier)
    assert [(p.seconds, p.bytes) for p in found.points] == [pytest.approx(e) for e in expected]


def test_equal_blocks_share_decisions_and_the_first_without_input_gradient_does_not() -> None:
    context = Context.of(mlp(depth=3), cluster(1, 2), CostTable(), Training())
    assert context.facts.ties.classes == {0: (0,), 1: (1, 2), 3: (3,)}
    context = Context.of(residual(depth=3), cluster(1, 2), CostTable(), Training())
    assert context.facts.ties.classes == {0: (0,), 1: (1, 2, 3), 4: (4,)}


def test_every_operator_on_the_data_axis_splits_samples() -> None:
    problem = problem_of(residual(), (2, 2), 1)
    samples = problem.context.facts.samples
    for root, domain in problem.domains.items():
        if samples.operator_dim[root]:
            assert {dims[0] for dims in domain} == {samples.operator_dim[root]}


def test_what_error_feedback_keeps_takes_memory() -> None:
    kept = [kept_of_feedback(error_feedback) for error_feedback in (False, True)]
    graph = mlp()
    assert kept[1] - kept[0] == sum(graph.tensors[tensor].bytes for tensor in graph.parameters)


def test_what_compressed_gradients_owe_takes_memory_where_they_are_summed() -> None:
    graph = mlp(width=64)
    without, packed = Training(), Training(compressor="int8")
    kept = [kept_by_ranks(one, width=64) for one in (without, packed)]
    sizes = [graph.tensors[tensor].bytes for tensor in graph.parameters]
    assert kept[1] - kept[0] == sum(size for size in sizes if size >= 4 * WHOLE_BELOW) > 0


def kept_of_feedback(error_feedback: bool) -> float:
    """Return the bytes that plain data parallelism keeps on a device, gradients sent in bfloat16."""
    return kept_by_ranks(Training(gradient_dtype="bfloat16", error_feedback=error_feedback))


def kept_by_ranks(training: Training, **sizes: int) -> float:
    """Return the bytes that plain data parallelism keeps on a device."""
    context = Context.of(mlp(**sizes), cluster(1, 2), CostTable(), training)
    problem = Problem.of(context, Mesh(axes=("data",), sizes=(2,), devices=(0, 1)), 1)
    first = (0,) * len(problem.sizes)
    return float(problem.per_block(first)[KEPT].sum())
