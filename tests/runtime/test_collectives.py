"""Collectives: sums of any dtype and size, and while memory is recorded, what was waited for is held
by the caller alone."""

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


def is_run_by_a_thread(work: dist.Work) -> bool:
    """Whether a work goes on, and holds its tensors, when nobody holds it: not so sends and receives."""
    try:
        return work.get_future() is not None
    except (RuntimeError, NotImplementedError):
        return False


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
                pending.works = [
                    Dropped(work) if is_run_by_a_thread(work) else work for work in pending.works
                ]
                lent = [weakref.ref(tensor) for tensor in pending.lent]
                assert lent, name
                pending.wait()
                held[name] += any(tensor() is not None for tensor in lent)
    return held


@pytest.mark.ranks
def test_what_was_waited_for_is_held_by_no_thread_of_the_backend() -> None:
    for held in run_ranks(2, still_held):
        assert not any(held.values()), held


COUNTS = (1, 4097, 2**18)
TERMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16)


def terms(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * rank + 1)
    # Sums of three are exact in every dtype.
    return torch.randint(-40, 40, (count,), generator=generator).to(dtype)


def sums() -> list[torch.Tensor]:
    """Sum buffers of every dtype and length, all under way at once; then whether any rank says yes."""
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    whole = [terms(rank, dtype, count) for dtype in TERMS for count in COUNTS]
    pending = [collectives.all_reduce(buffer, group) for buffer in whole]
    found = [one.wait() for one in reversed(pending)][::-1]
    assert all(sum_ is buffer for sum_, buffer in zip(found, whole, strict=True))
    number = torch.tensor(1.0 + rank)
    assert collectives.all_reduce(number, group).wait().item() == sum(
        1.0 + one for one in range(group.size())
    )
    votes = torch.tensor([False, rank == 1, True])
    return [*found, collectives.all_reduce(votes, group).wait()]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_exact_and_equal_on_all_ranks(ranks: int) -> None:
    everyone = run_ranks(ranks, sums)
    wanted = [
        sum((terms(rank, dtype, count) for rank in range(1, ranks)), terms(0, dtype, count))
        for dtype in TERMS
        for count in COUNTS
    ]
    for found in everyone:
        assert found[-1].tolist() == [False, True, True]
        for mine, theirs, right in zip(found[:-1], everyone[0], wanted, strict=False):
            assert mine.dtype is right.dtype
            assert torch.equal(mine, theirs)
            assert torch.equal(mine.double(), right.double())


def exchanges() -> list[torch.Tensor]:
    """Exchange equal pieces of several dtypes, all under way at once, and sum such pieces."""
    group = dist.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    whole = [terms(rank, dtype, ranks * count) for dtype in TERMS for count in COUNTS[:2]]
    whole.append(torch.complex(whole[0].float(), whole[0].float() + 1)[: 3 * ranks])
    exchanged = [collectives.all_to_all(torch.empty_like(one), one, group) for one in whole]
    summed = [
        collectives.reduce_scatter(torch.empty(one.numel() // ranks).to(one.dtype), one, group)
        for one in whole
    ]
    return [one.wait() for one in [*exchanged, *summed][::-1]][::-1]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_come_from_every_rank_and_add_up(ranks: int) -> None:
    everyone = run_ranks(ranks, exchanges)
    whole = [
        [terms(rank, dtype, ranks * count) for rank in range(ranks)]
        for dtype in TERMS
        for count in COUNTS[:2]
    ]
    whole.append([torch.complex(one.float(), one.float() + 1)[: 3 * ranks] for one in whole[0]])
    for rank, found in enumerate(everyone):
        for came, added, sent in zip(found[: len(whole)], found[len(whole) :], whole, strict=True):
            pieces = [one.view(ranks, -1)[rank] for one in sent]
            assert torch.equal(came, torch.cat(pieces))
            assert torch.equal(added, torch.stack(pieces).sum(0, dtype=added.dtype))
