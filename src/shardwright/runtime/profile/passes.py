"""Time operator shards on a CPU as a model runs them: one after another, once each, pass after pass.

An operator that runs again and again finds its instructions, and what it read and wrote, in the
caches. In a model the others were there in between: small operators take several times as long. So
a pass runs all shards forward and then all backward, as a step does, and a shard is timed once in
every pass. What else the machine does, and its clock rate, befall all shards alike.

A model runs equal shards once per layer, a pass once: what it touches may fit in caches which the model
outgrows. Then other memory is read before shards run forward, and before they run backward.

The clock is the thread's own, so that other programs do not count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph import CACHED_BYTES
from shardwright.runtime.profile.clock import Timing, summarise
from shardwright.runtime.profile.shards import Shard, apart

Timings = tuple[Timing | None, Timing | None]
# What the shards of one pass may occupy; more of them run in passes of their own.
PASS_BYTES = 512 * 2**20
FEWEST, ENOUGH, MOST = 3, 15, 100
# Passes go on for so long at least, and until the medians are known to so much.
LEAST_SECONDS, TOLERANCE = 1.0, 0.01
# Backward frees as it goes: only what it made last is still alive.
RECENT = 4
# How many shards run between two starts of the autograd engine alone.
ENGINE_EVERY = 8
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError)


def time_in_passes(
    shards: Sequence[Shard],
    budget_seconds: float,
    report: Callable[[int, int], None],
    *,
    from_memory: bool = False,
) -> list[Timings]:
    """Return the timings of forward and, where a gradient flows, backward, of every shard; None
    where it cannot run, or the budget does not reach it. ``from_memory``: their model is larger than
    caches.

    The time of starting the autograd engine is taken off the backward: a segment pays it once, not
    per operator.
    """
    deadline = time.perf_counter() + budget_seconds
    others = torch.zeros(CACHED_BYTES // 4 if from_memory else 0)
    found: list[Timings] = []
    for group in _groups(shards):
        left = deadline - time.perf_counter()
        share = left * len(group) / (len(shards) - len(found))
        found += _time(group, share, others) if left > 0 else [(None, None)] * len(group)
        report(len(found), len(shards))
    return found


def _groups(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Cut shards, in order, into groups whose tensors may be in memory together."""
    groups: list[list[Shard]] = []
    size = PASS_BYTES
    for shard in shards:
        if size + shard.bytes > PASS_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(shard)
        size += shard.bytes
    return groups


class _Turn:
    """One shard and its tensors, ready to run once a pass; what it took is in ``laps``."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        tensors = [operand.make("cpu") for operand in shard.operands]
        self.target, self.args, self.kwargs = shard.bind(tensors)
        self.wanted = [tensor for tensor in tensors if tensor.requires_grad]
        self.fresh = [
            tensor.detach()
            for operand, tensor in zip(shard.operands, tensors, strict=True)
            if operand.is_made and tensor.is_floating_point()
        ]
        self.made: Any = None
        self.seeds: list[Tensor] | None = None
        self.laps: tuple[list[float], list[float]] = ([], [])

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

    def timings(self, engine_seconds: float) -> Timings:
        ahead, back = (summarise(laps) if laps else None for laps in self.laps)
        if back is not None:
            seconds = max(back.seconds - engine_seconds, 0.0)
            back = Timing(seconds=seconds, spread=back.spread, count=back.count)
        return ahead, back


def gradient_outputs(result: Any) -> list[Tensor]:
    """Return the tensors of an operator's result that a gradient flows back from."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [out for out in results if isinstance(out, Tensor) and out.requires_grad]


def _time(shards: Sequence[Shard], budget_seconds: float, others: Tensor) -> list[Timings]:
    """Time shards that are in memory together; the first pass warms up and is not counted."""
    deadline = time.perf_counter() + budget_seconds
    ready = [_ready(shard) for shard in shards]
    turns = [turn for turn in ready if turn]
    engine: list[float] = []
    _run_pass(turns, others, engine)
    for laps in (engine, *(laps for turn in turns for laps in turn.laps)):
        laps.clear()
    begin = time.perf_counter()
    for number in range(1, MOST + 1):
        _run_pass(turns, others, engine)
        now = time.perf_counter()
        is_enough = number >= ENOUGH and now - begin > LEAST_SECONDS
        if (now > deadline and number >= FEWEST) or (is_enough and _is_settled(turns)):
            break
    start = summarise(engine).seconds if engine else 0.0
    return [turn.timings(start) if turn else (None, None) for turn in ready]


def _ready(shard: Shard) -> _Turn | None:
    """Return a shard made ready; None where it fails, as it does not in a pass after that."""
    try:
        turn = _Turn(shard)
        turn.forward()
        turn.backward()
    except FAILURES:
        return None
    return turn


def _run_pass(turns: Sequence[_Turn], others: Tensor, engine: list[float]) -> None:
    others.sum()
    for turn in turns:
        turn.forward()
    others.sum()
    recent: deque[Any] = deque(maxlen=RECENT)
    for number, turn in enumerate(reversed(turns)):
        if number % ENGINE_EVERY == 0:
            engine.append(_engine_seconds())
        recent.append(turn.backward())


def _engine_seconds() -> float:
    """Return what ``autograd.grad`` takes on one view."""
    leaf, seed = torch.rand(8, requires_grad=True), torch.rand(8)
    out = leaf.view(8)
    begin = time.thread_time()
    torch.autograd.grad([out], [leaf], [seed], allow_unused=True)
    return time.thread_time() - begin


def _is_settled(turns: Sequence[_Turn]) -> bool:
    seconds = spread = 0.0
    for turn in turns:
        for laps in turn.laps:
            if laps:
                timing = summarise(laps)
                # The spread of the median of so many.
                spread += timing.spread / len(laps) ** 0.5
                seconds += timing.seconds
    return spread <= TOLERANCE * seconds
