"""What a rank holds to run a Program: its places on the meshes, memory, state and groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shardwright.core.float8 import FLOAT8
from shardwright.core.program import Program
from shardwright.errors import InputError
from shardwright.runtime.capture import Captured
from shardwright.runtime.float8 import check_device
from shardwright.runtime.interpreter import Machine
from shardwright.runtime.messages import Groups
from shardwright.runtime.parameters import Parameters
from shardwright.runtime.randomness import Clock, RandomSource
from shardwright.runtime.segment import Site
from shardwright.runtime.store import Store
from shardwright.runtime.world import World


def machine_of(
    captured: Captured,
    program: Program,
    module: nn.Module,
    world: World,
    device: torch.device | str | None,
    seed: int,
) -> Machine:
    """Set up this rank on a torch device (None: the CPU), with a seed of dropout."""
    devices = program.strategy.devices
    if len(devices) != world.size:
        raise InputError(
            f"the plan is for {len(devices)} ranks but {world.size} were started; start "
            f"{len(devices)} (torchrun --nproc-per-node, or the launcher's count)"
        )
    place = torch.device(device or "cpu")
    if program.strategy.precision in FLOAT8:
        check_device(place)
    source = RandomSource(place, seed)
    mine = devices[world.rank]
    sites = {
        index: Site(mesh=mesh, coordinate=mesh.coordinate(mine), device=place, source=source)
        for index, mesh in enumerate(program.meshes)
        if mine in mesh.devices
    }
    rank_of = {device: number for number, device in enumerate(devices)}
    return Machine(
        captured=captured,
        program=program,
        device=mine,
        rank_of=rank_of,
        sites=sites,
        store=Store(program, place),
        parameters=Parameters(captured, program, module, sites),
        world=world,
        groups=Groups(program, rank_of, world),
        clock=Clock(),
    )


def resized(machine: Machine, captured: Captured, program: Program) -> Machine:
    """Return what a rank holds for a Program of the same plan and model at another batch size: the
    same state, and groups as far as they are alike."""
    place = next(iter(machine.sites.values())).device
    lender = machine.parameters
    return replace(
        machine,
        captured=captured,
        program=program,
        store=Store(program, place),
        parameters=Parameters(captured, program, lender.module, machine.sites, lender),
        groups=Groups(program, machine.rank_of, machine.world, machine.groups),
    )
