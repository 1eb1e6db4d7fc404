"""What the named strategies do with models as people write them."""

from __future__ import annotations

import itertools

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


def test_plain_gradients_share_messages_as_torch_would_put_them_together() -> None:
    import torch
    from torch import nn

    from shardwright.planner.space.seeds import capped_sync, single_sync
    from shardwright.runtime.capture import capture

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (600, 900, 700, 3000, 2500, 600)
            self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    net = Net()
    graph = capture(net, {"x": torch.ones(4, 600)}).graph
    sizes = [graph.tensors[tensor].bytes for tensor in reversed(graph.parameters)]
    tensors = [torch.empty(size // 4) for size in sizes]
    torch_buckets, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [2**20, 25 * 2**20]
    )
    expected = {frozenset(graph.parameters[-1 - n] for n in bucket) for bucket in torch_buckets}
    found = capped_sync(graph).buckets
    assert len(found) > 2
    assert {frozenset(bucket) for bucket in found} == expected
    # Sent once, behind backward: all in one bucket.
    (together,) = single_sync(graph).buckets
    assert sorted(together) == sorted(graph.parameters)


def test_megatron_splits_the_embedding_where_the_loss_is_cast() -> None:
    """Scores of 16 bits are cast for the loss: the vocabulary stays split, and so is the embedding."""
    from shardwright.core.decoder import Decoder
    from shardwright.runtime.capture.decoder import capture_decoder

    shape = Decoder(
        layers=2, hidden=64, heads=4, kv_heads=4, head_size=16, ffn=128, vocab=512, seq=32
    )
    graph = capture_decoder(shape, 2, "bfloat16")
    strategy = seed_strategy(graph, Seed(tensor=2))
    rows = next(
        config.rest
        for config, tensor in zip(strategy.parameters, graph.parameters, strict=True)
        if graph.tensors[tensor].name == "embed.weight"
    )
    assert rows[-1] == 0
