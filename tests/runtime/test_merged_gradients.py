"""Plans that merge selections (gTop-k) or sum factors (PowerSGD): ranks end as workers in NumPy do."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from shardwright.core.compression import (
    MERGED,
    SPARSE,
    at_step,
    kept_elements,
    merge_rounds,
)
from shardwright.core.strategy import Compressor, Feedback, GradientSync, Residual, Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.proofs import check_complete
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, Traffic, run_locally
from tests.ddp import emulator
from tests.runtime.test_compressed_gradients import (
    DENSITY,
    RATE,
    SGD,
    SIZES,
    Weighed,
    batches,
    name_of,
    states,
)
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
SAMPLES = 60  # divides by 2, 3, 4 and 5
LARGE = ("one", "two")


def compressing(
    captured: Captured, ranks: int, compressor: Compressor, density: float = DENSITY, **said: Any
) -> Strategy:
    plain = seed_strategy(captured.graph, Seed(data=ranks))
    density = density if compressor in SPARSE else 1.0
    sync = GradientSync(compressor=compressor, density=density, feedback=Feedback(**said))
    return replace(plain, gradient_sync=sync)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Weighed(), batches(SAMPLES)[0])


def trained(
    captured: Captured,
    strategy: Strategy,
    given: list[dict[str, Tensor]] | None = None,
    optimizer: Any = SGD,
) -> tuple[list[Any], Traffic]:
    """Return every rank's parameters after some steps, and its states by name and role; and what was sent."""
    program, module = lower(captured.graph, strategy), Weighed()
    check_complete(program, captured.graph)

    def train(world: LocalWorld) -> Any:
        mine = copy.deepcopy(module)
        options = RunOptions(world=world, lower=lower)
        executor = Executor(captured, program, mine, optimizer=optimizer, options=options)
        for batch in given or batches(SAMPLES):
            executor.step(batch)
        executor.to_module(mine)
        return dict(mine.named_parameters()), held(executor)

    return run_locally(train, len(strategy.devices))


def held(executor: Executor) -> dict[tuple[str, str], Tensor]:
    values = executor.program.values
    return {
        (name_of(executor, at), values[at].role): one.clone()
        for at, one in states(executor).items()
    }


def shares(batch: dict[str, Tensor], name: str, ranks: int) -> list[np.ndarray]:
    """Return every rank's gradient of a parameter."""
    return list(batch[name].unflatten(0, (ranks, -1)).sum(1).numpy())


@pytest.mark.parametrize("compressor", sorted(MERGED))
def test_merging_ranks_end_as_workers_in_numpy_do(captured: Captured, compressor: Any) -> None:
    rules: tuple[Residual, ...] = ("conserving", "paper")
    for ranks, rule in [(ranks, rule) for ranks in (2, 3, 4, 5) for rule in rules]:
        found, traffic = trained(captured, compressing(captured, ranks, compressor, residual=rule))
        for name in LARGE:
            count = int(np.prod(SIZES[name]))
            weight, owed = np.zeros(count), [np.zeros(count)] * ranks
            everything = np.zeros(count)
            for batch in batches(SAMPLES):
                mine = [one.reshape(-1) for one in shares(batch, name, ranks)]
                everything += np.sum(mine, 0)
                inputs = [a + b for a, b in zip(owed, mine, strict=True)]
                kept = kept_elements(DENSITY, count)
                mean, owed = emulator.step(compressor, inputs, kept, rule)
                weight -= RATE * ranks * mean
            for rank, (parameters, states_) in enumerate(found):
                assert torch.equal(parameters[name], found[0][0][name])
                flat = parameters[name].detach().view(-1).numpy()
                np.testing.assert_allclose(flat, weight, rtol=1e-12, atol=1e-12)
                there = states_[name, "state"].view(-1)
                np.testing.assert_allclose(there, owed[rank], rtol=0, atol=1e-12)
            kept_all = sum(one[name, "state"].view(-1) for _, one in found).numpy()
            applied = -found[0][0][name].detach().view(-1).numpy() / RATE
            lost = np.abs(everything - applied - kept_all).max()
            assert (lost < 1e-12) or rule == "paper"
        # A pack in each round: values of 8 bytes and places of 4.
        size = sum(kept_elements(DENSITY, int(np.prod(SIZES[name]))) for name in LARGE) * 12
        most = max(one.bytes for key, one in traffic.items() if key[1] == "transfer")
        sent = [sum(pair[0] == at for one in merge_rounds(compressor, ranks) for pair in one.pairs)
                for at in range(ranks)]  # fmt: skip
        assert most == max(sent) * size * len(batches())


