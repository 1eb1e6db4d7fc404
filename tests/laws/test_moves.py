"""Law: wherever chains of proposals lead, the strategy there trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from shardwright.chains.places import refine
from shardwright.chains.proposals import Drawing
from shardwright.core.costs import CostTable
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.local.moves import Space
from shardwright.planner.search.named import as_strategy
from shardwright.planner.space import Seed
from tests.laws.models import OPTIMIZER, Model, model, plain
from tests.laws.test_training import WANTED
from tests.planner.search.models import cluster
from tests.runtime.equivalence import assert_close
from tests.runtime.rehearsed import train_rehearsed

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WALKS = 2


def wander(one: Model, seed: int, steps: int) -> Strategy:
    """Accept every legal proposal, beginning at data parallelism on four devices."""
    context = Context.of(one.captured.graph, cluster(2, 2), CostTable(), Training())
    here = refine(context, as_strategy(context, Seed(data=4)))
    drawing = Drawing(Space(context), Random(seed))
    for _ in range(steps):
        try:
            changed = drawing.draw(here)
            lower(context.graph, changed, context.facts.samples)
            here = changed
        except ValueError:
            continue
    return replace(here, precision="float32", optimizer_states=1, batch_norm="synchronised")


# More in `make laws`.
NAMES = ("mlp", "cnn_batch_norm", "gpt", "lstm_translation")
MORE = ("cnn", "inception", "llama") if WANTED else ()


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_wherever_chains_lead_training_is_that_of_one_process(name: str) -> None:
    one = model(name)
    walks = [wander(one, seed, 20 * (seed + 1)) for seed in range(WALKS)]
    assert max(len(strategy.meshes) for strategy in walks) > 1
    for seed, strategy in enumerate(walks):
        runs, _ = train_rehearsed(one.captured, strategy, one.module, one.batch, OPTIMIZER, None)
        for run in runs:
            assert_close(run, plain(name, False), f"walk {seed}", one.tolerance)
