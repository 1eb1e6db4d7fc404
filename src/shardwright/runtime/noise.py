"""The gradient noise scale, measured while training: data parallelism has gradients of two batch sizes in every step.

A rank's own gradient is there just before it is synchronised, that of the global batch just before the update. What
it costs is a norm of each, and two numbers more in a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.core.layout import PARTIAL, REPLICATE
from shardwright.core.noise import NoiseScale
from shardwright.core.program import Kind, Program, Value
from shardwright.errors import InputError
from shardwright.runtime.collectives import Pending
from shardwright.runtime.interpreter import Compiled, Machine
from shardwright.runtime.update import owned_gradients

Action = Callable[[], None]


class NoiseMeter:
    """The estimate of a rank, equal on all ranks; the last step's norms are read when they are asked for, so that
    nothing waits for a device before."""

    def __init__(self, decay: float) -> None:
        self._estimate = NoiseScale(decay)
        self._last: tuple[Tensor, float, float, float] | None = None

    def take(self, squares: Tensor, scale: float, small: float, large: float) -> None:
        """Take |G_b|^2 and |G_B|^2, both times ``scale`` squared, of batches of so many samples."""
        self.estimate()
        self._last = squares, scale, small, large

    def estimate(self) -> NoiseScale:
        """Return the estimate from all steps taken."""
        if self._last is not None:
            (squares, scale, small, large), self._last = self._last, None
            local, summed = (square / scale**2 for square in squares.tolist())
            self._estimate.update(local, summed, small, large)
        return self._estimate


def meter_of(decay: float | None) -> NoiseMeter | None:
    """Return an estimate to begin with, None where none is wanted."""
    if decay is None:
        return None
    if not 0 < decay <= 1:
        raise InputError(
            f"the decay of the noise scale's averages is above 0 and at most 1, not {decay}; 0.99 remembers "
            "about 100 steps"
        )
    return NoiseMeter(decay)


def check(program: Program, noise: NoiseWatch, meter: NoiseMeter | None) -> None:
    """Raise InputError where the noise scale is wanted of a plan that has no gradient of fewer samples."""
    if meter is not None and not noise.is_on:
        raise InputError(
            "the noise scale is measured where ranks differ in their samples only and gradients meet once a "
            "step, so not with tensor, sequence or pipeline parallelism, one rank, early updates or error "
            f"feedback, but the plan is {program.strategy.label[:80]!r}; --pick a data-parallel one"
        )


def watch(machine: Machine, meter: NoiseMeter | None) -> NoiseWatch:
    """Return what takes the norms of a Program's gradients; nothing where nobody wants them, or where it has none
    of fewer samples."""
    program = machine.program
    first = _first_messages(program)
    whole = sum(len(program.messages[item].sources) for item in first)
    is_whole = whole == len(machine.parameters.masters)
    changes = program.updates or program.strategy.gradient_sync.feeds_back
    batch = _global_batch(program)
    if meter is None or not batch or not is_whole or changes:
        return NoiseWatch(machine, NoiseMeter(1.0), frozenset(), 0)
    return NoiseWatch(machine, meter, first, batch)


class NoiseWatch:
    """Takes the norms of a Program's gradients, where all its ranks share out a global batch of so many samples and
    nothing else; ``first`` are the messages that gradients are sent by as ranks have made them."""

    def __init__(
        self, machine: Machine, meter: NoiseMeter, first: frozenset[int], batch: int
    ) -> None:
        self.machine, self.meter, self._first = machine, meter, first
        program = machine.program
        ranks, pieces = len(program.strategy.devices), program.strategy.pipeline.num_microbatches
        scopes = {program.values[program.messages[item].sources[0]].scope for item in first}
        pieces = pieces if scopes == {"microbatch"} else 1
        self._shares = (
            ranks * pieces
        )  # local gradients, each of so many of which the global one is the sum
        self._batches = batch / self._shares, float(batch)
        self._square = torch.zeros((), dtype=torch.float64, device=machine.store.device)
        self._pending: Pending | None = None
        self._scale = 1.0

    @property
    def is_on(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self._first)

    def watched(self, compiled: Compiled) -> Compiled:
        """Return the instructions with norms taken before gradients are sent."""
        if not self.is_on:
            return compiled
        found: list[tuple[int, Action]] = [(compiled.actions[0][0], self._begin)]
        seen = set[int]()
        for index, action in compiled.actions:
            exchange = compiled.exchanges.get(index)
            is_first = int(self.machine.program.item[index]) in self._first
            if exchange is not None and is_first and index not in seen:
                seen.add(index)
                found.append((index, self._adding([item.raw for item in exchange.items])))
            found.append((index, action))
        return Compiled(tuple(found), compiled.exchanges)

    def _begin(self) -> None:
        """Forget what a step that failed has left."""
        self._square, self._pending = torch.zeros_like(self._square), None

    def _adding(self, readers: list[Callable[[], Tensor]]) -> Action:
        def add() -> None:
            self._square += _square([read() for read in readers])

        return add

    def meet(self, scale: float) -> None:
        """Start summing this step's norms over ranks; ``scale``: the loss's, which gradients still have."""
        if self._pending is not None or not self.is_on:
            return
        machine = self.machine
        held = [machine.store.data[slot] for slot, counts in owned_gradients(machine) if counts]
        summed = _square([one for one in held if one is not None])
        # A local gradient is its share of the mean; there are so many of them.
        local = self._square * self._shares
        squares = torch.stack((local, summed.to(local.device)))
        self._pending, self._scale = machine.world.all_reduce(squares), scale

    def finish(self) -> None:
        """Wait for the sum: every rank, or one might end while others still need it."""
        if self._pending is not None:
            self.meter.take(self._pending.wait(), self._scale, *self._batches)
            self._pending = None


def _square(tensors: list[Tensor]) -> Tensor:
    """Return the squared norm of all together (0-d, float64)."""
    norms = torch._foreach_norm(tensors) if tensors else []
    return torch.stack([norm.double() for norm in norms]).square().sum() if norms else torch.zeros(
        (), dtype=torch.float64
    )  # fmt: skip


def _first_messages(program: Program) -> frozenset[int]:
    """Return the messages that gradients are sent by as every rank has made them, terms of a sum over all."""
    found = set[int]()
    for index in range(program.num_instructions):
        item = int(program.item[index])
        if program.kind[index] != Kind.MESSAGE or program.messages[item].purpose != "synchronise":
            continue
        layouts = {program.values[source].layout for source in program.messages[item].sources}
        sizes = program.meshes[program.messages[item].mesh].sizes
        if all(
            placement == PARTIAL
            for layout in layouts
            for placement, size in zip(layout, sizes, strict=True)
            if size > 1
        ):
            found.add(item)
    return frozenset(found)


def _global_batch(program: Program) -> int:
    """Return the samples of a global batch that all ranks share out along the first dim of inputs; 0 where they do
    not."""
    ranks, pieces = len(program.strategy.devices), program.strategy.pipeline.num_microbatches
    if len(program.meshes) > 1 or ranks < 2:
        return 0
    batches = {0}
    for value in program.values:
        if value.role == "input" and value.shape:
            count = ranks * (pieces if value.scope == "microbatch" else 1)
            batches.add(_split(program, value) * count)
    batches.discard(0)
    return max(0, *batches) if len(batches) == 1 else 0


def _split(program: Program, value: Value) -> int:
    """Return how much of an input's first dim is here where all ranks share that out, 0 where all have the whole
    input, and -1 for what is split otherwise."""
    sizes = program.meshes[value.mesh].sizes
    placements = {place for place, size in zip(value.layout, sizes, strict=True) if size > 1}
    if placements == {0}:
        return value.shape[0]
    return 0 if placements == {REPLICATE} else -1
