"""What comes between gradients and the optimizer: which optimizers can be used, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.core.compression import PACKS, packed_by
from shardwright.core.layout import is_split
from shardwright.core.program import Program
from shardwright.core.staleness import Extrapolation, lag, rate_share
from shardwright.errors import InputError
from shardwright.runtime.collectives import Pending
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.outputs import counts
from shardwright.runtime.parameters import Master
from shardwright.runtime.prediction import check_prediction

# Optimizers of torch that run the model in their step, and those that look at whole tensors.
CLOSURE_OPTIMIZERS = frozenset({"LBFGS"})
WHOLE_OPTIMIZERS = frozenset({"Adafactor", "Muon"})


def admit_optimizer(
    optimizer: torch.optim.Optimizer, machine: Machine, how: Extrapolation, *, scales: bool
) -> None:
    """Refuse optimizers whose update of an element needs more than the element's shard, or more than one
    call a step where the plan makes several, or by which weights cannot be predicted as they are to be;
    ``scales``: the loss, by what all gradients are. Momentum that the plan has in front of a selection is
    taken off it, and what it leaves to torch is chosen (``choose_kernels``)."""
    _check_updates(optimizer, machine.program, scales=scales)
    _check_momentum(optimizer, machine.program)
    check_prediction(optimizer, machine.program.strategy.pipeline.staleness, how)
    name = type(optimizer).__name__
    values = machine.program.values
    layouts = {values[master.value].layout for master in machine.parameters.masters}
    has_shards = any(is_split(placement) for layout in layouts for placement in layout)
    if name in CLOSURE_OPTIMIZERS or (name in WHOLE_OPTIMIZERS and has_shards):
        raise InputError(
            f"an update must be possible shard by shard in one pass, but {name} "
            + ("calls the model again" if name in CLOSURE_OPTIMIZERS else "needs whole tensors")
            + "; use an elementwise optimizer such as AdamW"
            + ("" if name in CLOSURE_OPTIMIZERS else ", or a plan that shards no parameter")
        )
    _leave_momentum_in_front(optimizer, machine.program, machine.parameters.masters)
    choose_kernels(optimizer)


def choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Update by one kernel where the choice was left to torch, whose own is several passes over memory: with Adam and
    AdamW, which take a tenth to a quarter of the time on a CPU and a third on a GPU, equal up to rounding.

    Only contiguous parameters: torch's kernel reads others in the wrong order (2.13, CPU). Its SGD fails where a
    parameter gets its first gradient later than another, and gains little.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        is_free = group["fused"] is None and group["foreach"] is None
        if is_free and not group["differentiable"] and all(map(_fuses, group["params"])):
            group["fused"] = True


def _fuses(parameter: Tensor) -> bool:
    """Whether torch's one kernel updates a parameter, as its others would."""
    exact = parameter.dtype in (torch.float32, torch.float64)
    return parameter.is_contiguous() and (
        exact
        if parameter.device.type == "cpu"
        else parameter.is_cuda and parameter.is_floating_point()
    )


def _leave_momentum_in_front(
    optimizer: torch.optim.Optimizer, program: Program, masters: Sequence[Master]
) -> None:
    """Take an optimizer's momentum off the parameters whose gradients have it before they are selected: in
    groups of their own. Those whose gradients travel whole keep it."""
    if not program.strategy.gradient_sync.feedback.momentum:
        return
    selected = _selected(program, masters)
    for group in tuple(optimizer.param_groups):
        if group.get("momentum"):
            _divide(optimizer, group, [id(one) in selected for one in group["params"]])


def _selected(program: Program, masters: Sequence[Master]) -> set[int]:
    """Return the ids of parameters whose gradients are compressed."""
    packs = [one for one in program.transforms if one.name in PACKS]
    tensors = {program.values[one].tensor for pack in packs for one in packed_by(pack)}
    return {id(one.parameter) for one in masters if program.values[one.value].tensor in tensors}


def _divide(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], leaves: Sequence[bool]
) -> None:
    """Let those members of a group that leave have a group like it, without momentum."""
    if all(leaves):
        group["momentum"] = 0.0
        return
    members = {
        key: list(zip(group[key], leaves, strict=True))
        for key in ("params", "param_names")
        if key in group
    }
    other = {**group, "momentum": 0.0}
    for key, ends in members.items():
        group[key] = [one for one, is_leaving in ends if not is_leaving]
        other[key] = [one for one, is_leaving in ends if is_leaving]
    if any(leaves):
        optimizer.param_groups.append(other)


