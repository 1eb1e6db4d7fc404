"""Hooks of DistributedDataParallel on gloo: several buckets, every method, resuming, dying."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from shardwright.ddp import Compression, Compressor, hooks
from shardwright.ddp.methods import METHODS
from shardwright.errors import InputError, RunError
from tests.ddp.local import LocalWire, on_ranks
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.ranks
STEPS = 5
EVERY = {
    name: Compression(method=name, density=0.1, dense_below=20, dense_steps=1) for name in METHODS
} | {
    "momentum": Compression(
        method="gtop-k", density=0.1, momentum=0.5, clip=0.5, warm_up=(0.5,), dense_below=20
    ),
    "lags": Compression(method="top-k", densities={"0.weight": 0.3}, density=0.05, dense_below=20),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (8,), generator=generator)


def backward(module: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    F.cross_entropy(module(x), y).backward()


def parallel(bucket_bytes: int = 600) -> DistributedDataParallel:
    """Return the model in several buckets: its gradients have 4,416 bytes."""
    return DistributedDataParallel(model(), bucket_cap_mb=bucket_bytes / 2**20)  # type: ignore[arg-type]


def train(wrapped: nn.Module, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in steps:
        optimizer.zero_grad()
        backward(wrapped, rank, step)
        optimizer.step()


def weights(module: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in module.parameters()]


def train_every() -> dict[str, Any]:
    found = {}
    for name, settings in EVERY.items():
        wrapped = parallel()
        hooks.register(wrapped, settings)
        train(wrapped, dist.get_rank(), range(STEPS))
        found[name] = weights(wrapped)
    sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return found | {"buckets": sizes.split(",")}


def train_here(wire: LocalWire, settings: Compression) -> list[Tensor]:
    """The same with compressors among threads, all parameters at once."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    elements = sum(one.numel() for one in module.parameters())
    compressor = Compressor(settings, wire, elements)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(module, wire.rank, step)
        compressor.average({name: one.grad for name, one in module.named_parameters()})
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_method_trains_in_several_buckets_as_the_rehearsal_does(ranks: int) -> None:
    results = run_ranks(ranks, train_every, timeout=100)
    assert len(results[0]["buckets"]) >= 3
    for name, settings in EVERY.items():
        expected, _ = on_ranks(ranks, lambda wire, chosen=settings: train_here(wire, chosen))
        # Sums of halves round differently in another order.
        close = {"bfloat16": 0.02, "float16": 0.002}.get(name, 1e-11)
        for result in results:
            torch.testing.assert_close(result[name], expected[0], rtol=0, atol=close)
            assert all(map(torch.equal, result[name], results[0][name]))


def train_dense_both_ways() -> tuple[list[Tensor], list[Tensor]]:
    plain, hooked = parallel(10**6), parallel(10**6)
    hooks.register(hooked, Compression(method="top-k", density=1.0))
    for wrapped in (plain, hooked):
        train(wrapped, dist.get_rank(), range(STEPS))
    return weights(plain), weights(hooked)


def test_all_elements_kept_trains_as_plain_ddp_to_the_last_bit() -> None:
    for plain, hooked in run_ranks(3, train_dense_both_ways):
        assert all(map(torch.equal, plain, hooked))


