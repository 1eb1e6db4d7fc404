"""One clock for all ranks, so that what they measured can be laid side by side.

Processes of one machine read the same monotonic clock. Between machines the difference is found by
asking: rank 0 tells its time, and half of the way there and back is taken off.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.runtime.agreement import gathered

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
    machines = gathered(machine or machine_id())
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


class Ticks(Protocol):
    """Notes moments as the work that was asked for gets there, and tells them afterwards."""

    def mark(self) -> Any:
        """Note the moment at which all that was asked for so far is done."""
        ...

    def settle(self) -> None:
        """Wait until every moment that was noted has come."""
        ...

    def seconds(self, mark: Any) -> float:
        """Return when that was, by ``time.perf_counter``."""
        ...


class HostTicks:
    """Of the CPU, which has done what it was asked for when the call returns."""

    def mark(self) -> float:
        """Return now."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is outstanding."""

    def seconds(self, mark: float) -> float:
        """Return the moment."""
        return mark


class DeviceTicks:
    """Of a GPU, which gets to what it is asked for later: events on the stream that is the current one,
    told by the host's clock as it was at an event when the device stood idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return when the device came to an event; events know milliseconds."""
        return self._zero_seconds + self._zero.elapsed_time(mark) * 1e-3


def ticks_of(device: torch.device) -> Ticks:
    """Return what times work on a device."""
    return DeviceTicks(device) if device.type == "cuda" else HostTicks()
