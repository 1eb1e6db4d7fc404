"""Losses of pipelines trained by torch.distributed.pipelining and by us, on the same gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist

from shardwright.core.program import Kind
from shardwright.runtime.waiting import Action
from tests.beside_torch import THEIRS, Case, losses_beside, ours
from tests.runtime.world import run_ranks


@pytest.mark.ranks
def test_losses_are_those_of_torchs_own_schedules() -> None:
    case = Case(devices=2, microbatches=4, layers=4, width=8, rows=3, dtype=torch.float64)
    ranks = run_ranks(2, losses_beside, case, tuple(THEIRS), 3)
    for name, *found in zip(THEIRS, *ranks, strict=True):
        theirs = next(losses for _, losses in found if losses[0] is not None)
        for mine, _ in found:
            assert mine == pytest.approx(theirs, rel=1e-12), name
        assert mine[2] < mine[0]


def steps_ahead(case: Case) -> list[float]:
    """Take two steps, of which the last rank does not update after the first before the first rank has taken it."""
    rank, batch, executor = dist.get_rank(), case.batch(), ours(case, "zb-v")
    store = cast(dist.Store, dist.distributed_c10d._get_default_store())
    program, actions = executor.program, executor._training.actions

    def once_it_is_taken(action: Action) -> Action:
        def run() -> None:
            store.wait(["taken"], timedelta(seconds=30))
            action()

        return run

    if rank:
        held = [
            (index, once_it_is_taken(action) if program.kind[index] == Kind.UPDATE else action)
            for index, action in actions
        ]
        executor._training = replace(executor._training, actions=tuple(held))
    losses = [float(executor.step(batch))]
    if not rank:
        store.set("taken", "yes")
    return [*losses, float(executor.step(batch))]


@pytest.mark.ranks
def test_a_stage_that_is_done_begins_the_next_step_while_others_update() -> None:
    case = Case(devices=2, microbatches=4, layers=4, width=8, rows=3, dtype=torch.float64)
    first, second = run_ranks(2, steps_ahead, case)
    assert first == second
    assert first[1] < first[0]
