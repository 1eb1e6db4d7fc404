"""Parameters that lie on servers: pulled before forward, their gradients pushed and added up there.

The oracle is plain PyTorch in float64, on one process and the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.core.graph import OperatorGraph
from shardwright.core.strategy import Strategy
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.planner.space.servers import with_servers
from shardwright.proofs import check, check_complete
from shardwright.runtime.capture import capture
from tests import zoo
from tests.runtime.equivalence import Factory, Run, assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.strategies import strategy_of
from tests.runtime.test_checkpoint import load_and_train, train_and_save
from tests.runtime.world import run_ranks

SGD = partial(torch.optim.SGD, lr=1.0)
ADAM = partial(torch.optim.AdamW, lr=1e-2)


def served(
    seed: Seed, servers: tuple[int, ...], workers: tuple[int, ...], graph: OperatorGraph
) -> Strategy:
    return with_servers(seed_strategy(graph, seed), servers, workers)


def trained(
    factory: Factory,
    build: Callable[[OperatorGraph], Strategy],
    optimizer: Callable[..., Any],
    max_norm: float | None = None,
) -> list[Run]:
    module, batch = factory()
    captured = capture(module, batch)
    program = lower(captured.graph, build(captured.graph))
    check(program)
    check_complete(program, captured.graph)
    return train_rehearsed(captured, program.strategy, module, batch, optimizer, max_norm)[0]


@pytest.mark.torch
def test_servers_train_as_one_process_does() -> None:
    expected = train_plain(zoo.mlp, SGD)
    for seed, servers, workers in (
        (Seed(data=2), (0,), (1, 2)),
        (Seed(data=2, num_microbatches=2), (0, 1, 2), (3, 4)),  # biases divide by no 3
        (Seed(data=2, num_microbatches=2, schedule="gpipe"), (0, 1), (2, 3)),
        (Seed(data=4), (0, 2), (0, 1, 2, 3)),  # servers on workers' devices
        (Seed(data=2, tensor=2), (4, 5), (0, 1, 2, 3)),  # terms of shards
        (Seed(data=1), (0, 1), (2,)),
    ):
        runs = trained(zoo.mlp, partial(served, seed, servers, workers), SGD)
        assert len(runs) == len({*servers, *workers})
        for run in runs:
            assert_close(run, expected, f"{seed.label}, servers {servers}", 1e-9)


@pytest.mark.torch
def test_servers_clip_by_the_global_norm_and_keep_tied_weights_and_optimizer_state() -> None:
    tied = partial(zoo.gpt, tied=True)
    expected = train_plain(tied, ADAM, 0.1)

    def clipped(graph: OperatorGraph) -> Strategy:
        return replace(served(Seed(data=2), (0, 1), (0, 1), graph), clips=True)

    for run in trained(tied, clipped, ADAM, 0.1):
        assert_close(run, expected, "tied", 1e-9)


@pytest.mark.torch
def test_terms_travel_in_the_dtype_of_the_wire_and_add_up_to_about_the_gradient() -> None:
    def narrow(graph: OperatorGraph) -> Strategy:
        made = served(Seed(data=2), (0, 1), (2, 3), graph)
        return replace(made, gradient_sync=replace(made.gradient_sync, dtype="bfloat16"))

    module, batch = zoo.mlp()
    graph = capture(module, batch).graph
    program = lower(graph, narrow(graph))
    for purpose, dtype in (("synchronise", "bfloat16"), ("parameter", "float64")):
        sent = [one for one in program.messages if one.purpose == purpose]
        assert {program.values[value].dtype for one in sent for value in one.sources} == {dtype}
    slow = partial(torch.optim.SGD, lr=0.01)
    expected = train_plain(zoo.mlp, slow)
    for run in trained(zoo.mlp, narrow, slow):
        assert_close(run, expected, "bfloat16 terms", 2**-7)  # of a rate of 0.01, three times


@pytest.mark.ranks
def test_a_server_rank_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    build = partial(served, Seed(data=2), (0,), (1, 2))
    expected = run_ranks(3, train_and_save, build, str(tmp_path), 1, 2)
    assert run_ranks(3, load_and_train, build, str(tmp_path), 1, 2) == expected
    # Another plan goes on from what servers saved.
    alone = load_and_train(strategy_of(Seed()), str(tmp_path), 1, 2)
    torch.testing.assert_close(alone, expected[0], rtol=1e-10, atol=0)
