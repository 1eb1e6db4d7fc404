"""Error feedback: what gradients lose on the wire is sent later, and survives checkpoints."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.strategy import Strategy, WireDtype
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.scaling import Scaling
from shardwright.runtime.store import DTYPES
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.test_wire import Weighed, sums
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
STEPS = 5
Rounds = list[list[Tensor]]  # by turn, what every rank's gradient is


def feeding_back(strategy: Strategy, dtype: WireDtype = "bfloat16") -> Strategy:
    """Return a strategy with gradients in a dtype on the wire, and error feedback."""
    sync = replace(strategy.gradient_sync, dtype=dtype, error_feedback=True)
    return replace(strategy, gradient_sync=sync)


def batches() -> list[dict[str, Tensor]]:
    """Return batches, all of other values."""
    _, batch = sums(torch.float64)
    return [
        {name: (1 + turn / 7) * one.roll(turn, 1) for name, one in batch.items()}
        for turn in range(STEPS)
    ]


def weighed() -> zoo.Example:
    return Weighed(torch.float64), batches()[0]


def emulated(
    key: str, size: tuple[int, ...], num_ranks: int, often: bool, wire: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Train as P workers would with plain PyTorch: the parameter, each worker's residual, and the sum of
    what all were given."""
    parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer = SGD([parameter])
    residual = torch.zeros(num_ranks, *size, dtype=torch.float64)
    everything, applied = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for batch in batches():
        # A rank's samples: its share of each of two microbatches.
        shares = batch[key].unflatten(0, (2, num_ranks, -1)).sum(2)
        everything = everything + shares.sum((0, 1))
        turns = shares if often else shares.sum(0, keepdim=True)
        parameter.grad = torch.zeros_like(parameter)
        for turn in turns:
            sent: list[Tensor] = []
            for rank, gradient in enumerate(turn):
                whole = residual[rank] + gradient
                sent.append(whole.to(wire))
                residual[rank] = whole - sent[-1].double()
            parameter.grad += reduce(torch.add, sent).double()
            applied += torch.stack(sent).double().sum(0)
        optimizer.step()
    error = (everything - applied - residual.sum(0)).abs().max()
    assert error < 1e-12  # nothing is lost but where the backend itself adds up
    return parameter.detach(), residual, everything


def trained(
    captured: Captured, strategy: Strategy, module: nn.Module
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return every rank's whole parameters after some steps, and its states by parameter."""
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=RunOptions(world=world))
        for batch in batches():
            executor.step(batch)
        executor.to_module(mine)
        held = {
            captured.graph.tensors[program.values[index].tensor].name: one.clone()
            for index, one in executor.machine.parameters.states.items()
        }
        return {name: one.detach().clone() for name, one in mine.named_parameters()}, held

    return run_locally(train, len(strategy.devices))[0]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_ranks", "zero"), [(2, 0), (4, 1), (4, 2), (2, 3)])
def test_ranks_end_as_workers_in_plain_pytorch_do(num_ranks: int, zero: int, wire: Any) -> None:
    module, _, captured = captured_of(weighed)
    seed = Seed(data=num_ranks, zero=zero, num_microbatches=2)
    strategy = feeding_back(seed_strategy(captured.graph, seed), wire)
    ranks = trained(captured, strategy, module)
    for name, key in (("one", "x"), ("two", "z")):
        size = tuple(module.get_parameter(name).shape)
        expected, residual, _ = emulated(key, size, num_ranks, zero >= 2, DTYPES[wire])
        assert residual.abs().max() > 0
        for rank, (parameters, states) in enumerate(ranks):
            torch.testing.assert_close(parameters[name], expected, rtol=0, atol=0)
            torch.testing.assert_close(states[name], residual[rank], rtol=0, atol=0)


def test_sums_of_microbatches_that_are_wider_than_the_wire_feed_back_too() -> None:
    """In bfloat16 gradients add up in float32, and travel as what their parameters are."""
    module, batch = sums(torch.float32)
    captured = capture(module, batch, precision="bfloat16")
    seed = Seed(data=2, num_microbatches=2, precision="bfloat16")
    strategy = feeding_back(seed_strategy(captured.graph, seed))
    program = lower(captured.graph, strategy)
    states = [value for value in program.values if value.role == "state"]
    assert [value.dtype for value in states] == ["float32"] * 2
    ranks = trained(captured, strategy, module)
    assert any(bool(one.abs().max() > 0) for one in ranks[0][1].values())
    assert ranks[0][0]["one"].tolist() == ranks[1][0]["one"].tolist()


def test_buckets_change_and_residuals_do_not() -> None:
    module, _, captured = captured_of(weighed)
    alone = feeding_back(seed_strategy(captured.graph, Seed(data=2)))
    sync = replace(alone.gradient_sync, buckets=(tuple(reversed(captured.graph.parameters)),))
    merged = replace(alone, gradient_sync=sync)
    alone = replace(alone, gradient_sync=replace(sync, buckets=()))
    assert [len(lower(captured.graph, one).transforms) for one in (alone, merged)] == [4, 2]
    for one, other in zip(
        trained(captured, alone, module), trained(captured, merged, module), strict=True
    ):
        for here, there in zip(one, other, strict=True):
            assert all(torch.equal(here[name], there[name]) for name in here.keys() | there.keys())


