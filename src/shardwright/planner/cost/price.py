"""Seconds for every instruction of a Program.

Each segment and each message is priced once and gathered by the instructions' items, so the work
does not grow with microbatches. A transfer's time lies on its SEND, which occupies the link; the
RECEIVE waits for it and costs only the message overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster, Source
from shardwright.core.costs import Cost, CostTable
from shardwright.core.graph import DTYPE_BYTES, OperatorGraph
from shardwright.core.layout import local_bytes
from shardwright.core.program import Call, Kind, Message, Program, Segment, Value
from shardwright.core.strategy import Mesh
from shardwright.planner.cost.collective import collective_seconds, halo_seconds
from shardwright.planner.cost.compute import Rates, memory_seconds, operator_cost

SOURCES: tuple[Source, ...] = ("measured", "published", "modelled")


@dataclass(frozen=True, eq=False)
class Prices:
    """Per instruction: seconds, half-width, and the ``SOURCES`` index of most seconds."""

    seconds: NDArray[np.float64]
    spread: NDArray[np.float64]
    source: NDArray[np.int8]

    def by_source(self) -> tuple[tuple[str, float], ...]:
        """Return how many of all seconds rest on each sort of number."""
        totals = np.bincount(self.source, weights=self.seconds, minlength=len(SOURCES))
        return tuple((name, float(totals[i])) for i, name in enumerate(SOURCES) if totals[i] > 0)


def price(program: Program, graph: OperatorGraph, cluster: Cluster, table: CostTable) -> Prices:
    """Return the cost of every instruction, alone on its resource."""
    tariff = _Tariff(program, graph, cluster, table)
    columns = np.zeros((3, program.num_instructions))
    segments = range(len(program.segments))
    forward = _columns([tariff.segment(item, "forward") for item in segments])
    backward = _columns([tariff.segment(item, "backward") for item in segments])
    messages = _columns([tariff.message(item) for item in range(len(program.messages))])
    started = _columns([tariff.received() for _ in program.messages])
    meshes = range(len(program.meshes))
    updates = _columns([tariff.update(mesh) for mesh in meshes])
    clips = _columns([tariff.clip(mesh) for mesh in meshes])
    for kind, prices, index in (
        (Kind.FORWARD, forward, program.item),
        (Kind.RECOMPUTE, forward, program.item),
        (Kind.BACKWARD, backward, program.item),
        (Kind.MESSAGE, messages, program.item),
        (Kind.SEND, messages, program.item),
        (Kind.RECEIVE, started, program.item),
        (Kind.UPDATE, updates, program.group),
        (Kind.CLIP, clips, program.group),
    ):
        chosen = np.flatnonzero(program.kind == kind)
        if len(chosen):
            columns[:, chosen] = prices[:, index[chosen]]
    # Gradients kept over the step are first written, then added to.
    later = np.flatnonzero((program.kind == Kind.BACKWARD) & (program.microbatch > 0))
    if len(later):
        sums = np.array([tariff.accumulated(item) for item in program.segments])
        columns[0, later] += sums[program.item[later]]
    return Prices(seconds=columns[0], spread=columns[1], source=columns[2].astype(np.int8))


def _columns(costs: list[Cost]) -> NDArray[np.float64]:
    rows = [(cost.seconds, cost.spread, SOURCES.index(cost.source)) for cost in costs]
    return np.array(rows, dtype=np.float64).reshape(-1, 3).T


def _total(costs: list[Cost]) -> Cost:
    """Add costs; half-widths add too, since one machine's errors are not independent."""
    seconds = dict.fromkeys(SOURCES, 0.0)
    for cost in costs:
        seconds[cost.source] += cost.seconds
    source = max(SOURCES, key=lambda name: seconds[name])
    return Cost(
        seconds=sum(seconds.values()), spread=sum(cost.spread for cost in costs), source=source
    )


