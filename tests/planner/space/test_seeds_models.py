"""What the named strategies do with models as people write them."""

from __future__ import annotations

import pytest

from shardwright.planner.space import Seed, seed_strategy
from tests import zoo

pytestmark = pytest.mark.torch


def test_megatron_splits_gpt2s_fused_attention_and_its_feed_forward() -> None:
    from shardwright.runtime.capture import capture

    graph = capture(*zoo.gpt2()).graph
    configs = seed_strategy(graph, Seed(tensor=2)).configs
    products = [
        config.dims[-1]
        for operator, config in zip(graph.operators, configs, strict=True)
        if operator.kind in ("aten.addmm.default", "shardwright.linear_blocks")
    ]
    # Queries, keys and values by columns and their projection by rows; the same, through its gelu in
    # pieces, for the feed-forward.
    assert products == ["n", "k", "m", "k"] * 2
