"""Measure one step: when every instruction ran on this rank, and how many bytes were alive.

Times and memory come from different steps, since recording memory slows one and the next. Times are
those of the middle one of several, after one that nobody times: caches hold what came before. On the CPU
memory is what the allocator reports through the profiler: exact bytes of every tensor, temporaries
inside operators among them, plus what was alive before. On CUDA it is the allocator's own peak, and
times are those of events: when the device came to an instruction, not when it was told of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwright.core.joining import runs
from shardwright.core.program import Kind, Program
from shardwright.core.timeline import Timeline
from shardwright.runtime.agreement import gathered
from shardwright.runtime.allocations import allocations
from shardwright.runtime.clocks import Ticks, clock_offset, ticks_of
from shardwright.runtime.collectives import alone_after_waiting
from shardwright.runtime.interpreter import Compiled, Machine
from shardwright.runtime.meeting import Seen, told
from shardwright.runtime.messages import Exchange
from shardwright.runtime.status import StatusFile

Walk = Callable[[Compiled], None]
MOST_WAITERS = 2**16
# Training steps of one measurement: one to settle, three for times, one for memory.
STEPS = 5
# Runs one step with the given way of walking the instructions.
Run = Callable[[Walk], None]


def measure(
    machine: Machine,
    status: StatusFile,
    optimizer: torch.optim.Optimizer,
    compiled: Compiled,
    run: Run,
    meets_at_update: bool,
) -> Timeline:
    """Take ``STEPS`` training steps: one to settle, those for times, one for memory; equal on all ranks.

    ``meets_at_update``: see ``meeting.told``.
    """
    offset = clock_offset(_device(machine))
    # One for each work under way: what waited for its turn could wait for ever. They outlast a step, since
    # starting one takes milliseconds of the thread that computes.
    waiters = ThreadPoolExecutor(MOST_WAITERS, thread_name_prefix="waiter")
    try:
        steps = [_timed(machine, status, run, offset, waiters) for _ in range(STEPS - 1)][1:]
    finally:
        waiters.shutdown(wait=False)
    memory = measure_memory(machine, optimizer, status, run)
    mine = Noted(steps, memory)
    return _gather(machine, mine, meets_at_update=meets_at_update)


def _timed(
    machine: Machine, status: StatusFile, run: Run, offset: float, waiters: ThreadPoolExecutor
) -> Lap:
    """Take one step that all ranks begin together."""
    _together()
    ticks = ticks_of(_device(machine))
    clock = Stopwatch(machine.program.num_instructions, status, ticks, waiters)
    begin = time.perf_counter()
    run(clock.walk)
    ticks.settle()
    seconds = time.perf_counter() - begin
    seen = shared_out(machine.program, clock.seen())
    return Lap(seen.shifted(offset), begin + offset, seconds)


def shared_out(program: Program, seen: Seen) -> Seen:
    """Give each of several backwards that ran as one (``core.joining``) its part of what that took.

    The engine does not say where one ends and the next begins: the parts are as those of their forwards.
    """
    start, end = seen.start.copy(), seen.end.copy()
    forward = np.flatnonzero(program.kind == Kind.FORWARD)
    took = np.zeros(len(program.segments))
    took[program.item[forward]] = end[forward] - start[forward]
    for run in map(list, runs(program)):
        if np.isnan(start[run[0]]):  # another rank's
            continue
        until = np.cumsum(np.maximum(took[program.item[run]], 1e-9))
        edges = start[run[0]] + (np.nanmax(end[run]) - start[run[0]]) * until / until[-1]
        start[run[1:]], end[run] = edges[:-1], edges
    return replace(seen, start=start, end=end)


class Stopwatch:
    """Walks instructions and notes when each began and ended; messages end when complete, which may
    be long before anybody asks for them, as the ``waiters`` hear. Of those that are asked for at once the rank hears it
    itself: to be told by another thread takes some 90 us of a small one's 200."""

    def __init__(
        self, count: int, status: StatusFile, ticks: Ticks, waiters: ThreadPoolExecutor
    ) -> None:
        self.status, self.ticks, self._waiters = status, ticks, waiters
        # What the ticks noted, by instruction.
        self._start: list[Any] = [None] * count
        self._end: list[Any] = [None] * count
        self._asked: list[Any] = [None] * count
        self._finished: list[Any] = [None] * count
        self._done: list[list[Any]] = [[] for _ in range(count)]
        self._travels = np.zeros(count, dtype=np.bool_)

    def walk(self, compiled: Compiled) -> None:
        """Run one step."""
        words, mark = self.status.words, self.ticks.mark
        at_once = _asked_at_once(compiled)
        for index, action in compiled.actions:
            words[1] = index + 1
            exchange = compiled.exchanges.get(index)
            began = mark()
            action()
            ended = mark()
            if exchange is None:
                if self._start[index] is None:
                    self._start[index] = began
                self._end[index] = ended
            elif action == exchange.issue:
                self._start[index], self._end[index] = began, ended
                if index in at_once:
                    self._travels[index] |= any(one.works for one in exchange.under_way())
                else:
                    self._watch(index, exchange)
            elif action == exchange.complete:
                self._asked[index], self._finished[index] = began, ended

    def seen(self) -> Seen:
        """Return what was noted. The backend may tell late that something is complete, yet never
        later than who waited for it went on."""
        start, ended, asked, finished = map(
            self._told, (self._start, self._end, self._asked, self._finished)
        )
        last = [max(map(self.ticks.seconds, marks), default=math.nan) for marks in self._done]
        end = np.where(self._travels, np.fmin(np.array(last), finished), ended)
        unpacking = finished - np.maximum(asked, end)
        unpacking = np.where(self._travels, np.maximum(unpacking, 0.0), 0.0)
        return Seen(start=start, end=end, asked=asked, unpacking=unpacking)

    def _told(self, marks: list[Any]) -> NDArray[np.float64]:
        return np.array([math.nan if m is None else self.ticks.seconds(m) for m in marks])

    def _watch(self, index: int, exchange: Exchange) -> None:
        """Note when all works of a message are complete."""
        for pending in exchange.under_way():
            works: list[Any] = []
            for work in pending.works:
                try:
                    # On a GPU the callback runs on a stream that waits for the work.
                    work.get_future().add_done_callback(lambda _: self._note_done(index))
                    works.append(work)
                except (RuntimeError, NotImplementedError):
                    works.append(self._waited_for(index, work))
            self._travels[index] |= bool(works)
            pending.works = works

    def _waited_for(self, index: int, work: Any) -> _Heard:
        """Let a thread wait: sends and receives of gloo tell nobody else that they are complete."""

        def wait() -> None:
            work.wait()
            self._note_done(index)

        return _Heard(self._waiters.submit(wait))

    def _note_done(self, index: int) -> None:
        self._done[index].append(self.ticks.mark())


