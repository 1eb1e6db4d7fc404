"""Gradients in another dtype on the wire: what ranks end with is what rounding there makes of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.program import Kind
from shardwright.core.strategy import Strategy, WireDtype
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.loss import NUM_RIDING
from shardwright.runtime.store import DTYPES
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=1.0)
WIRES: tuple[WireDtype, ...] = ("float32", "bfloat16", "float16")


class Weighed(nn.Module):
    """Sums whose gradients are sums of the batch, so that every rank's are known to the last bit.

    The second weight's is added up over samples and over the first dim.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(8, dtype=dtype))
        self.two = nn.Parameter(torch.zeros(4, 8, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (x * self.one).sum() + (z * self.two).sum()


def sums(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a batch of eight samples which 8 bits of mantissa do not hold."""
    source = torch.Generator().manual_seed(3)
    whole = {"x": torch.randn(8, 8, generator=source, dtype=torch.float64)}
    whole["z"] = torch.randn(8, 4, 8, generator=source, dtype=torch.float64)
    # Multiples of 2^-16 below 8: their sums are exact in float32 in any order.
    exact = {name: (one * 2**16).round() / 2**16 for name, one in whole.items()}
    return Weighed(dtype), {name: one.to(dtype) for name, one in exact.items()}


def travelling(strategy: Strategy, dtype: WireDtype) -> Strategy:
    """Return a strategy with gradients in a dtype on the wire."""
    return replace(strategy, gradient_sync=replace(strategy.gradient_sync, dtype=dtype))


def updated(captured: Captured, strategy: Strategy, module: nn.Module, batch: dict[str, Tensor]):
    """Return every rank's whole parameters after one step, and what was sent."""
    program = lower(captured.graph, strategy)

    def train(world: LocalWorld) -> dict[str, Tensor]:
        mine = copy.deepcopy(module)
        options = RunOptions(seed=5, world=world)
        executor = Executor(captured, program, mine, optimizer=SGD, options=options)
        executor.step(batch)
        executor.to_module(mine)
        return {name: one.detach().clone() for name, one in mine.named_parameters()}

    return program, *run_locally(train, len(strategy.devices))


def added_up(shares: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of what ranks have, each rounded and added in rank order in a dtype."""
    return reduce(torch.add, [share.to(dtype) for share in shares])


@pytest.mark.torch
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("wire", WIRES)
def test_what_ranks_apply_is_the_sum_of_their_rounded_gradients(wire: str, zero: int) -> None:
    """Four ranks, two microbatches: from ZeRO-2 on each microbatch travels by itself."""
    module, batch = sums(torch.float64)
    captured = capture(module, batch)
    seed = Seed(data=4, zero=zero, num_microbatches=2)
    strategy = travelling(seed_strategy(captured.graph, seed), wire)  # type: ignore[arg-type]
    _, runs, _ = updated(captured, strategy, module, batch)
    for name, key in (("one", "x"), ("two", "z")):
        # A rank's samples: a quarter of each microbatch, which is half of the batch.
        shares = batch[key].unflatten(0, (2, 4, 1)).sum(2)
        often = shares if zero >= 2 else shares.sum(0, keepdim=True)
        turns = [added_up(list(turn), DTYPES[wire]).to(torch.float64) for turn in often]
        expected = -torch.stack(turns).sum(0)
        for run in runs:
            torch.testing.assert_close(run[name], expected, rtol=0, atol=0)
        exact = -batch[key].sum(0)
        assert wire == "float32" or not torch.equal(expected, exact)


@pytest.mark.torch
def test_mixed_precision_may_reduce_in_float32() -> None:
    """Without it, each rank's gradient is rounded to bfloat16 and so is the sum."""
    module, batch = sums(torch.float32)
    captured = capture(module, batch, precision="bfloat16")
    seed = Seed(data=2, num_microbatches=4, precision="bfloat16")
    plain = seed_strategy(captured.graph, seed)
    # One sample after the other is added up in float32; as bfloat16 each of them is rounded once.
    rounded = batch["x"].bfloat16().float()
    exact = -rounded.sum(0)
    shares = list(rounded.unflatten(0, (4, 2)).sum(0))
    _, wide, sent = updated(captured, travelling(plain, "float32"), module, batch)
    _, narrow, less = updated(captured, plain, module, batch)
    for run, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(run["one"], exact.to(run["one"].dtype), rtol=0, atol=0)
        expected = -added_up(shares, torch.bfloat16)
        torch.testing.assert_close(other["one"], expected.to(other["one"].dtype), rtol=0, atol=0)
    tag = (0, "all_reduce", 2)
    # Behind gradients in float32 rides the loss.
    assert sent[tag].bytes - 4 * NUM_RIDING == 2 * less[tag].bytes == 4 * (8 + 32)


@pytest.mark.torch
@pytest.mark.parametrize(
    "seed",
    [
        Seed(data=2),
        Seed(data=2, zero=1),
        Seed(data=2, tensor=2, zero=3, num_microbatches=2),
        Seed(data=2, stages=2, zero=2, num_microbatches=2),
    ],
    ids=lambda seed: seed.label,
)
def test_bytes_on_the_wire_are_those_of_the_program(seed: Seed) -> None:
    module, batch = zoo.gpt(dtype=torch.float32)
    captured = capture(module, batch)
    strategy = travelling(seed_strategy(captured.graph, seed), "bfloat16")
    program, _, traffic = updated(captured, strategy, module, batch)
    for primitive in ("all_reduce", "reduce_scatter"):
        planned = sum(
            program.messages[item].bytes
            for kind, item, group in zip(program.kind, program.item, program.group, strict=True)
            if kind == Kind.MESSAGE and group == 0
            if program.messages[item].primitive == primitive and program.messages[item].axes
        )
        seen = sum(
            sent.bytes for (rank, how, _), sent in traffic.items() if (rank, how) == (0, primitive)
        )
        # The loss is agreed upon beside the Program.
        assert seen == planned
    synchronised = [one for one in program.messages if one.purpose == "synchronise"]
    assert {program.values[one.sources[0]].dtype for one in synchronised} == {"bfloat16"}


SMALL_GPT = partial(zoo.gpt, width=64, length=8, depth=1, dtype=torch.float64)


def one_step(plans: list[tuple[WireDtype, int]]) -> list[tuple[dict[str, Tensor], float, float]]:
    """Train over gloo; return parameters, and measured and predicted peaks of the next step."""
    torch.set_num_threads(1)
    found: list[tuple[dict[str, Tensor], float, float]] = []
    for wire, zero in plans:
        module, batch, captured = captured_of(SMALL_GPT)
        seed = Seed(data=2, zero=zero, num_microbatches=2)
        program = lower(captured.graph, travelling(seed_strategy(captured.graph, seed), wire))
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD)
        executor.step(batch)
        executor.to_module(mine)
        after = {name: one.detach().clone() for name, one in mine.named_parameters()}
        masters = [master.parameter for master in executor.machine.parameters.masters]
        states = 2 * sum(one.numel() * one.element_size() for one in masters)
        measured = executor.profile_step(batch).peak_bytes[0]
        seconds = np.ones(program.num_instructions)
        predicted = simulate(program, seconds, scatter_copies=1.0).peak_bytes[0] - states
        found.append((after, measured, predicted))
        executor.close()
    return found


@pytest.mark.ranks
def test_two_processes_round_alike_and_need_the_memory_that_was_predicted() -> None:
    plans: list[tuple[WireDtype, int]] = [("bfloat16", 2), ("float16", 0)]
    ranks = run_ranks(2, one_step, plans)
    module, batch = SMALL_GPT()
    before = {name: one.detach() for name, one in module.named_parameters()}
    quarters: list[dict[str, Tensor]] = []  # of the gradient: a rank's of a microbatch
    for turn in range(4):
        module.zero_grad()
        module(**{name: one.chunk(4)[turn] for name, one in batch.items()}).backward()
        quarters.append({name: one.grad / 4 for name, one in module.named_parameters()})  # type: ignore[operator]
    for place, (wire, _) in enumerate(plans):
        for found in ranks:
            after, measured, predicted = found[place]
            assert measured == pytest.approx(predicted, rel=0.01)
            finest = torch.finfo(DTYPES[wire])
            for name, value in before.items():
                shares = torch.stack([quarter[name] for quarter in quarters])
                error = (value - after[name] - shares.sum(0)).abs()
                # Six roundings at most, each by half an ulp of what is no more than all shares.
                most = (
                    3 * finest.eps * shares.abs().sum(0) + 6 * finest.smallest_normal * finest.eps
                )
                assert bool((error <= most + 1e-15).all()), (name, wire)
        one, other = (rank[place][0] for rank in ranks)
        assert all(torch.equal(value, other[name]) for name, value in one.items())
