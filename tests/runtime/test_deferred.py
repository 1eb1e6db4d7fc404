"""A module built without its parameters' memory: the numbers are those of a plain build, bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import Captured, capture, load_model
from shardwright.runtime.deferred import build_deferred, copy_deferred, deferred_of
from shardwright.runtime.executor import Executor, RunOptions
from tests import zoo
from tests.runtime.equivalence import captured_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
parametrizations = nn.utils.parametrizations


def layers() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm, nn.Embedding(7, 6, padding_idx=2), nn.LSTM(4, 5, 2),
        nn.MultiheadAttention(8, 2), nn.TransformerEncoder(  # whose layers are deep copies
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        ),
    )  # fmt: skip


def inits() -> nn.Module:
    first, second, third = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 7)
    nn.init.orthogonal_(first.weight)
    nn.init.trunc_normal_(second.weight, std=1.0, a=-0.5, b=0.5)  # draws until all are inside
    nn.init.trunc_normal_(third.weight, std=1.0, a=1.0, b=3.0)
    nn.init.sparse_(third.weight, 0.3)
    nn.init.kaiming_normal_(second.weight[:3], mode="fan_out")
    third.register_parameter("cut", nn.Parameter(torch.randn(4, 4)[:, 1:3]))
    third.register_parameter("turned", nn.Parameter(torch.randn(3, 4).t()))
    third.register_parameter("drawn", nn.Parameter(torch.multinomial(torch.rand(6), 3) * 1.0))
    with torch.no_grad():
        first.bias[1:3] = second.bias[:2] * 2 + torch.tensor([1.0, 2.0])
        for parameter in third.parameters():
            parameter.div_(3)
    return nn.Sequential(first, second, third)


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)),
        parametrizations.spectral_norm(nn.Linear(4, 5)),
        parametrizations.orthogonal(nn.Linear(4, 5)),
    )


def seeds() -> nn.Module:
    torch.manual_seed(7)
    first = nn.Linear(3, 4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        second = nn.Linear(4, 4)
    own = torch.Generator().manual_seed(5)
    state = torch.get_rng_state()
    third = nn.Linear(4, 4)
    torch.set_rng_state(state)
    third.register_parameter("own", nn.Parameter(torch.randn(4, 4, generator=own)))
    third.register_parameter("next", nn.Parameter(torch.randn(4, generator=own)))
    third.register_buffer("noise", torch.randn(3))
    third.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]  # type: ignore[assignment]
    return nn.Sequential(first, second, third, nn.Linear(4, 4))


def tied() -> nn.Module:
    first, last = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    last.weight = first.weight
    module = nn.Sequential(first, last).double()
    module.spare = nn.Linear(2, 2)
    module.listed = [first.weight]  # type: ignore[assignment]
    module.requires_grad_(False).spare.requires_grad_(True)
    return module


def hugging_face(name: str) -> Callable[[], nn.Module]:
    return load_model(f"hf:{name}-tiny").make_module


@pytest.mark.parametrize(
    "make",
    [layers, inits, parametrized, seeds, tied]
    + [partial(hugging_face, name) for name in ("gpt2", "llama", "t5", "bert", "swin", "mamba")],
)
def test_a_deferred_build_has_the_numbers_of_a_plain_one(make: Callable[..., nn.Module]) -> None:
    if isinstance(make, partial):
        make = make()
    torch.manual_seed(3)
    plain = make()
    after = torch.rand(2)
    torch.manual_seed(3)
    built = build_deferred(make)
    deferred = deferred_of(built.module)
    assert deferred is not None, built.note
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(built.module.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    for name, parameter in found.items():
        twins = [other for other, tensor in expected.items() if tensor is expected[name]]
        assert [other for other, tensor in found.items() if tensor is parameter] == twins
        assert parameter.is_meta
        assert parameter.requires_grad == expected[name].requires_grad
    made = dict(deferred.values(set(expected)))
    unique = dict(plain.named_parameters())
    assert made.keys() == unique.keys()
    for name, value in made.items():
        assert _same(value, unique[name]), name
        assert value.stride() == unique[name].stride()
    buffers = dict(built.module.named_buffers())
    assert all(_same(tensor, buffers[name]) for name, tensor in plain.named_buffers())
    assert torch.equal(torch.rand(2), after)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_a_parameter_is_made_again_out_of_order() -> None:
    torch.manual_seed(0)
    expected = dict(inits().named_parameters())
    torch.manual_seed(0)
    deferred = deferred_of(build_deferred(inits).module)
    assert deferred is not None
    for name in reversed(list(expected)):
        ((_, value),) = deferred.values({name})
        assert torch.equal(value, expected[name]), name


def reads_memory() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_parameter("extra", nn.Parameter(torch.full((2,), random.random())))
    try:
        module.bias.data *= float(module.weight.detach().numpy().sum())
    except RuntimeError:  # a factory that goes another way must not get wrong numbers
        module.bias.data *= 0
    return module


def shares_memory() -> nn.Module:
    whole = torch.randn(4, 4) * float(np.random.rand())
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    first.weight, second.weight = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
    return nn.Sequential(first, second)


def loads_much() -> nn.Module:
    return nn.ParameterList([torch.as_tensor(np.random.rand(9, 2**20), dtype=torch.float64) * 2])


@pytest.mark.parametrize("make", [reads_memory, shares_memory, loads_much])
def test_what_cannot_be_deferred_is_built_whole_and_says_so(make: Callable[[], nn.Module]) -> None:
    modules: list[nn.Module] = []
    for build in (make, lambda: build_deferred(make).module):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        modules.append(build())
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert "whole module" in build_deferred(make).note


WIDTH, LAYERS = 256, 8


def wide() -> nn.Module:
    """Eight equal layers of 256 KB, initialised twice, as Hugging Face's models are."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.02)
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight.mul_(1 / (number + 1))
    return nn.Sequential(*layers)


