"""Blocks that stand alike are lowered once: the Program is that of blocks which are each like none."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.core.schedules import NAMED, SCHEDULES
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import find_samples
from shardwright.planner.lower import lower
from shardwright.planner.lower.builder import ProgramBuilder
from shardwright.planner.lower.gradients import place
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.lower import Lowering
from shardwright.planner.lower.outline import Outline
from shardwright.planner.space import Seed, seed_strategy
from tests.laws.strategies import MESHES, Shape, random_strategy, with_wire
from tests.planner.lower.test_expand import DEPTH, MODELS, echoed

GRIDS = [(sizes, n) for sizes in MESHES for n in (1, 2, 3, 4) if 2 <= math.prod(sizes) * n <= 8]
DRAWS = 6


def unlike(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with no block like another, as lowering sees it."""
    blocks = [replace(one, signature=f"{number}") for number, one in enumerate(graph.blocks)]
    return replace(graph, blocks=tuple(blocks))


def everything(program: Program) -> dict[str, object]:
    found = {one.name: getattr(program, one.name) for one in fields(program)}
    return {
        name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in found.items()
    }


def lowered(graph: OperatorGraph, strategy: Strategy) -> dict[str, object] | str:
    try:
        return everything(lower(graph, strategy))
    except ValueError as error:
        return str(error)


def drawn(graph: OperatorGraph, random: Random) -> Strategy:
    """Draw a strategy that mostly treats equal blocks alike, on one mesh or several."""
    samples, schedule = find_samples(graph), random.choice((*NAMED, "custom"))
    (sizes, stages), even = random.choice(GRIDS), random.random() < 0.5
    shape = Shape(
        sizes=sizes,
        stages=stages,
        chunks=random.choice((1, 2)) if SCHEDULES[schedule].chunks else 1,
        num_microbatches=random.choice((1, 2, 4)),
        schedule=schedule,
        wildness=random.choice((0.0, 0.5, 1.0)),
        recomputes=random.random() < 0.5,
        drops=random.random() < 0.5,
        cuts_blocks=random.random() < 0.3,
        shuffles=random.random() < 0.5,
        seed=random.randrange(2**32),
    )
    strategy = with_wire(random_strategy(graph, samples, shape), shape.seed, "bfloat16")
    strategy = echoed(Outline(graph, samples), strategy, random)
    sync = replace(strategy.gradient_sync, buckets=())
    return replace(
        strategy,
        gradient_sync=sync if even else strategy.gradient_sync,
        reshard_again=() if even else strategy.reshard_again,
        updates=random.choice(("step", "ready", "microbatch")),
    )


@pytest.mark.parametrize("name", MODELS)
def test_blocks_that_are_alike_give_the_program_of_blocks_that_are_not(name: str) -> None:
    graph = MODELS[name]()
    for draw in range(DRAWS):
        strategy = drawn(graph, Random(f"{name} {draw}"))
        assert lowered(graph, strategy) == lowered(unlike(graph), strategy), draw


class Counted(Lowering):
    """Lowers, and notes which blocks it looked at operator by operator."""

    def __init__(self, graph: OperatorGraph, strategy: Strategy) -> None:
        ground = Ground(graph, find_samples(graph))
        placed = place(graph, strategy, ground.samples, ground.iterations)
        super().__init__(ProgramBuilder(ground, strategy), placed)
        self.looked_at: list[int] = []

    def lower_anew(self, number: int) -> None:
        self.looked_at.append(number)
        super().lower_anew(number)


@pytest.mark.parametrize(
    ("name", "most"), [("mlp", 9), ("residual", 9), ("images", 9), ("encoded", 20)]
)
def test_of_equal_layers_on_eight_meshes_few_are_looked_at(name: str, most: int) -> None:
    graph = MODELS[name]()
    strategy = seed_strategy(graph, Seed(data=2, stages=8, num_microbatches=4))
    lowering = Counted(graph, strategy)
    lowering.run()
    assert DEPTH > 30
    assert len(lowering.looked_at) <= most
