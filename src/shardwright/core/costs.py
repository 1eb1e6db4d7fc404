"""Measurements and what the planner reads of them.

A ``Record`` is one measurement as the store keeps it. A ``CostTable`` is the planner's immutable view
of the records which fit one cluster; what it lacks is modelled, and says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cluster import Cluster, Source
from shardwright.core.graph import KEPT_AS, Operator, OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured duration.

    ``key`` says what was measured (see ``operator_key`` and ``collective_key``). ``seconds`` is the
    median of ``count`` runs and ``spread`` half the distance between the quartiles.
    ``environment`` names hardware, versions and threads.
    """

    key: str
    seconds: float
    spread: float
    count: int
    environment: str
    measured_at: str = ""

    def __post_init__(self) -> None:
        if self.count < 1 or not self.environment or not self.seconds >= 0:
            raise ValueError(f"a record needs runs, an environment and a duration: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A predicted duration with its half-width and where it comes from."""

    seconds: float
    spread: float = 0.0
    source: Source = "modelled"


def operator_key(
    graph: OperatorGraph,
    operator: Operator,
    input_shapes: tuple[tuple[int, ...], ...],
    output_shapes: tuple[tuple[int, ...], ...],
    phase: str,
    precision: str = "float32",
) -> str:
    """Name an operator shard by what decides its duration: kind, local shapes, dtypes, constants, and
    whether its model is larger than caches.

    ``phase`` is ``forward`` or ``backward``. ``precision`` is the strategy's: the dtype which float32
    tensors of the graph have when the operator runs.
    """
    precision = KEPT_AS.get(precision, precision)
    stored = [graph.tensors[index].dtype for index in operator.inputs]
    dtypes = [precision if dtype == "float32" else dtype for dtype in stored]
    needs = "".join(
        "g" if graph.tensors[index].needs_gradient else "-" for index in operator.inputs
    )
    shapes = ";".join(
        "x".join(map(str, s)) + f":{d}" for s, d in zip(input_shapes, dtypes, strict=True)
    )
    outputs = ";".join("x".join(map(str, shape)) for shape in output_shapes)
    constants = ",".join(
        f"{name}={value}" for name, value in operator.attributes if name not in SHAPE_ATTRIBUTES
    )
    key = f"operator|{phase}|{operator.kind}|{shapes}|{needs}|{outputs}|{constants}"
    return key + "|from memory" * graph.outgrows_caches


# Arguments that restate a shape: the local output shape already says it.
SHAPE_ATTRIBUTES = frozenset({"size", "shape", "split_size", "sizes", "implicit"})


def link_label(cluster: Cluster, devices: tuple[int, ...]) -> str:
    """Say over which sort of link a group talks: ``loopback``, or the slowest link's bits per second.

    One label, one set of measurements; the planner and the runtime both name collectives with it.
    """
    hosts = {cluster.devices[device].host for device in devices}
    if len(hosts) == 1 and cluster.kind_of(devices[0]).backend == "cpu":
        return "loopback"
    return f"{cluster.slowest_bandwidth(devices) * 8 / 1e9:.4g}Gbit/s"


def collective_key(primitive: str, hosts: int, devices: int, link: str) -> str:
    """Name a collective by its group: how many hosts and devices, over which sort of link."""
    return f"collective|{primitive}|{hosts}x{devices}|{link}"


def beneath_key(what: str, primitive: str, hosts: int, devices: int, link: str) -> str:
    """Name what a collective costs its ranks while they compute: seconds ``held`` of the computing
    thread, ``stolen`` from it by the backend's threads, or ``waited`` for it at once."""
    return f"{what}|{primitive}|{hosts}x{devices}|{link}"


# Names what an optimizer takes for one tensor, by its bytes; with fewer than two states see ``update_key``.
UPDATE, MEASURED_STATES = "update", 2
# Names what adding a gradient of a later microbatch to the sum of those before takes, by its bytes.
ADD = "add"
# Names what compressing a gradient takes, or adding a rank's, by its elements: ``pack|int8|65536``; where some
# are selected also by their density, of which there are these: ``pack|top-k|0.001|65536``.
PACK = "pack"
PACK_DENSITIES = (0.001, 0.1)
# Kernels that an operator's backward starts for one of its forward, about.
BACKWARD_STARTS = 1.5


def update_key(states: int) -> str:
    """Name what an optimizer takes that keeps so many tensors per parameter."""
    return f"{UPDATE}|{states}" if states < MEASURED_STATES else UPDATE


def meeting_name(what: str, hosts: int, devices: int, link: str) -> str:
    """Name a scalar of a group's collectives: ``skew``, ``hiding`` or ``crowding`` (``CostTable``)."""
    return f"{what}|{hosts}x{devices}|{link}"


@dataclass(frozen=True)
class CostTable:
    """Everything known about durations on one cluster.

    ``operators`` maps operator keys to costs. ``collectives`` maps collective keys, and those of what
    they cost beneath computation (``beneath_key``), to points (bytes, seconds, spread), ascending in
    bytes; so do ``UPDATE`` and ``ADD``, and ``PACK`` with (elements, seconds, spread). ``overheads`` are named scalars measured on the machine:
    ``segment_seconds`` (fixed cost of one segment), ``begin_seconds`` (what more the first takes behind others), ``start_seconds`` (what the host takes to start an
    operator on a GPU), ``message_seconds``, ``part_seconds`` (of each further gradient that travels in a message),
    ``update_seconds`` (once a step, before any tensor),
    ``process_bytes`` (what an empty rank occupies), ``cores`` (on how many the ranks compute, where some
    share one); and by group of ranks
    (``meeting_name``) ``skew`` (the wait for the slowest rank, as a share of computation since they
    last met), ``hiding`` (seconds of computation that hide a collective) and ``crowding`` (seconds that one takes longer
    while more ranks compute than there are cores). ``factors`` are fitted
    to plans that ran: by how much the seconds of ``compute``, or of a message's primitive, differ there
    from what is known of them alone.
    """

    operators: tuple[tuple[str, Cost], ...] = ()
    collectives: tuple[tuple[str, tuple[tuple[float, float, float], ...]], ...] = ()
    overheads: tuple[tuple[str, float], ...] = ()
    factors: tuple[tuple[str, float], ...] = ()

    @cached_property
    def operator_map(self) -> dict[str, Cost]:
        """Operators by key."""
        return dict(self.operators)

    @cached_property
    def collective_map(self) -> dict[str, tuple[tuple[float, float, float], ...]]:
        """Collective points by key."""
        return dict(self.collectives)

    @cached_property
    def overhead_map(self) -> dict[str, float]:
        """Scalars by name."""
        return dict(self.overheads)

    @cached_property
    def factor_map(self) -> dict[str, float]:
        """Factors by what they multiply."""
        return dict(self.factors)

    def fitted(self, what: str, cost: Cost) -> Cost:
        """Return a cost as plans that ran say it is."""
        factor = self.factor_map.get(what, 1.0)
        if factor == 1.0:
            return cost
        return Cost(seconds=factor * cost.seconds, spread=factor * cost.spread, source=cost.source)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all measurements."""
        known = (self.operators, self.collectives, self.overheads)
        text = repr((*known, self.factors) if self.factors else known)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
