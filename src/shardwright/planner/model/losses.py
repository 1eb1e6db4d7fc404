"""The computation that messages cost on one mesh, as the search counts it: never more than is charged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.planner.cost.burden import NOTHING, Burden, is_measured, message_burden

Axes = tuple[int, ...]
Groups = Mapping[Axes, Sequence[tuple[tuple[int, ...], int]]]


class Losses:
    """What messages over some axes cost ranks that compute; nothing where it was not measured."""

    def __init__(self, cluster: Cluster, table: CostTable, groups: Groups) -> None:
        self._cluster, self._table, self._groups = cluster, table, groups
        self._is_measured = is_measured(table)
        self._known: dict[tuple[str, Axes, int], Burden] = {}

    def held(self, primitive: str, axes: Axes, num_bytes: int) -> float:
        """Return the seconds that a message holds the computing thread, hidden or not."""
        return self._burden(primitive, axes, num_bytes).held

    def least(
        self, primitive: str, axes: Axes, num_bytes: int, alone: float, beneath: float
    ) -> float:
        """Return the least seconds that a message costs: waited for while it takes as long as
        ``alone``, or with at least ``beneath`` of computation, which hides it in part or whole."""
        burden = self._burden(primitive, axes, num_bytes)
        hidden = min(beneath / burden.hiding, 1.0) if burden.hiding > 0 else 0.0
        return burden.held + min(burden.stolen * hidden, alone)

    def _burden(self, primitive: str, axes: Axes, num_bytes: int) -> Burden:
        if not self._is_measured or primitive in {"slice", "copy"}:
            return NOTHING
        key = (primitive, axes, num_bytes)
        if key not in self._known:
            self._known[key] = min(
                (
                    message_burden(primitive, num_bytes, devices, self._cluster, self._table)
                    for devices, _ in self._groups[axes]
                ),
                key=lambda burden: burden.row,
            )
        return self._known[key]
