"""What the optimizer costs: it touches every byte of its shards, and starts its kernels once a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.cluster import DeviceKind
from shardwright.core.costs import Cost
from shardwright.planner.cost.compute import memory_seconds

# Measured with two states: the optimizer reads p, g, m, v and writes p, m, v.
_MEASURED_TOUCHES = 7


def update_seconds(
    num_bytes: float, num_tensors: float, states: int, kind: DeviceKind, known: Mapping[str, float]
) -> Cost:
    """Return the seconds of updating shards of so many bytes in so many tensors, with ``states``
    values kept per element; ``known`` are a machine's measured overheads."""
    touches = 3 + 2 * states
    per_byte = known.get("update_seconds_per_byte")
    if per_byte is None:
        return Cost(seconds=memory_seconds(num_bytes * touches, kind))
    share = touches / _MEASURED_TOUCHES
    per_tensor = known.get("update_seconds_per_tensor", 0.0)
    return Cost(
        seconds=share * (num_bytes * per_byte + num_tensors * per_tensor), source="measured"
    )
