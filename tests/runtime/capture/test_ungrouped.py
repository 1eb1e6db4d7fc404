"""A forward that asks for ranks is captured as one process runs it, also where there are some."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.runtime.capture import capture

pytestmark = pytest.mark.torch


class Contrast(nn.Module):
    """Samples against those of all ranks, whose own stand somewhere among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        every, first = h, 0
        if dist.is_initialized():
            found = [torch.zeros_like(h) for _ in range(dist.get_world_size())]
            dist.all_gather(found, h)
            every, first = torch.cat(found), dist.get_rank() * len(h)
        return nn.functional.cross_entropy(h @ every.T, torch.arange(len(h)) + first)


def test_a_group_of_ranks_changes_no_graph() -> None:
    module, batch = Contrast(), {"x": torch.randn(4, 6)}
    alone = capture(module, batch).graph
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        among = capture(module, batch).graph
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
    finally:
        dist.destroy_process_group()
    assert among == alone
