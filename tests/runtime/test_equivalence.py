"""Every named strategy trains like the single process: three steps in float64, to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.space.seeds import Seed, seed_strategy
from tests import zoo
from tests.runtime.equivalence import Factory, assert_equivalent
from tests.runtime.strategies import named

pytestmark = pytest.mark.ranks

TWO = [
    Seed(data=2),
    Seed(data=2, zero=1),
    Seed(data=2, zero=2, num_microbatches=2),
    Seed(data=2, zero=3),
    Seed(data=2, zero=3, num_microbatches=2, recompute=True),
    Seed(tensor=2),
    Seed(tensor=2, sequence=True, recompute=True, num_microbatches=2),
    Seed(stages=2, num_microbatches=4),
    Seed(stages=2, num_microbatches=4, schedule="gpipe", recompute=True),
]
FOUR = [
    Seed(data=2, tensor=2, sequence=True, zero=1),
    Seed(data=2, stages=2, zero=3, num_microbatches=2, recompute=True),
    Seed(tensor=2, stages=2, num_microbatches=2),
    Seed(stages=4, num_microbatches=4),
]


@pytest.mark.parametrize(
    "factory", [zoo.mlp, zoo.gpt, zoo.bert, zoo.cnn_groupnorm], ids=lambda factory: factory.__name__
)
def test_two_ranks_train_as_one_process(factory: Factory) -> None:
    assert_equivalent(2, factory, named(*TWO), processes=factory is zoo.gpt)


@pytest.mark.parametrize("factory", [zoo.gpt, zoo.cnn_groupnorm], ids=lambda f: f.__name__)
def test_four_ranks_train_as_one_process(factory: Factory) -> None:
    assert_equivalent(4, factory, named(*FOUR), processes=factory is zoo.gpt)


@pytest.mark.parametrize("factory", [zoo.gpt, zoo.bert], ids=lambda f: f.__name__)
def test_a_split_sequence_trains_as_one_process(factory: Factory) -> None:
    seeds = (
        Seed(context=2),
        Seed(context=2, zero=3, num_microbatches=2, recompute=True),
        Seed(context=2, zero=1),
    )
    assert_equivalent(2, factory, named(*seeds))


def test_a_split_sequence_combines_with_other_splits() -> None:
    seeds = (
        Seed(data=2, context=2, zero=3),
        Seed(context=2, tensor=2),
        Seed(context=2, stages=2, num_microbatches=2),
        Seed(context=4, zero=1),
    )
    assert_equivalent(4, zoo.gpt, named(*seeds))


class TwoLosses(nn.Module):
    """Guesses tokens, which a sequence's pieces add up, and keeps the last state small, which one has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        states = torch.tanh(self.layer(self.words(ids)))
        guessed = nn.functional.cross_entropy(self.head(states).transpose(1, 2), labels)
        return guessed + 0.1 * states[:, -1].square().mean()


def two_losses() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(12, (4, 8))
    return TwoLosses().double(), {"ids": ids, "labels": ids.flip(1)}


def test_a_split_sequence_adds_up_only_the_losses_that_it_splits() -> None:
    assert_equivalent(2, two_losses, named(Seed(context=2), Seed(context=2, zero=3)))


def test_tied_embeddings_train_as_one_process() -> None:
    tied = (Seed(stages=2, num_microbatches=2), Seed(data=2, zero=3), Seed(tensor=2))
    assert_equivalent(2, partial(zoo.gpt, tied=True), named(*tied))


def test_adam_states_follow_their_shards() -> None:
    adam = partial(torch.optim.AdamW, lr=1e-2)
    assert_equivalent(2, zoo.mlp, named(Seed(data=2, zero=1), Seed(stages=2)), adam)


def _clipping(seed: Seed, graph: OperatorGraph) -> Strategy:
    return replace(seed_strategy(graph, seed), clips=True)


def test_the_gradient_norm_counts_every_shard_once() -> None:
    seeds = (Seed(data=2, zero=2), Seed(stages=2, num_microbatches=2), Seed(tensor=2))
    strategies = {seed.label: partial(_clipping, seed) for seed in seeds}
    assert_equivalent(2, zoo.gpt, strategies, max_norm=0.1)
