"""What is measured before the first search: plain strategies, as far as the model allows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.costs import CostTable
from shardwright.planner.search import search
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.verbs.narrate import axis_words, plain_strategies, run_of, tell
from tests.planner.search.models import cluster, mlp

pytestmark = pytest.mark.torch


def test_a_plan_for_gpus_says_what_lies_around_its_tensors() -> None:
    graph, where, table = mlp(), cluster(1, 2), CostTable()
    plan = search(graph, where, table, seed_plan="megatron:1x2").best
    names = [name for name, size in tell(plan, graph, where, table).beside if size > 0]
    assert names == ["allocator's slack", "NCCL's buffers", "context and kernels"]
    cpus = replace(where, kinds=(replace(where.kinds[0], backend="cpu"),))
    assert tell(plan, graph, cpus, table).beside == ()


class Dropping(nn.Module):
    """Dropout, whose backward reads other bytes on CPUs than on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.drop(x)).square().mean()


def test_what_is_told_of_a_plan_for_gpus_is_what_was_predicted_for_them() -> None:
    with torch.device("meta"):
        graph = capture(Dropping(), {"x": torch.empty(2**20, 64)}).graph
    where, table = cluster(1, 2), CostTable()
    plan = search(graph, where, table, seed_plan="megatron:2x1").best
    assert tell(plan, graph, where, table).predicted.step_seconds == plan.predicted.step_seconds


def test_axes_are_told_by_what_they_split_whatever_they_are_called() -> None:
    graph = mlp()
    two = seed_strategy(graph, Seed(data=2, tensor=2))
    assert axis_words(two, graph) == (("samples", "weights, activations"),)
    mesh = replace(two.meshes[0], axes=("tensor", "outer"))
    assert axis_words(replace(two, meshes=(mesh,)), graph) == (("samples", "weights, activations"),)
    whole = tuple(replace(config, dims=("", "")) for config in two.configs)
    assert axis_words(replace(two, configs=whole), graph) == (("nothing split",) * 2,)


def test_stages_on_meshes_of_other_axes_each_say_what_theirs_split() -> None:
    graph = mlp()
    split = seed_strategy(graph, Seed(data=2, tensor=2, stages=2))
    first, last = split.meshes
    alone = replace(last, axes=(), sizes=(), devices=last.devices[:1])
    configs = tuple(
        replace(config, dims=()) if config.mesh == 1 else config for config in split.configs
    )
    words = axis_words(replace(split, meshes=(first, alone), configs=configs), graph)
    assert words == (("samples", "weights, activations"), ())


class Mixing(nn.Module):
    """A loss that is no sum over samples, so that microbatches are impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum().square().log()


def test_a_model_that_microbatches_cannot_cut_is_measured_without_a_pipeline() -> None:
    graph = capture(Mixing(), {"x": torch.rand(8, 8)}).graph
    strategies = plain_strategies(graph, 2)
    assert strategies
    assert all(strategy.pipeline.num_microbatches == 1 for strategy in strategies)
    assert all(run_of(strategy, graph) for strategy in strategies)
