"""What a training loop may use, with every kind of plan: each equals plain PyTorch in float64.

Parameter groups, frozen parameters, several losses, custom autograd functions, tied weights over
stages, buffers under microbatches and recomputation. Ranks are shared: one world runs all plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.program import Program
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests import zoo
from tests.runtime.equivalence import assert_equivalent, batches, captured_of
from tests.runtime.strategies import named
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks

PLANS = named(
    Seed(data=2, num_microbatches=2),
    Seed(data=2, zero=3, num_microbatches=2, recompute=True),
    Seed(tensor=2, recompute=True),
    Seed(stages=2, num_microbatches=2, recompute=True),
)


def seeded(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double(), zoo.mlp()[1]


def grouped(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make groups as people do: no decay for biases, a rate of its own for the head."""
    groups: dict[str, list[nn.Parameter]] = {"bias": [], "head": [], "body": []}
    for name, parameter in parameters:
        kind = "bias" if name.endswith("bias") else "head" if name.startswith("head") else "body"
        groups[kind].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups["bias"], "weight_decay": 0.0},
            {"params": groups["head"], "lr": 3e-2},
            {"params": groups["body"]},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )


def test_parameter_groups_keep_their_settings_with_every_plan() -> None:
    assert_equivalent(2, zoo.mlp, PLANS, grouped)


class Frozen(nn.Module):
    """A perceptron whose first layers, and one bias, are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 8)
        self.body[0].requires_grad_(False)
        self.body[1].weight.requires_grad_(False)
        self.body[2].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


def test_frozen_parameters_stay_and_cost_no_state_with_every_plan() -> None:
    assert_equivalent(2, partial(seeded, Frozen), PLANS, partial(torch.optim.AdamW, lr=1e-2))


def test_frozen_parameters_have_neither_gradients_nor_masters() -> None:
    module, batch = seeded(Frozen)
    graph = capture(module, batch).graph
    program = lower(graph, seed_strategy(graph, Seed(data=2, zero=1)))
    roles = {
        value.role
        for value in program.values
        if graph.tensors[value.tensor].name == "body.0.weight"
    }
    assert roles == {"parameter"}


class Several(nn.Module):
    """Two losses, returned among other things in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head, self.back = nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = x
        for layer in self.body:
            h = torch.relu(layer(h))
        logits = self.head(h)
        right, near = F.cross_entropy(logits, y), F.mse_loss(self.back(h), x)
        return {"logits": logits, "loss": right + 0.5 * near, "right": right, "near": near}


def several() -> tuple[nn.Module, dict[str, Tensor]]:
    return seeded(Several)


def test_a_sum_of_several_losses_among_other_outputs_trains_with_every_plan() -> None:
    assert_equivalent(2, several, PLANS)


class Clamped(torch.autograd.Function):
    """Rounds forward, and passes the gradient straight through where it is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Rounding(nn.Module):
    """A layer with a custom gradient and a counter of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Clamped.apply(self.linear(x))


class Quantised(nn.Module):
    """Layers with custom gradients between plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(16, 16), Rounding(), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


def test_custom_autograd_functions_train_with_every_plan_that_keeps_batches_whole() -> None:
    plans = named(Seed(data=2, recompute=True), Seed(tensor=2), Seed(stages=2))
    assert_equivalent(2, partial(seeded, Quantised), plans)


class Noise(Rounding):
    """A layer that looks at values, so that it is opaque, and drops."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 100 else F.dropout(super().forward(x), 0.5, self.training)


