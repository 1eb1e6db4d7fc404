"""One clock for all ranks, so that what they measured can be laid side by side.

Processes of one machine read the same monotonic clock. Between machines the difference is found by
asking: rank 0 tells its time, and half of the way there and back is taken off.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The quickest of these is hardly delayed; its error is at most half the way there and back.
QUESTIONS = 16


def machine_id() -> str:
    """Name the running kernel: who has the same reads the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def clock_offset(
    device: torch.device, machine: str = "", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds to add to this rank's clock to have rank 0's (a collective call)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine or machine_id())
    rank, offset = dist.get_rank(), 0.0
    for other, place in enumerate(machines):
        if place == machines[0]:
            continue
        if rank == 0:
            _answer(other, device, clock)
        elif rank == other:
            offset = best_offset(_ask(device, clock) for _ in range(QUESTIONS))
    return offset


def best_offset(answers: Iterable[tuple[float, float, float]]) -> float:
    """Return how far another clock is ahead, from (asked, its time, answered) by this and that.

    The quickest answer counts: wherever in between the other clock was read, the middle is wrong by
    no more than half of its way there and back.
    """
    asked, there, answered = min(answers, key=lambda answer: answer[2] - answer[0])
    return there - (asked + answered) / 2


def _ask(device: torch.device, clock: Callable[[], float]) -> tuple[float, float, float]:
    time_there = torch.zeros(1, dtype=torch.float64, device=device)
    asked = clock()
    dist.send(time_there, 0)
    dist.recv(time_there, 0)
    there = float(time_there)
    return asked, there, clock()


def _answer(rank: int, device: torch.device, clock: Callable[[], float]) -> None:
    for _ in range(QUESTIONS):
        question = torch.zeros(1, dtype=torch.float64, device=device)
        dist.recv(question, rank)
        dist.send(torch.tensor([clock()], dtype=torch.float64, device=device), rank)
