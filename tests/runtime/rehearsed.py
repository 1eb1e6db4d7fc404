"""Train by a strategy with all ranks in this process, and compare with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.runtime.capture import Captured
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, Traffic, run_locally
from tests.runtime.equivalence import Run, copied, step_through


def train_rehearsed(
    captured: Captured,
    strategy: Strategy,
    module: nn.Module,
    batch: dict[str, Tensor],
    optimizer: Callable[..., Any],
    max_norm: float | None = None,
    streams: bool = False,
    device: str = "cpu",
) -> tuple[list[Run], Traffic]:
    """Return what every rank ended with, and what was sent; the module is left as it is. All ranks share the
    ``device``."""
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> Run:
        mine = copy.deepcopy(module)
        options = RunOptions(max_norm=max_norm, seed=5, world=world, device=device)
        executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
        names = [name for name, _ in captured.graph.outputs]
        losses, outputs = step_through(executor, batch, names, streams)
        executor.to_module(mine)
        return Run(losses, copied(mine.named_parameters()), copied(mine.named_buffers()), outputs)

    return run_locally(train, len(strategy.devices))
