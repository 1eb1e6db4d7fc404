"""What a rank holds of a model's state, by name: the border between a plan and a checkpoint.

Every parameter, buffer and optimizer tensor has a key, ``parameter/NAME``, ``buffer/NAME`` or
``optimizer/ENTRY/NAME``, which means the same under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph import TensorSpec
from shardwright.core.layout import PARTIAL, is_split
from shardwright.core.program import STATES, ValueRole
from shardwright.errors import CheckpointError
from shardwright.runtime.capture import seen_as
from shardwright.runtime.gather import kept_values
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.manifest import dtype_name, plain
from shardwright.runtime.parameters import parts, tensor_of
from shardwright.runtime.tables import Group, ModuleTable

# Roles of states that are summed and shared out where a plan has other terms, and what they are called.
SUMMED_STATES: dict[ValueRole, str] = {
    "state": "residuals of error feedback",
    "velocity": "velocities of gradients before they are compressed",
}


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a tensor in this rank's memory: ``local`` begins at ``start`` of the whole.

    ``is_writer``: of the ranks that hold this box, this one writes it.
    """

    key: str
    local: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    is_writer: bool


def module_tables(module: nn.Module) -> dict[str, ModuleTable]:
    """Describe every parameter and buffer of a module by all its names, ties included."""
    persistent = set(module.state_dict(keep_vars=True))
    tables: dict[str, ModuleTable] = {}
    first: dict[int, str] = {}
    for kind, named in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            tables[name] = ModuleTable(
                dtype=dtype_name(tensor.dtype),
                shape=list(tensor.shape),
                key=first.setdefault(id(tensor), f"{kind}/{name}"),
                persistent=name in persistent,
            )
    return tables


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by key, tied ones once."""
    found = {f"parameter/{name}": tensor.detach() for name, tensor in module.named_parameters()}
    return found | {f"buffer/{name}": tensor for name, tensor in module.named_buffers()}


def key_of(machine: Machine, spec: TensorSpec) -> str:
    """Return the key of a graph's parameter or buffer: a parameter that forward writes is a buffer of the
    graph, and a parameter of the module."""
    is_parameter = isinstance(tensor_of(machine.parameters.module, spec.name), nn.Parameter)
    return f"{'parameter' if is_parameter else 'buffer'}/{spec.name}"


def idle_tensors(machine: Machine) -> dict[str, Tensor]:
    """Return, by key, what the module has but the graph does not use: equal on all ranks."""
    known = {
        key_of(machine, spec)
        for spec in machine.captured.graph.tensors
        if spec.role in ("parameter", "buffer")
    }
    tensors = module_tensors(machine.parameters.module)
    return {key: t for key, t in tensors.items() if key not in known and not t.is_meta}


def lasting(machine: Machine) -> list[Held]:
    """Return every lasting parameter and buffer of this rank: masters, what is at rest, buffers.

    A tensor may be held more than once (master and rest); one of them is written.
    """
    kept = set(kept_values(machine).values())
    tensors, values = machine.captured.graph.tensors, machine.program.values
    found: list[Held] = []
    for index, raw in machine.parameters.raw.items():
        value, spec = values[index], tensors[values[index].tensor]
        if spec.role == "constant" or (value.role == "parameter" and not value.resident):
            continue
        if value.role in STATES:
            continue
        held = boxes_of(machine, index, key_of(machine, spec), raw)
        found += held if index in kept else [replace(one, is_writer=False) for one in held]
    return found


def boxes_of(machine: Machine, index: int, key: str, local: Tensor) -> list[Held]:
    """Describe a shard that lies as a value does, by its boxes: more than one of a flat shard, whose
    padding is left out."""
    value = machine.program.values[index]
    shape = tuple(machine.captured.graph.tensors[value.tensor].shape)
    shard = seen_as(local, value.shape)  # as the graph sees it, not as the optimizer does
    is_writer = _writes(machine, index)
    return [
        Held(key, part.local, part.start, shape, is_writer)
        for part in parts(shape, shard, value, machine.sites[value.mesh])
    ]


def _writes(machine: Machine, index: int) -> bool:
    """Whether this rank, of those that hold the same shard of a value, writes it."""
    value = machine.program.values[index]
    site = machine.sites[value.mesh]
    replica, count = 0, 1
    for placement, size, place in zip(value.layout, site.mesh.sizes, site.coordinate, strict=True):
        if not is_split(placement) and placement != PARTIAL:  # terms of a sum are no replicas
            replica, count = replica * size + place, count * size
    # Replicas share the writing of parameters. Those of a buffer may differ (local batch
    # statistics), so all of them are taken from the first, as ``to_module`` does.
    turn = 0 if value.role == "buffer" else value.tensor % count
    return replica == turn


def _holds_first(machine: Machine, index: int) -> bool:
    """Whether a value's shard on this rank is the first of its tensor."""
    value = machine.program.values[index]
    coordinate = machine.sites[value.mesh].coordinate
    return not any(
        place for place, placed in zip(coordinate, value.layout, strict=True) if is_split(placed)
    )


