"""What one whole transformer layer sends, on real ranks and on 64 ranks in one process.

Counted is everything: what a third layer adds to a model of two, on the wire. The layer has separate
query, key and value projections, biases and two layer norms. Elements sent per rank and step by ring
algorithms: matrices and activations by the formulas of 1-D (arXiv 1909.08053, 2205.05198), 2-D
(2104.05343), 2.5-D (2105.14500) and 3-D (2105.14450), whose papers leave out layer norms' way to
whole rows and vectors; both are added here, each by its own line.
"""

from __future__ import annotations

import math
import os
from functools import cache, partial

import pytest
import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space.grids import Grid, grid_strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, Traffic, run_locally
from tests import zoo
from tests.papers.test_tensor_parallel_3d import Wire
from tests.runtime.equivalence import captured_of, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.world import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
# Narrower, and a gradient's way over depth and rows is one all-reduce: fewer messages, more bytes.
B, S, H = 16, 16, 128
TOKENS, WEIGHTS = B * S * H, 12 * H * H
SGD = partial(torch.optim.SGD, lr=1e-3)
Plan = Seed | Grid

FOUR: tuple[Plan, ...] = (
    Seed(tensor=4),
    Seed(tensor=4, sequence=True),
    Grid(name="cube", sizes=(2, 1, 2), keeps=True),
)
IN_ONE_PROCESS: tuple[Grid, ...] = (
    Grid(name="summa", sizes=(2, 2)),
    Grid(name="tesseract", sizes=(2, 2, 2)),
    Grid(name="cube", sizes=(2, 2, 2), keeps=True),
)
SIXTY_FOUR: tuple[Grid, ...] = (
    Grid(name="tesseract", sizes=(4, 4, 4)),
    Grid(name="cube", sizes=(4, 4, 4), keeps=True),
)


def ring(ranks: int) -> float:
    """Elements sent by an all-reduce, per element."""
    return 2 * (ranks - 1) / ranks


def megatron(p: int, *, sequence: bool) -> float:
    # Biases of row-parallel linears, and with sequence parallelism gains and biases of norms.
    vectors = (6 if sequence else 2) * H
    return 4 * ring(p) * TOKENS + ring(p) * vectors


def plane(depth: int, q: int) -> float:
    # Forward gathers inputs and weights; backward scatters both gradients, gathers weights again.
    matrices = 14 * (q - 1) * TOKENS / depth + 3 * (q - 1) * WEIGHTS
    norms = 4 * (q - 1) / q * TOKENS / depth
    over_depth = ring(depth) * WEIGHTS
    gains, biases = ring(depth * q * q) * 4 * H, ring(depth * q) * 9 * H / q
    return (matrices + norms + over_depth) / q**2 + gains + biases


def cube(p_i: int, p_j: int, p_l: int) -> float:
    ranks = p_i * p_j * p_l
    linears = 4 * (p_j - 1) * TOKENS + 12 * (p_l - 1) * TOKENS + (p_i - 1) * WEIGHTS
    norms = 8 * (p_l - 1) / p_l * TOKENS
    # Query, key, value and up lie on j, out and down on l; each replicated over the other two axes.
    biases = ring(p_i * p_l) * 7 * H / p_j + ring(p_i * p_j) * 2 * H / p_l
    return (2 * linears + norms) / ranks + ring(ranks) * 4 * H + biases


def expected(plan: Plan) -> float:
    if isinstance(plan, Seed):
        return megatron(plan.tensor, sequence=plan.sequence)
    if plan.name == "cube":
        return cube(*plan.sizes)
    depth, q = (1, plan.sizes[0]) if plan.name == "summa" else plan.sizes[:2]
    return plane(depth, q)


@cache
def captured(depth: int) -> Captured:
    return captured_of(partial(zoo.gpt, batch=B, length=S, width=H, depth=depth))[2]


def strategy_of(graph: OperatorGraph, plan: Plan) -> Strategy:
    return grid_strategy(graph, plan) if isinstance(plan, Grid) else seed_strategy(graph, plan)


@cache
def program_of(plan: Plan, depth: int) -> Program:
    graph = captured(depth).graph
    return lower(graph, strategy_of(graph, plan))


def executor_of(plan: Plan, depth: int, world: LocalWorld | None = None) -> Executor:
    model, program = captured(depth), program_of(plan, depth)
    module = zoo.gpt(batch=B, length=S, width=H, depth=depth)[0]
    return Executor(model, program, module, optimizer=SGD, options=RunOptions(world=world))


def sent_for_a_layer(plans: tuple[Plan, ...]) -> list[float]:
    """Train models of two and three layers on this rank; return by how much they differ."""
    batch = zoo.gpt(batch=B, length=S, width=H)[1]
    found: list[float] = []
    for plan in plans:
        counts: list[float] = []
        for depth in (2, 3):
            executor = executor_of(plan, depth)
            with Wire() as wire:
                executor.step(batch)
            counts.append(wire.elements)
            executor.close()
        found.append(counts[1] - counts[0])
    return found


@pytest.mark.ranks
def test_a_layer_on_real_ranks_sends_what_the_formulas_say() -> None:
    for found in run_ranks(4, sent_for_a_layer, FOUR, timeout=240):
        assert found == pytest.approx([expected(plan) for plan in FOUR], rel=1e-12)


def elements(traffic: Traffic, rank: int) -> float:
    """What a rank sent inside the Program, by ring algorithms."""
    total = 0.0
    for (sender, primitive, size), sent in traffic.items():
        factors = {"all_reduce": ring(size), "all_gather": size - 1, "agree": 0.0}
        if sender == rank:
            total += sent.elements * factors.get(primitive, (size - 1) / size)
    return total


minutes = pytest.mark.skipif(
    "SHARDWRIGHT_LAWS" not in os.environ, reason="minutes: 64 ranks in one process, in `make laws`"
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "plan",
    [*IN_ONE_PROCESS, *(pytest.param(plan, marks=minutes) for plan in SIXTY_FOUR)],
    ids=lambda plan: plan.label,
)
def test_a_layer_on_many_ranks_in_one_process_sends_what_the_formulas_say(plan: Grid) -> None:
    ranks = math.prod(plan.sizes)
    seen = (0, ranks // 3, ranks - 1)
    batch = zoo.gpt(batch=B, length=S, width=H)[1]
    counts: list[list[float]] = []
    for depth in (2, 3):
        program_of(plan, depth)

        def step(world: LocalWorld, depth: int = depth) -> None:
            executor_of(plan, depth, world).step(batch)

        traffic = run_locally(step, ranks)[1]
        counts.append([elements(traffic, rank) for rank in seen])
    differences = [more - less for less, more in zip(*counts, strict=True)]
    assert differences == pytest.approx([expected(plan)] * 3, rel=1e-12)


@pytest.mark.parametrize("q", [1, 2])
def test_products_of_a_plane_and_their_gradients_are_the_dense_ones(q: int) -> None:
    """Forward is A B, the input's gradient A B^T, the weight's A^T B: one step shows all three."""
    module, batch = zoo.mlp()
    model = capture(module, batch)
    strategy = grid_strategy(model.graph, Grid(name="summa", sizes=(q, q)))
    plain = train_plain(zoo.mlp, SGD)
    for run in train_rehearsed(model, strategy, module, batch, SGD)[0]:
        assert run.losses == pytest.approx(plain.losses, rel=1e-12)
        for name, parameter in run.parameters.items():
            torch.testing.assert_close(parameter, plain.parameters[name], rtol=1e-12, atol=1e-13)
