"""The noise scale of data-parallel training: the norms of plain PyTorch's gradients, rank by rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.core.noise import NoiseScale
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.scaling import Scaling
from tests import zoo
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1)
STEPS, DECAY = 3, 0.9
# A plan, and into how many gradients it cuts a batch before they meet.
SEEDS = [
    (Seed(data=2), 2),
    (Seed(data=4), 4),
    (Seed(data=2, num_microbatches=2), 2),
    (Seed(data=2, zero=1), 2),
    (Seed(data=2, zero=2, num_microbatches=2), 4),
    (Seed(data=2, zero=3), 2),
]


def square(module) -> float:
    return sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)


def plain(shares: int, cut) -> NoiseScale:
    """The estimate from plain PyTorch: the gradient of each share of the batch, and of all."""
    module, batch = zoo.gpt()
    optimizer, found = SGD(module.parameters()), NoiseScale(DECAY)
    size = len(next(iter(batch.values())))
    for _ in range(STEPS):
        squares: list[float] = []
        for share in range(shares):
            optimizer.zero_grad()
            module(**cut(batch, share, shares)).backward()
            squares.append(square(module))
        optimizer.zero_grad()
        module(**batch).backward()
        found.update(sum(squares) / shares, square(module), size / shares, size)
        optimizer.step()
    return found


def piece(batch: dict[str, Tensor], share: int, shares: int) -> dict[str, Tensor]:
    return {name: tensor.chunk(shares)[share] for name, tensor in batch.items()}


def in_turn(batch: dict[str, Tensor], share: int, shares: int) -> dict[str, Tensor]:
    """What a rank of two has of two microbatches: a piece of each."""
    return {
        name: torch.cat([half.chunk(shares)[share] for half in tensor.chunk(2)])
        for name, tensor in batch.items()
    }


def trained(seed: Seed, options: RunOptions, **more) -> list[NoiseScale]:
    module, batch, captured = captured_of(zoo.gpt)
    strategy = replace(seed_strategy(captured.graph, seed), **more)
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> NoiseScale:
        mine = copy.deepcopy(module)
        executor = Executor(
            captured, program, mine, optimizer=SGD, options=replace(options, world=world)
        )
        for _ in range(STEPS):
            executor.step(batch)
        assert executor.noise is not None
        return executor.noise

    return run_locally(train, len(strategy.devices))[0]


def assert_alike(found: NoiseScale, expected: NoiseScale) -> None:
    assert found.steps == expected.steps == STEPS
    assert found.variance == pytest.approx(expected.variance, rel=1e-9)
    assert found.gradient_square == pytest.approx(expected.gradient_square, rel=1e-9)


@pytest.mark.parametrize(("seed", "shares"), SEEDS, ids=lambda one: getattr(one, "label", ""))
def test_the_norms_are_those_of_plain_pytorch(seed: Seed, shares: int) -> None:
    cut = in_turn if seed.num_microbatches == 2 and shares == 2 else piece
    expected = plain(shares, cut)
    for found in trained(seed, RunOptions(noise_decay=DECAY)):
        assert_alike(found, expected)


def test_a_scaled_loss_and_clipping_leave_the_norms_as_they_are() -> None:
    """But for the steps: without an update by the whole gradient they would differ, so it clips at a large norm."""
    options = RunOptions(noise_decay=DECAY, scaling=Scaling(scale=1024.0))
    for found in trained(Seed(data=2), options, clips=True, max_norm=1e6):
        assert_alike(found, plain(2, piece))


def test_a_batch_of_another_size_counts_as_what_it_is() -> None:
    module, batch = zoo.mlp()
    half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(data=2))

    def resize(other):
        again = capture(module, other)
        return again, lower(again.graph, strategy)

    def train(world: LocalWorld) -> NoiseScale:
        mine = copy.deepcopy(module)
        options = RunOptions(world=world, noise_decay=1.0)
        executor = Executor(
            captured, lower(captured.graph, strategy), mine, optimizer=partial(torch.optim.SGD, lr=0.0),
            options=options, resize=resize,
        )  # fmt: skip
        for one in (batch, half):
            executor.step(one)
        assert executor.noise is not None
        return executor.noise

    expected = NoiseScale(1.0)
    for one in (batch, half):
        squares = []
        for part in (*(piece(one, share, 2) for share in range(2)), one):
            module.zero_grad()
            module(**part).backward()
            squares.append(square(module))
        size = len(next(iter(one.values())))
        expected.update((squares[0] + squares[1]) / 2, squares[2], size / 2, size)
    for found in run_locally(train, 2)[0]:
        assert found.steps == 2
        assert found.variance == pytest.approx(expected.variance, rel=1e-9)


@pytest.mark.parametrize("seed", [Seed(), Seed(tensor=2), Seed(stages=2, num_microbatches=2)])
def test_other_plans_have_no_gradient_of_fewer_samples_and_say_so(seed: Seed) -> None:
    with pytest.raises(InputError, match="samples only"):
        trained(seed, RunOptions(noise_decay=DECAY))
