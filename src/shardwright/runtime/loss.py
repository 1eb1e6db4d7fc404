"""The loss of a step: its gradient to begin with, and its sum over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shardwright.core.program import Kind
from shardwright.runtime import outputs
from shardwright.runtime.collectives import Pending
from shardwright.runtime.interpreter import Compiled, Compiler, Machine
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.store import DTYPES


class LossSum:
    """Sums the loss over microbatches and ranks, once a step; tells all whether one was interrupted."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.interrupted = False
        self._pending: Pending | None = None

    @property
    def slots(self) -> list[int]:
        """Where this rank has it, by microbatch."""
        program = self.machine.program
        return outputs.slots_of(program, self.machine.store, program.loss)

    def seed(self, scale: float) -> None:
        """Write the gradient that backward begins with."""
        program, store = self.machine.program, self.machine.store
        loss = program.values[program.loss]
        if loss.gradient < 0 or loss.mesh not in self.machine.sites:
            return
        gradient = program.values[loss.gradient]
        device = self.machine.sites[loss.mesh].device
        for piece in range(program.strategy.pipeline.num_microbatches):
            begin = torch.full(gradient.shape, scale, dtype=DTYPES[gradient.dtype], device=device)
            store.data[store.slot(loss.gradient, piece)] = begin

    def start(self) -> None:
        """Start summing, unless that was done in this step."""
        if self._pending is not None:
            return
        machine, program = self.machine, self.machine.program
        site = machine.sites.get(program.values[program.loss].mesh)
        device = next(iter(machine.sites.values())).device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        if site is not None and outputs.counts(program, program.loss, site):
            for slot in self.slots:
                held = machine.store.data[slot]
                total[0] += held if held is not None else torch.nan
        total[1] = float(INTERRUPTION.requested)
        self._pending = machine.world.all_reduce(total)

    def finish(self) -> Tensor:
        """Return the sum, equal on all ranks."""
        if self._pending is None:
            raise RuntimeError("the loss was not reduced")
        total = self._pending.wait()
        self.interrupted = bool(total[1])
        return total[0]

    def clear(self) -> None:
        """Forget it: the step is over."""
        self._pending = None


def told_early(compiled: Compiled, compiler: Compiler, total: LossSum) -> Compiled:
    """Return instructions that start summing the loss as soon as it is made, so that it has come by
    the end of the step; else waiting for it takes as long as a message.

    Only where all ranks run alike do they meet there: elsewhere summing starts with the update.
    """
    program = compiler.program
    place = _made(compiled, compiler, total.slots)
    if len(program.meshes) > 1 or place < 0:
        return compiled
    index = compiled.actions[place][0]
    before, after = compiled.actions[: place + 1], compiled.actions[place + 1 :]
    return Compiled((*before, (index, total.start), *after), compiled.exchanges)


def _made(compiled: Compiled, compiler: Compiler, slots: Collection[int]) -> int:
    """Return the place of the last action of the last instruction that forward makes the loss by."""
    kinds = compiler.program.kind
    makers = {
        index
        for index, _ in compiled.actions
        if Kind(int(kinds[index])) in (Kind.FORWARD, Kind.MESSAGE)
        and not set(slots).isdisjoint(compiler.touch(index).writes)
    }
    places = [place for place, (index, _) in enumerate(compiled.actions) if index in makers]
    return max(places, default=-1)