def test_rounds_are_those_of_the_table() -> None:
    for ranks in range(2, 40):
        log = (ranks - 1).bit_length()
        is_power = 2**log == ranks
        assert len(merge_rounds("gtop-k", ranks)) == (log if is_power else log + 1)
        assert len(merge_rounds("gtop-k-tree", ranks)) == 2 * log
        for way in sorted(MERGED):
            knows = [{place} for place in range(ranks)]
            for one in merge_rounds(way, ranks):
                before = [set(known) for known in knows]
                for sender, receiver in one.pairs:
                    more = set[int]() if one.replaces else knows[receiver]
                    knows[receiver] = more | before[sender]
            assert all(known == set(range(ranks)) for known in knows)


def test_factors_are_those_of_workers_in_numpy(captured: Captured) -> None:
    for ranks, rank in ((2, 1), (3, 2)):
        found, _ = trained(captured, compressing(captured, ranks, "powersgd", rank=rank))
        rows, columns = SIZES["two"]
        generator = torch.Generator().manual_seed(0)
        right = torch.randn((columns, rank), generator=generator, dtype=torch.float64).numpy()
        weight, owed = np.zeros((rows, columns)), [np.zeros((rows, columns))] * ranks
        for batch in batches(SAMPLES):
            inputs = [a + b for a, b in zip(owed, shares(batch, "two", ranks), strict=True)]
            mean, owed, right = emulator.power_sgd(inputs, right)
            weight -= RATE * ranks * mean
        everything = sum(sum(shares(batch, "two", ranks)) for batch in batches(SAMPLES))
        for at, (parameters, states_) in enumerate(found):
            assert torch.equal(parameters["two"], found[0][0]["two"])
            mine = parameters["two"].detach().numpy()
            np.testing.assert_allclose(mine, weight, rtol=0, atol=1e-10)
            np.testing.assert_allclose(states_["two", "state"], owed[at], rtol=0, atol=1e-10)
            np.testing.assert_allclose(states_["two", "factor"], right, rtol=0, atol=1e-10)
            assert ("one", "state") not in states_  # no matrix
        kept = sum(one["two", "state"].numpy() for _, one in found)
        applied = -found[0][0]["two"].detach().numpy() / RATE
        np.testing.assert_allclose(everything, applied + kept, rtol=0, atol=1e-11)


@pytest.mark.parametrize("compressor", ["gtop-k", "powersgd"])
def test_what_is_not_finite_reaches_all_and_is_not_owed(
    captured: Captured, compressor: Any
) -> None:
    wrong = {name: one.clone() for name, one in batches(SAMPLES)[1].items()}
    wrong["two"][0, 0, 0] = float("inf")  # of the first rank's samples
    strategy = compressing(captured, 2, compressor)
    before, _ = trained(captured, strategy, batches(SAMPLES)[:1])
    after, _ = trained(captured, strategy, [batches(SAMPLES)[0], wrong])
    for rank in range(2):
        assert not after[rank][0]["two"].isfinite().all()
        assert all(bool(one.isfinite().all()) for one in after[rank][1].values())
        if compressor == "powersgd":  # gTop-k: the first owes what merging dropped of the other
            assert torch.equal(after[rank][1]["two", "state"], before[rank][1]["two", "state"])


def test_momentum_is_masked_where_elements_are_sent_and_norms_are_bounded_by_share(
    captured: Captured,
) -> None:
    momentum, most = 0.5, 3.0
    strategy = compressing(captured, 2, "top-k", momentum=momentum, local_norm=most)
    found, _ = trained(captured, strategy)
    total = sum(int(np.prod(size)) for size in SIZES.values())
    for name in LARGE:
        count = int(np.prod(SIZES[name]))
        weight, owed, velocity = np.zeros(count), np.zeros((2, count)), np.zeros((2, count))
        for batch in batches(SAMPLES):
            bound = most * np.sqrt(count / total / 2)
            for at, mine in enumerate(shares(batch, name, 2)):
                flat = mine.reshape(-1)
                velocity[at] = momentum * velocity[at] + flat * min(1, bound / np.linalg.norm(flat))
                owed[at] += velocity[at]
            for at in range(2):
                sent = emulator.top(owed[at], kept_elements(DENSITY, count))
                weight -= RATE * sent
                owed[at] -= sent
                velocity[at][sent != 0] = 0
        for at, (parameters, states_) in enumerate(found):
            flat = parameters[name].detach().view(-1).numpy()
            np.testing.assert_allclose(flat, weight, rtol=1e-11, atol=1e-11)
            for role, one in (("state", owed), ("velocity", velocity)):
                there = states_[name, role].view(-1)
                np.testing.assert_allclose(there, one[at], rtol=0, atol=1e-11)


