"""Batches with another number of samples than planned, such as the last of a data set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright
from shardwright.core.plan import Plan
from shardwright.core.program import Program
from shardwright.core.strategy import Pipeline, Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.verbs.resizing import resize
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
ADAM = partial(torch.optim.AdamW, lr=1e-2)
SIZES = (3, 6)
SEEDS = [
    Seed(),
    Seed(num_microbatches=4),
    Seed(data=2, num_microbatches=2),
    Seed(data=4, zero=1),
    Seed(data=2, zero=2, num_microbatches=4),
    Seed(data=2, zero=3, num_microbatches=2),
    Seed(tensor=2, num_microbatches=2),
    Seed(data=2, tensor=2, sequence=True),
    Seed(stages=2, num_microbatches=4),
    Seed(stages=2, data=2, num_microbatches=2),
]


# Halves of backwards in an order of one's own, for two microbatches.
OWN = Pipeline(
    schedule="custom",
    num_microbatches=2,
    order=("0F0 0F1 0I1 0I0 0W1 0W0", "1F0 1F1 1I1 1W1 1I0 1W0"),
)


def summed() -> zoo.Example:
    """Return a model whose loss is a sum, with an output and dims of more than the samples."""
    torch.manual_seed(0)
    return Summed().double(), zoo.mlp()[1]


class Summed(nn.Module):
    """Squares of two layers, without a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.up(x).tanh()), y, reduction="sum")


def of_size(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return another batch of so many samples."""
    rows = (torch.arange(size) * 5 + size) % next(iter(batch.values())).shape[0]
    return {name: tensor[rows] for name, tensor in batch.items()}


def sized(factory: Callable[[], zoo.Example], size: int) -> zoo.Example:
    """Build a model with a batch of so many samples."""
    module, batch = factory()
    return module, of_size(batch, size)


def resizer(
    seen: Callable[[Mapping[str, Tensor]], Captured], captured: Captured, strategy: Strategy
) -> Callable[[Mapping[str, Tensor]], tuple[Captured, Program]]:
    def made(batch: Mapping[str, Tensor]) -> tuple[Captured, Program]:
        again = seen(batch)
        program = lower(again.graph, resize(captured.graph, again.graph, strategy))
        check(program)
        return again, program

    return made


def plainly(
    factory: Callable[[], zoo.Example], sizes: Sequence[int]
) -> tuple[list[float], nn.Module]:
    """Return losses and module of plain PyTorch: evaluated, trained, and whole in between."""
    module, batch = factory()
    optimizer, losses = ADAM(module.parameters()), list[float]()
    for size in sizes:
        with torch.no_grad():
            losses.append(float(module(**of_size(batch, size))))
        for one in (of_size(batch, size), batch):
            optimizer.zero_grad()
            loss = module(**one)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, module


@pytest.mark.parametrize(
    ("factory", "seed", "sizes"),
    [
        *[(zoo.mlp, seed, SIZES) for seed in SEEDS],
        *[(zoo.gpt, seed, (3,)) for seed in SEEDS[5:8]],
        (summed, SEEDS[2], (1, 12)),
        (zoo.mlp, OWN, (3, 6, 12)),
    ],
    ids=lambda one: getattr(one, "__name__", getattr(one, "label", "")),
)
def test_batches_of_other_sizes_train_and_evaluate_as_in_one_process(
    factory: Callable[[], zoo.Example], seed: Seed | Pipeline, sizes: Sequence[int]
) -> None:
    expected, plain = plainly(factory, sizes)
    module, batch, captured = captured_of(factory)
    if isinstance(seed, Pipeline):
        strategy = seed_strategy(captured.graph, Seed(stages=2, num_microbatches=2))
        strategy = replace(strategy, pipeline=seed)
    else:
        strategy = seed_strategy(captured.graph, seed)
    program = lower(captured.graph, strategy)

    def seen(batch: Mapping[str, Tensor]) -> Captured:
        return captured_of(sized, factory, len(next(iter(batch.values()))))[2]

    def train(world: LocalWorld) -> tuple[list[float], nn.Module]:
        mine = copy.deepcopy(module)
        executor = Executor(
            captured, program, mine, optimizer=ADAM, options=RunOptions(world=world),
            resize=resizer(seen, captured, strategy),
        )  # fmt: skip
        losses: list[float] = []
        for size in sizes:
            losses.append(float(executor.evaluate(of_size(batch, size))))
            losses.append(float(executor.step(of_size(batch, size))))
            losses.append(float(executor.step(batch)))
        assert executor.steps == 2 * len(sizes)
        executor.to_module(mine)
        return losses, mine

    for losses, mine in run_locally(train, len(strategy.devices))[0]:
        assert losses == pytest.approx(expected, rel=1e-9)
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_microbatches_are_no_larger_than_planned_and_devices_share_what_divides() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))

    def resized(size: int) -> tuple[int, bool]:
        again = capture(module, of_size(batch, size))
        found = resize(captured.graph, again.graph, strategy)
        return found.pipeline.num_microbatches, found.configs == strategy.configs

    # Planned are 2 samples per device and microbatch.
    assert resized(4) == (1, True)
    assert resized(6) == (3, True)  # two would be of 3 samples, which two devices cannot share
    assert resized(12) == (3, True)
    assert resized(3) == (3, False)  # every device runs all of them, one after another
    assert resized(8) == (2, True)


def test_what_differs_in_more_than_samples_is_refused() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed())
    program = lower(captured.graph, strategy)
    plain = Executor(captured, program, module, optimizer=ADAM)
    with pytest.raises(InputError, match="global shape"):
        plain.step(of_size(batch, 3))
    executor = Executor(
        captured,
        program,
        module,
        optimizer=ADAM,
        resize=resizer(partial(capture, module), captured, strategy),
    )
    for wrong in (
        {**batch, "x": batch["x"][:3]},
        {**of_size(batch, 3), "x": batch["x"][:3, :8]},
        {"x": batch["x"][:3]},
        of_size(batch, 0),
    ):
        with pytest.raises(InputError, match=r"global shape|is missing"):
            executor.step(wrong)


class Branching(nn.Module):
    """A model that leads small batches another way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (x if len(x) > 4 else x.exp()).mean()


def test_a_model_that_runs_other_operators_on_a_small_batch_is_refused() -> None:
    module, batch = Branching(), {"x": torch.randn(8, 4)}
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed())
    executor = Executor(
        captured, lower(captured.graph, strategy), module, optimizer=ADAM,
        resize=resizer(partial(capture, module), captured, strategy),
    )  # fmt: skip
    with pytest.raises(InputError, match="drop_last=True"):
        executor.evaluate({"x": batch["x"][:3]})
    assert torch.isfinite(executor.step(batch))


def built(plan: Plan) -> list[float]:
    """Train by ``shardwright.build`` on this rank; return what ``plainly`` does."""
    module, batch = zoo.mlp()
    executor = shardwright.build(plan, module, optimizer=ADAM, batch=batch)
    losses: list[float] = []
    for size in SIZES:
        losses.append(float(executor.evaluate(of_size(batch, size))))
        losses += [float(executor.step(one)) for one in (of_size(batch, size), batch)]
    executor.close()
    return losses


@pytest.mark.ranks
def test_ranks_of_their_own_take_batches_of_other_sizes() -> None:
    module, batch = zoo.mlp()
    plan = shardwright.plan(
        module, "1x2xV100", batch=batch, precision="float64", seed_plan="megatron:2x1"
    ).best
    expected, _ = plainly(zoo.mlp, SIZES)
    for losses in run_ranks(2, built, plan):
        assert losses == pytest.approx(expected, rel=1e-9)
