"""Gradients of many microbatches add up in float32; what travels stays in the model's own dtype."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.core.graph import KEPT_AS
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Accumulation, Precision
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check
from shardwright.runtime.capture import Captured
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.scaling import Scaling
from tests import zoo
from tests.runtime.equivalence import captured_of

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=1.0)
COUNT = 16
SINGLE = partial(zoo.mlp, dtype=torch.float32)


class Weighed(nn.Module):
    """A sum whose gradient is the sum of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def small_after_large(small: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a batch of which half precision loses all but the first sample's share, one by one."""
    x = torch.full((COUNT, 8), small)
    x[0] = 1.0
    return Weighed(), {"x": x}


def trained(captured: Captured, program: Program, module: nn.Module, batch: dict[str, Tensor]):
    """Return every rank's masters after one step, by the value that they are."""

    def train(world: LocalWorld) -> list[Tensor]:
        options = RunOptions(seed=5, world=world, scaling=Scaling(scale=1.0))
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        executor.step(batch)
        masters = executor.machine.parameters.masters
        return [master.parameter.detach().clone() for master in masters]

    return run_locally(train, len(program.strategy.devices))


@pytest.mark.parametrize("how", ["float32", "own"])
@pytest.mark.parametrize(
    ("precision", "tensor"), [("bfloat16", 1), ("bfloat16", 2), ("float16", 2), ("fp8", 1)]
)
def test_small_gradients_after_a_large_one_are_not_lost(
    how: Accumulation, precision: Precision, tensor: int
) -> None:
    small = 2.0**-12 if precision == "float16" else 2.0**-8
    total = 1 + (COUNT - 1) * small if how == "float32" else 1.0
    module, batch, captured = captured_of(
        small_after_large, small, precision=KEPT_AS.get(precision, precision)
    )
    seed = Seed(tensor=tensor, num_microbatches=COUNT, precision=precision)
    strategy = replace(seed_strategy(captured.graph, seed), accumulation=how)
    program = lower(captured.graph, strategy)
    found, _ = trained(captured, program, module, batch)
    for masters in found:
        for master in masters:
            assert master.dtype is torch.float32
            torch.testing.assert_close(master, torch.full_like(master, -total), rtol=0, atol=0)


def planned_bytes(program: Program) -> dict[tuple[str, str], int]:
    """Return what the Program says one device sends, by purpose and primitive."""
    found: dict[tuple[str, str], int] = {}
    for kind, item in zip(program.kind.tolist(), program.item.tolist(), strict=True):
        message = program.messages[item] if kind == Kind.MESSAGE else None
        if message and message.axes:
            key = (message.purpose, message.primitive)
            found[key] = found.get(key, 0) + message.bytes
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["float32", "own"])
def test_parameters_and_gradients_travel_in_their_own_dtype(zero: int, how: Accumulation) -> None:
    module, batch, captured = captured_of(SINGLE, precision="bfloat16")
    seed = Seed(data=2, zero=zero, num_microbatches=2, precision="bfloat16")
    program = lower(captured.graph, replace(seed_strategy(captured.graph, seed), accumulation=how))
    check(program)
    planned = planned_bytes(program)
    whole = 2 * sum(parameter.numel() for parameter in module.parameters())
    synchronised = sum(size for (why, _), size in planned.items() if why == "synchronise")
    gathered = sum(size for (why, _), size in planned.items() if why == "parameter")
    # From ZeRO-2 on gradients travel with each microbatch, from ZeRO-3 on parameters twice with each.
    assert synchronised == whole * (2 if zero >= 2 else 1)
    assert gathered == whole * (0, 1, 1, 4)[zero]
    _, traffic = trained(captured, program, module, batch)
    for name, given in (("all_reduce", 1), ("reduce_scatter", 1), ("all_gather", 2)):
        sent = traffic[0, name, 2].bytes if (0, name, 2) in traffic else 0
        assert given * sent == sum(size for (_, kind), size in planned.items() if kind == name)