def _asked_at_once(compiled: Compiled) -> set[int]:
    """Return the messages that are waited for before anything is computed."""
    started, found = set[int](), set[int]()
    for index, action in compiled.actions:
        exchange = compiled.exchanges.get(index)
        if exchange is None:
            started.clear()
        elif action == exchange.issue:
            started.add(index)
        elif action == exchange.complete and index in started:
            found.add(index)
    return found


@dataclass(frozen=True, slots=True)
class _Heard:
    """A work for which a thread waits; waiting for it is waiting for the thread."""

    future: Future[None]

    def wait(self) -> None:
        """Block until complete; raises what the work raised."""
        self.future.result()


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

    device = _device(machine)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run(walk)
        return np.array([[0.0, base], [0.0, float(torch.cuda.max_memory_allocated(device))]])
    _together()
    begin = time.time_ns()
    with alone_after_waiting():
        changes = allocations(partial(run, walk))
    rows = np.array([[0.0, 0.0], *changes], dtype=np.float64)
    rows[1:, 0] = (rows[1:, 0] - begin) * 1e-9
    rows[:, 1] = base + np.cumsum(rows[:, 1])
    return rows


@dataclass(frozen=True, eq=False)
class Lap:
    """One step of one rank: its instructions and its begin on the common clock, and its seconds."""

    seen: Seen
    begin: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Noted:
    """What one rank measured."""

    laps: list[Lap]
    memory: NDArray[np.float64]


def _device(machine: Machine) -> torch.device:
    return next(iter(machine.sites.values())).device


def _gather(machine: Machine, mine: Noted, *, meets_at_update: bool) -> Timeline:
    """Put the ranks' measurements together."""
    noted = dict(gathered((machine.device, mine)))
    together = zip(*(one.laps for one in noted.values()), strict=True)
    took = [max(lap.seconds for lap in laps) for laps in together]
    middle = sorted(range(len(took)), key=took.__getitem__)[len(took) // 2]
    laps = {device: one.laps[middle] for device, one in noted.items()}
    program, begin = machine.program, min(lap.begin for lap in laps.values())
    unseen = np.full(program.num_instructions, np.nan)
    step = Timeline(
        source="measured",
        start=unseen,
        end=unseen,
        group=program.group,
        memory=tuple(noted[mesh.devices[0]].memory for mesh in program.meshes),
        peak_bytes=tuple(
            max(float(noted[device].memory[:, 1].max()) for device in mesh.devices)
            for mesh in program.meshes
        ),
        step_seconds=took[middle],
    )
    seen = {device: lap.seen.shifted(-begin) for device, lap in laps.items()}
    return told(program, seen, step, meets_at_update=meets_at_update)
