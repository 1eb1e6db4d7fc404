"""Which operators the named groups run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.operators.derivatives import base_kind
from shardwright.planner.cost.recomputation import (
    recomputed_operators,
    with_recomputation,
)
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.verbs.frameworks import with_alternate_products
from tests import zoo
from tests.planner.lower.test_lower import transformer_like

pytestmark = pytest.mark.torch


def kinds(graph: OperatorGraph, operators: frozenset[int]) -> list[str]:
    return [base_kind(graph.operators[index].kind) for index in sorted(operators)]


def test_selective_runs_all_again_but_products_and_what_frees_nothing() -> None:
    graph = transformer_like(layers=3)
    assert kinds(graph, recomputed_operators(graph, "selective")) == ["gelu"] * 3


def test_selective_takes_the_whole_chain_of_a_norm_in_elementary_operators() -> None:
    module, batch = zoo.llama()
    graph = capture(module, batch).graph
    again = recomputed_operators(graph, "selective")
    block = graph.blocks[2]
    found = kinds(graph, again & frozenset(range(block.start, block.stop)))
    assert found.count("rsqrt") == 2
    assert found.count("silu") == 1
    assert not {"linear", "scaled_dot_product_attention", "cat"} & set(found)


def test_alternate_products_are_counted_anew_in_every_block() -> None:
    """Of seven products of a layer (queries, keys, values, result, gate, up, down) four are kept."""
    module, batch = zoo.llama()
    graph = capture(module, batch).graph
    strategy = with_alternate_products(graph, seed_strategy(graph, Seed()))
    again = set(strategy.recompute_operators)
    kept_kinds = {"linear", "scaled_dot_product_attention"}
    layers = [
        [
            index not in again
            for index in range(block.start, block.stop)
            if base_kind(graph.operators[index].kind) in kept_kinds
        ]
        for block in graph.blocks
        if again & set(range(block.start, block.stop))
    ]
    assert (
        layers == [[True, False, True, True, False, True, False, True]] * 2
    )  # attention is the fourth


class Scores(nn.Module):
    """Attention written out, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, -1)
            scores = (query @ key.transpose(1, 2) / 3).softmax(-1)
            x = x + nn.functional.dropout(scores, 0.1) @ value
        return x.square().sum()


def test_attention_lies_between_the_product_of_scores_and_their_use() -> None:
    graph = capture(Scores(), {"x": torch.zeros(4, 6, 8)}).graph
    found = kinds(graph, recomputed_operators(graph, "attention"))
    assert found == ["matmul", "div", "softmax", "dropout"] * 2


def test_a_name_replaces_what_the_strategy_recomputed() -> None:
    graph = transformer_like(layers=3)
    strategy = seed_strategy(graph, Seed(recompute=True))
    assert with_recomputation(graph, strategy, "blocks") == strategy
    some = with_recomputation(graph, strategy, "selective")
    assert (some.recompute, len(some.recompute_operators)) == ((), 3)
    none = with_recomputation(graph, some, "none")
    assert (none.recompute, none.recompute_operators, none.reshard_again) == ((), (), ())
