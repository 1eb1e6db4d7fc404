"""Between backward and the next step: looking at the loss, clipping, unscaling, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwright.core.program import Kind
from shardwright.runtime.collectives import Pending
from shardwright.runtime.forecast import Forecasts
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.loss import LossSum
from shardwright.runtime.noise import NoiseWatch
from shardwright.runtime.parameters import taken
from shardwright.runtime.prediction import Oracle, buffering, versioned
from shardwright.runtime.scaling import LossScaler
from shardwright.runtime.update import clip, owned_gradients, slowed
from shardwright.runtime.waiting import Action


class Ends(NamedTuple):
    """What an executor has for the end of a step. ``max_norm``: of gradients, None where they are not clipped;
    ``checks``: whether a loss that is not finite is refused; ``share``: of the learning rate that a stage takes for a
    minibatch."""

    optimizer: Callable[[], torch.optim.Optimizer]
    loss: LossSum
    noise: NoiseWatch
    forecasts: Forecasts
    oracle: Oracle
    scaler: LossScaler | None
    max_norm: float | None
    checks: bool
    share: Callable[[int, int], float]


def _alone(buffer: Tensor) -> Pending:
    return Pending((), buffer)


class Updating:
    """Makes the actions of a rank's CLIP and UPDATE instructions. ``skips``: whether this step's update is left out,
    None before that is known; ``gradient_norm`` is the last step's."""

    def __init__(self, machine: Machine, ends: Ends) -> None:
        self.machine, self.ends = machine, ends
        self.skips: bool | None = None
        self.gradient_norm: Tensor | None = None

    def action(self, index: int, instance: int) -> Action:
        """Return the action of an instruction on an instance of its values."""
        machine, program = self.machine, self.machine.program
        if program.kind[index] == Kind.TRANSFORM:
            return self._versioned(index, instance, self.ends.optimizer)
        if program.kind[index] == Kind.CLIP:
            return self._clipping(index, instance)
        masters = taken(program, machine.parameters, index)
        pairs = [(one.parameter, machine.store.slot(one.gradient, instance)) for one in masters]
        return partial(self._update, index, pairs, knows=self._knows_loss(index))

    def _clipping(self, index: int, instance: int) -> Action:
        machine, program = self.machine, self.machine.program
        if not program.strategy.pipeline.is_flushed and len(program.meshes) > 1:
            return self._clipping_alone(int(program.group[index]), instance)
        # Every gradient is complete before the first mesh's update: the first CLIP of a rank
        # serves all meshes it is on, so that all ranks meet in one sum.
        if program.group[index] != min(machine.sites):
            return lambda: None
        every = owned_gradients(machine)
        return lambda: self._clip(every)

    def _knows_loss(self, index: int) -> bool:
        """Whether the loss is known at an update: not while other microbatches or meshes have to run."""
        program, pipeline = self.machine.program, self.machine.program.strategy.pipeline
        at, last = int(program.microbatch[index]), pipeline.num_microbatches - 1
        return pipeline.is_flushed and (at < 0 or (at == last and len(program.meshes) == 1))

    def _clipping_alone(self, mesh: int, instance: int) -> Action:
        """Return the action that clips the gradients of a stage that waits for no other, by their own norm."""
        machine, bound = self.machine, self.ends.max_norm
        site = machine.sites[mesh]
        add_up = _alone
        if len(site.mesh.devices) > 1:
            axes = tuple(range(len(site.mesh.axes)))
            add_up = machine.groups.among(site.mesh, machine.device, axes)[0].all_reduce
        own = owned_gradients(machine, instance)

        def work() -> None:
            if bound is not None:
                clip(machine, own, bound, add_up)

        return work

    def evaluation(self, index: int, instance: int) -> Action:
        """Return the action of a version where nothing is trained: the parameters as they are."""
        return self._versioned(index, instance, None)

    def _versioned(
        self, index: int, instance: int, optimizer: Callable[[], torch.optim.Optimizer] | None
    ) -> Action:
        program = self.machine.program
        transform = program.transforms[int(program.item[index])]
        if transform.name == "buffer":
            return buffering(transform, self.machine, self.ends.oracle)
        moment = program.shift_of(index), instance
        ends = self.ends
        return versioned(transform, self.machine, moment, optimizer, ends.oracle, ends.forecasts)

    def _before_update(self) -> None:
        ends, machine = self.ends, self.machine
        ends.loss.start()
        ends.noise.meet(ends.scaler.scale if ends.scaler else 1.0)
        if ends.checks:
            ends.loss.check(machine.clock.step)
        if ends.scaler and self.skips is None:
            # Here every gradient is complete, of all meshes that this rank is on.
            store, slots = machine.store, [slot for slot, _ in owned_gradients(machine)]
            found = ends.scaler.unscale(store.data, store.owned, dict.fromkeys(slots), store.device)
            self.skips = bool(machine.world.all_reduce(found).wait() > 0)

    def _clip(self, pairs: Sequence[tuple[int, bool]]) -> None:
        """Look at all gradients: scale them by their norm where that is asked for."""
        self._before_update()
        if self.ends.max_norm is None:
            return
        if self.skips:
            device = self.machine.store.device
            self.gradient_norm = torch.full((), torch.inf, dtype=torch.float64, device=device)
        else:
            everyone = self.machine.world.all_reduce
            self.gradient_norm = clip(self.machine, pairs, self.ends.max_norm, everyone)

    def _update(
        self, index: int, pairs: Sequence[tuple[nn.Parameter, int]], *, knows: bool
    ) -> None:
        if knows:
            self._before_update()
        for parameter, slot in pairs:
            gradient = self.machine.store.data[slot]
            if gradient is not None and gradient.shape != parameter.shape:
                gradient = gradient.contiguous().view_as(parameter)
            parameter.grad = None if gradient is None else gradient.contiguous()
        if not self.skips:
            self.ends.oracle.about_to_update([parameter for parameter, _ in pairs])
            self._step(index)
        for parameter, _ in pairs:
            parameter.grad = None
        self.ends.forecasts.updated()

    def _step(self, index: int) -> None:
        program, ends = self.machine.program, self.ends
        minibatch = self.machine.clock.minibatch(program.shift_of(index))
        with slowed(ends.optimizer(), ends.share(int(program.group[index]), minibatch)):
            ends.optimizer().step()
        ends.oracle.updated()
