"""The weights that a stage is expected to have some updates from now.

An update repeats the direction of the one before, as far as anybody can know: W - s * eta * D (SpecTrain, Chen et
al., 2018; PipeOptim, Guan et al., 2023). D is what the optimizer's state says of it, by its own rule. Buffers
are no weights, and are never predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.program import Transform
from shardwright.core.staleness import PREDICTS, Staleness, forward_shift
from shardwright.errors import InputError
from shardwright.runtime.forecast import Forecasts
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.outputs import counts
from shardwright.runtime.waiting import Action

Entry = Mapping[str, Any]  # of an optimizer's state, or one of its groups


def _momentum(parameter: Tensor, state: Entry, group: Entry, steps: int) -> Tensor:
    """SGD with momentum, dampened or Nesterov's: with equal gradients its buffer is what every step takes, and
    weight decay is in it."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return parameter.clone()
    return torch.sub(parameter, buffer, alpha=steps * float(group["lr"]))


def _adam(parameter: Tensor, state: Entry, group: Entry, steps: int) -> Tensor:
    """Adam and AdamW, whose decoupled decay shrinks the weights before each of the steps."""
    taken = float(state.get("step", 0.0))
    if taken == 0:
        return parameter.clone()
    first, second = group["betas"]
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (squares.sqrt() / math.sqrt(1 - second**taken)).add_(group["eps"])
    direction = state["exp_avg"] / (1 - first**taken) / root
    rate, decay = group["lr"], group["weight_decay"]
    if not (decay and group.get("decoupled_weight_decay", False)):
        return parameter - steps * rate * direction
    kept = (1 - rate * decay) ** steps
    return kept * parameter - direction * ((1 - kept) / decay)


Expect = Callable[[Tensor, Entry, Entry, int], Tensor]
RULES: dict[type[torch.optim.Optimizer], Expect] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


def check_prediction(optimizer: torch.optim.Optimizer, staleness: Staleness) -> None:
    """Refuse optimizers whose next steps nobody can tell from their state."""
    if staleness not in PREDICTS:
        return
    named = "torch.optim's SGD with momentum, Adam and AdamW"
    if type(optimizer) not in RULES:
        raise InputError(
            f"{staleness} predicts weights by the optimizer's rule, which is known of {named}, not of "
            f"{type(optimizer).__name__}; use one of these, or a plan that stashes weights"
        )
    if any(group.get("momentum") == 0 for group in optimizer.param_groups):
        raise InputError(
            f"{staleness} predicts weights from the optimizer's momentum, but momentum is 0; set it, "
            "or use a plan that stashes weights"
        )


def expected(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int) -> Tensor:
    """Return a parameter as it is expected to be so many updates later, at the current learning rate, in
    memory of its own; as it is where nothing updated it yet."""
    state = optimizer.state.get(parameter, {})
    weights = parameter.detach()
    if steps == 0 or not state:
        return weights.clone()
    group = next(
        one for one in optimizer.param_groups if any(parameter is other for other in one["params"])
    )
    return RULES[type(optimizer)](weights, state, group, steps)


def versioned(
    transform: Transform,
    machine: Machine,
    moment: tuple[int, int],
    optimizer: Callable[[], torch.optim.Optimizer] | None,
    forecasts: Forecasts,
) -> Action:
    """Return the action that writes versions of parameters for a minibatch, ``moment``: its (shift,
    instance). Without an optimizer they are the parameters as they are."""
    (shift, instance), constants = moment, dict(transform.constants)
    rows, store, clock = _rows(transform, machine, instance), machine.store, machine.clock
    if optimizer is None or not constants["copies"]:

        def alias() -> None:
            for slot, raw, _ in rows:
                store.data[slot] = raw

        return alias
    ahead, lag = (int(str(constants[name])) for name in ("forward", "lag"))
    is_forward = shift == forward_shift(transform.mesh)
    site = machine.sites[transform.mesh]
    told = [counts(machine.program, value, site) for value in transform.reads]

    def predict() -> None:
        minibatch = clock.minibatch(shift)
        steps = ahead + min(minibatch - clock.first, lag)
        for slot, raw, parameter in rows:
            store.data[slot] = expected(optimizer(), parameter, steps).to(raw.dtype)
        if is_forward:
            made = [
                (parameter, store.data[slot])
                for (slot, _, parameter), is_told in zip(rows, told, strict=True)
                if is_told
            ]
            forecasts.see(minibatch, made, steps)

    return predict


def _rows(
    transform: Transform, machine: Machine, instance: int
) -> list[tuple[int, Tensor, nn.Parameter]]:
    """Return by version its slot, the parameter in use, and the one that is updated."""
    values, parameters = machine.program.values, machine.parameters
    trained = {values[one.value].tensor: one.parameter for one in parameters.masters}
    return [
        (machine.store.slot(new, instance), parameters.raw[old], trained[values[old].tensor])
        for old, new in zip(transform.reads, transform.writes, strict=True)
    ]