def test_what_cannot_be_fed_back_is_refused() -> None:
    module = Weighed(torch.float32)
    captured = capture(module, sums(torch.float32)[1])
    strategy = seed_strategy(captured.graph, Seed(data=2))
    for wrong in (
        feeding_back(strategy, "parameter"),
        replace(feeding_back(strategy), precision="float16"),
    ):
        with pytest.raises(InputError, match="error feedback"):
            lower(captured.graph, wrong)
    program = lower(captured.graph, feeding_back(seed_strategy(captured.graph, Seed())))
    with pytest.raises(InputError, match="units of the loss"):
        Executor(captured, program, module, optimizer=SGD, options=RunOptions(scaling=Scaling()))


def resumed(root: Path, zero: int) -> list[Any]:
    """Train five steps; the same with a stop after the second; and under another plan from there."""
    torch.set_num_threads(1)
    module, _, captured = captured_of(weighed)
    found: list[Any] = []

    def executor(seed: Seed) -> Executor:
        strategy = feeding_back(seed_strategy(captured.graph, seed))
        return Executor(
            captured, lower(captured.graph, strategy), copy.deepcopy(module), optimizer=SGD
        )

    mine = Seed(data=2, zero=zero, num_microbatches=2)
    one, other, third = executor(mine), executor(mine), executor(Seed(data=2))
    for turn, batch in enumerate(batches()):
        if turn == 2:
            one.save(root)
            other.load(root)
            third.load(root)
            found.append(next(iter(third.machine.parameters.states.values())).clone())
        one.step(batch)
        if turn >= 2:
            other.step(batch)
    for each in (one, other):
        whole = copy.deepcopy(module)
        each.to_module(whole)
        found.append({name: value.detach().clone() for name, value in whole.named_parameters()})
        found.append([state.clone() for state in each.machine.parameters.states.values()])
    return found


def peaks(plans: list[tuple[WireDtype, int, int]]) -> list[tuple[float, float]]:
    """Return, by plan of (wire, ZeRO level, microbatches), the measured and the predicted peak."""
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    module, batch = zoo.gpt(width=64, length=8, depth=1, dtype=torch.float64)
    captured = capture(module, batch)
    for wire, zero, microbatches in plans:
        seed = Seed(data=2, zero=zero, num_microbatches=microbatches)
        strategy = feeding_back(seed_strategy(captured.graph, seed), wire)
        program = lower(captured.graph, replace(strategy, optimizer_states=1))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        seconds = np.ones(program.num_instructions)
        predicted = simulate(program, seconds, scatter_copies=1.0).peak_bytes[0]
        found.append((executor.profile_step(batch).peak_bytes[0], predicted))
        executor.close()
    return found


@pytest.mark.ranks
def test_residuals_take_the_memory_that_is_predicted() -> None:
    plans: list[tuple[WireDtype, int, int]] = [
        ("bfloat16", 0, 2),
        ("bfloat16", 2, 2),
        ("float32", 1, 1),
    ]
    for found in run_ranks(2, peaks, plans):
        for measured, predicted in found:
            assert measured == pytest.approx(predicted, rel=0.01)


def summed_up(root: Path) -> dict[str, Tensor]:
    """Load a checkpoint of two ranks on four; return what is owed to each parameter here."""
    torch.set_num_threads(1)
    module, _, captured = captured_of(weighed)
    strategy = feeding_back(seed_strategy(captured.graph, Seed(data=4)))
    executor = Executor(captured, lower(captured.graph, strategy), module, optimizer=SGD)
    told = pytest.warns(UserWarning, match="2 and 4") if executor.rank == 0 else nullcontext()
    with told:
        executor.load(root)
    program = executor.program
    return {
        captured.graph.tensors[program.values[index].tensor].name: state.clone()
        for index, state in executor.machine.parameters.states.items()
    }


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 2])
def test_a_run_resumes_to_the_last_bit_and_other_ranks_share_what_is_owed(
    zero: int, tmp_path: Path
) -> None:
    ranks = run_ranks(2, resumed, tmp_path, zero)
    for found in ranks:
        _, straight, states, again, others = found
        assert all(torch.equal(straight[name], again[name]) for name in straight)
        assert all(torch.equal(a, b) for a, b in zip(states, others, strict=True))
    here = run_ranks(4, summed_up, tmp_path)
    owed = torch.stack([found[0] for found in ranks]).sum(0)
    name = "one" if owed.shape == (8,) else "two"
    now = torch.stack([states[name] for states in here])
    torch.testing.assert_close(now.sum(0), owed, rtol=1e-15, atol=1e-15)
    assert all(torch.equal(one, now[0]) for one in now)
