"""What gradients and the optimizer cost, tensor by tensor: sums over microbatches touch every byte, and so do updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.core.cluster import DeviceKind
from shardwright.core.costs import ADD, MEASURED_STATES, UPDATE, Cost, CostTable, update_key
from shardwright.core.program import Kind, Program
from shardwright.planner.cost.collective import interpolate
from shardwright.planner.cost.roofline import memory_seconds

# Reads of the gradient and the sum, and the write of the latter.
_ADDED_TOUCHES = 3


def added_seconds(sizes: Sequence[float], kind: DeviceKind, table: CostTable) -> float:
    """Return the seconds of adding gradients to sums, for each of which so many bytes are read and written together: as
    measured of one that was just made, else through the memory."""
    points = table.collective_map.get(ADD)
    if not points:
        return memory_seconds(sum(sizes), kind)
    return sum(interpolate(points, size / _ADDED_TOUCHES).seconds for size in sizes)


def update_seconds(num_bytes: float, states: int, kind: DeviceKind, table: CostTable) -> Cost:
    """Return the seconds of updating a shard of so many bytes, with ``states`` values kept per element: as measured of
    such an optimizer, else as one with two states in proportion to the memory that they touch."""
    touches = _touches(states)
    for name, kept in (
        (update_key(states), min(states, MEASURED_STATES)),
        (UPDATE, MEASURED_STATES),
    ):
        if points := table.collective_map.get(name):
            found, share = interpolate(points, num_bytes), touches / _touches(kept)
            return Cost(
                seconds=share * found.seconds, spread=share * found.spread, source="measured"
            )
    return Cost(seconds=memory_seconds(num_bytes * touches, kind))


def _touches(states: int) -> int:
    """Return how often an update reads or writes something as large as the parameter: this, its gradient, states."""
    return 3 + 2 * states


def update_all(sizes: Sequence[int], states: int, kind: DeviceKind, table: CostTable) -> Cost:
    """Return the seconds of one step of the optimizer on shards of so many bytes each."""
    total = sum(sizes)
    if not total:
        return Cost(seconds=0.0)
    if UPDATE not in table.collective_map:
        whole = update_seconds(total, states, kind, table)
        return Cost(seconds=whole.seconds + kind.launch_seconds)
    equal = Counter(sizes).items()
    costs = [(count, update_seconds(size, states, kind, table)) for size, count in equal]
    return Cost(
        seconds=table.overhead_map.get("update_seconds", 0.0)
        + sum(count * cost.seconds for count, cost in costs),
        spread=sum(count * cost.spread for count, cost in costs),
        source="measured",
    )


def updates_by_mesh(program: Program) -> list[tuple[int, tuple[int, ...]]]:
    """Return the mesh of every update that names what it takes, and that."""
    if not program.updates:
        return []
    ends = zip(program.kind.tolist(), program.item.tolist(), program.group.tolist(), strict=True)
    mesh_of = {item: mesh for kind, item, mesh in ends if kind == Kind.UPDATE}
    return [(mesh_of[item], masters) for item, masters in enumerate(program.updates)]
