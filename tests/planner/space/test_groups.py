"""ZeRO within groups: every group holds all of the state."""

from __future__ import annotations

import math

from shardwright.core.layout import local_shape
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like


def test_states_are_divided_by_the_group_and_samples_by_all() -> None:
    graph = transformer_like(layers=3)
    made = seed_strategy(graph, Seed(data=2, group=2, zero=1))
    mesh = made.meshes[0]
    assert (mesh.axes, mesh.sizes) == (("data", "group"), (2, 2))
    for tensor, config in zip(graph.parameters, made.parameters, strict=True):
        shape = graph.tensors[tensor].shape
        held = math.prod(local_shape(shape, config.optimizer, mesh.sizes))
        assert held == math.prod(shape) // 2
        assert mesh.axes[0] == "data"
        assert str(config.optimizer[0]) == str(config.rest[0])
    assert made.label == "data parallel x 4, ZeRO-1 in groups of 2"
    plain = seed_strategy(graph, Seed(data=4, zero=1))
    for one, other in zip(made.configs, plain.configs, strict=True):
        assert one.dims == other.dims * 2
