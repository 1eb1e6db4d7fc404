"""All ranks in one process: the same training, bytes counted, and mistakes told instead of hung."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.core.strategy import ParameterConfig, SyncEvery
from shardwright.errors import InputError, RunError
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.executor import Executor, RunOptions
from shardwright.runtime.local_world import LocalWorld, run_locally
from shardwright.runtime.loss import NUM_RIDING
from tests import zoo
from tests.runtime.equivalence import (
    Factory,
    Run,
    assert_close,
    captured_of,
    train_each,
    train_plain,
)
from tests.runtime.rehearsed import Traffic, train_rehearsed
from tests.runtime.strategies import strategy_of
from tests.runtime.world import run_ranks

pytestmark = pytest.mark.torch
SGD = partial(torch.optim.SGD, lr=1.0)


def rehearsed(factory: Factory, seed: Seed) -> tuple[list[Run], Traffic]:
    module, batch, captured = captured_of(factory)
    strategy = seed_strategy(captured.graph, seed)
    return train_rehearsed(captured, strategy, module, batch, SGD)


@pytest.mark.parametrize(
    "seed",
    [
        Seed(data=2, tensor=2, sequence=True, zero=1),
        Seed(data=2, stages=2, zero=3, num_microbatches=2, recompute=True),
        Seed(stages=4, num_microbatches=4, schedule="gpipe"),
    ],
    ids=lambda seed: seed.label,
)
def test_every_rank_in_one_process_trains_as_plain_pytorch_does(seed: Seed) -> None:
    runs, _ = rehearsed(zoo.gpt, seed)
    expected = train_plain(zoo.gpt, SGD)
    assert len(runs) == 4
    for run in runs:
        assert_close(run, expected, seed.label)


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_state_sharded_along_one_of_two_data_axes_trains_as_plain_pytorch(sync: SyncEvery) -> None:
    factory = partial(zoo.mlp, width=256, depth=2)
    module, batch = factory()
    captured = capture(module, batch)
    found = seed_strategy(captured.graph, Seed(data=2, tensor=2, num_microbatches=2))
    both = replace(
        found,
        configs=tuple(replace(one, dims=(one.dims[0],) * 2) for one in found.configs),
        parameters=(ParameterConfig(rest=(-1, -1), optimizer=(-1, 0), sync=sync),)
        * len(found.parameters),
    )
    runs, traffic = train_rehearsed(captured, both, module, batch, SGD)
    assert traffic[0, "all_reduce", 2].elements > 0
    for run in runs:
        assert_close(run, train_plain(factory, SGD), "sharded within hosts")


def test_sixty_four_ranks_fit_in_one_process() -> None:
    factory = partial(zoo.mlp, batch=64, depth=1)
    runs, _ = rehearsed(factory, Seed(data=64))
    assert len(runs) == 64
    assert_close(runs[63], train_plain(factory, SGD), "64 ranks")


@pytest.mark.ranks
def test_processes_and_threads_train_alike() -> None:
    seed = Seed(tensor=2, stages=2, num_microbatches=2)
    (threads, *_), _ = rehearsed(zoo.gpt, seed)
    (processes, *_) = run_ranks(4, train_each, zoo.gpt, [strategy_of(seed)], SGD)
    assert_close(threads, processes[0], seed.label, tolerance=1e-12)


def test_a_local_world_is_deterministic_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seed = Seed(data=2, zero=3)
    first, second = rehearsed(zoo.mlp, seed)[0], rehearsed(zoo.mlp, seed)[0]
    assert torch.equal(before, torch.get_rng_state())
    assert first[0].losses == second[0].losses
    for name, tensor in first[1].parameters.items():
        assert torch.equal(tensor, second[1].parameters[name])


def test_data_parallelism_sends_gradients_and_the_loss_behind_them_once_a_step() -> None:
    module, _ = zoo.mlp()
    elements = sum(parameter.numel() for parameter in module.parameters())
    _, traffic = rehearsed(zoo.mlp, Seed(data=4))
    agreed = traffic[0, "agree", 4].messages
    _, other = rehearsed(zoo.mlp, Seed(data=4, zero=2))
    for rank in range(4):
        sent = traffic[rank, "all_reduce", 4]
        # and the count of targets, which the mean of the loss divides by
        assert sent.elements == 3 * (elements + 1 + NUM_RIDING)
        # Where no gradients go to all ranks, the loss is agreed upon by itself.
        assert other[rank, "agree", 4].messages == agreed + 3


def test_a_rank_that_does_not_come_is_named() -> None:
    def target(world: LocalWorld) -> None:
        if world.rank != 1:
            world.group((0, 1, 2)).all_reduce(torch.ones(4)).wait()

    with pytest.raises(RunError, match="rank 0 in the start waits for all_reduce with ranks 1;"):
        run_locally(target, 3)


def test_two_ranks_that_wait_for_each_other_are_told() -> None:
    def target(world: LocalWorld) -> None:
        other = 1 - world.rank
        link = world.link(other, world.rank)
        link.receive(torch.empty(2), 0).wait()
        world.link(world.rank, other).send(torch.ones(2), 0).wait()

    with pytest.raises(RunError, match=r"rank 0 .* rank 1 to send; rank 1 .* rank 0 to send"):
        run_locally(target, 2)


def test_different_sizes_in_one_collective_are_told() -> None:
    def target(world: LocalWorld) -> None:
        world.group((0, 1)).all_reduce(torch.ones(4 + world.rank)).wait()

    with pytest.raises(RunError, match=r"rank 0 does all_reduce of 4 .* rank 1 all_reduce of 5"):
        run_locally(target, 2)


def test_messages_out_of_order_are_told() -> None:
    def target(world: LocalWorld) -> None:
        link = world.link(0, 1)
        if world.rank == 0:
            works = [link.send(torch.ones(2), tag) for tag in (1, 2)]
        else:
            works = [link.receive(torch.empty(2), tag) for tag in (2, 1)]
        for work in works:
            work.wait()

    with pytest.raises(RunError, match="in the order in which rank 0 sends"):
        run_locally(target, 2)


def test_nothing_is_kept_of_messages_that_have_come() -> None:
    def target(world: LocalWorld) -> int:
        if world.rank == 1:
            for _ in range(3):
                world.link(0, 1).receive(torch.empty(64), 0).wait()
            world.link(1, 0).send(torch.ones(1), 0).wait()
            return 0
        gone: list[weakref.ref[Tensor]] = []
        for _ in range(3):
            buffer = torch.ones(64)
            world.link(0, 1).send(buffer, 0).wait()
            gone.append(weakref.ref(buffer))
        del buffer
        world.link(1, 0).receive(torch.empty(1), 0).wait()
        return sum(one() is not None for one in gone)

    assert run_locally(target, 2)[0] == [0, 0]


def test_a_message_that_nobody_receives_is_told() -> None:
    def target(world: LocalWorld) -> None:
        if world.rank == 0:
            world.link(0, 1).send(torch.ones(2), 0).wait()

    with pytest.raises(RunError, match="waits for rank 1 to receive"):
        run_locally(target, 2)


def test_memory_that_changes_under_way_is_told() -> None:
    def target(world: LocalWorld) -> None:
        buffer = torch.ones(4)
        pending = world.group((0, 1)).all_gather(torch.empty(8), buffer)
        buffer += world.rank
        pending.wait()

    with pytest.raises(RunError, match="but rank 1 changed what it gave"):
        run_locally(target, 2)


@pytest.mark.parametrize("waits", [False, True])
def test_what_was_sent_may_be_written_again_once_its_sender_has_waited(waits: bool) -> None:
    def target(world: LocalWorld) -> float:
        link, buffer = world.link(0, 1), torch.ones(4)
        if world.rank == 0:
            pending = link.send(buffer, 0)
            if waits:
                pending.wait()
            buffer += 1
            world.link(1, 0).receive(torch.empty(1), 0).wait()
            pending.wait()
            return float(buffer.sum())
        arriving = link.receive(buffer, 0)
        world.link(1, 0).send(torch.ones(1), 0)
        return float(arriving.wait().sum())

    if waits:
        assert run_locally(target, 2)[0] == [8, 4]
    else:
        with pytest.raises(RunError, match="but rank 0 changed what it gave"):
            run_locally(target, 2)


def test_the_first_error_of_a_rank_ends_all_and_is_raised() -> None:
    def target(world: LocalWorld) -> None:
        if world.rank == 2:
            raise ZeroDivisionError("rank 2")
        world.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        run_locally(target, 3)


def test_checkpoints_are_refused_where_ranks_are_not_processes() -> None:
    module, batch = zoo.mlp()
    captured = capture(module, batch)
    program = lower(captured.graph, seed_strategy(captured.graph, Seed()))

    def target(world: LocalWorld) -> None:
        options = RunOptions(world=world)
        Executor(captured, program, module, optimizer=SGD, options=options).save("nowhere")

    with pytest.raises(InputError, match="one process per rank"):
        run_locally(target, 1)
