"""Measure one step: when every instruction ran on this rank, and how many bytes were alive.

Times and memory come from two different steps, since recording memory slows the first. On the CPU
memory is what the allocator reports through the profiler: exact bytes of every tensor, temporaries
inside operators among them, plus what was alive before. On CUDA it is the allocator's own peak.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardwright.core.timeline import Timeline
from shardwright.runtime.collectives import alone_after_waiting
from shardwright.runtime.interpreter import Compiled, Machine
from shardwright.runtime.status import StatusFile

Walk = Callable[[Compiled], None]
# Runs one step with the given way of walking the instructions.
Run = Callable[[Walk], None]


def measure(
    machine: Machine,
    status: StatusFile,
    optimizer: torch.optim.Optimizer,
    compiled: Compiled,
    run: Run,
) -> Timeline:
    """Take two training steps, one for times and one for memory; equal on all ranks."""
    clock = _Stopwatch(machine.program.num_instructions, status)
    _together()
    begin = time.perf_counter()
    run(clock.walk)
    seconds = time.perf_counter() - begin
    memory = measure_memory(machine, optimizer, status, run)
    return _gather(machine, clock.start - begin, clock.end - begin, memory, seconds)


class _Stopwatch:
    """Walks instructions and notes when each began and ended; messages end when complete."""

    def __init__(self, count: int, status: StatusFile) -> None:
        self.start = np.full(count, np.nan)
        self.end = np.full(count, np.nan)
        self.status = status

    def walk(self, compiled: Compiled) -> None:
        words = self.status.words
        for index, action in compiled.actions:
            words[1] = index + 1
            began = time.perf_counter()
            action()
            if math.isnan(self.start[index]):
                self.start[index] = began
            self.end[index] = time.perf_counter()
            exchange = compiled.exchanges.get(index)
            pending = getattr(exchange, "pending", None)
            if pending is not None:
                self._watch(index, pending.works)

    def _watch(self, index: int, works: Iterable[Any]) -> None:
        """Note completion from the communication thread, where the backend can tell."""
        for work in works:
            try:
                work.get_future().add_done_callback(lambda _: self._done(index))
            except (RuntimeError, NotImplementedError):
                return

    def _done(self, index: int) -> None:
        self.end[index] = time.perf_counter()


def _together() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def lasting_bytes(machine: Machine, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes alive between steps: parameters, masters, buffers and optimizer state."""
    tensors: list[Tensor] = list(machine.parameters.raw.values())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(t.untyped_storage().nbytes() for t in storages.values())


def measure_memory(
    machine: Machine, optimizer: torch.optim.Optimizer, status: StatusFile, run: Run
) -> NDArray[np.float64]:
    """Take one step and return (seconds since its begin, bytes alive) rows."""
    base = lasting_bytes(machine, optimizer)

    def walk(compiled: Compiled) -> None:
        for index, action in compiled.actions:
            status.words[1] = index + 1
            action()

    device = next(iter(machine.sites.values())).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run(walk)
        return np.array([[0.0, base], [0.0, float(torch.cuda.max_memory_allocated(device))]])
    _together()
    begin = time.time_ns()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with alone_after_waiting(), recording as profiler:
        run(walk)
    results = profiler.profiler
    kineto: Any = results.kineto_results if results is not None else None
    events = kineto.events() if kineto is not None else []
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    rows = np.array([[0.0, 0.0], *changes], dtype=np.float64)
    rows[1:, 0] = (rows[1:, 0] - begin) * 1e-9
    rows[:, 1] = base + np.cumsum(rows[:, 1])
    return rows


def _gather(
    machine: Machine,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    memory: NDArray[np.float64],
    seconds: float,
) -> Timeline:
    """Put the ranks' measurements together: the first device of each mesh speaks for it."""
    mine = (machine.device, start, end, memory, seconds)
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    by_device = {one[0]: one for one in everyone}
    program = machine.program
    starts, ends = np.full_like(start, np.nan), np.full_like(end, np.nan)
    memories: list[NDArray[np.float64]] = []
    for index, mesh in enumerate(program.meshes):
        speaker = by_device[mesh.devices[0]]
        chosen = program.group == index
        starts[chosen], ends[chosen] = speaker[1][chosen], speaker[2][chosen]
        memories.append(speaker[3])
    peaks = tuple(
        max(float(by_device[device][3][:, 1].max()) for device in mesh.devices)
        for mesh in program.meshes
    )
    return Timeline(
        source="measured",
        start=starts,
        end=ends,
        group=program.group,
        memory=tuple(memories),
        peak_bytes=peaks,
        step_seconds=max(one[4] for one in everyone),
    )
