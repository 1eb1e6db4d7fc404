"""Backwards that nothing lies between run as one, and give what one process gives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.graph import OperatorGraph
from shardwright.core.joining import runs
from shardwright.core.program import Kind
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy, single_sync
from shardwright.runtime.meeting import Seen
from shardwright.runtime.trace import shared_out
from tests.runtime.equivalence import assert_close, captured_of, train_plain
from tests.runtime.rehearsed import train_rehearsed

pytestmark = pytest.mark.torch


class Steps(nn.Module):
    """A cell run over a sequence, every state of which is read once more behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(50, 8),
            nn.GRUCell(8, 12),
            nn.Linear(12, 50),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        read, state = self.embedding(x), torch.zeros(len(x), 12, dtype=torch.float64)
        states = list[Tensor]()
        for step in range(x.shape[1]):
            state = self.cell(read[:, step], state)
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), y.flatten())


class Skips(nn.Module):
    """Layers that read what layers far before them made, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        made = [x]
        for layer in self.layers:
            made.append(torch.tanh(layer(made[-1] + made[len(made) // 2])))
        return F.mse_loss(self.layers[0](made[-1]) + made[1], y)


def steps() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Steps().double(), {name: torch.randint(0, 50, (8, 5)) for name in ("x", "y")}


def skips() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    draw = partial(torch.randn, 8, 8, dtype=torch.float64)
    return Skips().double(), {"x": draw(), "y": draw()}


def together(graph: OperatorGraph, data: int) -> Strategy:
    """Return data parallelism whose gradients travel in one message, at the end."""
    return replace(seed_strategy(graph, Seed(data=data)), gradient_sync=single_sync(graph))


@pytest.mark.parametrize("factory", [steps, skips])
def test_joined_backwards_train_as_one_process_does(factory) -> None:
    optimizer = partial(torch.optim.SGD, lr=1.0)
    expected = train_plain(factory, optimizer)
    module, batch, captured = captured_of(factory)
    strategy = together(captured.graph, data=2)
    assert len(runs(lower(captured.graph, strategy))) > 0
    trained, _ = train_rehearsed(captured, strategy, module, batch, optimizer)
    for run in trained:
        assert_close(run, expected, factory.__name__, tolerance=1e-12)


def test_whatever_no_message_lies_between_is_joined() -> None:
    graph = captured_of(skips)[2].graph
    program = lower(graph, together(graph, data=2))
    (run,) = runs(program)
    assert list(run) == np.flatnonzero(program.kind == Kind.BACKWARD).tolist()


def test_messages_of_gradients_and_activations_keep_backwards_apart() -> None:
    graph = captured_of(skips)[2].graph
    for seed in (Seed(data=2), Seed(data=2, zero=3), Seed(tensor=2)):
        program = lower(graph, seed_strategy(graph, seed))
        for run in runs(program):
            between = program.kind[run[0] : run[-1] + 1]
            assert (between == Kind.BACKWARD).all()
            brought = {
                value
                for message in program.messages
                for value in message.results
                if program.values[value].gradient >= 0
            }
            segments = [program.segments[int(program.item[index])] for index in run]
            made = {program.values[v].gradient for one in segments[1:] for v in one.outputs}
            read = {v for one in segments[:-1] for v in one.inputs} & brought
            assert made.isdisjoint(program.values[v].gradient for v in read)


@pytest.mark.parametrize("seed", [Seed(data=2, num_microbatches=2), Seed(stages=2)])
def test_microbatches_and_stages_run_each_backward_alone(seed: Seed) -> None:
    graph = captured_of(skips)[2].graph
    assert runs(lower(graph, seed_strategy(graph, seed))) == []


def test_what_is_made_again_runs_alone() -> None:
    graph = captured_of(skips)[2].graph
    strategy = replace(together(graph, data=1), recompute=(1, 2))
    program = lower(graph, strategy)
    joined = {int(program.item[index]) for run in runs(program) for index in run}
    assert not any(program.segments[item].recomputed for item in joined)


def test_the_time_of_joined_backwards_is_shared_out_as_their_forwards_took() -> None:
    graph = captured_of(skips)[2].graph
    program = lower(graph, together(graph, data=1))
    (run,) = runs(program)
    count = program.num_instructions
    start, end = np.arange(count, dtype=float), np.arange(0.5, count)
    first = {int(program.item[i]): i for i in np.flatnonzero(program.kind == Kind.FORWARD)}
    end[first[int(program.item[run[0]])]] += 0.5  # of the first, forward took twice as long
    start[run[0]], end[run[0]] = 100.0, 100.0 + len(run) + 1
    start[list(run[1:])] = end[list(run[1:])] = np.nan
    none = np.full(count, np.nan)
    shared = shared_out(program, Seen(start=start, end=end, asked=none, unpacking=none))
    took = (shared.end - shared.start)[list(run)]
    assert took == pytest.approx([2.0, *[1.0] * (len(run) - 1)])
