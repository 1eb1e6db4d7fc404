"""Losses of pipelines trained by torch.distributed.pipelining and by us, on the same gloo ranks."""

from __future__ import annotations

import pytest
import torch

from tests.beside_torch import THEIRS, Case, losses_beside
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
