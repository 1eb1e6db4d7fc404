"""Clipping by the norm that the plan holds: torch's norm, torch's update, under any plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests import zoo
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)
SEEDS = [
    Seed(),
    Seed(data=2),
    Seed(tensor=2),
    Seed(tensor=2, sequence=True),
    Seed(data=2, zero=1),
    Seed(data=2, zero=2, num_microbatches=2),
    Seed(data=2, zero=3),
    Seed(stages=2, num_microbatches=2),
    Seed(data=2, tensor=2, zero=1),
]


def clipped(
    factory: Callable[[], zoo.Example], max_norm: float, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return norms and parameters of plain PyTorch."""
    module, batch = factory()
    optimizer, norms = SGD(module.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        module(**batch).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm))
        optimizer.step()
    return norms, [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_the_plans_norm_is_that_of_one_process(seed: Seed, max_norm: float) -> None:
    module, batch, captured = captured_of(zoo.gpt)
    norms, parameters = clipped(zoo.gpt, max_norm, 2)
    strategy = replace(seed_strategy(captured.graph, seed), clips=True, max_norm=max_norm)
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> tuple[list[Tensor | None], nn.Module]:
        mine, options = copy.deepcopy(module), RunOptions(world=world)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        found: list[Tensor | None] = []
        for _ in norms:
            executor.step(batch)
            found.append(executor.gradient_norm)
        executor.to_module(mine)
        return found, mine

    for found, trained in run_locally(train, len(strategy.devices))[0]:
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=0)
        for one, other in zip(trained.parameters(), parameters, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=1e-9, atol=1e-12)


def built(clips: bool, planned: float, max_norm: float | None = None) -> Executor:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = replace(seed_strategy(captured.graph, Seed()), clips=clips, max_norm=planned)
    return Executor(
        captured, lower(captured.graph, strategy), module, optimizer=SGD,
        options=RunOptions(max_norm=max_norm),
    )  # fmt: skip


def test_a_norm_given_when_it_runs_counts_instead_of_the_plans() -> None:
    executor = built(True, 1e3, max_norm=0.01)
    before = {name: p.detach().clone() for name, p in executor.machine.parameters.named()}
    executor.step(zoo.mlp()[1])
    moved = [(p.detach() - before[name]) / 0.1 for name, p in executor.machine.parameters.named()]
    assert float(torch.stack([one.norm() for one in moved]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_without_clipping_there_is_no_norm() -> None:
    executor = built(False, 0.0)
    executor.step(zoo.mlp()[1])
    assert executor.gradient_norm is None


@pytest.mark.parametrize(
    ("clips", "planned", "given", "says"),
    [
        (True, 0.0, None, "RunOptions"),
        (False, 0.0, 1.0, "plan again with clip="),
        (True, 1.0, 0.0, "more than 0"),
    ],
)
def test_norms_that_do_not_agree_are_refused(
    clips: bool, planned: float, given: float | None, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        built(clips, planned, given)
