"""The loss of a step: its gradient to begin with, and its sum over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from shardwright.core.program import Kind
from shardwright.errors import RunError
from shardwright.runtime import outputs
from shardwright.runtime.hostcopy import HostCopy
from shardwright.runtime.interpreter import Compiled, Compiler, Machine
from shardwright.runtime.status import INTERRUPTION
from shardwright.runtime.store import DTYPES


class LossSum:
    """Sums the loss over microbatches and ranks, once a step; tells all whether one was interrupted.

    ``is_late``: before the update the loss can only be known by waiting for all that the device was
    told to do; where it is summed early, and on the CPU, it is there by then.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        device = next(iter(machine.sites.values())).device
        self.is_late = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sum: HostCopy | None = None
        self._last: HostCopy | None = None
        self._before: HostCopy | None = None
        self._is_finished = False
        self._unchecked: int | None = None  # the step whose loss nobody has looked at yet

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
        for piece in range(program.ring):
            begin = torch.full(gradient.shape, scale, dtype=DTYPES[gradient.dtype], device=device)
            store.data[store.slot(loss.gradient, piece)] = begin

    def start(self) -> None:
        """Start summing, unless that was done in this step."""
        if self._sum is not None:
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
        self._sum = HostCopy(machine.world.all_reduce(total), device, self._stream)

    def finish(self) -> Tensor:
        """Return the sum, equal on all ranks, on the device: nothing waits there for the host."""
        if self._sum is None:
            raise RuntimeError("the loss was not reduced")
        self._is_finished = True
        return self._sum.tensor()[0]

    def number(self) -> float:
        """Return this step's sum or, between steps, the last one's; waits until it is known."""
        known = self._sum or self._last
        return known.read()[0] if known is not None else 0.0

    def check(self, step: int) -> None:
        """Refuse a loss that is not finite before the update or, where it ``is_late``, keep that for
        ``check_last``: to wait for it would leave the device without work."""
        if self.is_late:
            self._unchecked = step
        else:
            self._require_finite(step, "nothing was updated:")

    def check_last(self) -> None:
        """Look at the last step's loss, where the step itself did not."""
        step, self._unchecked = self._unchecked, None
        if step is not None:
            done = "its gradients were used: go back to the last checkpoint, and"
            self._require_finite(step, done)

    def _require_finite(self, step: int, done: str) -> None:
        if not math.isfinite(loss := self.number()):
            raise RunError(
                f"the loss must be finite, but it is {loss} in step {step}; {done} lower the learning "
                "rate, clip gradients, or look at the batch",
                rank=self.machine.world.rank,
                stage=min(self.machine.sites),
                instruction="loss",
            )

    @property
    def interrupted(self) -> bool:
        """Whether some rank was asked to stop before it finished its last step."""
        return self._last is not None and bool(self._last.read()[1])

    @property
    def heard(self) -> bool:
        """The same without waiting: of the last step on the CPU, of the one before on a GPU."""
        known = self._last if self._stream is None else self._before
        return known is not None and bool(known.read()[1])

    def follow(self, other: LossSum) -> None:
        """Take over what another one's last step told."""
        self._before, self._last = self._last, other._last

    def clear(self) -> None:
        """The step is over."""
        if self._sum is not None and self._is_finished:
            self._sum.let_go()
            self._before, self._last = self._last, self._sum
        self._sum, self._is_finished = None, False


def told_early(compiled: Compiled, compiler: Compiler, total: LossSum) -> Compiled:
    """Return instructions that start summing the loss as soon as it is made, so that it has come by
    the end of the step; else waiting for it takes as long as a message.

    Only where all ranks run alike do they meet there: elsewhere summing starts with the update.
    """
    program = compiler.program
    place = _made(compiled, compiler, total.slots)
    if len(program.meshes) > 1 or place < 0:
        return compiled
    total.is_late = False
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