@pytest.mark.parametrize("compressor", ["top-k", "gtop-k", "gtop-k-tree"])
def test_unmasked_momentum_moves_what_it_applies_and_owes_as_the_optimizers_does(
    captured: Captured, compressor: Any
) -> None:
    for ranks in (2, 3, 4):
        strategy = compressing(captured, ranks, compressor, momentum=0.5, masked=False)
        found, _ = trained(captured, strategy)
        for name in LARGE:
            weight, sums = np.zeros(SIZES[name]), np.zeros(SIZES[name])
            for batch in batches(SAMPLES):
                sums = 0.5 * sums + sum(shares(batch, name, ranks))
                weight = weight - RATE * sums
            left = sum(states_[name, "state"].view(SIZES[name]).numpy() for _, states_ in found)
            there = found[0][0][name].detach().numpy() - RATE * left
            np.testing.assert_allclose(there, weight, rtol=0, atol=1e-11)
            runs_on = sum(states_[name, "velocity"].view(SIZES[name]) for _, states_ in found)
            np.testing.assert_allclose(runs_on.numpy(), sums, rtol=0, atol=1e-11)
            assert np.abs(left).max() > 0.1


def test_what_travels_whole_keeps_the_optimizers_momentum(captured: Captured) -> None:
    strategy = compressing(captured, 2, "top-k", momentum=0.5)
    both = partial(torch.optim.SGD, lr=RATE, momentum=0.5)
    found, without = (trained(captured, strategy, optimizer=one)[0] for one in (both, SGD))
    weight = velocity = np.zeros(SIZES["few"])
    for batch in batches(SAMPLES):
        velocity = 0.5 * velocity + sum(shares(batch, "few", 2))
        weight = weight - RATE * velocity
    for (parameters, _), (others, _) in zip(found, without, strict=True):
        np.testing.assert_allclose(parameters["few"].detach(), weight, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(parameters[name], others[name]) for name in LARGE)


def test_without_residuals_what_is_not_sent_is_forgotten(captured: Captured) -> None:
    found, _ = trained(captured, compressing(captured, 2, "top-k", residual="none"))
    assert all(not states_ for _, states_ in found)
    weight = np.zeros(SIZES["one"])
    for batch in batches(SAMPLES):
        for mine in shares(batch, "one", 2):
            weight -= RATE * emulator.top(mine, kept_elements(DENSITY, len(mine)))
    np.testing.assert_allclose(found[0][0]["one"].detach(), weight, rtol=1e-12, atol=1e-12)


def test_densities_warm_up_by_steps(captured: Captured) -> None:
    strategy = compressing(captured, 2, "gtop-k", density=0.005, warm_up=1)
    found, traffic = trained(captured, strategy)
    densities = [at_step(strategy.gradient_sync, step).density for step in range(5)]
    assert densities == [0.25, 0.0625, 0.015625, 0.005, 0.005]  # never below the plan's own
    counts = [int(np.prod(SIZES[name])) for name in LARGE]
    sizes = [sum(kept_elements(share, count) for count in counts) * 12 for share in densities]
    assert {one.bytes for key, one in traffic.items() if key[1] == "transfer"} == {sum(sizes)}
    count, owed, weight = counts[0], [np.zeros(counts[0])] * 2, np.zeros(counts[0])
    for batch, share in zip(batches(SAMPLES), densities, strict=True):
        inputs = [a + b for a, b in zip(owed, shares(batch, "one", 2), strict=True)]
        mean, owed = emulator.step("gtop-k", inputs, kept_elements(share, count))
        weight -= RATE * 2 * mean
    np.testing.assert_allclose(found[0][0]["one"].detach(), weight, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1][1]["one", "state"], owed[1], rtol=0, atol=1e-12)


