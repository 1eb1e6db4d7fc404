"""Dropped and made again: exact, and as little memory as predicted."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Kind
from shardwright.core.strategy import Recomputation, Strategy
from shardwright.planner.cost.recomputation import with_recomputation
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.saved_tensors import look_up_saved, stand_in
from tests import zoo
from tests.runtime.equivalence import assert_close, assert_equivalent, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.test_executor import SGD, noisy

pytestmark = pytest.mark.torch


def recomputing(name: Recomputation, seed: Seed, graph: OperatorGraph) -> Strategy:
    return with_recomputation(graph, seed_strategy(graph, seed), name)


def test_two_ranks_train_as_one_process() -> None:
    seeds = (
        Seed(tensor=2, sequence=True, num_microbatches=2),
        Seed(context=2),
        Seed(data=2, zero=3),
        Seed(stages=2, num_microbatches=4),
    )
    module, batch = zoo.gpt()
    captured, plain = capture(module, batch), train_plain(zoo.gpt, SGD)
    for seed in seeds:
        strategy = recomputing("selective", seed, captured.graph)
        runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
        for run in runs:
            assert_close(run, plain, seed.label)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_single_operators_may_run_again(share: float) -> None:
    def some(graph: OperatorGraph) -> Strategy:
        count = len(graph.operators)
        chosen = [i for i in range(count) if (7 * i) % count < share * count]
        return replace(seed_strategy(graph, Seed()), recompute_operators=tuple(chosen))

    for factory in (zoo.gpt, zoo.cnn, zoo.lstm_translation):
        assert_equivalent(1, factory, {"some": some})


class Products(TorchDispatchMode):
    """Counts the matrix products that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
        self.count += str(func) in names
        return func(*args, **(kwargs or {}))


def test_as_many_products_run_again_as_under_pytorchs_own_checkpoint() -> None:
    depth = 3
    module, batch = zoo.gpt(depth=depth)
    captured = capture(module, batch)
    counts: dict[str, int] = {}
    for name in ("none", "blocks"):
        program = lower(captured.graph, recomputing(name, Seed(), captured.graph))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        with Products() as products:
            executor.step(batch)
        counts[name] = products.count
    for name in ("none", "blocks"):
        plain = copy.deepcopy(module)
        for layer in plain.layers if name == "blocks" else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        with Products() as products:
            plain(**batch).backward()
        assert counts[name] == products.count
    # Of query, key, value, output, up and down the last is not needed again.
    assert counts["blocks"] - counts["none"] == 5 * depth


def test_dropout_that_runs_again_draws_the_same_mask() -> None:
    losses: list[list[float]] = []
    for again in (False, True):
        module, batch = noisy()
        captured = capture(module, batch)
        graph = captured.graph
        which = [i for i, op in enumerate(graph.operators) if again and "linear" not in op.kind]
        strategy = replace(seed_strategy(graph, Seed()), recompute_operators=tuple(which))
        program = lower(graph, strategy)
        assert (program.kind == Kind.RECOMPUTE).any() == again
        executor = Executor(captured, program, module, optimizer=SGD, options=RunOptions(seed=4))
        losses.append([float(executor.step(batch)) for _ in range(3)])
    assert losses[0] == losses[1]


def test_measured_memory_falls_as_predicted() -> None:
    module, batch = zoo.gpt(length=64, width=128, depth=4)
    captured = capture(module, batch)
    peaks: list[float] = []
    for name in ("none", "selective", "blocks"):
        strategy = replace(recomputing(name, Seed(), captured.graph), optimizer_states=0)
        program = lower(captured.graph, strategy)
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        peaks.append(executor.profile_step(batch).peak_bytes[0])
        predicted = simulate(program, np.ones(program.num_instructions)).peak_bytes[0]
        assert peaks[-1] == pytest.approx(predicted, rel=0.01)
    assert peaks[1] < 0.85 * peaks[0]
    assert peaks[2] < peaks[1]


def test_a_saved_part_is_looked_up_in_what_was_made_again() -> None:
    weight = torch.randn(3, 4, dtype=torch.float64)
    first = torch.randn(4, 6, dtype=torch.float64)
    data: list[Tensor | None] = [first.clone()]
    leaf, tensor = stand_in(data[0])
    with torch.enable_grad(), look_up_saved(data, [0]):
        result = (weight @ tensor[:, 1:4]).square().sum()
    assert leaf.untyped_storage().nbytes() == leaf.element_size()
    data[0] = first.t().contiguous().t()  # the same numbers, laid out otherwise
    (found,) = torch.autograd.grad(result, [leaf])
    plain = first.clone().requires_grad_()
    (weight @ plain[:, 1:4]).square().sum().backward()
    torch.testing.assert_close(found, plain.grad, rtol=0, atol=0)


def test_an_input_is_let_go_by_the_graph() -> None:
    data: list[Tensor | None] = [torch.randn(4, 4)]
    held = data[0].untyped_storage()._weak_ref() if data[0] is not None else None
    layer = nn.Linear(4, 4)
    leaf, tensor = stand_in(data[0])
    with torch.enable_grad(), look_up_saved(data, [0]):
        result = layer(tensor).sum()
    del tensor
    data[0] = None
    assert torch.UntypedStorage._expired(held)
    with pytest.raises(RuntimeError, match="made again"):
        torch.autograd.grad(result, [leaf, layer.weight])
