"""What the named strategies do with models as people write them."""

from __future__ import annotations

import pytest

from shardwright.planner.space import Seed, seed_strategy
from tests import zoo

pytestmark = pytest.mark.torch


def test_megatron_splits_gpt2s_feed_forward_through_its_gelu_in_pieces() -> None:
    from shardwright.runtime.capture import capture

    graph = capture(*zoo.gpt2()).graph
    configs = seed_strategy(graph, Seed(tensor=2)).configs
    products = [
        config.dims[-1]
        for operator, config in zip(graph.operators, configs, strict=True)
        if operator.kind == "aten.addmm.default"
    ]
    # Fused queries, keys and values stay whole, and so does what projects them back.
    assert products == ["", "", "m", "k"] * (len(products) // 4)
    assert products
