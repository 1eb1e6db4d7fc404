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

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    deadline = time.perf_counter() + budget_seconds
    others = torch.zeros(CACHED_BYTES // 4 if from_memory else 0)
    total, done, seen = sum(map(len, runs)), 0, _Seen()
    for group in _groups(runs):
        size, left = sum(map(len, group)), deadline - time.perf_counter()
        if left > 0:
            _time(group, left * size / (total - done), others, seen)
        done += size
        report(done, total)
    start = summarise(seen.engine).seconds if seen.engine else 0.0
    backward = {shard.keys[1] for run in runs for shard in run}
    timings = {key: summarise(laps) for key, laps in seen.laps.items()}
    for key in timings.keys() & backward:
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

    def forward(self, seen: _Seen) -> None:
        # The operator before it has just written them.
        for tensor in self.fresh:
            apart(tensor).mul_(1)
        begin = time.thread_time()
        self.made = self.target(*self.args, **self.kwargs)
        seen.add(self.shard.keys[0], time.thread_time() - begin)

    def backward(self, seen: _Seen) -> Any:
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
        seen.add(self.shard.keys[1], time.thread_time() - begin)
        return found


def _own_or_shared(operand: Operand, shared: dict[object, Tensor]) -> Tensor:
    if operand.parameter < 0:
        return operand.make("cpu")
    name = operand.parameter, operand.shape
    if name not in shared:
        shared[name] = operand.make("cpu")
    return shared[name]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What calls took, by key, and what the autograd engine takes by itself."""

    laps: dict[str, list[float]] = field(default_factory=dict)
    engine: list[float] = field(default_factory=list)

    def add(self, key: str, seconds: float) -> None:
        self.laps.setdefault(key, []).append(seconds)

    @property
    def is_settled(self) -> bool:
        seconds = spread = 0.0
        for laps in self.laps.values():
            timing = summarise(laps)
            # The spread of the median of so many.
            spread += timing.spread / len(laps) ** 0.5
            seconds += timing.seconds
        return spread <= TOLERANCE * seconds


def gradient_outputs(result: Any) -> list[Tensor]:
    """Return the tensors of an operator's result that a gradient flows back from."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [out for out in results if isinstance(out, Tensor) and out.requires_grad]


def _time(runs: Sequence[Run], budget_seconds: float, others: Tensor, seen: _Seen) -> None:
    """Time shards that are in memory together; the first pass warms up and is not counted."""
    deadline = time.perf_counter() + budget_seconds
    shared: dict[object, Tensor] = {}
    ready = [[turn for shard in run if (turn := _ready(shard, shared))] for run in runs]
    _run_pass(ready, others, _Seen())
    begin = time.perf_counter()
    for number in range(1, MOST + 1):
        _run_pass(ready, others, seen)
        now = time.perf_counter()
        is_enough = number >= ENOUGH and now - begin > LEAST_SECONDS
        if (now > deadline and number >= FEWEST) or (is_enough and seen.is_settled):
            break


def _ready(shard: Shard, shared: dict[object, Tensor]) -> _Turn | None:
    """Return a shard made ready; None where it fails, as it does not in a pass after that."""
    unseen = _Seen()
    try:
        turn = _Turn(shard, shared)
        turn.forward(unseen)
        turn.backward(unseen)
    except FAILURES:
        return None
    return turn


def _run_pass(runs: Sequence[Sequence[_Turn]], others: Tensor, seen: _Seen) -> None:
    for turns in runs:
        others.sum()
        for turn in turns:
            turn.forward(seen)
        others.sum()
        recent: deque[Any] = deque(maxlen=RECENT)
        for number, turn in enumerate(reversed(turns)):
            recent.append(turn.backward(seen))
            if (
                number % ENGINE_EVERY == 0
            ):  # not before the first, which begins backward in a step as well
                seen.engine.append(_engine_seconds())


def _engine_seconds() -> float:
    """Return what ``autograd.grad`` takes on one view."""
    leaf, seed = torch.rand(8, requires_grad=True), torch.rand(8)
    out = leaf.view(8)
    begin = time.thread_time()
    torch.autograd.grad([out], [leaf], [seed], allow_unused=True)
    return time.thread_time() - begin
