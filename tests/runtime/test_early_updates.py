"""Parameters that are updated as soon as their gradients are final, which then go."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Strategy
from shardwright.errors import InputError
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.scaling import Scaling
from tests import zoo
from tests.runtime.equivalence import Run, assert_close, batches, captured_of, copied, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WIDE = partial(zoo.gpt, width=128, length=2, depth=6)
SEEDS = [
    Seed(), Seed(num_microbatches=2), Seed(data=2), Seed(data=2, zero=1, num_microbatches=2),
    Seed(data=2, zero=2, num_microbatches=2), Seed(data=2, zero=3, recompute=True),
    Seed(data=2, tensor=2, zero=3), Seed(stages=2, num_microbatches=4),
]  # fmt: skip


def early(strategy: Strategy) -> Strategy:
    """Return a strategy whose parameters are updated when their gradients are ready."""
    return replace(strategy, updates="ready", optimizer_states=1)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_training_is_that_of_one_process(seed: Seed) -> None:
    module, batch, captured = captured_of(
        zoo.gpt
    )  # embeddings are tied: two stages add to their gradient
    strategy = early(seed_strategy(captured.graph, seed))
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    expected = train_plain(zoo.gpt, SGD)
    for run in runs:
        assert_close(run, expected, seed.label, 1e-12)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.label)
def test_every_parameter_is_updated_once_behind_all_that_touches_it(seed: Seed) -> None:
    graph = captured_of(zoo.gpt)[2].graph
    program = lower(graph, early(seed_strategy(graph, seed)))
    taken: dict[int, int] = {}
    for index in np.flatnonzero(program.kind == Kind.UPDATE).tolist():
        for master in program.updates[int(program.item[index])]:
            assert master not in taken
            taken[master] = index
            waits = program.predecessor[program.offset[index] : program.offset[index + 1]]
            assert len(waits)
    trained = [tensor for tensor in graph.parameters if graph.tensors[tensor].needs_gradient]
    assert len(taken) == len(trained)
    tensor_of = {program.values[master].tensor: index for master, index in taken.items()}
    inside = [index for index in taken.values() if program.microbatch[index] >= 0]
    assert len(inside) >= len(taken) - 1
    for index in np.flatnonzero(program.kind == Kind.BACKWARD).tolist():
        segment = program.segments[int(program.item[index])]
        read = {program.values[v].tensor for v in segment.inputs} & tensor_of.keys()
        assert all(tensor_of[tensor] > index for tensor in read)


def lowered(seed: Seed) -> tuple[Program, Program]:
    """Return a Program that updates at the end, and one that does so early, of more weights than data."""
    graph = captured_of(WIDE)[2].graph
    strategy = seed_strategy(graph, seed)
    return lower(graph, replace(strategy, optimizer_states=1)), lower(graph, early(strategy))


@pytest.mark.parametrize("seed", [Seed(), Seed(data=2)], ids=lambda seed: seed.label)
def test_gradients_of_the_whole_model_are_never_there_at_once(seed: Seed) -> None:
    late, soon = lowered(seed)
    assert sum(soon.allocated) == sum(soon.freed)
    peaks = [simulate(one, np.ones(one.num_instructions)).peak_bytes[0] for one in (late, soon)]
    resting = [one for one in late.values if one.role == "parameter" and one.alias < 0]
    assert peaks[0] - peaks[1] > 0.5 * sum(8 * int(np.prod(one.shape)) for one in resting)


def peaks(seeds: list[Seed]) -> list[tuple[float, float]]:
    """Return the measured and the predicted peak of each plan; the last one updates often."""
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    module, batch = zoo.gpt(width=64, length=4, depth=2)
    captured = capture(module, batch)
    for seed in seeds:
        how = often if seed is seeds[-1] else early
        program = lower(captured.graph, how(seed_strategy(captured.graph, seed)))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        predicted = simulate(program, np.ones(program.num_instructions), scatter_copies=1.0)
        found.append((executor.profile_step(batch).peak_bytes[0], predicted.peak_bytes[0]))
        executor.close()
    return found


@pytest.mark.ranks
def test_the_peak_is_the_one_predicted() -> None:
    seeds = [
        Seed(data=2), Seed(data=2, num_microbatches=2), Seed(data=2, zero=2, num_microbatches=2),
        Seed(data=2, num_microbatches=2),
    ]  # fmt: skip
    for found in run_ranks(2, peaks, seeds):
        for measured, predicted in found:
            assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    "seed",
    [
        Seed(num_microbatches=2), Seed(data=2, num_microbatches=4),
        Seed(data=2, tensor=2, zero=3, num_microbatches=2, recompute=True),
    ],
    ids=lambda seed: seed.label,
)  # fmt: skip
def test_after_every_microbatch_training_is_that_of_many_small_steps(seed: Seed) -> None:
    module, batch, captured = captured_of(zoo.gpt)
    strategy = often(seed_strategy(captured.graph, seed))
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    plain, _ = zoo.gpt()
    optimizer, pieces, losses = SGD(plain.parameters()), seed.num_microbatches, list[float]()
    for whole in batches(batch):
        parts = {name: one.chunk(pieces) for name, one in whole.items()}
        found = []
        for turn in range(pieces):
            optimizer.zero_grad()
            loss = plain(**{name: part[turn] for name, part in parts.items()}) / pieces
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        losses.append(sum(found))
    expected = Run(losses, copied(plain.named_parameters()), copied(plain.named_buffers()), [])
    for run in runs:
        assert_close(run, expected, seed.label, 1e-12)


def often(strategy: Strategy) -> Strategy:
    """Return a strategy that updates after every microbatch."""
    return replace(early(strategy), updates="microbatch")


class Counting(torch.optim.SGD):
    """An optimizer of one's own, which may count its calls."""


def test_what_needs_all_gradients_at_once_is_refused() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = early(seed_strategy(captured.graph, Seed()))
    for seed in (Seed(data=2, zero=1), Seed(stages=2), Seed(schedule="gpipe")):
        with pytest.raises(InputError, match="after every microbatch"):
            lower(captured.graph, often(seed_strategy(captured.graph, seed)))
    for wrong in (replace(strategy, clips=True), replace(strategy, precision="float16")):
        with pytest.raises(InputError, match="gradients are ready"):
            lower(captured.graph, wrong)
    program = lower(captured.graph, strategy)
    with pytest.raises(InputError, match="Counting"):
        Executor(captured, program, module, optimizer=partial(Counting, lr=0.1))
    with pytest.raises(InputError, match="overflowed"):
        Executor(captured, program, module, optimizer=SGD, options=RunOptions(scaling=Scaling()))