# -- states ----------------------------------------------------------------------------------------


def terms(machine: Machine, role: ValueRole) -> dict[str, int]:
    """Return, by the parameters that states of a role are kept of, how many terms theirs add up from.

    A state may differ along the axes on which it is a partial sum: every place there has a term. Terms of
    a parameter's states are counted one after another.
    """
    return {name: count for name, (count, _) in _terms(machine, role).items()}


def _terms(machine: Machine, role: ValueRole) -> dict[str, tuple[int, dict[int, int]]]:
    """Return, by parameter, the number of terms, and of each state value its first."""
    tensors, found = machine.captured.graph.tensors, dict[str, tuple[int, dict[int, int]]]()
    for index, value in enumerate(machine.program.values):
        if value.role == role:
            sizes = machine.program.meshes[value.mesh].sizes
            own = [size for size, p in zip(sizes, value.layout, strict=True) if p == PARTIAL]
            count, first = found.setdefault(tensors[value.tensor].name, (0, {}))
            first[index] = count
            found[tensors[value.tensor].name] = (count + math.prod(own), first)
    return found


def state_key(name: str, term: int, role: ValueRole) -> str:
    """Return the key of one term of a parameter's states of a role."""
    return f"{role}/{term}/{name}"


def states(machine: Machine, role: ValueRole) -> list[Held]:
    """Return every state of a role of this rank: of each term the boxes that it holds."""
    found: list[Held] = []
    for name, (_, first) in _terms(machine, role).items():
        for index, start in first.items():
            if index in machine.parameters.states:
                value, place = machine.program.values[index], 0
                site = machine.sites[value.mesh]
                for placement, size, at in zip(
                    value.layout, site.mesh.sizes, site.coordinate, strict=True
                ):
                    place = place * size + at if placement == PARTIAL else place
                local = machine.parameters.states[index]
                found += boxes_of(machine, index, state_key(name, start + place, role), local)
    return found


def every_state(machine: Machine) -> list[Held]:
    """Return all states of this rank, of every role."""
    return [one for role in SUMMED_STATES for one in states(machine, role)] + factors(machine)


def factors(machine: Machine) -> list[Held]:
    """Return every factor of this rank, whole: it means something to shards of its parameter like this one."""
    tensors, found = machine.captured.graph.tensors, list[Held]()
    for index, local in machine.parameters.states.items():
        value = machine.program.values[index]
        if value.role == "factor":
            site, shape = machine.sites[value.mesh], tuple(local.shape)
            places = zip(value.layout, site.coordinate, strict=True)
            shard = "-".join([str(at) for placement, at in places if is_split(placement)]) or "0"
            key = f"factor/{shard}/{tensors[value.tensor].name}"
            found.append(Held(key, local, (0,) * len(shape), shape, _writes(machine, index)))
    return found


