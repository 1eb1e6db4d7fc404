"""What messages cost on one mesh, asked for once."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES, tensor_bytes
from shardwright.core.halo import Halos, extended_shape, most_moved
from shardwright.core.layout import Layout
from shardwright.core.strategy import Mesh
from shardwright.planner.cost import collective_seconds
from shardwright.planner.cost.collective import halo_seconds
from shardwright.planner.cost.groups import peer_groups
from shardwright.planner.cost.transfers import paired_seconds
from shardwright.planner.model.facts import Shape
from shardwright.planner.model.losses import Losses
from shardwright.planner.space import reshard_steps
from shardwright.planner.space.redistribute import Step

LOCAL = frozenset({"slice", "copy"})
# So many equal gradients in one message make the cost of starting it invisible.
MANY = 1024


class MessageCosts:
    """Seconds of messages on one mesh, as ``planner.cost.price`` would price them."""

    def __init__(
        self, cluster: Cluster, table: CostTable, message_seconds: float, mesh: Mesh
    ) -> None:
        self.cluster, self.table, self.mesh = cluster, table, mesh
        self._starting = message_seconds
        self._groups = {
            axes: peer_groups(cluster, mesh, axes)
            for count in range(1, len(mesh.sizes) + 1)
            for axes in itertools.combinations(range(len(mesh.sizes)), count)
        }
        self._groups[()] = [((mesh.devices[0],), 1)]
        self.losses = Losses(cluster, table, self._groups)
        self._messages: dict[tuple[object, ...], float] = {}
        self._reshards: dict[tuple[Shape, str, Layout, Layout], float] = {}
        self.parameters: dict[object, NDArray[np.float64]] = {}

    def message(self, primitive: str, axes: tuple[int, ...], num_bytes: int) -> float:
        """Price one message."""
        key = (primitive, axes, num_bytes)
        if key not in self._messages:
            cluster, table = self.cluster, self.table
            slowest = max(
                collective_seconds(
                    primitive, num_bytes, devices, cluster, table, concurrent
                ).seconds
                for devices, concurrent in self._groups[axes]
            )
            self._messages[key] = slowest + (0.0 if primitive in LOCAL else self._starting)
        return self._messages[key]

    def reshard(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a change of layout; infinite where there is none."""
        if source == target:
            return 0.0
        key = (shape, dtype, source, target)
        if key not in self._reshards:
            try:
                self._reshards[key] = sum(one for _, one in self.by_axes(*key))
            except ValueError:
                self._reshards[key] = float("inf")
        return self._reshards[key]

    def merged(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a gradient's share of a message that carries many: no cost of starting one."""
        try:
            steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        except ValueError:
            return math.inf
        return sum(
            self.message(step.primitive, axes, step.bytes * MANY) / MANY for step, axes in steps
        )

    def packed(self, axes: tuple[int, ...], num_bytes: int) -> float:
        """Price a compressed gradient's share of a message that gathers many over some axes."""
        return self.message("all_gather", axes, num_bytes * MANY) / MANY

    def summed(self, axes: tuple[int, ...], num_bytes: int) -> float:
        """Price such a share of a message that sums factors of many."""
        return self.message("all_reduce", axes, num_bytes * MANY) / MANY

    def paired(
        self, axes: tuple[int, ...], pairs: tuple[tuple[int, int], ...], num_bytes: int
    ) -> float:
        """Price such a share of a message from places along some axes to others."""
        key = ("send_receive", axes, pairs, num_bytes)
        if key not in self._messages:
            ends = (self.cluster, self.table)
            many = paired_seconds(self.mesh, axes, pairs, num_bytes * MANY, ends).seconds
            self._messages[key] = (many + self._starting) / MANY
        return self._messages[key]

    def held(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Return the computing thread's own seconds of a change of layout."""
        steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        return sum(self.losses.held(step.primitive, axes, step.bytes) for step, axes in steps)

    def lost(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Return the least computation that a tensor's share of a message of many costs."""
        steps = _steps(shape, dtype, source, target, self.mesh.sizes)
        total = 0.0
        for step, axes in steps:
            many = (step.primitive, axes, step.bytes * MANY)
            own = self.message(step.primitive, axes, step.bytes)
            total += self.losses.least(*many, self.message(*many), own) / MANY
        return total

    def by_axes(
        self, shape: Shape, dtype: str, source: Layout, target: Layout
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return the seconds of every message of a change of layout, with the axes it spans.

        Raises ValueError where there is no such change.
        """
        return [
            (axes, self.message(step.primitive, axes, step.bytes))
            for step, axes in _steps(shape, dtype, source, target, self.mesh.sizes)
        ]

    def halos(self, local: Shape, dtype: str, halos: Halos) -> float:
        """Price bringing a shard's halos, or giving their gradients back."""
        cluster, table, total = self.cluster, self.table, 0.0
        for halo in halos:
            moved = most_moved(local, halo, self.mesh.sizes) * DTYPE_BYTES[dtype]
            local = extended_shape(local, (halo,))
            copied = tensor_bytes(local, dtype)
            key = (f"halo {copied}", halo.axes, moved)
            if key not in self._messages:
                slowest = max(
                    halo_seconds(moved, copied, devices, cluster, table, share).seconds
                    for devices, share in self._groups[halo.axes]
                )
                self._messages[key] = slowest + self._starting
            total += self._messages[key]
        return total


def _steps(
    shape: Shape, dtype: str, source: Layout, target: Layout, sizes: tuple[int, ...]
) -> list[tuple[Step, tuple[int, ...]]]:
    """Return the steps of a change of layout with the axes they span.

    Where the first axis shards one dim before and after, and the second another or none, only the
    second has work to do: a smaller problem, and the same one for many data-parallel widths.
    """
    kept = source[0]
    is_inner = len(sizes) == len(("data", "tensor")) and kept == target[0] and kept >= 0
    if not is_inner or kept in (source[1], target[1]) or shape[kept] % sizes[0]:
        return [(step, step.axes) for step in reshard_steps(shape, dtype, source, target, sizes)]
    local = tuple(n // sizes[0] if dim == kept else n for dim, n in enumerate(shape))
    return [(step, (1,)) for step in reshard_steps(local, dtype, source[1:], target[1:], sizes[1:])]