def peak_bytes(run: Callable[[], object]) -> int:
    """Return how much memory torch had at most, beyond what it had, while something ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    held = peak = 0
    results: Any = profile.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_no_more_than_a_few_parameters_are_in_memory_at_once() -> None:
    gc.collect()
    one = WIDTH * WIDTH * 4
    assert peak_bytes(wide) >= LAYERS * one
    made: list[nn.Module] = []
    building = peak_bytes(lambda: made.append(build_deferred(wide).module))
    deferred = deferred_of(made[0])
    assert deferred is not None

    def cut() -> None:
        shards = [value[::4].clone() for _, value in deferred.values({"0.weight", "3.weight"})]
        assert len(shards) == 2

    assert building < 4 * one  # a weight, and what the rejection of samples needs beside it
    assert peak_bytes(cut) < 4 * one


SEEDS = [Seed(data=2, zero=3), Seed(tensor=2), Seed(stages=2, num_microbatches=2)]


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    module, batch = zoo.gpt()
    module.idle = nn.Linear(3, 3)
    return module, batch


def train_both_ways() -> list[bool]:
    """Return, per plan, whether a deferred module, a copy without memory, a released one and a plain
    one train alike."""
    same, graphs = list[bool](), dict[str, Captured]()
    for seed in SEEDS:
        results: list[list[Tensor]] = []
        for way in ("plain", "released", "deferred", "copied"):
            torch.manual_seed(5)
            make = lambda: example()[0]  # noqa: E731
            module = build_deferred(make).module if way == "deferred" else make()
            module = copy_deferred(module) if way == "copied" else module
            assert (deferred_of(module) is not None) == (way in ("deferred", "copied"))
            batch = example()[1]
            if way not in graphs:
                known = captured_of(example)[2] if way in ("plain", "released") else None
                graphs[way] = known or capture(module, batch)
            captured = graphs[way]
            program = lower(captured.graph, seed_strategy(captured.graph, seed))
            executor = Executor(
                captured, program, module,
                optimizer=partial(torch.optim.AdamW, lr=0.1),
                options=RunOptions(releases=way == "released"),
            )  # fmt: skip
            began = executor.full_parameters()
            losses = [executor.step(batch), executor.evaluate(batch)]
            results.append([*began.values(), *losses, *executor.full_parameters().values()])
            results[-1] += list(module.get_submodule("idle").parameters())
            if way != "plain":
                assert all(module.get_parameter(name).is_meta for name in began)
                with pytest.raises(InputError, match="meta device"):
                    executor.to_module(module)
            executor.close()
        same += [
            len(one) == len(other) and all(map(torch.equal, one, other))
            for one, other in pairwise(results)
        ]
    return same


@pytest.mark.ranks
def test_ranks_of_a_deferred_module_hold_and_train_what_those_of_a_plain_one_do() -> None:
    for same in run_ranks(2, train_both_ways):
        assert same == [True] * 3 * len(SEEDS)


def test_a_module_with_opaque_parts_is_deferred_alike() -> None:
    """Export refuses a branch on values, so the model is run once for real, with its own numbers."""
    losses: list[list[Tensor]] = []
    ways: tuple[Callable[[nn.Module], nn.Module], ...] = (
        lambda module: module,
        lambda _: build_deferred(lambda: zoo.switching()[0]).module,
        copy_deferred,
    )
    for way in ways:
        module, batch = zoo.switching()
        module = way(module)
        captured = capture(module, batch)
        assert any(note for note in captured.graph.notes)
        program = lower(captured.graph, seed_strategy(captured.graph, Seed()))
        optimizer = partial(torch.optim.SGD, lr=0.1)
        executor = Executor(captured, program, module, optimizer=optimizer)
        losses.append([executor.step(batch), executor.step(batch)])
        executor.close()
    assert all(
        torch.equal(one, other)
        for pair in pairwise(losses)
        for one, other in zip(*pair, strict=True)
    )


def test_build_takes_a_factory_and_warns_where_it_builds_whole() -> None:
    _, batch = zoo.mlp()
    plan = shardwright.plan(zoo.mlp()[0], "1x1xV100", batch=batch, precision="float64")
    optimizer = partial(torch.optim.SGD, lr=0.1)
    losses: list[Tensor] = []

    def resisting() -> nn.Module:
        module, _ = zoo.mlp()
        assert all(p.data_ptr() for p in module.parameters())
        return module

    for model in (zoo.mlp()[0], zoo.mlp, resisting):
        context = pytest.warns if model is resisting else lambda *_, **__: nullcontext()
        with context(UserWarning, match="data_ptr"):
            executor = shardwright.build(plan, model, optimizer=optimizer, batch=batch)
        losses.append(executor.step(batch))
        own = executor.machine.parameters.module
        assert all(p.is_meta == (model is not own) for p in own.parameters())
        executor.close()
    assert losses[0] == losses[1] == losses[2]