# -- optimizer -------------------------------------------------------------------------------------


def optimizer_state(
    machine: Machine, optimizer: torch.optim.Optimizer
) -> tuple[list[Held], dict[str, Any]]:
    """Return this rank's optimizer state: boxes like those of the masters, and plain values.

    Raises CheckpointError for state of a sharded parameter that is neither elementwise nor one
    number, since no other plan could load it.
    """
    boxes: list[Held] = []
    values: dict[str, Any] = {}
    for master in machine.parameters.masters:
        for entry, value in optimizer.state.get(master.parameter, {}).items():
            key = f"optimizer/{entry}/{master.name}"
            if not isinstance(value, Tensor):
                nested: dict[str, Tensor] = {}
                values[key] = plain(value, key, nested)
                if nested:
                    raise _no_other_plan(entry, master.name, "tensors in containers")
                continue
            index, shape = master.value, tuple(value.shape)
            whole = machine.captured.graph.tensors[machine.program.values[index].tensor].shape
            if value.shape == master.parameter.shape:
                boxes += boxes_of(machine, index, key, value)
            elif value.numel() == 1 or master.parameter.numel() == math.prod(whole):
                is_writer = _writes(machine, index) and _holds_first(machine, index)
                boxes.append(Held(key, value, (0,) * len(shape), shape, is_writer))
            else:
                raise _no_other_plan(entry, master.name, f"shape {tuple(value.shape)}")
    return boxes, values


def _no_other_plan(entry: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"optimizer state {entry!r} of {name!r} has {what}, unlike its sharded parameter, so no "
        "other plan could load it; use a plan without ZeRO for this optimizer"
    )


def parameter_groups(machine: Machine, optimizer: torch.optim.Optimizer) -> list[Group]:
    """Return the optimizer's parameter groups: settings as JSON holds them, and members here."""
    name_of = {id(master.parameter): master.name for master in machine.parameters.masters}
    groups: list[Group] = []
    for position, group in enumerate(optimizer.param_groups):
        settings: dict[str, Any] = {}
        for key, value in group.items():
            if key not in ("params", "param_names"):
                number = value.item() if isinstance(value, Tensor) else value
                settings[key] = plain(number, f"optimizer group {position} {key!r}", {})
        members = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
        groups.append(Group(position=position, settings=settings, names=members))
    return groups


def merged_groups(ranks: list[list[Group]]) -> list[Group]:
    """Merge the groups of all ranks: those of equal position and settings are one group."""
    merged: dict[str, Group] = {}
    for group in sorted((g for groups in ranks for g in groups), key=lambda g: g.position):
        key = f"{group.position} {sorted(group.settings.items())}"
        known = merged.get(key)
        names = [*(known.names if known else []), *group.names]
        names = list(dict.fromkeys(names))
        merged[key] = Group(position=group.position, settings=group.settings, names=names)
    return list(merged.values())


def settings_of(group: Group, saved: list[Group]) -> Mapping[str, Any]:
    """Return the saved settings of a present group: those of its members, or of its position.

    Raises CheckpointError where its members had different settings.
    """
    if not group.names:
        known = [one.settings for one in saved if one.position == group.position]
        return known[0] if known else {}
    homes = {name: one for one in saved for name in one.names}
    found: dict[str, Mapping[str, Any]] = {}
    first: dict[str, str] = {}
    for name in group.names:
        if name in homes:
            text = str(sorted(homes[name].settings.items()))
            found[text] = homes[name].settings
            first.setdefault(text, name)
    if len(found) > 1:
        one, other = list(first.values())[:2]
        raise CheckpointError(
            f"parameters of one optimizer group must have had equal settings, but {one!r} and "
            f"{other!r} were in different groups when the checkpoint was saved; make the "
            "optimizer with the same groups"
        )
    return next(iter(found.values()), {})
