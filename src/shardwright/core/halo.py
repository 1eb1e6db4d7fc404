"""Halos: rows beyond a shard's own edges, which a sliding window over a split dim must see.

A convolution or pooling whose height is split in ``n`` equal pieces reads, for its own output rows,
``before`` rows of the previous piece and ``after`` rows of the next one. At the edges of the whole
tensor, where there is no neighbour, they hold the value with which the operator pads. Widths that
are split as well come second: their halos are columns of the tensor whose halo rows have arrived, so
that the corners are right without messages of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.core.strategy import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """``before`` and ``after`` rows along tensor dim ``dim``, which the mesh ``axes`` split.

    ``fill`` is what lies beyond the whole tensor: 0, or minus infinity for a maximum.
    """

    dim: int
    axes: tuple[int, ...]
    before: int
    after: int
    fill: float = 0.0

    @property
    def size(self) -> int:
        """Rows on both sides."""
        return self.before + self.after


Halos = tuple[Halo, ...]


def extended_shape(shape: tuple[int, ...], halos: Halos) -> tuple[int, ...]:
    """Return a shard's shape with its halos."""
    extended = list(shape)
    for halo in halos:
        extended[halo.dim] += halo.size
    return tuple(extended)


def own_shape(shape: tuple[int, ...], halos: Halos) -> tuple[int, ...]:
    """Return a shard's shape without its halos."""
    own = list(shape)
    for halo in halos:
        own[halo.dim] -= halo.size
    return tuple(own)


def most_moved(shape: tuple[int, ...], halo: Halo, sizes: tuple[int, ...]) -> int:
    """Return the elements of the device that sends, or receives, most in one exchange.

    ``shape`` is the shard's without ``halo``. Between two pieces each has one neighbour, else those
    in the middle have two.
    """
    row = math.prod(shape) // shape[halo.dim]
    pieces = math.prod(sizes[axis] for axis in halo.axes)
    return row * (max(halo.before, halo.after) if pieces == 2 else halo.size)


def check_reach(shape: tuple[int, ...], halo: Halo) -> None:
    """Raise ValueError where a shard of ``shape`` has fewer rows than its neighbours need of it."""
    if shape[halo.dim] < max(halo.before, halo.after):
        raise ValueError(
            "a halo comes from the next pieces only, so each must have as many rows as the halo, but "
            f"dim {halo.dim} of a shard of {shape} is shorter than the halo of {halo.before} before "
            f"and {halo.after} after; split it into fewer pieces"
        )


def neighbours(mesh: Mesh, device: int, axes: tuple[int, ...]) -> tuple[int, int]:
    """Return the devices with the previous and the next piece along ``axes``, -1 where none is."""
    row = mesh.peers(device, axes)
    place = row.index(device)
    following = row[place + 1] if place + 1 < len(row) else -1
    return (row[place - 1] if place else -1), following
