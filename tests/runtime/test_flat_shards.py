"""ZeRO over any number of ranks: flat shards where no dim divides."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright.core.layout import FLAT
from shardwright.planner.lower import lower
from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from shardwright.runtime.checkpoint import load_into_module
from shardwright.runtime.executor import Executor
from tests import zoo
from tests.runtime.equivalence import assert_close, batches, captured_of, train_plain
from tests.runtime.rehearsed import train_rehearsed
from tests.runtime.strategies import strategy_of
from tests.runtime.world import run_ranks

ADAM = partial(torch.optim.AdamW, lr=1e-2)
MODEL = partial(zoo.mlp, batch=60, width=11, depth=2)  # 11 and 8: nothing divides
NUMELS = (11 * 11, 11, 11 * 11, 11, 11 * 8, 8)


@pytest.mark.torch
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("ranks", [3, 5, 6])
def test_zero_trains_as_plain_pytorch_where_no_dim_divides(zero: int, ranks: int) -> None:
    module, batch, captured = captured_of(MODEL)
    seed = Seed(data=ranks, zero=zero, num_microbatches=2)
    strategy = replace(seed_strategy(captured.graph, seed), clips=True)
    assert {config.optimizer for config in strategy.parameters} == {(FLAT,)}
    runs, _ = train_rehearsed(captured, strategy, module, batch, ADAM, 0.1)
    for run in runs:
        assert_close(run, train_plain(MODEL, ADAM, 0.1), seed.label)


@pytest.mark.torch
def test_every_rank_keeps_its_share_of_the_state() -> None:
    module, batch = MODEL()
    graph = capture(module, batch).graph
    shares = sum(math.ceil(numel / 6) for numel in NUMELS)
    for zero, copies in ((0, 3 * sum(NUMELS)), (1, sum(NUMELS) + 3 * shares), (3, 3 * shares)):
        program = lower(graph, seed_strategy(graph, Seed(data=6, zero=zero)))
        assert program.base_bytes == (8 * copies,)  # parameter, master where apart, two states


def go_on(seed: Seed, directory: str, until: int) -> list[float]:
    """Train from the newest checkpoint, if any, to a step, and save."""
    module, batch = MODEL()
    captured = capture(module, batch)
    program = lower(captured.graph, strategy_of(seed)(captured.graph))
    executor = Executor(captured, program, module, optimizer=ADAM)
    if list(Path(directory).glob("latest")):
        executor.load(directory)
    losses = [float(executor.step(one)) for one in batches(batch, until)[executor.steps :]]
    executor.save(directory)
    return losses


@pytest.mark.ranks
def test_a_checkpoint_of_flat_shards_loads_under_any_number_of_ranks(tmp_path: Path) -> None:
    module, batch = MODEL()
    plain, optimizer = module, ADAM(module.parameters())
    expected: list[float] = []
    for one in batches(batch, 6):
        loss = plain(**one)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    directory = str(tmp_path)
    found = run_ranks(3, go_on, Seed(data=3, zero=3), directory, 2)[0]
    found += run_ranks(2, go_on, Seed(data=2, zero=1), directory, 4)[0]
    found += go_on(Seed(), directory, 6)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    loaded, _ = MODEL()
    assert load_into_module(tmp_path, loaded) == 6
    for one, other in zip(loaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
