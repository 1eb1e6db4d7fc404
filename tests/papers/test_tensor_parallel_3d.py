"""Tensor parallelism in 1, 2, 2.5 and 3 dimensions against the formulas of the papers.

Megatron-LM (arXiv 1909.08053, 2205.05198), Optimus (2104.05343), Tesseract (2105.14500) and 3-D
(2105.14450). Volumes are elements sent per rank by ring algorithms, counted over the messages of a
lowered Program.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.space.grids import Grid, grid_strategy
from tests import zoo
from tests.runtime.equivalence import StrategyBuilder, assert_equivalent


def _build(grid: Grid, graph: OperatorGraph) -> Strategy:
    return grid_strategy(graph, grid)


def builders(*grids: Grid) -> dict[str, StrategyBuilder]:
    """Return builders which can be sent to another process, by label."""
    return {grid.label: partial(_build, grid) for grid in grids}


FOUR = [
    Grid(name="summa", sizes=(2, 2)),
    Grid(name="tesseract", sizes=(1, 2, 2)),
    Grid(name="tesseract", sizes=(2, 1, 2), recompute=True),
    Grid(name="cube", sizes=(1, 2, 2), keeps=True),
    Grid(name="cube", sizes=(2, 2, 1), num_microbatches=2, keeps=True),
    Grid(name="cube", sizes=(2, 1, 2), recompute=True),
    Grid(name="cube", sizes=(4, 1, 1)),
]
EIGHT = [
    Grid(name="cube", sizes=(2, 2, 2), keeps=True),
    Grid(name="cube", sizes=(2, 2, 2), recompute=True),
    Grid(name="cube", sizes=(2, 1, 4)),
    Grid(name="tesseract", sizes=(2, 2, 2)),
]


@pytest.mark.ranks
def test_grids_of_four_ranks_train_as_one_process() -> None:
    adam = partial(torch.optim.AdamW, lr=1e-2)
    assert_equivalent(4, zoo.gpt, builders(*FOUR))
    assert_equivalent(4, zoo.mlp, builders(*FOUR), adam)


@pytest.mark.ranks
def test_grids_of_eight_ranks_train_as_one_process() -> None:
    assert_equivalent(8, zoo.gpt, builders(*EIGHT))
