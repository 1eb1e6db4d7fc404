"""Collectives: while memory is recorded, what was waited for is held by the caller alone."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwright.runtime import collectives
from shardwright.runtime.collectives import Pending, alone_after_waiting
from tests.runtime.world import run_ranks

ROUNDS, SIZE = 20, 4096


class Dropped:
    """A work that its waiter lets go of first, and then keeps the interpreter to itself for a while.

    So a thread of the backend is the last to hold the work's tensors, and once the work is complete
    waits for the interpreter to let go of them.
    """

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        del self.work
        until = time.perf_counter() + 2e-3
        while time.perf_counter() < until:
            pass


def still_held() -> dict[str, int]:
    """Return how often the backend still held what it was lent, by collective."""
    group = dist.group.WORLD
    assert group is not None
    whole, piece = torch.ones(SIZE), torch.ones(SIZE // group.size())
    start: dict[str, Callable[[], Pending]] = {
        "all-reduce": lambda: collectives.all_reduce(whole.clone(), group),
        "all-reduce of widened": lambda: collectives.all_reduce(whole.to(torch.int16), group),
        "all-gather": lambda: collectives.all_gather(whole.clone(), piece, group),
        "reduce-scatter": lambda: collectives.reduce_scatter(piece.clone(), whole, group),
        "all-to-all": lambda: collectives.all_to_all(whole.clone(), whole, group),
    }
    held = dict.fromkeys(start, 0)
    sys.setswitchinterval(1.0)
    with alone_after_waiting():
        for _ in range(ROUNDS):
            for name, begin in start.items():
                pending = begin()
                pending.works = [Dropped(work) for work in pending.works]
                lent = [weakref.ref(tensor) for tensor in pending.lent]
                assert lent, name
                pending.wait()
                held[name] += any(tensor() is not None for tensor in lent)
    return held


@pytest.mark.ranks
def test_what_was_waited_for_is_held_by_no_thread_of_the_backend() -> None:
    for held in run_ranks(2, still_held):
        assert not any(held.values()), held