def test_what_does_not_go_together_is_refused(captured: Captured) -> None:
    for compressor, said, words in (
        ("int8", {"residual": "paper"}, "published rule"),
        ("int8", {"momentum": 0.9}, "before the selection"),
        ("top-k", {"momentum": 0.9, "residual": "none"}, "before the selection"),
        ("top-k", {"masked": False}, "not masked"),
        ("top-k", {"rank": 2}, "rank"),
        ("powersgd", {"rank": 0}, "rank"),
        ("powersgd", {"warm_up": 3}, "first steps"),
        ("top-k", {"local_norm": -1.0}, "norm"),
        ("none", {"momentum": 0.9}, "goes with a compressor"),
    ):
        strategy = compressing(captured, 2, compressor, **said)
        if compressor == "none":
            strategy = replace(strategy, gradient_sync=replace(strategy.gradient_sync, density=1.0))
        with pytest.raises(InputError, match=words):
            lower(captured.graph, strategy)
    program = lower(captured.graph, compressing(captured, 2, "top-k", momentum=0.9))

    def train(world: LocalWorld) -> None:
        for other in (
            partial(torch.optim.SGD, lr=RATE, momentum=0.8),
            partial(torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True),
            torch.optim.AdamW,
        ):
            options = RunOptions(world=world)
            with pytest.raises(InputError, match="may have no other"):
                Executor(captured, program, Weighed(), optimizer=other, options=options)

    run_locally(train, 2)
    warming = lower(captured.graph, compressing(captured, 2, "top-k", warm_up=2))
    with pytest.raises(InputError, match="another Program"):
        Executor(captured, warming, Weighed(), optimizer=SGD)


# -- on ranks ------------------------------------------------------------------------------------


def resumed(root: Path) -> tuple[list[tuple[list[Tensor], list[Tensor]]], Tensor, Tensor]:
    """Train with a stop after the second step, and without; and as torch's PowerSGD does."""
    torch.set_num_threads(1)
    captured, found = capture(Weighed(), batches()[0]), []
    cases: list[tuple[Compressor, dict[str, Any]]] = [
        ("gtop-k", {"momentum": 0.5, "warm_up": 1}),
        ("powersgd", {"rank": 2}),
        ("top-k", {"momentum": 0.5, "masked": False}),
    ]
    for compressor, said in cases:
        program = lower(captured.graph, compressing(captured, 2, compressor, **said))
        options = RunOptions(lower=lower)
        one, other = (
            Executor(captured, program, Weighed(), optimizer=SGD, options=options) for _ in range(2)
        )
        for turn, batch in enumerate(batches()):
            if turn == 2:
                one.save(root / compressor)
                other.load(root / compressor)
            one.step(batch)
            if turn >= 2:
                other.step(batch)
        ends = [Weighed(), Weighed()]
        for executor, module in zip((one, other), ends, strict=True):
            executor.to_module(module)
        both = [[one.detach().clone() for one in module.parameters()] for module in ends]
        found.append((both[0], both[1]))
    return found, found[1][0][1], reference()


def reference() -> Tensor:
    """Return what torch's hook makes of the parameter that is a matrix."""
    state = theirs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2  # from the first step on
    state.rng = _Seeded()
    module = Weighed()
    for name in ("one", "few"):
        module.get_parameter(name).requires_grad_(False)
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(state, theirs.powerSGD_hook)
    optimizer, rank = SGD(wrapped.parameters()), dist.get_rank()
    for batch in batches():
        optimizer.zero_grad()
        mine = {name: one.unflatten(0, (2, -1))[rank] for name, one in batch.items()}
        (2 * wrapped(**mine)).backward()  # of the whole batch: hooks give means
        optimizer.step()
    return module.get_parameter("two").detach().clone()


class _Seeded:
    """Draws what plans do, for torch's hook."""

    def randint(self, most: int) -> int:
        del most
        return 0


@pytest.mark.ranks
def test_runs_resume_to_the_last_bit_and_factors_are_those_of_torchs_hook(tmp_path: Path) -> None:
    for found, ours, torchs in run_ranks(2, resumed, tmp_path):
        for straight, again in found:
            assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
        torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-10)
