"""Time operator shards on a CPU as models run them: one after another, step after step.

An operator that runs again and again by itself finds its instructions, and what it read and wrote, in the
caches; among many of other kinds it finds less than in its model, whose layers are alike: small operators take
several times as long. So a pass runs what strategies run, in their order, all forward and then all backward, as a
step does. Every call has operands of its own but for parameters, which calls share that share them in the model: a
cell of a recurrence finds them in the caches, a layer does not. All calls of equal shards count alike. What
else the machine does, and its clock rate, befall all shards alike.

Of equal layers a pass runs a few: what it touches may fit in caches which the model outgrows. Then other memory
is read before shards run forward, and before they run backward.

The clock is the thread's own, so that other programs do not count.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph import CACHED_BYTES
from shardwright.runtime.profile.clock import Timing, summarise
from shardwright.runtime.profile.shards import Operand, Shard, apart

Run = Sequence[Shard]
# What the shards of one pass may occupy; more of them run in passes of their own.
PASS_BYTES = 512 * 2**20
FEWEST, ENOUGH, MOST = 3, 15, 100
# Passes go on for so long at least, and until the medians are known to so much.
LEAST_SECONDS, TOLERANCE = 1.0, 0.01
# Read before shards that run from memory: a cache that others use, too, gives up what is twice as large.
OTHERS_BYTES = 2 * CACHED_BYTES
# Backward frees as it goes: only what it made last is still alive.
RECENT = 4
# How many shards run between two starts of the autograd engine alone.
ENGINE_EVERY = 8
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError)


def time_in_passes(
    runs: Sequence[Run],
    budget_seconds: float,
    report: Callable[[int, int], None],
    *,
    from_memory: bool = False,
) -> dict[str, Timing]:
    """Return by key what shards take that models run in this order; nothing of what cannot run, of the
    backward of what no gradient flows through, and of what the budget does not reach. ``from_memory``: their model is
    larger than caches.

    The time of starting the autograd engine is taken off the backward: a segment pays it once, not
    per operator.
    """
    others = torch.zeros(OTHERS_BYTES // 4 if from_memory else 0)
    deadline = time.perf_counter() + budget_seconds
    total, done, turns, engine = sum(map(len, runs)), 0, list[_Turn](), list[float]()
    for group in _groups(runs):
        size, left = sum(map(len, group)), deadline - time.perf_counter()
        if left > 0:
            turns += _time(group, left * size / (total - done), others, engine)
        done += size
        report(done, total)
    timings, start = _by_key(turns), summarise(engine).seconds if engine else 0.0
    for key in timings.keys() & {turn.shard.keys[1] for turn in turns}:
        seconds = max(timings[key].seconds - start, 0.0)
        timings[key] = replace(timings[key], seconds=seconds)
    return timings


def _groups(runs: Sequence[Run]) -> list[list[list[Shard]]]:
    """Cut runs, in order, into groups whose tensors may be in memory together; a long one is cut in pieces."""
    groups: list[list[list[Shard]]] = [[]]
    size = 0
    for run in runs:
        groups[-1].append([])
        for shard in run:
            if size and size + shard.bytes > PASS_BYTES:
                groups.append([[]])
                size = 0
            groups[-1][-1].append(shard)
            size += shard.bytes
    return [group for each in groups if (group := [run for run in each if run])]


class _Turn:
    """A call of a shard and its tensors, ready to run once a pass; parameters are those in ``shared``, by number and shape."""

    def __init__(self, shard: Shard, shared: dict[object, Tensor]) -> None:
        self.shard = shard
        self.laps: tuple[list[float], list[float]] = ([], [])
        tensors = [_own_or_shared(operand, shared) for operand in shard.operands]
        self.target, self.args, self.kwargs = shard.bind(tensors)
        self.wanted = [tensor for tensor in tensors if tensor.requires_grad]
        self.fresh = [
            tensor.detach()
            for operand, tensor in zip(shard.operands, tensors, strict=True)
            if operand.is_made and tensor.is_floating_point()
        ]
        self.made: Any = None
        self.seeds: list[Tensor] | None = None

    def forward(self) -> None:
        # The operator before it has just written them.
        for tensor in self.fresh:
            apart(tensor).mul_(1)
        begin = time.thread_time()
        self.made = self.target(*self.args, **self.kwargs)
        self.laps[0].append(time.thread_time() - begin)

    def backward(self) -> Any:
        outs = gradient_outputs(self.made)
        self.made = None
        if not self.wanted or not outs:
            return None
        if self.seeds is None:
            self.seeds = self.shard.seeds_of(outs)
        for seed in self.seeds:
            apart(seed).mul_(1)
        begin = time.thread_time()
        found = torch.autograd.grad(outs, self.wanted, self.seeds, allow_unused=True)
        self.laps[1].append(time.thread_time() - begin)
        return found

    def without_tensors(self) -> _Turn:
        """Hold no tensors any longer."""
        self.args, self.kwargs, self.wanted, self.fresh = (), {}, [], []
        self.made = self.seeds = None
        return self


def _own_or_shared(operand: Operand, shared: dict[object, Tensor]) -> Tensor:
    if operand.parameter < 0:
        return operand.make("cpu")
    name = operand.parameter, operand.shape
    if name not in shared:
        shared[name] = operand.make("cpu")
    return shared[name]


def _by_key(turns: Sequence[_Turn]) -> dict[str, Timing]:
    """Return what shards took in the median of all their calls, each of which varies by the spread: that some
    of them always find less in the caches than others is no doubt about what all take."""
    calls: dict[str, list[list[float]]] = {}
    for turn in turns:
        for key, laps in zip(turn.shard.keys, turn.laps, strict=True):
            if laps:
                calls.setdefault(key, []).append(laps)
    found: dict[str, Timing] = {}
    for key, each in calls.items():
        spread = statistics.median(summarise(laps).spread for laps in each)
        found[key] = replace(summarise(list(chain.from_iterable(each))), spread=spread)
    return found


def _is_enough(turns: Sequence[_Turn], number: int, begin: float, deadline: float) -> bool:
    """Whether so many passes since ``begin`` have told what can be told in time."""
    now = time.perf_counter()
    if number < ENOUGH or now - begin <= LEAST_SECONDS:
        return number >= FEWEST and now > deadline
    timings = _by_key(turns).values()
    # The spread of the median of so many.
    spread = sum(timing.spread / timing.count**0.5 for timing in timings)
    return now > deadline or spread <= TOLERANCE * sum(timing.seconds for timing in timings)


def gradient_outputs(result: Any) -> list[Tensor]:
    """Return the tensors of an operator's result that a gradient flows back from."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [out for out in results if isinstance(out, Tensor) and out.requires_grad]