class _Tariff:
    """Prices of one Program's segments and messages, remembered by what decides them."""

    def __init__(
        self, program: Program, graph: OperatorGraph, cluster: Cluster, table: CostTable
    ) -> None:
        self.program = program
        self.graph = graph
        self.cluster = cluster
        self.table = table
        self.overheads = table.overhead_map
        self.calls: dict[tuple[object, ...], Cost] = {}
        self.sorts: dict[object, int] = {}
        self.sort_of: dict[int, int] = {}
        self.routes: dict[tuple[int, tuple[int, ...]], list[tuple[tuple[int, ...], int]]] = {}
        self._joined = self._find_joined()
        precision = program.strategy.precision
        # One device of each kind per mesh: the group waits for its slowest member.
        self.rates: list[list[Rates]] = []
        by_kind: dict[int, Rates] = {}
        for mesh in program.meshes:
            found: dict[int, Rates] = {}
            for device in mesh.devices:
                kind = cluster.devices[device].kind
                if kind not in by_kind:
                    by_kind[kind] = Rates(
                        cluster=cluster, table=table, device=device, precision=precision
                    )
                found[kind] = by_kind[kind]
            self.rates.append(list(found.values()))

    def segment(self, number: int, phase: str) -> Cost:
        segment = self.program.segments[number]
        if phase == "backward" and not segment.has_backward:
            return Cost(seconds=0.0)
        fixed = Cost(seconds=self.overheads.get("segment_seconds", 0.0), source="measured")
        options: list[Cost] = []
        for rates in self.rates[segment.mesh]:
            costs = [self._call(call, phase, rates) for call in segment.calls]
            if phase == "backward":
                joined = self._joined[number]
                costs.append(Cost(seconds=memory_seconds(3 * joined, rates.kind)))
            options.append(_total([fixed, *costs]))
        return max(options, key=lambda cost: cost.seconds)

    def _call(self, call: Call, phase: str, rates: Rates) -> Cost:
        shapes = tuple(self.program.values[value].shape for value in call.operands)
        key = (self._sort(call.operator), shapes, call.result_shapes, phase, rates.device)
        if key not in self.calls:
            self.calls[key] = operator_cost(
                self.graph, call.operator, shapes, call.result_shapes, phase, rates
            )
        return self.calls[key]

    def _sort(self, index: int) -> int:
        """Number operators by all that decides their cost besides local shapes: layers repeat."""
        if index not in self.sort_of:
            operator = self.graph.operators[index]
            specs = [self.graph.tensors[t] for t in (*operator.inputs, *operator.outputs)]
            whole = tuple((spec.dtype, spec.needs_gradient, spec.shape) for spec in specs)
            key = (operator.kind, operator.attributes, operator.input_names, operator.flops, whole)
            self.sort_of[index] = self.sorts.setdefault(key, len(self.sorts))
        return self.sort_of[index]

    def _find_joined(self) -> list[int]:
        """Return by segment the bytes of gradients that are added to others of the same value.

        Backward runs the last reader of a value first. So its gradient is written once and then
        added to, however the readers are spread over segments.
        """
        values, tensors = self.program.values, self.graph.tensors
        found, written = [0] * len(self.program.segments), set[int]()
        for number in reversed(range(len(found))):
            segment = self.program.segments[number]
            if not segment.has_backward:
                continue
            uses: dict[int, int] = {}
            for call in segment.calls:
                for value in call.operands:
                    uses[value] = uses.get(value, 0) + 1
            for value, count in uses.items():
                gradient = values[value].gradient
                if tensors[values[value].tensor].needs_gradient:
                    found[number] += (count - (gradient not in written)) * _bytes(values[value])
                # ``accumulated`` counts what is summed over the step.
                if gradient >= 0 and values[gradient].scope == "microbatch":
                    written.add(gradient)
        return found

    def accumulated(self, segment: Segment) -> float:
        """Return the seconds of adding a later microbatch's gradients to those kept."""
        values = self.program.values
        kept = [values[v] for v in segment.inputs if values[v].gradient >= 0]
        size = sum(_bytes(value) for value in kept if values[value.gradient].scope == "step")
        return max(memory_seconds(3 * size, rates.kind) for rates in self.rates[segment.mesh])

    def received(self) -> Cost:
        seconds = self.overheads.get("message_seconds", 0.0)
        return Cost(seconds=seconds, source="measured" if seconds else "modelled")

    def message(self, item: int) -> Cost:
        """Return the slowest group's time; merged items are also copied in and out."""
        message = self.program.messages[item]
        if message.destination >= 0:
            return _total([self._transfer(item), self.received()])
        mesh = self.program.meshes[message.mesh]
        groups = self._groups(message.mesh, mesh, message.axes)
        costs = [self._within(message, devices, concurrent) for devices, concurrent in groups]
        slowest = max(costs, key=lambda cost: cost.seconds)
        parts = [slowest]
        if message.primitive not in {"slice", "copy"}:
            parts.append(self.received())
        if len(message.sources) > 1:
            copied = collective_seconds(
                "copy", 2 * message.bytes, mesh.devices[:1], self.cluster, self.table
            )
            parts.append(copied)
        return _total(parts)

    def _within(self, message: Message, devices: tuple[int, ...], concurrent: int) -> Cost:
        args = (devices, self.cluster, self.table, concurrent)
        if message.primitive in {"halo", "halo_sum"}:
            ends = (*message.sources, *message.results)
            size = max(_bytes(self.program.values[value]) for value in ends)
            return halo_seconds(message.bytes, size, *args)
        return collective_seconds(message.primitive, message.bytes, *args)

    def _transfer(self, item: int) -> Cost:
        """Price the slowest pair; pairs leaving one host share its uplink, others their devices."""
        message, hosts = self.program.messages[item], self.cluster.devices
        moved: dict[tuple[int, int], int] = {}
        for source, pieces in zip(message.sources, self.program.pieces(item), strict=True):
            width = DTYPE_BYTES[self.program.values[source].dtype]
            for piece in pieces:
                ends = (piece.source, piece.destination)
                if piece.source != piece.destination:
                    moved[ends] = moved.get(ends, 0) + piece.num_elements * width
        users: dict[tuple[str, int], int] = {}
        ports: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
        for source, target in moved:
            crosses = hosts[source].host != hosts[target].host
            ends = (("from", source), ("to", target))
            ports[source, target] = (("host", hosts[source].host),) if crosses else ends
            for port in ports[source, target]:
                users[port] = users.get(port, 0) + 1
        seen: dict[tuple[int, int, bool], tuple[int, int]] = {}
        for pair, size in moved.items():
            share, crosses = max(users[port] for port in ports[pair]), len(ports[pair]) == 1
            # Through one device's port pieces follow each other.
            key = (share, size, crosses) if crosses else (1, size * share, crosses)
            seen.setdefault(key, pair)
        costs = [
            collective_seconds("transfer", size, pair, self.cluster, self.table, share)
            for (share, size, _), pair in seen.items()
        ]
        return max(costs, key=lambda cost: cost.seconds, default=Cost(seconds=0.0))

    def _groups(
        self, index: int, mesh: Mesh, axes: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return one group of each shape over hosts, with how many groups share its uplinks."""
        if (index, axes) not in self.routes:
            self.routes[index, axes] = peer_groups(self.cluster, mesh, axes)
        return self.routes[index, axes]

    def update(self, mesh: int) -> Cost:
        """Bytes of this mesh's optimizer shards, at the measured or the memory-bound rate."""
        own = self._master_bytes(mesh)
        states = self.program.strategy.optimizer_states
        measured = self.overheads.get("update_seconds_per_byte")
        if measured is not None:
            # Measured with two states: reads p, g, m, v and writes p, m, v.
            return Cost(seconds=own * measured * (3 + 2 * states) / 7, source="measured")
        kind = min((rates.kind for rates in self.rates[mesh]), key=lambda k: k.memory_bandwidth)
        seconds = memory_seconds(own * (3 + 2 * states), kind)
        return Cost(seconds=seconds + kind.launch_seconds)

    def clip(self, mesh: int) -> Cost:
        """Read every gradient once, one small all-reduce, scale them."""
        kind = min((rates.kind for rates in self.rates[mesh]), key=lambda k: k.memory_bandwidth)
        touched = memory_seconds(3 * self._master_bytes(mesh), kind)
        everyone = self.program.strategy.devices
        norm = collective_seconds("all_reduce", 8, everyone, self.cluster, self.table)
        return _total([Cost(seconds=touched), norm])

    def _master_bytes(self, mesh: int) -> int:
        """Return the local bytes of the optimizer's shards on one mesh."""
        home: dict[int, int] = {}
        for value in self.program.values:
            if value.role in ("parameter", "master"):
                home.setdefault(value.tensor, value.mesh)
        total = 0
        sizes = self.program.meshes[mesh].sizes
        for tensor, config in zip(
            self.graph.parameters, self.program.strategy.parameters, strict=True
        ):
            spec = self.graph.tensors[tensor]
            if home.get(tensor) == mesh and spec.needs_gradient:
                total += local_bytes(spec.shape, spec.dtype, config.optimizer, sizes)
        return total


def _bytes(value: Value) -> int:
    return math.prod(value.shape) * DTYPE_BYTES[value.dtype]


def peer_groups(
    cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """Return one group of each shape over hosts, with the number of groups sharing its uplinks.

    On one CPU host all groups share the memory, so all of them count.
    """
    kept = [axis for axis in range(len(mesh.sizes)) if axis not in axes]
    grid = np.array(mesh.devices).reshape(mesh.sizes).transpose(*kept, *axes)
    length = int(np.prod([mesh.sizes[axis] for axis in axes], dtype=np.int64))
    groups = grid.reshape(-1, length)
    host_of = np.array([device.host for device in cluster.devices])
    hosts = host_of[groups]
    crossing: dict[int, int] = {}
    for row in hosts:
        members = set(map(int, row))
        if len(members) > 1 or cluster.kind_of(mesh.devices[0]).backend == "cpu":
            for host in members:
                crossing[host] = crossing.get(host, 0) + 1
    shapes: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}
    for devices, row in zip(groups, hosts, strict=True):
        names, counts = np.unique(row, return_counts=True)
        concurrent = max(crossing.get(int(name), 1) for name in names)
        shape = (len(names), int(counts.max()), concurrent)
        shapes.setdefault(shape, (tuple(map(int, devices)), concurrent))
    return list(shapes.values())
