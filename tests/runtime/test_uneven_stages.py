"""Pipelines whose stages have unequal numbers of devices train as one process does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.space.placement import Part, place_parts
from shardwright.planner.space.seeds import Seed, balanced_stages
from tests.runtime.equivalence import assert_equivalent

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.tanh(self.layers(x)), y)


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    return Net().double(), {name: torch.randn(12, 8, dtype=torch.float64) for name in "xy"}


def uneven(sizes: tuple[int, ...], schedule: str, pieces: int, graph: OperatorGraph) -> Strategy:
    stages, parts, first = balanced_stages(graph, len(sizes)), list[Part](), 0
    for number, size in enumerate(sizes):
        own = tuple(index for index, stage in enumerate(stages) if stage == number)
        devices = tuple(range(first, first + size))
        parts.append(Part(devices=devices, operators=own, seed=Seed(data=size)))
        first += size
    return place_parts(graph, parts, Seed(num_microbatches=pieces, schedule=schedule))


def test_stages_of_one_and_three_devices_train_as_one_process_does() -> None:
    """Three data-parallel devices feed one, and one feeds three; samples are divided, and gradients summed."""
    cases = [
        ((3, 1), "1f1b", 4),
        ((1, 3), "zb-h1", 2),
        ((1, 3), "gpipe", 4),
        ((1, 2, 1), "1f1b-so", 2),
    ]
    strategies = {f"{case}": partial(uneven, *case) for case in cases}
    assert_equivalent(4, net, strategies)