class Branching(nn.Module):
    """A model of which every step leaves some parameters out, of which all steps do another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = model()[0], model()[2], model()[4]
        self.never = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, *, is_long: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.second(x).tanh() if is_long else x)


def train_with_unused(bucket_bytes: int = 600) -> list[list[Tensor]]:
    found = []
    for is_hooked in (False, True):
        wrapped = DistributedDataParallel(
            Branching(), bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=True  # type: ignore[arg-type]
        )  # fmt: skip
        if is_hooked:
            hooks.register(wrapped, Compression(method="gtop-k", density=1.0))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(dist.get_rank(), step)
            is_long = (step + dist.get_rank()) % 2 == 0
            F.cross_entropy(wrapped(x, is_long=is_long), y).backward()
            optimizer.step()
        found.append(weights(wrapped))
    return found


def test_parameters_that_a_step_does_not_use_are_found_meanwhile() -> None:
    """DistributedDataParallel asks all ranks for them while buckets are still under way."""
    for plain, hooked in run_ranks(2, train_with_unused, timeout=60):
        assert all(map(torch.equal, plain, hooked))


def train_power_sgd() -> tuple[list[Tensor], list[Tensor]]:
    state = theirs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    reference = parallel(10**6)
    reference.register_comm_hook(state, theirs.powerSGD_hook)
    train(reference, dist.get_rank(), range(6))
    ours = parallel(10**6)
    settings = Compression(method="powersgd", rank=2, dense_steps=2, dense_below=1)
    compressor = hooks.register(ours, settings)
    # Torch draws, at the first compressed step, one after another in the order of the bucket.
    generator = torch.Generator().manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
    factors = {
        f"{place}.weight": torch.randn(columns, 2, generator=generator, dtype=torch.float64)
        for place, columns in ((2, 16), (0, 12))
    }
    compressor.load_state_dict(compressor.state_dict() | {"factor": factors})
    train(ours, dist.get_rank(), range(6))
    return weights(reference), weights(ours)


def test_power_sgd_is_torchs_on_one_bucket_with_equal_seeds() -> None:
    for reference, ours in run_ranks(2, train_power_sgd):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-11)


def train_and_resume(name: str) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    straight = parallel()
    hooks.register(straight, EVERY[name])
    train(straight, rank, range(6))
    first = parallel()
    before = hooks.register(first, EVERY[name])
    train(first, rank, range(3))
    resumed = parallel()  # whose first step has one bucket again
    resumed.load_state_dict(first.state_dict())
    hooks.register(resumed, EVERY[name]).load_state_dict(before.state_dict())
    train(resumed, rank, range(3, 6))
    return weights(straight), weights(resumed)


@pytest.mark.parametrize("name", ["momentum"])
def test_resuming_is_exact_although_buckets_begin_anew(name: str) -> None:
    for straight, resumed in run_ranks(2, train_and_resume, name):
        assert all(map(torch.equal, straight, resumed))


def accumulate() -> tuple[list[Tensor | None], int]:
    wrapped = parallel()
    compressor = hooks.register(wrapped, Compression(method="top-k", density=0.999, dense_below=1))
    with wrapped.no_sync():
        backward(wrapped, dist.get_rank(), 0)
    backward(wrapped, dist.get_rank(), 1)
    return [one.grad for one in wrapped.parameters()], compressor.step


def test_microbatches_are_compressed_once() -> None:
    (found, steps), _ = run_ranks(2, accumulate)
    module = model()
    for rank in range(2):
        for step in range(2):
            backward(module, rank, step)
    assert steps == 1
    gaps = [float((a - b.grad / 2).abs().max()) for a, b in zip(found, module.parameters())]
    assert max(gaps) < 0.1 * max(float(b.grad.abs().max()) for b in module.parameters())


def fail() -> str:
    wrapped = parallel()
    compressor = hooks.register(wrapped, Compression(method="top-k", density=0.1, dense_below=1))
    state = compressor.state_dict()
    compressor.load_state_dict(state | {"residual": {"4.weight": torch.zeros(3)}})
    with pytest.raises(RuntimeError) as caught:
        backward(wrapped, dist.get_rank(), 0)
    return str(caught.value)


def load_on_one() -> str:
    settings = Compression(method="top-k", density=0.1, dense_below=1, dense_steps=2)
    first, second = parallel(), parallel()
    compressor, resumed = (hooks.register(one, settings) for one in (first, second))
    train(first, dist.get_rank(), range(3))
    if dist.get_rank() == 0:
        resumed.load_state_dict(compressor.state_dict())
    with pytest.raises(RuntimeError) as caught:
        backward(second, dist.get_rank(), 3)
    return str(caught.value)


def test_a_state_that_one_rank_alone_loads_ends_backward_on_all() -> None:
    """They waited for each other: one sends selections, the other whole gradients."""
    assert all("go on from steps 3, 0" in text for text in run_ranks(2, load_on_one))


def test_what_goes_wrong_in_the_queue_ends_backward() -> None:
    assert all("the residual of 4.weight has 3 elements" in text for text in run_ranks(2, fail))


def die() -> None:
    wrapped = parallel()
    compressor = hooks.register(wrapped, EVERY["gtop-k"])
    train(wrapped, dist.get_rank(), range(2))
    if dist.get_rank() == 1:
        send = compressor.wire.swap

        def last(tensor: Tensor, rank: int) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return send(tensor, rank)

        compressor.wire.swap = last  # type: ignore[method-assign]
    train(wrapped, dist.get_rank(), range(2, 5))


def test_a_rank_that_dies_among_messages_ends_all() -> None:
    with pytest.raises(RunError) as caught:
        run_ranks(3, die, timeout=60)
    assert caught.value.rank == 1


def refuse() -> None:
    with pytest.raises(InputError, match="DistributedDataParallel"):
        hooks.register(model(), EVERY["top-k"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not 'top-k'"):
        hooks.register(parallel(), "top-k")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no 9\.weight"):
        hooks.register(parallel(), Compression(method="top-k", densities={"9.weight": 0.1}))
    with pytest.raises(InputError, match="has no 9;"):
        hooks.register(parallel(), Compression(method="top-k", densities={9: 0.1}))  # type: ignore[dict-item]
    compressed = parallel()
    hooks.register(compressed, EVERY["top-k"])
    with pytest.raises(InputError, match="by a hook already"):
        hooks.register(compressed, EVERY["int8"])
    turning = DistributedDataParallel(nn.ParameterList([torch.zeros(4, dtype=torch.complex64)]))
    with pytest.raises(InputError, match="real numbers"):
        hooks.register(turning, EVERY["top-k"])
    rows = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    hooks.register(rows, EVERY["top-k"])
    with pytest.raises(InputError, match="sparse=True"):
        rows(torch.tensor([1, 2])).sum().backward()


def differ() -> None:
    wrapped = parallel()
    mine = Compression(method="top-k", density=0.1 if dist.get_rank() else 0.2)
    with pytest.raises(InputError, match=r"density is 0\.2 on rank 0 and 0\.1 on rank 1"):
        hooks.register(wrapped, mine)
    compressor = hooks.register(wrapped, EVERY["top-k"])  # the model has no hook yet
    train(wrapped, dist.get_rank(), range(2))
    state = compressor.state_dict()
    for wrong, said in (
        (state | {"residual": {"9.weight": torch.zeros(3)}}, r"has no 9\.weight"),
        ({name: one for name, one in state.items() if name != "velocity"}, "lacks velocity"),
        (wrapped.state_dict(), "is of None"),
        (None, "is of None"),
    ):
        with pytest.raises(InputError, match=said):
            compressor.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lacks"):
        hooks.reshared([{"version": 1}] * 2, 4)
    with pytest.raises(InputError, match="not 0"):
        hooks.reshared([state] * 2, 0)


def test_settings_that_differ_and_states_of_others_are_refused() -> None:
    run_ranks(2, differ, timeout=30)


def test_other_modules_and_unknown_parameters_are_refused() -> None:
    run_ranks(2, refuse)
