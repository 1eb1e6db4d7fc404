"""What the optimizer costs: it touches every byte of its shards, tensor by tensor."""

from __future__ import annotations

from shardwright.core.cluster import DeviceKind
from shardwright.core.costs import UPDATE, Cost, CostTable
from shardwright.planner.cost.collective import interpolate
from shardwright.planner.cost.compute import memory_seconds

# Measured with two states: the optimizer reads p, g, m, v and writes p, m, v.
_MEASURED_TOUCHES = 7


def update_seconds(num_bytes: float, states: int, kind: DeviceKind, table: CostTable) -> Cost:
    """Return the seconds of updating a shard of so many bytes, with ``states`` values kept per
    element."""
    touches = 3 + 2 * states
    points = table.collective_map.get(UPDATE)
    if not points:
        return Cost(seconds=memory_seconds(num_bytes * touches, kind))
    share = touches / _MEASURED_TOUCHES
    found = interpolate(points, num_bytes)
    return Cost(seconds=share * found.seconds, spread=share * found.spread, source="measured")
