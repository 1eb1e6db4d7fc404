"""What transforms cost: one function per name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.core.cluster import DeviceKind
from shardwright.core.costs import Cost
from shardwright.core.program import Transform, TransformName, Value
from shardwright.planner.cost.compute import memory_seconds

Price = Callable[[Transform, Sequence[Value], DeviceKind], Cost]


def transform_cost(
    transform: Transform, values: Sequence[Value], kinds: Sequence[DeviceKind]
) -> Cost:
    """Return the seconds of a transform on the slowest of some devices; ``values`` are the Program's."""
    found = [COSTS[transform.name](transform, values, kind) for kind in kinds]
    return max(found, key=lambda cost: cost.seconds)


def _cast(transform: Transform, values: Sequence[Value], kind: DeviceKind) -> Cost:
    """Read each value and write it, one kernel each."""
    touched = sum(values[one].bytes for one in (*transform.reads, *transform.writes))
    started = len(transform.reads) * kind.launch_seconds
    return Cost(seconds=memory_seconds(touched, kind) + started)


def _feedback(transform: Transform, values: Sequence[Value], kind: DeviceKind) -> Cost:
    """Add each value to its residual, round that, and take off what was written: three kernels."""
    half = len(transform.reads) // 2
    touched = sum(
        values[source].bytes + 5 * values[residual].bytes + 2 * values[sent].bytes
        for source, residual, sent in zip(
            transform.reads[:half], transform.reads[half:], transform.writes[:half], strict=True
        )
    )
    return Cost(seconds=memory_seconds(touched, kind) + 3 * half * kind.launch_seconds)


def _version(transform: Transform, values: Sequence[Value], kind: DeviceKind) -> Cost:
    """Read each parameter and write it; where it is predicted, read two states of the optimizer too, by a few
    kernels. Nothing where it is the parameter itself."""
    constants = dict(transform.constants)
    if not constants["copies"]:
        return Cost(seconds=0.0)
    predicts = constants["forward"] or constants["lag"]
    touched, kernels = (6, 4) if predicts else (2, 1)
    size = sum(values[one].bytes for one in transform.reads)
    started = kernels * len(transform.reads) * kind.launch_seconds
    return Cost(seconds=memory_seconds(touched * size, kind) + started)


COSTS: dict[TransformName, Price] = {"cast": _cast, "feedback": _feedback, "version": _version}
