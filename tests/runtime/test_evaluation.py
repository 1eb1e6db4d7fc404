"""Evaluation is plain PyTorch's, in whichever mode the module was when it was captured."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)


class Normed(nn.Module):
    """Batch norm, which may be frozen, and dropout, whose rate is zero while training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.frozen, self.norm = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x)).relu()
        return self.dropout(self.norm(self.second(x))).square().mean()


@pytest.mark.parametrize("seed", [Seed(), Seed(data=2), Seed(stages=2), Seed(tensor=2)])
@pytest.mark.parametrize("mode", ["training", "evaluation", "one norm frozen"])
def test_training_and_evaluation_are_those_of_plain_pytorch(mode: str, seed: Seed) -> None:
    torch.manual_seed(0)
    module, batch = Normed().double(), {"x": torch.randn(8, 6, dtype=torch.float64)}
    nn.init.uniform_(module.frozen.running_mean)
    plain = copy.deepcopy(module)
    module.train(mode != "evaluation")
    module.frozen.train(mode == "training")
    plain.frozen.train(mode != "one norm frozen")
    captured = capture(module, batch, batch_norm="synchronised")
    program = lower(captured.graph, seed_strategy(captured.graph, seed))

    def train(world: LocalWorld) -> list[Tensor]:
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=RunOptions(world=world))
        losses = [executor.evaluate(batch), executor.step(batch), executor.step(batch)]
        return [*losses, executor.evaluate(batch), executor.evaluate(batch)]

    optimizer = SGD(plain.parameters())
    expected = [evaluated(plain, batch)]
    for _ in range(2):
        expected.append(plain(**batch))
        optimizer.zero_grad()
        expected[-1].backward()
        optimizer.step()
    expected += [evaluated(plain, batch)] * 2
    for run in run_locally(train, len(program.strategy.devices))[0]:
        for found, wanted in zip(run, expected, strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=0)


def evaluated(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in evaluation mode."""
    return copy.deepcopy(module).eval()(**batch)
