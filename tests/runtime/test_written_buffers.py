"""Buffers that forward reads and writes in one step: gradients are of what was read."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests.runtime.equivalence import assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.torch


class Queue(nn.Module):
    """Keys of former steps that new queries are held against, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("queue", torch.randn(8, 4))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        scores = self.net(x) @ self.queue.clone().T
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.net(z), self.queue[: -len(z)]]))
        return scores.logsumexp(1).mean()


class Scale(nn.Module):
    """A running size, read before it moves on and again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        old = self.size
        self.size = self.size * 0.9 + x.detach().abs().mean(0) * 0.1
        return x / old + x * self.size


class Kept(nn.Module):
    """A copy of the old value that is used after the new one was written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        old, before = self.mean.clone(), self.steps.clone()
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.steps += 1
        return x * (old + self.mean) * before


class Layers(nn.Module):
    """Layers that hold such buffers, each a block that may be recomputed."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), kind(), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


class Watching(nn.Module):
    """A module that stays opaque, for it draws in Python, with a size that moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        old = self.size.clone()
        self.size += x.detach().abs().mean(0)
        return x / old


def queue() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    return Queue().double(), {"x": x, "z": x.flip(0) * 1.1}


def layers(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Layers(kind).double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def recomputing(graph: OperatorGraph) -> Strategy:
    every = tuple(range(len(graph.blocks)))
    return replace(seed_strategy(graph, Seed(data=2)), recompute=every, label="recomputation")


WAYS = {**named(Seed(data=2), Seed(data=2, zero=3)), "recomputation": recomputing}


def test_a_queue_is_differentiated_by_as_it_was_read() -> None:
    assert_equivalent(2, queue, WAYS)


@pytest.mark.parametrize("kind", [Scale, Kept, Watching])
def test_the_old_value_of_a_buffer_outlives_the_write_of_the_new_one(kind: type[nn.Module]) -> None:
    assert_equivalent(2, partial(layers, kind), WAYS)


class Far(nn.Module):
    """A size that the first layer reads and the loss moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("size", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x / self.size
        for layer in self.layers:
            x = layer(x).tanh()
        self.size = self.size * 0.5 + x.detach().abs().mean(0)
        return x.pow(2).mean()


def far() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Far().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}


def test_a_buffer_that_one_stage_reads_and_another_writes_is_refused() -> None:
    """The first stage went on with what stood there when it was built."""
    graph = capture(*far()).graph
    with pytest.raises(InputError, match="size is used on meshes 0, 1; put what reads"):
        lower(graph, seed_strategy(graph, Seed(stages=2)))
