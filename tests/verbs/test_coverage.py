"""Architectures of every kind are captured whole, can be split, and train split as they do whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.operators.splitting import has_rule
from shardwright.planner.lower import lower
from shardwright.planner.space import Seed, seed_strategy
from shardwright.runtime import verify
from shardwright.runtime.capture import capture, load_model
from shardwright.verbs.coverage import (
    cost_share,
    coverage,
    data_parallel,
    random_splits,
    tensor_parallel,
    try_training,
)
from tests import zoo

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LARGEST_SHARE = 0.05  # of modelled cost in operators that cannot be split
# One architecture of each kind, at the sequence lengths that keep the test short; the laws train Llama, T5
# and Mixtral by random strategies.
CHOSEN = {
    "bert-tiny": 16, "swin-tiny": None, "wav2vec2-tiny": 2000, "mamba2-tiny": 16, "clip-tiny": 16,
}  # fmt: skip


def splits_of_whole(graph: OperatorGraph) -> Strategy:
    """Split a graph at random, of which hardly anything stays whole."""
    assert all(has_rule(operator.kind) for operator in graph.operators)
    found = coverage(graph)
    assert found.num_with_rule == found.num_operators
    assert found.replicated_share < LARGEST_SHARE
    return random_splits(graph)


@pytest.mark.parametrize("name", CHOSEN)
def test_an_architecture_is_captured_whole_and_split_at_random_trains_as_one_process_does(
    name: str,
) -> None:
    proof = try_training(f"hf:{name}", splits_of_whole, CHOSEN[name])
    assert proof.is_equal, proof
    assert proof.split_share > 0.3


# What is not split of the tiny mixture are products for its experts, which take as long as larger ones.
@pytest.mark.parametrize(("name", "share"), [("mixtral-tiny", 0.3), ("clip-tiny", 0.6)])
def test_architectures_that_mix_samples_train_data_parallel(name: str, share: float) -> None:
    proof = try_training(f"hf:{name}", data_parallel, 16)
    assert proof.is_equal, proof
    assert proof.split_share > share


@pytest.mark.parametrize("name", ["gpt2-tiny", "falcon-tiny"])
def test_layers_written_as_products_with_a_weight_are_tensor_parallel_too(name: str) -> None:
    proof = try_training(f"hf:{name}", tensor_parallel, 16)
    assert proof.is_equal, proof
    assert proof.split_share > 0.25


def test_samples_are_split_on_behind_statistics_of_the_whole_batch() -> None:
    source = load_model("hf:resnet-tiny")
    graph = capture(source.build(), source.example(4), batch_norm="synchronised").graph
    configs = data_parallel(graph).configs
    assert cost_share(graph, lambda index: any(configs[index].dims)) > 0.99


def test_shares_of_cost_add_up_to_one() -> None:
    module, batch = zoo.mlp()
    graph = capture(module, batch).graph
    linears = cost_share(graph, lambda index: "linear" in graph.operators[index].kind)
    others = cost_share(graph, lambda index: "linear" not in graph.operators[index].kind)
    assert linears > others > 0
    assert linears + others == pytest.approx(1.0)


class Opaque(torch.nn.Module):
    """A layer that export cannot see into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) ** 2 if x.mean() < 100 else x


class Around(torch.nn.Module):
    """An opaque layer and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque, self.plain = Opaque(), torch.nn.Linear(4, 4)

    def forward(self, Input_X: torch.Tensor) -> torch.Tensor:
        return self.plain(self.opaque(Input_X)).pow(2).mean()


@pytest.mark.parametrize("zero", [0, 3])
def test_an_opaque_layer_trains_under_zero(zero: int) -> None:
    module = Around().double()
    batch = {"Input_X": torch.randn(4, 4, dtype=torch.float64)}
    captured = capture(module, batch)
    assert [op.kind for op in captured.graph.operators if not has_rule(op.kind)] == [
        "opaque.Opaque"
    ]
    program = lower(captured.graph, seed_strategy(captured.graph, Seed(data=2, zero=zero)))
    plain = verify.train_plainly(module, [batch], clips=False, tell=lambda _: None)
    ranks = verify.train_here(captured, program, module, [batch], lambda _: None)
    assert verify.gaps(ranks, plain, captured)[0].difference < verify.TOLERANCE


def test_a_model_of_a_file_is_tried_like_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from tests import zoo\ndef build():\n    return zoo.mlp()\n")
    assert try_training(f"{path}:build", random_splits).is_equal


class Trunk(torch.nn.Module):
    """A wide layer whose control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x if x.sum() < 1e9 else -x)))


class Hidden(torch.nn.Module):
    """A trunk that cannot be captured between small layers that can."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)
        self.trunk = Trunk()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.stem(x))).mean()


def test_an_opaque_trunk_is_most_of_what_cannot_be_split() -> None:
    graph = capture(Hidden(), {"x": torch.randn(64, 8)}, global_batch=4096).graph
    (trunk,) = coverage(graph).replicated
    assert trunk.kind == "opaque.Trunk"
    products = [op.flops for op in graph.operators if "linear" in op.kind or "opaque" in op.kind]
    assert trunk.share > 0.8 * max(products) / sum(products)
