"""What the allocator of torch gives and takes back."""

import os
import subprocess
import sys

import pytest
import torch

from shardwright.runtime.allocations import allocations

pytestmark = pytest.mark.torch

IN_A_PROCESS = """
import torch
from shardwright.runtime.allocations import allocations
assert allocations(lambda: torch.ones(1000))
"""


def test_what_is_given_and_taken_back_is_told() -> None:
    told = allocations(lambda: torch.ones(1000, dtype=torch.float64).sum())
    assert [change for _, change in told if abs(change) >= 8000] == [8000, -8000]
    assert sum(change for _, change in told) == 0


def test_the_profiler_prints_nothing() -> None:
    """In a process of its own: how loud it is, it asks once, and other tests use it by themselves."""
    own = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
