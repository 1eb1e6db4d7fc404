"""What comes between gradients and the optimizer: which optimizers can be used, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.core.layout import is_split
from shardwright.errors import InputError
from shardwright.runtime.interpreter import Machine

# Optimizers of torch that run the model in their step, and those that look at whole tensors.
CLOSURE_OPTIMIZERS = frozenset({"LBFGS"})
WHOLE_OPTIMIZERS = frozenset({"Adafactor", "Muon"})


def check_optimizer(optimizer: torch.optim.Optimizer, machine: Machine) -> None:
    """Refuse optimizers whose update of an element needs more than the element's shard."""
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


def clip(machine: Machine, pairs: Sequence[tuple[int, bool]], max_norm: float) -> None:
    """Scale all gradients as ``torch.nn.utils.clip_grad_norm_`` would on the whole model.

    ``pairs``: the slot of each gradient, and whether this rank counts it in sums over the world.
    """
    data, owned = machine.store.data, machine.store.owned
    device = next(iter(machine.sites.values())).device
    found = [data[slot] for slot, counts in pairs if counts and data[slot] is not None]
    square = torch.zeros((), dtype=torch.float64, device=device)
    for norm in torch._foreach_norm([g for g in found if g is not None]) if found else []:
        square += norm.double().square()
    machine.world.all_reduce(square).wait()
    factor = max_norm / (square.sqrt() + 1e-6)
    factor = factor.clamp(max=1.0)
    for slot, _ in pairs:
        gradient = data[slot]
        if gradient is not None:
            scale = factor.to(gradient.dtype)
            data[slot] = gradient.mul_(scale) if owned[slot] else gradient * scale
            owned[slot] = True
