"""The weights that a stage is expected to have some updates from now.

An update repeats the direction of the one before, as far as anybody can know: W - s * eta * D (SpecTrain, Chen et
al., 2018; PipeOptim, Guan et al., 2023). D is what the optimizer's state says of it, by its own rule. Or it
decays as momentum does without new gradients, or is the difference of the last two weights over eta, which needs no
rule. Buffers are no weights, and are never predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.core.program import Transform
from shardwright.core.staleness import COURSES, PREDICTS, Extrapolation, Staleness, forward_shift
from shardwright.errors import InputError
from shardwright.runtime.forecast import Forecasts
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.outputs import counts
from shardwright.runtime.randomness import Clock
from shardwright.runtime.store import Store
from shardwright.runtime.waiting import Action

Entry = Mapping[str, Any]  # of an optimizer's state, or one of its groups
Row = tuple[int, Tensor, nn.Parameter]  # of a version


class Motion(NamedTuple):
    """What an optimizer's state says of its next steps: along what they go, how much of that is left after a step
    without a gradient, and which share of the weights a step takes by decoupled decay, in learning rates."""

    direction: Tensor
    memory: float
    decay: float = 0.0


def _momentum(state: Entry, group: Entry) -> Motion | None:
    """SGD with momentum, dampened or Nesterov's: with equal gradients its buffer is what every step takes, and
    weight decay is in it."""
    buffer = state.get("momentum_buffer")
    return None if buffer is None else Motion(buffer, group["momentum"])


def _adam(state: Entry, group: Entry) -> Motion | None:
    """Adam and AdamW, whose decoupled decay shrinks the weights before each of the steps."""
    taken = float(state.get("step", 0.0))
    if taken == 0:
        return None
    first, second = group["betas"]
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (squares.sqrt() / math.sqrt(1 - second**taken)).add_(group["eps"])
    direction = state["exp_avg"] / (1 - first**taken) / root
    is_apart = group.get("decoupled_weight_decay", False)
    return Motion(direction, first, group["weight_decay"] if is_apart else 0.0)


RULES: dict[type[torch.optim.Optimizer], Callable[[Entry, Entry], Motion | None]] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


def check_prediction(
    optimizer: torch.optim.Optimizer, staleness: Staleness, how: Extrapolation
) -> None:
    """Refuse optimizers whose next steps nobody can tell from their state, and ways of prediction that there are not."""
    if how.course not in COURSES or how.limit < 0 or not math.isfinite(how.limit):
        raise InputError(
            f"weights are predicted along {', '.join(COURSES)}, and as far as a limit of 0 (none) or more allows, but "
            f"the course is {how.course!r} and the limit {how.limit}; choose others"
        )
    if staleness not in PREDICTS:
        if how != Extrapolation():
            raise InputError(
                f"how weights are predicted is of plans that predict ({', '.join(sorted(PREDICTS))}), but this "
                f"one has staleness {staleness}; leave out the extrapolation"
            )
        return
    if how.course == "difference":
        return
    named = "torch.optim's SGD with momentum, Adam and AdamW"
    if type(optimizer) not in RULES:
        raise InputError(
            f"{staleness} predicts weights by the optimizer's rule, which is known of {named}, not of "
            f"{type(optimizer).__name__}; use one of these, predict along differences, or use a plan that stashes "
            "weights"
        )
    if any(group.get("momentum") == 0 for group in optimizer.param_groups):
        raise InputError(
            f"{staleness} predicts weights from the optimizer's momentum, but momentum is 0; set it, "
            "predict along differences, or use a plan that stashes weights"
        )


class Oracle:
    """Tells what parameters are expected to be, at the current learning rates, and what they were. It remembers what
    they were before their last update, if it goes by that, and at forwards before, since the pipeline was empty."""

    def __init__(self, clock: Clock, how: Extrapolation) -> None:
        self.how, self._clock = how, clock
        self._since = -1  # the first minibatch of those whose updates are remembered
        self._before: dict[nn.Parameter, Tensor] = {}
        self.past: deque[list[Tensor]] = deque()

    def about_to_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Be told of an update."""
        if self.how.course == "difference":
            before = self._remembered()
            before.update((one, one.detach().clone()) for one in parameters)

    def _remembered(self) -> dict[nn.Parameter, Tensor]:
        if self._since != self._clock.first:
            self._since = self._clock.first
            self._before.clear()
            self.past.clear()
        return self._before

    def before(self, weights: Sequence[Tensor], updates: int) -> list[Tensor]:
        """Return, at the forward of every minibatch, the weights that there were so many updates before."""
        self._remembered()
        self.past.append([one.detach().clone() for one in weights])
        if len(self.past) > updates + 1:
            self.past.popleft()
        return self.past[0]

    def expected(
        self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int
    ) -> Tensor:
        """Return a parameter as it is expected to be so many updates later, in memory of its own; as it
        is where nothing updated it yet."""
        weights, group = parameter.detach(), _group(optimizer, parameter)
        rate = float(group["lr"])
        if self.how.course == "difference":
            before = self._remembered().get(parameter)
            if steps == 0 or before is None:
                return weights.clone()
            return weights.add(self._limited(weights - before, rate), alpha=steps)
        state = optimizer.state.get(parameter, {})
        motion = RULES[type(optimizer)](state, group) if steps and state else None
        if motion is None:
            return weights.clone()
        left = motion.memory if self.how.course == "decaying" else 1.0
        kept = 1 - rate * motion.decay
        way = sum(left**step * kept ** (steps - step) for step in range(1, steps + 1))
        start = weights if kept == 1 else kept**steps * weights
        return torch.sub(start, self._limited(motion.direction, 1.0), alpha=rate * way)

    def versions(
        self, optimizer: torch.optim.Optimizer, rows: Sequence[Row], steps: int
    ) -> list[Tensor]:
        """Return the parameters of rows so many updates later, in the dtypes in which they are used."""
        return [self.expected(optimizer, one, steps).to(raw.dtype) for _, raw, one in rows]

    def _limited(self, step: Tensor, unit: float) -> Tensor:
        most = self.how.limit * unit
        return step.clamp(-most, most) if self.how.limit else step


