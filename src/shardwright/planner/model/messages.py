"""What messages cost on one mesh, asked for once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.graph import DTYPE_BYTES, tensor_bytes
from shardwright.core.halo import Halos, extended_shape, most_moved
from shardwright.core.layout import Layout
from shardwright.core.program import LOCAL
from shardwright.core.strategy import Mesh
from shardwright.planner.cost import collective_seconds
from shardwright.planner.cost.burden import NOTHING, Burden, is_measured, message_burden
from shardwright.planner.cost.collective import halo_seconds
from shardwright.planner.cost.groups import peer_groups
from shardwright.planner.cost.transfers import paired_seconds
from shardwright.planner.model.facts import Shape
from shardwright.planner.remember import remembered
from shardwright.planner.space import reshard_steps

Axes = tuple[int, ...]
# So many equal gradients in one message make the cost of starting it invisible.
MANY = 1024


class MessageCosts:
    """Seconds of messages on one mesh, as ``planner.cost.price`` would price them; and what
    ``parameters`` cost, which problems on it work out once."""

    def __init__(
        self, cluster: Cluster, table: CostTable, message_seconds: float, mesh: Mesh
    ) -> None:
        self.cluster, self.table, self.mesh = cluster, table, mesh
        self._starting = message_seconds
        self._has_burdens = is_measured(table)
        self.parameters: dict[object, tuple[NDArray[np.float64], float]] = {}

    @remembered
    def groups(self, axes: Axes) -> list[tuple[tuple[int, ...], int]]:
        """Return the groups of devices along some axes that differ, see ``peer_groups``."""
        return peer_groups(self.cluster, self.mesh, axes)

    @remembered
    def slowest(self, primitive: str, axes: Axes, num_bytes: int) -> float:
        """Price one message of the slowest group, but for starting it."""
        ends = (self.cluster, self.table)
        return max(
            collective_seconds(primitive, num_bytes, devices, *ends, concurrent).seconds
            for devices, concurrent in self.groups(axes)
        )

    def message(self, primitive: str, axes: Axes, num_bytes: int) -> float:
        """Price one message."""
        slowest = self.slowest(primitive, axes, num_bytes)
        return slowest + (0.0 if primitive in LOCAL else self._starting)

    def share(self, primitive: str, axes: Axes, num_bytes: int) -> float:
        """Price a gradient's share of a message that carries many: no cost of starting one."""
        return self.message(primitive, axes, num_bytes * MANY) / MANY

    @remembered
    def paired(self, axes: Axes, pairs: tuple[tuple[int, int], ...], num_bytes: int) -> float:
        """Price one message from places along some axes to others, but for starting it."""
        ends = (self.cluster, self.table)
        return paired_seconds(self.mesh, axes, pairs, num_bytes, ends).seconds

    def paired_share(self, axes: Axes, pairs: tuple[tuple[int, int], ...], num_bytes: int) -> float:
        """Price a gradient's share of such a message that carries many."""
        return (self.paired(axes, pairs, num_bytes * MANY) + self._starting) / MANY

    @remembered
    def reshard(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a change of layout; infinite where there is none."""
        if source == target:
            return 0.0
        try:
            return sum(one for _, one in self.by_axes(shape, dtype, source, target))
        except ValueError:
            return math.inf

    def merged(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price the same of a gradient whose messages carry many."""
        try:
            steps = reshard_steps(shape, dtype, source, target, self.mesh.sizes)
        except ValueError:
            return math.inf
        return sum(self.share(step.primitive, step.axes, step.bytes) for step in steps)

    @remembered
    def moving(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Price a change of layout with the computing thread's own seconds, hidden or not; infinite where
        there is none."""
        seconds = self.reshard(shape, dtype, source, target)
        if not self._has_burdens or seconds == math.inf:
            return seconds
        steps = reshard_steps(shape, dtype, source, target, self.mesh.sizes)
        held = (self._burden(step.primitive, step.axes, step.bytes).held for step in steps)
        return seconds + sum(held)

    def lost(self, shape: Shape, dtype: str, source: Layout, target: Layout) -> float:
        """Return the least computation that a tensor's share of a message of many costs: waited for while
        it takes as long as alone, or with so much of computation, which hides it in part or whole."""
        if not self._has_burdens:
            return 0.0
        total = 0.0
        for step in reshard_steps(shape, dtype, source, target, self.mesh.sizes):
            own = self.message(step.primitive, step.axes, step.bytes)
            many = (step.primitive, step.axes, step.bytes * MANY)
            burden = self._burden(*many)
            hidden = min(own / burden.hiding, 1.0) if burden.hiding > 0 else 0.0
            total += (burden.held + min(burden.stolen * hidden, self.message(*many))) / MANY
        return total

    @remembered
    def _burden(self, primitive: str, axes: Axes, num_bytes: int) -> Burden:
        """Return what a message costs ranks that compute; nothing where that was not measured. Of groups
        the least counts: never more than is charged."""
        if primitive in LOCAL:
            return NOTHING
        burdens = (
            message_burden(primitive, num_bytes, devices, self.cluster, self.table)
            for devices, _ in self.groups(axes)
        )
        return min(burdens)

    def by_axes(
        self, shape: Shape, dtype: str, source: Layout, target: Layout
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return the seconds of every message of a change of layout, with the axes it spans.

        Raises ValueError where there is no such change.
        """
        return [
            (step.axes, self.message(step.primitive, step.axes, step.bytes))
            for step in reshard_steps(shape, dtype, source, target, self.mesh.sizes)
        ]

    def halos(self, local: Shape, dtype: str, halos: Halos) -> float:
        """Price bringing a shard's halos, or giving their gradients back."""
        total = 0.0
        for halo in halos:
            moved = most_moved(local, halo, self.mesh.sizes) * DTYPE_BYTES[dtype]
            local = extended_shape(local, (halo,))
            total += self._halo(moved, tensor_bytes(local, dtype), halo.axes)
        return total

    @remembered
    def _halo(self, moved: int, copied: int, axes: Axes) -> float:
        slowest = max(
            halo_seconds(moved, copied, devices, self.cluster, self.table, share).seconds
            for devices, share in self.groups(axes)
        )
        return slowest + self._starting