class Noisy(Quantised):
    """Dropout in an opaque module and outside of one."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.body[1] = Noise()
        self.rate = rate

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(F.dropout(x, self.rate, self.training), y)


def drop(seeds: Sequence[Seed], rate: float) -> list[list[list[float]]]:
    """Return the losses of two steps and of an evaluation, by plan and rank."""
    module, batch, captured = captured_of(partial(seeded, partial(Noisy, rate)))
    found: list[list[list[float]]] = []
    for seed in seeds:
        strategy = seed_strategy(captured.graph, seed)
        if seed.recompute:
            strategy = replace(strategy, recompute=tuple(range(len(captured.graph.blocks))))
        program = lower(captured.graph, strategy)

        def train(world: LocalWorld, program: Program = program) -> list[float]:
            mine, options = copy.deepcopy(module), RunOptions(world=world)
            optimizer = partial(torch.optim.SGD, lr=0.1)
            executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
            steps = [float(executor.step(one)) for one in batches(batch, 2)]
            return [*steps, float(executor.evaluate(batch))]

        found.append(run_locally(train, len(strategy.devices))[0])
    return found


def test_dropout_that_no_axis_splits_draws_alike_under_every_plan() -> None:
    (expected,), ranks = drop([Seed(), Seed(stages=2, recompute=True)], 0.5)
    assert len(ranks) == 2
    for found in ranks:
        assert found == pytest.approx(expected, rel=1e-12)


def test_replicas_of_an_opaque_module_draw_alike() -> None:
    seeds = (Seed(), Seed(data=2, recompute=True), Seed(tensor=2))
    (expected,), *plans = drop(seeds, 0.0)
    for ranks in plans:
        assert len(ranks) == 2
        for found in ranks:
            assert found == pytest.approx(expected, rel=1e-12)


class Normalised(nn.Module):
    """Batch norms; without a momentum (a mean over all steps) the second one is opaque."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=one))
            for one in (0.1, momentum, 0.1)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(F.dropout(x, 0.0)), y)


def normalised(pieces: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return seeded(partial(Normalised, 0.1 if pieces > 1 else None))


def accumulate(pieces: int) -> tuple[dict[str, Tensor], float]:
    """Train two steps with gradient accumulation; return the state, and the loss in evaluation."""
    module, batch = normalised(pieces)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for one in batches(batch, 2):
        for number in range(pieces):
            piece = {name: tensor.chunk(pieces)[number] for name, tensor in one.items()}
            (module(**piece) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    return module.state_dict(), float(module(**batch).detach())


def normalise(seeds: list[Seed]) -> list[tuple[dict[str, Tensor], float]]:
    """Do the same with executors, statistics synchronised where samples are split."""
    found: list[tuple[dict[str, Tensor], float]] = []
    for seed in seeds:
        module, batch = normalised(seed.num_microbatches)
        captured = capture(module, batch, batch_norm="synchronised" if seed.data > 1 else "local")
        strategy = seed_strategy(captured.graph, seed)
        if seed.recompute:
            strategy = replace(strategy, recompute=tuple(range(len(captured.graph.blocks))))
        program = lower(captured.graph, strategy)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        executor = Executor(captured, program, module, optimizer=optimizer)
        for one in batches(batch, 2):
            executor.step(one)
        loss = float(executor.evaluate(batch))
        trained, _ = normalised(seed.num_microbatches)
        executor.to_module(trained)
        found.append((trained.state_dict(), loss))
    return found


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (1, [Seed(num_microbatches=2), Seed(num_microbatches=2, recompute=True)]),
        (
            2,
            [
                Seed(data=2, zero=3, recompute=True),
                Seed(stages=2, num_microbatches=2, recompute=True),
            ],
        ),
    ],
)
def test_buffers_are_written_once_per_microbatch_as_with_gradient_accumulation(
    ranks: int, seeds: list[Seed]
) -> None:
    worlds = [normalise(seeds)] if ranks == 1 else run_ranks(ranks, normalise, seeds)
    for world in worlds:
        for seed, (state, found) in zip(seeds, world, strict=True):
            expected, loss = accumulate(seed.num_microbatches)
            for name, tensor in expected.items():
                torch.testing.assert_close(
                    state[name], tensor, rtol=1e-10, atol=1e-12, msg=f"{seed.label} {name}"
                )
            assert found == pytest.approx(loss, rel=1e-10)
