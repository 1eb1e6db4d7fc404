"""ZeRO within groups trains as plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from shardwright.planner.space.seeds import Seed, seed_strategy
from shardwright.runtime.capture import capture
from tests import zoo
from tests.runtime.equivalence import assert_close, train_plain
from tests.runtime.rehearsed import train_rehearsed

ADAM = partial(torch.optim.AdamW, lr=1e-2)
MODEL = partial(zoo.mlp, batch=24, width=12, depth=2)


@pytest.mark.torch
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_that_each_hold_all_of_the_state_stay_equal(zero: int) -> None:
    module, batch = MODEL()
    captured = capture(module, batch)
    seed = Seed(data=2, group=2, zero=zero, num_microbatches=2)
    strategy = replace(seed_strategy(captured.graph, seed), clips=True)
    runs, _ = train_rehearsed(captured, strategy, module, batch, ADAM, 0.1)
    for run in runs:
        assert_close(run, train_plain(MODEL, ADAM, 0.1), seed.label)
