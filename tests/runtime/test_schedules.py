"""Schedules of pipelines train as one process does, and need the memory that their order says."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from shardwright.core.program import Kind
from shardwright.core.schedules import NamedSchedule
from shardwright.core.strategy import Pipeline
from shardwright.planner.lower import lower
from shardwright.planner.simulate import simulate
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.transfers import Receive
from tests import zoo
from tests.runtime.equivalence import Factory, assert_close, captured_of, train_each, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.strategies import strategy_of
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=1.0)
TIED = partial(zoo.gpt, tied=True)
CHUNKS = Seed(stages=2, chunks=2, schedule="interleaved")
EXACT = 1e-9


@pytest.mark.torch
@pytest.mark.parametrize(
    ("factory", "seed"),
    [
        (partial(zoo.mlp, batch=24, depth=7), replace(CHUNKS, stages=4, num_microbatches=6)),
        (partial(zoo.mlp, batch=12, depth=5), replace(CHUNKS, chunks=3, data=2, num_microbatches=3)),
        (TIED, replace(CHUNKS, tensor=2, num_microbatches=4, recompute=True)),
        (TIED, replace(CHUNKS, data=2, zero=3, num_microbatches=2)),
        (TIED, replace(CHUNKS, data=2, zero=1, num_microbatches=1)),
        (TIED, replace(CHUNKS, schedule="looped-bfs", data=2, zero=3, num_microbatches=4)),
        (TIED, Seed(stages=4, num_microbatches=8, schedule="1f1b-so", recompute=True)),
        (TIED, Seed(stages=2, data=2, zero=2, num_microbatches=4, schedule="1f1b-so")),
    ],
    ids=lambda one: one.label if isinstance(one, Seed) else "",
)  # fmt: skip
def test_every_rank_of_a_schedule_trains_as_plain_pytorch_does(
    factory: Factory, seed: Seed
) -> None:
    module, batch, captured = captured_of(factory)
    strategy = seed_strategy(captured.graph, seed)
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    expected = train_plain(factory, SGD)
    assert len(runs) == seed.stages * seed.data * seed.tensor
    for run in runs:
        assert_close(run, expected, seed.label, EXACT)


@pytest.mark.torch
def test_an_order_of_ones_own_trains_with_backwards_backwards() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    strategy = seed_strategy(captured.graph, Seed(stages=2, num_microbatches=2))
    order = ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")
    pipeline = Pipeline(schedule="custom", num_microbatches=2, order=order)
    strategy = replace(strategy, pipeline=pipeline)
    runs, _ = train_rehearsed(captured, strategy, module, batch, SGD)
    for run in runs:
        assert_close(run, train_plain(zoo.mlp, SGD), "own order", EXACT)


@pytest.mark.torch
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_comes_next_is_asked_for_before_what_has_come_is_used(
    schedule: NamedSchedule,
) -> None:
    module, batch = zoo.mlp(batch=12, depth=5)
    captured = capture(module, batch)
    seed = Seed(stages=3, num_microbatches=4, schedule=schedule)
    program = lower(captured.graph, seed_strategy(captured.graph, seed))

    def hides(world: LocalWorld) -> list[bool]:
        executor = Executor(
            captured, program, copy.deepcopy(module), optimizer=SGD, options=RunOptions(world=world)
        )
        found, asked, computed = list[bool](), dict[int, int](), 0
        for index, action in executor._training.actions:
            exchange = executor._training.exchanges.get(index)
            if isinstance(exchange, Receive) and action == exchange.issue:
                asked[index] = computed
            elif isinstance(exchange, Receive) and program.microbatch[index] > 0:
                found.append(asked[index] < computed)
            computed += program.kind[index] in (Kind.FORWARD, Kind.BACKWARD)
        return found

    ranks, _ = run_locally(hides, 3)
    assert all(all(found) and len(found) >= 3 for found in ranks)


@pytest.mark.torch
def test_what_another_stage_waits_for_is_sent_before_the_loss_is_summed() -> None:
    module, batch = zoo.mlp(batch=12, depth=5)
    captured = capture(module, batch)
    program = lower(
        captured.graph, seed_strategy(captured.graph, Seed(stages=3, num_microbatches=4))
    )

    def later(world: LocalWorld) -> tuple[int, int]:
        options = RunOptions(world=world)
        executor = Executor(
            captured, program, copy.deepcopy(module), optimizer=SGD, options=options
        )
        actions = [action for _, action in executor._training.actions]
        kinds = [int(program.kind[index]) for index, _ in executor._training.actions]
        begun = actions.index(executor.loss.start)
        sends = [
            exchange.issue in actions[begun:]
            for index, exchange in executor._training.exchanges.items()
            if program.kind[index] == Kind.SEND
        ]
        assert len(sends) >= 4
        return sum(sends), kinds[begun:].count(Kind.UPDATE)

    ranks, _ = run_locally(later, 3)
    assert [sent for sent, _ in ranks] == [0, 0, 0]
    assert all(updates > 0 for _, updates in ranks)


@pytest.mark.ranks
def test_ranks_train_by_schedules_as_one_process_does() -> None:
    seeds = [
        replace(CHUNKS, num_microbatches=4, recompute=True),
        Seed(stages=2, num_microbatches=4, schedule="1f1b-so"),
        Seed(stages=2, num_microbatches=4, schedule="zb-h1"),
        replace(CHUNKS, num_microbatches=4, schedule="zb-v", recompute=True),
    ]
    slow = partial(torch.optim.SGD, lr=0.1)
    first, _ = run_ranks(2, train_each, TIED, [strategy_of(seed) for seed in seeds], slow)
    expected = train_plain(TIED, slow)
    for run, seed in zip(first, seeds, strict=True):
        assert_close(run, expected, seed.label, EXACT)


def peaks(seeds: list[Seed]) -> list[tuple[float, float]]:
    """Return, per plan, the measured and the predicted peak of this rank."""
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    module, batch = zoo.gpt(width=64, length=64)
    captured = capture(module, batch)
    for seed in seeds:
        program = lower(captured.graph, seed_strategy(captured.graph, seed))
        executor = Executor(captured, program, copy.deepcopy(module), optimizer=SGD)
        executor.step(batch)
        measured = executor.profile_step(batch).peak_bytes[executor.stage]
        held = [master.parameter for master in executor.machine.parameters.masters]
        states = sum(p.numel() * p.element_size() for p in held) * program.strategy.optimizer_states
        seconds = np.ones(program.num_instructions)
        predicted = simulate(program, seconds, scatter_copies=1.0).peak_bytes  # as on CPUs
        found.append((measured, predicted[executor.stage] - states))
        executor.close()
    return found


@pytest.mark.ranks
def test_peaks_of_schedules_are_those_predicted() -> None:
    seeds = [
        Seed(stages=2, num_microbatches=8, schedule="1f1b"),
        Seed(stages=2, num_microbatches=8, schedule="1f1b-so"),
        Seed(stages=2, num_microbatches=8, schedule="gpipe"),
        replace(CHUNKS, num_microbatches=8),
    ]
    ranks = run_ranks(2, peaks, seeds)
    for found in ranks:
        for measured, predicted in found:
            assert measured == pytest.approx(predicted, rel=0.01)
    first = [measured for measured, _ in ranks[0]]
    assert first[0] < first[1] < first[2]  # 2, 3 and 8 microbatches in flight
