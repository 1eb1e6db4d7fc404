"""Outputs besides the loss equal those of plain PyTorch under every plan, training and evaluating."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.strategy import Strategy
from shardwright.errors import CaptureError, InputError
from shardwright.planner.cost.recomputation import with_recomputation
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)
NAMES = ("cross_entropy", "penalty", "logits", "accuracy", "scale")


class Reporting(nn.Module):
    """A classifier of two blocks with batch norm and dropout, two losses and three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(F.dropout(self.norm(x), 0.0 if self.training else 0.5, self.training))
        cross_entropy = F.cross_entropy(logits, label)
        penalty = 0.01 * logits.square().mean()
        return {
            "loss": cross_entropy + penalty,
            "cross_entropy": cross_entropy,
            "penalty": penalty,
            "logits": logits * self.scale.detach(),
            "accuracy": (logits.argmax(-1) == label).double().mean(),
            "scale": self.scale * 2,
        }


@pytest.fixture(scope="module")
def captured() -> tuple[nn.Module, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    module = Reporting().double()
    batch = {"x": torch.randn(16, 12, dtype=torch.float64), "label": torch.randint(0, 4, (16,))}
    return module, batch, capture(module, batch, batch_norm="synchronised", outputs=NAMES)


PLANS = {
    "one": Seed(),
    "data": Seed(data=2),
    "zero": Seed(data=2, zero=3),
    "tensor": Seed(tensor=2),
    "stages": Seed(stages=2),
    "data and tensor": Seed(data=2, tensor=2),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_are_those_of_one_process(
    plan: str, recompute: bool, captured: tuple[nn.Module, dict[str, Tensor], Captured]
) -> None:
    module, batch, graph = captured
    strategy = replace(seed_strategy(graph.graph, PLANS[plan]), batch_norm="synchronised")
    if recompute:
        strategy = replace(strategy, recompute_operators=tuple(range(len(graph.graph.operators))))
    compare(module, batch, graph, strategy)


def compare(
    module: nn.Module, batch: dict[str, Tensor], captured: Captured, strategy: Strategy
) -> None:
    """Train two steps and evaluate, and hold every output against the module's own."""
    program = lower(captured.graph, strategy)
    check(program)

    def train(world: LocalWorld) -> list[dict[str, Tensor]]:
        mine = copy.deepcopy(module)
        options = RunOptions(world=world)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        found: list[dict[str, Tensor]] = []
        names = [name for name, _ in captured.graph.outputs]
        for _ in range(2):
            loss = executor.step(batch, outputs=names)
            found.append({"loss": loss, **executor.outputs})
        loss = executor.evaluate(batch, outputs=names)
        return [*found, {"loss": loss, **executor.outputs}]

    plain = copy.deepcopy(module)
    optimizer = SGD(plain.parameters())
    expected: list[dict[str, Tensor]] = []
    for _ in range(2):
        expected.append(plain(**batch))
        optimizer.zero_grad()
        expected[-1]["loss"].backward()
        optimizer.step()
    expected.append(plain.eval()(**batch))
    runs, _ = run_locally(train, len(strategy.devices))
    for run in runs:
        for found, wanted in zip(run, expected, strict=True):
            for name in found:
                torch.testing.assert_close(
                    found[name], wanted[name].detach(), rtol=1e-10, atol=1e-12
                )


class Plain(Reporting):
    """The same without batch norm, so that microbatches change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["none", "selective"])
def test_outputs_of_microbatches_add_up_or_lie_one_behind_the_other(name: str) -> None:
    torch.manual_seed(1)
    module = Plain().double()
    batch = {"x": torch.randn(16, 12, dtype=torch.float64), "label": torch.randint(0, 4, (16,))}
    graph = capture(module, batch, outputs=NAMES)
    for seed in (
        Seed(num_microbatches=4),
        Seed(data=2, num_microbatches=2),
        Seed(stages=2, num_microbatches=4),
        Seed(stages=2, tensor=2, num_microbatches=2, schedule="gpipe"),
    ):
        strategy = with_recomputation(graph.graph, seed_strategy(graph.graph, seed), name)  # type: ignore[arg-type]
        compare(module, batch, graph, strategy)


def test_what_is_not_there_is_refused_by_name(
    captured: tuple[nn.Module, dict[str, Tensor], Captured],
) -> None:
    module, batch, graph = captured
    with pytest.raises(CaptureError, match="'perplexity' is not among loss, cross_entropy"):
        capture(module, batch, outputs=("perplexity",))
    program = lower(graph.graph, seed_strategy(graph.graph, Seed()))
    executor = Executor(graph, program, copy.deepcopy(module), optimizer=SGD)
    with pytest.raises(InputError, match="reports cross_entropy, penalty"):
        executor.step(batch, outputs=("perplexity",))


def test_outputs_not_asked_for_at_capture_are_not_computed(
    captured: tuple[nn.Module, dict[str, Tensor], Captured],
) -> None:
    module, batch, graph = captured
    alone = capture(module, batch, batch_norm="synchronised")
    assert len(alone.graph.operators) < len(graph.graph.operators)
    assert alone.graph.fingerprint != graph.graph.fingerprint
