"""Plans that compress gradients: ranks end as workers in NumPy do, and nothing is lost but late."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.core.compression import SPARSE, WHOLE_BELOW, kept_elements
from shardwright.core.program import Kind
from shardwright.core.strategy import Compressor, GradientSync, Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check_complete
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from tests import zoo
from tests.ddp import emulator
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
RATE, STEPS, DENSITY = 0.5, 5, 0.02
SGD = partial(torch.optim.SGD, lr=RATE)
METHODS: tuple[Compressor, ...] = ("top-k", "int8", "1-bit")
SIZES = {"one": (WHOLE_BELOW + 76,), "two": (40, 30), "few": (8,)}  # the last travels whole


class Weighed(nn.Module):
    """Sums whose gradients are sums of the batch, so that what every rank has is known."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    def forward(self, one: Tensor, two: Tensor, few: Tensor) -> Tensor:
        return (one * self.one).sum() + (two * self.two).sum() + (few * self.few).sum()


def batches(samples: int = 12) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(3)
    return [
        {
            name: torch.randn(samples, *size, generator=source, dtype=torch.float64)
            for name, size in SIZES.items()
        }
        for _ in range(STEPS)
    ]


def weighed() -> zoo.Example:
    return Weighed(), batches()[0]


def packing(strategy: Strategy, compressor: Compressor, density: float = DENSITY) -> Strategy:
    """Return a strategy whose gradients are compressed."""
    density = density if compressor in SPARSE else 1.0
    sync = replace(strategy.gradient_sync, compressor=compressor, density=density)
    return replace(strategy, gradient_sync=sync)


def emulated(name: str, ranks: int, compressor: Compressor) -> tuple[Any, Any]:
    """Train as P workers do in NumPy; return the parameter, and what each worker owes."""
    count = int(np.prod(SIZES[name]))
    keep = {
        "top-k": partial(emulator.top, k=kept_elements(DENSITY, count)),
        "int8": emulator.int8,
        "1-bit": emulator.one_bit,
    }[compressor]
    weight, owed = np.zeros(count), [np.zeros(count) for _ in range(ranks)]
    everything, applied = np.zeros(count), np.zeros(count)
    for batch in batches():
        # A rank's samples: its share of each of two microbatches.
        shares = batch[name].unflatten(0, (2, ranks, -1)).sum((0, 2)).view(ranks, -1).numpy()
        everything += shares.sum(0)
        mean, owed = emulator.all_gathered([a + b for a, b in zip(owed, shares)], keep)
        weight -= RATE * ranks * mean
        applied += ranks * mean
    np.testing.assert_allclose(everything, applied + np.sum(owed, 0), rtol=0, atol=1e-12)
    return weight, owed


def trained(captured: Captured, strategy: Strategy, module: nn.Module) -> list[Any]:
    """Return every rank's whole parameters after some steps, and its states by parameter."""
    program = lower(captured.graph, strategy)
    check_complete(program, captured.graph)

    def train(world: LocalWorld) -> Any:
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=RunOptions(world=world))
        for batch in batches():
            executor.step(batch)
        executor.to_module(mine)
        held = {name_of(executor, value): one.clone() for value, one in states(executor).items()}
        return {name: one.detach().clone() for name, one in mine.named_parameters()}, held

    return run_locally(train, len(strategy.devices))[0]


def states(executor: Executor) -> dict[int, Tensor]:
    return executor.machine.parameters.states


def name_of(executor: Executor, value: int) -> str:
    return executor.captured.graph.tensors[executor.program.values[value].tensor].name


