"""Columns that the simulator's kernels read, made without loading these."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.program import Program

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Bytes(NamedTuple):
    """Per instruction: bytes appearing, disappearing, and held until which instruction.

    ``copied`` appear in addition as it is completed, and go at once. What is ``lent`` is sent from
    where it lies, so that ``freed`` goes only then. A host stays with what is ``local``.
    """

    allocated: Ints
    freed: Ints
    held: Ints
    copied: Ints
    until: Ints
    lent: NDArray[np.bool_]
    local: NDArray[np.bool_]


class Ways(NamedTuple):
    """What resources are that send, one entry each: whether between hosts, and what a message waits for a
    core; None where none is or does."""

    far: NDArray[np.bool_] | None = None
    waits: Floats | None = None


ALIKE = Ways()


def shared_groups(program: Program) -> NDArray[np.int32]:
    """Return the group of every instruction, meshes of the same devices by the first of them."""
    first: dict[frozenset[int], int] = {}
    for number, mesh in enumerate(program.meshes):
        first.setdefault(frozenset(mesh.devices), number)
    if len(first) == len(program.meshes):
        return program.group
    own = np.array([first[frozenset(mesh.devices)] for mesh in program.meshes], dtype=np.int32)
    return own[program.group]


def ranks_of_groups(program: Program) -> Ints:
    """Return how many devices each group has; of meshes of the same devices the first has them all."""
    seen: set[frozenset[int]] = set()
    sizes = np.zeros(len(program.meshes), dtype=np.int64)
    for number, mesh in enumerate(program.meshes):
        devices = frozenset(mesh.devices)
        sizes[number] = 0 if devices in seen else len(devices)
        seen.add(devices)
    return sizes
