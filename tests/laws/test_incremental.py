"""Law: judging a strategy from those before is judging it from nothing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, given, settings

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import iterate
from shardwright.planner.judge.evaluate import Evaluation, evaluate
from shardwright.planner.judge.incremental import Incremental
from shardwright.planner.lower import lower
from shardwright.planner.lower.incremental import IncrementalLowering
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from tests.laws.columns import columns
from tests.laws.models import Model, model
from tests.laws.moves import moved, redrawn
from tests.laws.strategies import Shape, random_strategy, shapes, with_wire
from tests.laws.test_training import EXAMPLES, WANTED
from tests.planner.search.models import cluster

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MODELS = (
    "mlp",
    "cnn_batch_norm",
    "inception",
    "windows",
    "gpt",
    "lstm_translation",
    "experts",
    "t5",
)
FACTOR = max(1.0, WANTED / sum(EXAMPLES[name] for name in MODELS))
MOVES = 6


def outcome(judged: Evaluation) -> tuple[object, ...]:
    """Return all that a verdict says, to the last bit."""
    return judged.strategy, judged.objective, judged.stage_bytes, judged.sources


def tried(act, strategy: Strategy):
    """Return what comes of it, or that it is refused: a whole lowering checks more, and sooner."""
    try:
        return act(strategy)
    except ValueError:
        return "refused"


def holds(one: Model, shape: Shape, where: Cluster) -> None:
    """Go from a random strategy on by small changes, now and then back."""
    graph, samples, random = one.captured.graph, one.samples, Random(shape.seed)
    iterations = [iterate(graph, index) for index in range(len(graph.operators))]
    context = Context.of(graph, where, CostTable(), Training())
    incremental, lowering = Incremental(context), IncrementalLowering(graph, samples)
    strategy = with_wire(random_strategy(graph, samples, shape), shape.seed, "bfloat16")
    for _ in range(MOVES):
        known = tried(lambda s: columns(lower(graph, s, samples)), strategy)
        assert tried(lambda s: columns(lowering.lower(s)), strategy) == known
        known = tried(lambda s: outcome(evaluate(context, s)), strategy)
        assert tried(lambda s: outcome(incremental.evaluate(s)), strategy) == known
        other = moved(graph, strategy, random) if random.random() < 0.3 else strategy
        other = redrawn(graph, samples, iterations, other, random)
        strategy = other if random.random() < 0.8 else strategy


@pytest.mark.parametrize("name", MODELS)
def test_every_judgement_from_those_before_is_the_judgement_from_nothing(name: str) -> None:
    one, where = model(name), cluster(2, 4)

    @settings(
        max_examples=round(EXAMPLES[name] * FACTOR),
        derandomize=WANTED == 0,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
    )
    @given(shape=shapes())
    def law(shape: Shape) -> None:
        holds(one, shape, where)

    law()
