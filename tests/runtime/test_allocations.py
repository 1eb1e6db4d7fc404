"""What the allocator of torch gives and takes back."""

import pytest
import torch

from shardwright.runtime.allocations import allocations

pytestmark = pytest.mark.torch


def test_what_is_given_and_taken_back_is_told_and_nothing_is_printed(monkeypatch, capfd) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    told = allocations(lambda: torch.ones(1000, dtype=torch.float64).sum())
    assert [change for _, change in told if abs(change) >= 8000] == [8000, -8000]
    assert sum(change for _, change in told) == 0
    assert capfd.readouterr() == ("", "")
