"""Out of the executor: whole tensors from shards that lie on different ranks.

Bits are moved unchanged: the shards are put into their places of a zeroed whole, and the bytes are
summed over the world, where each is counted by one rank only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from shardwright.core.layout import is_split
from shardwright.errors import InputError
from shardwright.runtime.capture import seen_as
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.parameters import parts, tensor_of
from shardwright.runtime.store import DTYPES


def whole_tensor(machine: Machine, value: int) -> Tensor:
    """Return a lasting value whole on every rank. Every rank of the world must call it."""
    entry = machine.program.values[value]
    shape = machine.captured.graph.tensors[entry.tensor].shape
    device = next(iter(machine.sites.values())).device
    whole = torch.zeros(shape, dtype=DTYPES[entry.dtype], device=device)
    site = machine.sites.get(entry.mesh)
    if site is not None:
        is_first = all(
            place == 0
            for placement, place in zip(entry.layout, site.coordinate, strict=True)
            if not is_split(placement)
        )
        if is_first:
            for part in parts(shape, machine.parameters.raw[value], entry, site):
                part.within(whole).copy_(part.local)
    if whole.numel():
        machine.world.all_reduce(whole.view(-1).view(torch.uint8)).wait()
    return whole


def kept_values(machine: Machine) -> dict[int, int]:
    """Return, by tensor, the value that holds it between steps: master or rest, or a buffer."""
    kept: dict[int, int] = {}
    for index, value in enumerate(machine.program.values):
        if value.alias >= 0 or value.role not in ("parameter", "master", "buffer"):
            continue
        if value.role == "parameter" and not value.resident:
            continue
        if value.role == "master" or value.tensor not in kept:
            kept[value.tensor] = index
    return kept


def whole_tensors(
    machine: Machine, names: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, all or those in ``names``, whole on every rank, one after the
    other. Every rank of the world must take them all."""
    tensors, module = machine.captured.graph.tensors, machine.parameters.module
    for tensor, value in kept_values(machine).items():
        if tensors[tensor].role in ("parameter", "buffer"):
            name = tensors[tensor].name
            if names is None or name in names:
                yield name, seen_as(whole_tensor(machine, value), tensor_of(module, name).shape)


def full_parameters(machine: Machine) -> dict[str, Tensor]:
    """Return every parameter whole, by name."""
    names = {name for name, _ in machine.parameters.module.named_parameters()}
    return dict(whole_tensors(machine, names))


def to_module(machine: Machine, module: nn.Module) -> None:
    """Copy parameters and buffers into a module."""
    named = dict(module.named_parameters())
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    if empty:
        raise InputError(
            f"a module must have memory to receive parameters, but {empty[0]!r} is on the meta "
            "device; build another one on the CPU, or call to_empty(device='cpu')"
        )
    with torch.no_grad():
        for name, whole in whole_tensors(machine):
            (named[name] if name in named else module.get_buffer(name)).copy_(whole)
