"""Train a small model by a strategy on several ranks and by plain PyTorch, and compare.

The reference is the unmodified module with the same optimizer, on the whole batch. Gradients are
compared through SGD: with a learning rate of 1 an update is the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from tests.runtime.captures import shared
from tests.runtime.world import run_ranks

Factory = Callable[[], tuple[nn.Module, dict[str, Tensor]]]
StrategyBuilder = Callable[[OperatorGraph], Strategy]
STEPS = 3


@dataclass(frozen=True)
class Run:
    """Losses (and named outputs) of the steps, and parameters (and buffers) after them."""

    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])


@lru_cache(maxsize=64)
def captured_of(
    factory: Callable[..., tuple[nn.Module, dict[str, Tensor]]], *arguments: Any, **options: Any
) -> tuple[nn.Module, dict[str, Tensor], Captured]:
    """Build a model and capture it, once in a run of tests: for those that leave the model as it is, and do
    not ask what capturing it shows. ``options`` are the capture's."""
    module, batch = factory(*arguments)
    make = partial(capture, module, batch, **options)
    return module, batch, shared(make, factory, arguments, options)


def batches(batch: dict[str, Tensor], steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Return different batches made from one, by rolling its samples against each other."""
    names = list(batch)
    return [
        {name: batch[name].roll(step * (names.index(name) + 1), 0) for name in names}
        for step in range(steps)
    ]


def train_plain(
    factory: Factory,
    optimizer: Callable[..., Any],
    max_norm: float | None = None,
    names: Sequence[str] = (),
) -> Run:
    """Train with plain PyTorch; ``names`` are the outputs to keep."""
    module, batch = factory()
    chosen = optimizer(list(module.named_parameters()))
    losses: list[float] = []
    outputs: list[dict[str, Tensor]] = []
    for one in batches(batch):
        output = module(**one)
        if names:
            outputs.append(copied((name, output[name]) for name in names))
        loss = output if isinstance(output, Tensor) else output["loss"]
        chosen.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        chosen.step()
        losses.append(float(loss.detach()))
    return Run(losses, copied(module.named_parameters()), copied(module.named_buffers()), outputs)


def train_planned(
    captured: Captured,
    strategy: StrategyBuilder,
    module: nn.Module,
    batch: dict[str, Tensor],
    optimizer: Callable[..., Any],
    max_norm: float | None = None,
) -> Run:
    """Train a copy of the module with the executor on this rank."""
    program = lower(captured.graph, strategy(captured.graph))
    options = RunOptions(max_norm=max_norm, seed=5)
    mine, trained = copy.deepcopy(module), copy.deepcopy(module)
    executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
    losses = [float(executor.step(one)) for one in batches(batch)]
    executor.to_module(trained)
    return Run(losses, copied(trained.named_parameters()), copied(trained.named_buffers()))


def step_through(
    executor: Executor, batch: dict[str, Tensor], names: Sequence[str], streams: bool = False
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train the steps and return their losses and named outputs; where it ``streams``, every batch
    is fetched while the step before computes."""
    losses: list[float] = []
    outputs: list[dict[str, Tensor]] = []
    if streams:
        for step in executor.train(batches(batch), names):
            losses.append(float(step.loss))
            outputs.append(copied(step.outputs.items()))
        return losses, outputs
    for one in batches(batch):
        losses.append(float(executor.step(one, outputs=names)))
        outputs.append(copied(executor.outputs.items()))
    return losses, outputs


def train_each(
    factory: Factory,
    strategies: Sequence[StrategyBuilder],
    optimizer: Callable[..., Any],
    max_norm: float | None = None,
) -> list[Run]:
    """Train by one strategy after another in the same world; the model is captured once."""
    module, batch, captured = captured_of(factory)
    return [
        train_planned(captured, strategy, module, batch, optimizer, max_norm)
        for strategy in strategies
    ]


def copied(named: Any) -> dict[str, Tensor]:
    """Return lasting copies of named tensors."""
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_close(found: Run, expected: Run, label: str, tolerance: float = 1e-10) -> None:
    """Compare losses and parameters relatively; float64 leaves about 1e-15 per operation."""
    losses = torch.tensor(expected.losses, dtype=torch.float64)
    differences = (torch.tensor(found.losses, dtype=torch.float64) - losses).abs() / losses.abs()
    assert float(differences.max()) <= tolerance, f"{label}: losses differ by {differences}"
    for name, tensor in expected.parameters.items():
        # A key's bias has a gradient of exactly zero in theory: what is left of it is rounding.
        scale = max(float(tensor.abs().max()), 1e-3)
        difference = float((found.parameters[name] - tensor).abs().max()) / scale
        assert difference <= tolerance, f"{label}: {name} differs by {difference:.2e}"
    for step, outputs in enumerate(expected.outputs):
        assert found.outputs[step].keys() == outputs.keys()
        for name, tensor in outputs.items():
            said = f"{label}: output {name} of step {step}"
            assert found.outputs[step][name].shape == tensor.shape, said
            scale = max(float(tensor.abs().max()), 1e-3)
            difference = float((found.outputs[step][name] - tensor).abs().max()) / scale
            assert difference <= tolerance, f"{said} differs by {difference:.2e}"


def assert_equivalent(
    num_ranks: int,
    factory: Factory,
    strategies: Mapping[str, StrategyBuilder],
    optimizer: Callable[..., Any] | None = None,
    max_norm: float | None = None,
    *,
    processes: bool = False,
) -> None:
    """Assert that every rank of every strategy (by name) trains as the single process does.

    The ranks are threads that take turns, or ``processes`` that talk over gloo: then each captures
    and lowers for itself, which takes longer than training does.
    """
    from tests.runtime.rehearsed import train_rehearsed  # which needs what stands above

    chosen = optimizer or partial(torch.optim.SGD, lr=1.0)
    expected = train_plain(factory, chosen, max_norm)
    if processes:
        arguments = (factory, list(strategies.values()), chosen, max_norm)
        for runs in run_ranks(num_ranks, train_each, *arguments, timeout=240):
            for name, run in zip(strategies, runs, strict=True):
                assert_close(run, expected, name)
        return
    module, batch, captured = captured_of(factory)
    for name, build in strategies.items():
        strategy = build(captured.graph)
        runs, _ = train_rehearsed(captured, strategy, module, batch, chosen, max_norm)
        assert len(runs) == num_ranks
        for run in runs:
            assert_close(run, expected, name)