@pytest.mark.parametrize("compressor", METHODS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_end_as_workers_in_numpy_do(ranks: int, compressor: Compressor) -> None:
    module, _, captured = captured_of(weighed)
    seed = Seed(data=ranks, num_microbatches=2)
    strategy = packing(seed_strategy(captured.graph, seed), compressor)
    found = trained(captured, strategy, module)
    for name in ("one", "two"):
        weight, owed = emulated(name, ranks, compressor)
        for rank, (parameters, held) in enumerate(found):
            assert torch.equal(parameters[name], found[0][0][name])
            flat = parameters[name].view(-1).numpy()
            np.testing.assert_allclose(flat, weight, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(held[name].view(-1), owed[rank], rtol=0, atol=1e-12)
            assert "few" not in held


def test_each_parameter_may_be_compressed_in_its_own_way() -> None:
    module, _, captured = captured_of(weighed)
    plain = seed_strategy(captured.graph, Seed(data=2, num_microbatches=2))
    number = {captured.graph.tensors[one].name: one for one in captured.graph.parameters}
    apart = ((number["one"], "int8", 1.0), (number["two"], "top-k", DENSITY))
    sync = replace(plain.gradient_sync, apart=tuple(sorted(apart)))
    found = trained(captured, replace(plain, gradient_sync=sync), module)
    how: dict[str, Compressor] = {"one": "int8", "two": "top-k"}
    for name, one in how.items():
        weight, owed = emulated(name, 2, one)
        for rank, (parameters, held) in enumerate(found):
            flat = parameters[name].view(-1).numpy()
            np.testing.assert_allclose(flat, weight, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(held[name].view(-1), owed[rank], rtol=0, atol=1e-12)
    whole = replace(plain, gradient_sync=replace(plain.gradient_sync, compressor="int8"))
    others = replace(whole.gradient_sync, apart=((number["two"], "none", 1.0),))
    _, held = trained(captured, replace(whole, gradient_sync=others), module)[0]
    assert set(held) == {"one"}


def test_what_of_a_bucket_waits_for_no_other_rank_comes_before_what_does() -> None:
    graph = captured_of(weighed)[2].graph
    plain = seed_strategy(graph, Seed(data=2))
    one, two, few = graph.parameters
    sync = GradientSync(
        method="capped", buckets=((one, two, few),), apart=((one, "int8", 1.0), (two, "1-bit", 1.0))
    )
    program = lower(graph, replace(plain, gradient_sync=sync))
    names = [
        program.transforms[item].name
        if kind == Kind.TRANSFORM
        else program.messages[item].primitive
        for kind, item in zip(program.kind, program.item, strict=True)
        if kind == Kind.TRANSFORM or (kind == Kind.MESSAGE and program.messages[item].axes)
    ]
    assert names == [
        *("all_reduce", "int8", "all_gather", "1-bit", "all_gather"),
        *("int8 sum", "1-bit sum"),
    ]


def test_where_everything_is_kept_training_is_as_without() -> None:
    module, _, captured = captured_of(weighed)
    plain = seed_strategy(captured.graph, Seed(data=4))
    whole = trained(captured, packing(plain, "top-k", 1.0), module)
    for (here, held), (there, _) in zip(whole, trained(captured, plain, module), strict=True):
        assert all(bool((one == 0).all()) for one in held.values())
        for name, one in here.items():
            torch.testing.assert_close(one, there[name], rtol=1e-13, atol=1e-13)


WIDER = partial(zoo.gpt, width=64, length=8)


@pytest.mark.parametrize(
    ("seed", "packs"),
    [
        (Seed(data=2), True),
        (Seed(data=2, tensor=2), True),
        (Seed(data=2, stages=2, num_microbatches=2), True),
        (Seed(data=2, zero=1), False),  # gradients are scattered
        (Seed(tensor=2), False),
    ],
)
def test_only_sums_over_devices_are_compressed(seed: Seed, packs: bool) -> None:
    graph = captured_of(WIDER)[2].graph
    plain = seed_strategy(graph, seed)
    sent = [synchronised_bytes(lower(graph, one)) for one in (plain, packing(plain, "top-k"))]
    assert (sent[1] < 0.2 * sent[0]) is packs
    assert packs or sent[0] == sent[1]


def synchronised_bytes(program: Any) -> int:
    return sum(one.bytes for one in program.messages if one.purpose == "synchronise")


def test_bytes_are_those_of_values_and_indices() -> None:
    module = Weighed()
    graph = capture(module, batches()[0]).graph
    program = lower(graph, packing(seed_strategy(graph, Seed(data=4)), "top-k"))
    (gather,) = [one for one in program.messages if one.primitive == "all_gather"]
    kept = [kept_elements(DENSITY, int(np.prod(SIZES[name]))) for name in ("one", "two")]
    assert gather.bytes == 4 * sum(kept) * (8 + 4)  # of four ranks: float64 and 32-bit places


def test_mixed_precision_owes_in_float32() -> None:
    module, batch = zoo.gpt(width=64, length=8, depth=1, dtype=torch.float32)
    captured = capture(module, batch, precision="bfloat16")
    seed = Seed(data=2, num_microbatches=2, precision="bfloat16")
    program = lower(captured.graph, packing(seed_strategy(captured.graph, seed), "int8"))
    held = {value.dtype for value in program.values if value.role == "state"}
    assert held == {"float32"}

    def train(world: LocalWorld) -> float:
        executor = Executor(
            captured, program, copy.deepcopy(module), optimizer=SGD, options=RunOptions(world=world)
        )
        losses = [float(executor.step(batch)) for _ in range(3)]
        assert losses[-1] < losses[0]
        return losses[-1]

    assert len(set(run_locally(train, 2)[0])) == 1


@pytest.mark.parametrize("compressor", METHODS)
def test_what_is_not_finite_reaches_all_and_is_not_owed(compressor: Compressor) -> None:
    module, _, captured = captured_of(weighed)
    program = lower(
        captured.graph, packing(seed_strategy(captured.graph, Seed(data=2)), compressor)
    )
    wrong = batches()[0]
    wrong["two"][0, 0, 0] = float("inf")  # of the first rank's samples

    def train(world: LocalWorld) -> tuple[bool, bool]:
        mine = copy.deepcopy(module)
        executor = Executor(captured, program, mine, optimizer=SGD, options=RunOptions(world=world))
        executor.step(batches()[0])
        before = [one.clone() for one in states(executor).values()]
        executor.step(wrong)
        executor.to_module(mine)
        name = {value: name_of(executor, value) for value in states(executor)}
        stays = all(
            torch.equal(old, one) or name[value] == "one"
            for old, (value, one) in zip(before, states(executor).items(), strict=True)
        )
        stays_finite = all(bool(one.isfinite().all()) for one in states(executor).values())
        rank = world.rank
        kept = stays if rank == 0 else stays_finite
        return kept, bool(mine.get_parameter("two").isfinite().all())

    assert run_locally(train, 2)[0] == [(True, False)] * 2


def test_what_cannot_be_compressed_is_refused() -> None:
    graph = captured_of(weighed)[2].graph
    strategy = packing(seed_strategy(graph, Seed(data=2)), "top-k")
    sync = strategy.gradient_sync
    for wrong, said in (
        (replace(strategy, precision="float16"), "compressor"),
        (replace(strategy, updates="microbatch"), "compressed"),
        (replace(strategy, gradient_sync=replace(sync, dtype="bfloat16")), "compressor"),
        (replace(strategy, gradient_sync=replace(sync, density=0.0)), "density"),
        (replace(strategy, gradient_sync=replace(sync, compressor="int8")), "density"),
        (replace(strategy, gradient_sync=replace(sync, apart=((0, "int8", 0.5),))), "density"),
        (replace(strategy, gradient_sync=replace(sync, apart=((0, "int8", 1.0),) * 2)), "once"),
        (replace(strategy, gradient_sync=replace(sync, apart=((999, "int8", 1.0),))), "parameters"),
    ):
        with pytest.raises(InputError, match=said):
            lower(graph, wrong)


# -- on ranks ------------------------------------------------------------------------------------


def resumed(root: Path, compressor: Compressor) -> list[Any]:
    """Train five steps; the same with a stop after the second."""
    torch.set_num_threads(1)
    module, _, captured = captured_of(weighed)
    strategy = packing(seed_strategy(captured.graph, Seed(data=2)), compressor)
    program = lower(captured.graph, strategy)
    one, other = (
        Executor(captured, program, copy.deepcopy(module), optimizer=SGD) for _ in range(2)
    )
    found: list[Any] = []
    for turn, batch in enumerate(batches()):
        if turn == 2:
            one.save(root)
            other.load(root)
            found.append({name_of(one, at): held.clone() for at, held in states(one).items()})
        one.step(batch)
        if turn >= 2:
            other.step(batch)
    for each in (one, other):
        whole = copy.deepcopy(module)
        each.to_module(whole)
        found.append([value.detach().clone() for value in whole.parameters()])
    return found


def shared_out(root: Path, compressor: Compressor) -> dict[str, Tensor]:
    """Load a checkpoint of two ranks on four; return what is owed to each parameter here."""
    torch.set_num_threads(1)
    module, _, captured = captured_of(weighed)
    strategy = packing(seed_strategy(captured.graph, Seed(data=4)), compressor)
    executor = Executor(captured, lower(captured.graph, strategy), module, optimizer=SGD)
    with pytest.warns(UserWarning, match="2 and 4") if executor.rank == 0 else nullcontext():
        executor.load(root)
    return {name_of(executor, at): held.clone() for at, held in states(executor).items()}


@pytest.mark.ranks
def test_a_run_resumes_to_the_last_bit_and_other_ranks_share_what_is_owed(tmp_path: Path) -> None:
    ranks = run_ranks(2, resumed, tmp_path, "top-k")
    for _, straight, again in ranks:
        assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    here = run_ranks(4, shared_out, tmp_path, "top-k")
    for name in ("one", "two"):
        owed = sum(found[0][name] for found in ranks)
        assert bool(owed.abs().max() > 0)
        torch.testing.assert_close(sum(one[name] for one in here), owed, rtol=1e-15, atol=1e-15)


def peaks(compressors: tuple[Compressor, ...]) -> list[tuple[float, float]]:
    """Return, by compressor, the measured and the predicted peak of a step."""
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    module, batch = zoo.gpt(width=64, length=8, depth=1, dtype=torch.float64)
    captured = capture(module, batch)
    for compressor in compressors:
        strategy = packing(seed_strategy(captured.graph, Seed(data=2)), compressor)
        program = lower(captured.graph, replace(strategy, optimizer_states=2))
        optimizer = partial(torch.optim.AdamW, lr=RATE)
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=optimizer)
        executor.step(batch)
        predicted = simulate(program, np.ones(program.num_instructions)).peak_bytes[0]
        found.append((executor.profile_step(batch).peak_bytes[0], predicted))
        executor.close()
    return found


@pytest.mark.ranks
def test_residuals_and_packing_take_the_memory_that_is_predicted() -> None:
    for found in run_ranks(2, peaks, (*METHODS, "gtop-k", "powersgd")):
        for (
            measured,
            predicted,
        ) in found:  # selecting takes NumPy's memory, which the profiler does not hear
            assert measured == pytest.approx(predicted, rel=0.04)


def test_every_transform_of_a_plan_is_priced_and_simulated() -> None:
    graph = captured_of(WIDER)[2].graph
    program = lower(graph, packing(seed_strategy(graph, Seed(data=2)), "top-k"))
    assert (program.kind == Kind.TRANSFORM).sum() == len(program.transforms) == 8
