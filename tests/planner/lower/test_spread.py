"""Strategies of deep graphs, made for a short one."""

from __future__ import annotations

from shardwright.operators.splitting import find_samples
from shardwright.planner.lower.fold import Folder
from shardwright.planner.lower.spread import SHOWN, Spreader
from shardwright.planner.space import Seed, seed_strategy
from tests.planner.lower.test_lower import transformer_like


def test_a_pipeline_may_have_more_stages_than_the_short_graph_has_blocks() -> None:
    graph = transformer_like(layers=16)
    folder = Folder(graph, find_samples(graph))
    seed = Seed(stages=SHOWN + 5, num_microbatches=4)
    assert len(Spreader(folder).short.graph.blocks) < seed.stages
    made = Spreader(folder).spread(lambda one, samples: seed_strategy(one, seed, samples))
    assert made == seed_strategy(graph, seed)