def _check_momentum(optimizer: torch.optim.Optimizer, program: Program) -> None:
    """Refuse momentum behind a selection that has another in front."""
    momentum = program.strategy.gradient_sync.feedback.momentum
    for group in optimizer.param_groups if momentum else ():
        found = group.get("momentum") or group.get("betas", (0,))[0]
        is_other = group.get("betas") or group.get("nesterov") or group.get("dampening")
        if found and (is_other or found != momentum):
            raise InputError(
                f"this plan's gradients have a momentum of {momentum:g} before they are selected, and those that "
                f"travel whole may have no other, but the optimizer has {found:g}"
                f"{' of another kind' if is_other else ''}; use SGD(momentum={momentum:g}) or one without "
                "momentum, or plan without --gradient-momentum"
            )


def _check_updates(optimizer: torch.optim.Optimizer, program: Program, *, scales: bool) -> None:
    """Refuse to update parameters one after another by what may count its calls, or where a loss's
    scale decides on all of them at once."""
    if not program.updates:
        return
    if not type(optimizer).__module__.startswith("torch.optim"):
        raise InputError(
            "where parameters are updated when their gradients are ready, an optimizer is called many "
            f"times a step, and {type(optimizer).__name__} may count them; use one of torch.optim, or "
            "update by step"
        )
    if scales:
        raise InputError(
            "where parameters are updated when their gradients are ready, nobody knows yet whether the "
            "scaled loss overflowed; leave out scaling, or update by step"
        )


def share_of(program: Program, annealing: int) -> Callable[[int, int], float]:
    """Return which share of the learning rate a stage takes for a minibatch, where stages begin with smaller ones."""
    staleness, stages = program.strategy.pipeline.staleness, len(program.meshes)
    if annealing < 0 or (annealing and staleness != "pipemare"):
        raise InputError(
            "learning rates that are smaller at first, by how late a stage's gradients are, are those of "
            f"staleness pipemare, over 0 steps or more, but rate_annealing is {annealing} and the plan has staleness "
            f"{staleness}; leave it out, or plan pipemare"
        )
    if not annealing:
        return lambda stage, minibatch: 1.0
    return lambda stage, minibatch: rate_share(lag(stage, stages), minibatch, annealing)


@contextmanager
def slowed(optimizer: torch.optim.Optimizer, share: float) -> Iterator[None]:
    """Take a share of the learning rates for a while."""
    groups = optimizer.param_groups if share != 1 else []
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * share
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def bound_of(program: Program, asked: float | None) -> float | None:
    """Return what to clip the gradient's norm to, None where the plan does not clip."""
    clips = program.strategy.clips
    bound = program.strategy.max_norm or None if asked is None else asked
    if clips != (bound is not None):
        remedy = (
            "give RunOptions(max_norm=...)" if clips else "plan again with clip=, or leave it out"
        )
        raise InputError(
            f"max_norm and the plan must agree, but max_norm is {asked} and the plan "
            f"{'clips, to no norm of its own' if clips else 'does not clip'}; {remedy}"
        )
    if bound is not None and not bound > 0:
        raise InputError(f"max_norm must be more than 0, not {bound}; plan without clipping")
    return bound


def owned_gradients(machine: Machine, instance: int = 0) -> list[tuple[int, bool]]:
    """Return the slot of each gradient that a rank updates by, of an ``instance``, and whether it counts it in sums
    over the world."""
    program, sites = machine.program, machine.sites
    return [
        (
            machine.store.slot(one.gradient, instance),
            counts(program, one.value, sites[program.values[one.value].mesh]),
        )
        for one in machine.parameters.masters
    ]


def clip(
    machine: Machine,
    pairs: Sequence[tuple[int, bool]],
    max_norm: float,
    add_up: Callable[[Tensor], Pending],
) -> Tensor:
    """Scale all gradients as ``torch.nn.utils.clip_grad_norm_`` would on the whole model, and return
    their norm before that (0-d, float64).

    ``pairs``: the slot of each gradient, and whether this rank counts it in sums over the world;
    ``add_up`` makes the sum over all ranks whose gradients these are.
    """
    data, owned = machine.store.data, machine.store.owned
    device = next(iter(machine.sites.values())).device
    found = [g for slot, counts in pairs if counts and (g := data[slot]) is not None]
    square = torch.zeros((), dtype=torch.float64, device=device)
    for norm in torch._foreach_norm(found) if found else []:
        square += norm.double().square()
    norm = add_up(square).wait().sqrt()
    factor = max_norm / (norm + 1e-6)
    factor = factor.clamp(max=1.0)
    for slot, _ in pairs:
        gradient = data[slot]
        if gradient is not None:
            scale = factor.to(gradient.dtype)
            data[slot] = gradient.mul_(scale) if owned[slot] else gradient * scale
            owned[slot] = True
    return norm
