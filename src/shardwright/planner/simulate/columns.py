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


def _first_alike(program: Program) -> list[int]:
    """Return for each mesh the first that has the same devices."""
    first: dict[frozenset[int], int] = {}
    return [
        first.setdefault(frozenset(mesh.devices), number)
        for number, mesh in enumerate(program.meshes)
    ]


def shared_groups(program: Program) -> NDArray[np.int32]:
    """Return the group of every instruction, meshes of the same devices by the first of them."""
    return np.array(_first_alike(program), dtype=np.int32)[program.group]


def ranks_of_groups(program: Program) -> Ints:
    """Return how many devices each group has; of meshes of the same devices the first has them all."""
    pairs = zip(program.meshes, _first_alike(program), strict=True)
    sizes = [len(mesh.devices) * (first == number) for number, (mesh, first) in enumerate(pairs)]
    return np.array(sizes, dtype=np.int64)