def _time(
    runs: Sequence[Run], budget_seconds: float, others: Tensor, engine: list[float]
) -> list[_Turn]:
    """Time shards that are in memory together; the first pass warms up and is not counted. ``engine`` gets what
    the autograd engine takes by itself."""
    deadline = time.perf_counter() + budget_seconds
    shared: dict[object, Tensor] = {}
    ready = [[turn for shard in run if (turn := _ready(shard, shared))] for run in runs]
    turns = [turn for run in ready for turn in run]
    _run_pass(ready, others, [])
    for turn in turns:
        turn.laps = ([], [])
    begin, number = time.perf_counter(), 0
    while number < MOST and not _is_enough(turns, number, begin, deadline):
        _run_pass(ready, others, engine)
        number += 1
    return [turn.without_tensors() for turn in turns]


def _ready(shard: Shard, shared: dict[object, Tensor]) -> _Turn | None:
    """Return a shard made ready; None where it fails, as it does not in a pass after that."""
    try:
        turn = _Turn(shard, shared)
        turn.forward()
        turn.backward()
    except FAILURES:
        return None
    return turn


def _run_pass(runs: Sequence[Sequence[_Turn]], others: Tensor, engine: list[float]) -> None:
    for turns in runs:
        others.sum()
        for turn in turns:
            turn.forward()
        others.sum()
        recent: deque[Any] = deque(maxlen=RECENT)
        for number, turn in enumerate(reversed(turns)):
            recent.append(turn.backward())
            if (
                number % ENGINE_EVERY == 0
            ):  # not before the first, which begins backward in a step as well
                engine.append(_engine_seconds())


def _engine_seconds() -> float:
    """Return what ``autograd.grad`` takes on one view."""
    leaf, seed = torch.rand(8, requires_grad=True), torch.rand(8)
    out = leaf.view(8)
    begin = time.thread_time()
    torch.autograd.grad([out], [leaf], [seed], allow_unused=True)
    return time.thread_time() - begin