def _group(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the group that a parameter is in."""
    return next(
        one for one in optimizer.param_groups if any(parameter is other for other in one["params"])
    )


def versioned(
    transform: Transform,
    machine: Machine,
    moment: tuple[int, int],
    optimizer: Callable[[], torch.optim.Optimizer] | None,
    oracle: Oracle,
    forecasts: Forecasts,
) -> Action:
    """Return the action that writes versions of parameters for a minibatch, ``moment``: its (shift,
    instance). Without an optimizer they are the parameters as they are."""
    (shift, instance), constants = moment, dict(transform.constants)
    rows, store, clock = _rows(transform, machine, instance), machine.store, machine.clock
    own = [raw for _, raw, _ in rows]
    if optimizer is None or not constants["copies"]:
        return partial(_write, store, rows, own)
    ahead, lag, behind = (int(str(constants[name])) for name in ("forward", "lag", "behind"))
    if behind:
        return lambda: _write(store, rows, oracle.before(own, behind))
    is_forward = shift == forward_shift(transform.mesh)
    told = _told(transform, machine, rows) if is_forward else []

    def predict() -> None:
        minibatch = clock.minibatch(shift)
        steps = ahead + min(minibatch - clock.first, lag)
        _write(store, rows, oracle.versions(optimizer(), rows, steps))
        if is_forward:
            forecasts.see(minibatch, [(one, store.data[slot]) for slot, _, one in told], steps)

    return predict


def _told(transform: Transform, machine: Machine, rows: Sequence[Row]) -> list[Row]:
    """Return the versions whose errors this device tells: of replicas one does."""
    site = machine.sites[transform.mesh]
    return list(compress(rows, [counts(machine.program, one, site) for one in transform.reads]))


def _write(store: Store, rows: Sequence[Row], weights: Sequence[Tensor]) -> None:
    for (slot, _, _), version in zip(rows, weights, strict=True):
        store.data[slot] = version


def _rows(transform: Transform, machine: Machine, instance: int) -> list[Row]:
    """Return by version its slot, the parameter in use, and the one that is updated."""
    values, parameters = machine.program.values, machine.parameters
    trained = {values[one.value].tensor: one.parameter for one in parameters.masters}
    return [
        (machine.store.slot(new, instance), parameters.raw[old], trained[values[old].tensor])
        for old, new in zip(transform.reads, transform.writes, strict=True)
    ]
