"""What the input of a step costs: fetched, prepared, drawn from the loader and copied to devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.halo import own_shape
from shardwright.core.program import Kind, Program, Value, data_of
from shardwright.operators.splitting.samples import Samples, batch_size

# By what an instruction of input is: the name of its resource, what it does in words, and what shortens it.
WORDS = {
    Kind.FETCH: ("disk", "fetching from a host's storage", "faster storage or a cache does"),
    Kind.PREPARE: ("host", "preparing on a host's cores", "more cores or cheaper preparation do"),
    Kind.DRAW: ("loader", "a rank's loader", "faster loaders do, such as those of more workers"),
    Kind.COPY: ("copy", "copying from a host to its devices", "smaller samples do"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """One instruction of a step's input: ``seconds`` that the devices of a host keep one of its resources.

    ``host`` stands for all that read alike, ``meshes`` are those that read there.
    """

    kind: Kind
    host: int
    meshes: tuple[int, ...]
    seconds: float

    @property
    def resource(self) -> str:
        """The name of what it keeps."""
        return f"{WORDS[self.kind][0]}:{self.host}"


def input_bytes(program: Program, mesh: int) -> int:
    """Return one device's bytes of the batch."""
    pieces = program.strategy.pipeline.num_microbatches
    return sum(
        value.bytes * (pieces if value.scope == "microbatch" else 1)
        for value in _shards(program, mesh)
    )


def _shards(program: Program, mesh: int) -> list[Value]:
    """Return the shards of the batch on a mesh that are read: a Program may hold values of others as well, for
    strategies that were lowered before."""
    read: set[int] = set()
    for segment in program.segments:
        read.update(*(call.operands for call in segment.calls))
    read.update(*(message.sources for message in program.messages))
    roots = sorted({data_of(program.values, value) for value in read if value >= 0})
    values = [program.values[one] for one in roots]
    return [value for value in values if value.role == "input" and value.mesh == mesh]


def input_costs(
    program: Program, graph: OperatorGraph, samples: Samples, cluster: Cluster
) -> tuple[Feeding, ...]:
    """Return the instructions that feed a step, host by host in the order in which a batch goes through them; none
    where the cluster has no rates of input.

    Devices of one host share its storage, its cores and its bus; loaders are each rank's own. What a loader takes for
    a batch besides its samples is work, too, of cores that are counted.
    """
    if not any(cluster.input_rates):
        return ()
    batch = batch_size(graph, samples)
    found: list[Feeding] = []
    for host, counts in _readers(program, cluster):
        meshes = tuple(counts)
        rows = {mesh: _rows(program, graph, mesh, batch) for mesh in meshes}
        read: dict[int, int] = {}  # samples, by device
        for mesh, devices in counts.items():
            read |= {one: max(read.get(one, 0), rows[mesh]) for one in devices}
        passing = sum(input_bytes(program, mesh) * len(counts[mesh]) for mesh in meshes)
        drawn = max(
            _seconds(batch, cluster.input_rate),
            _seconds(max(read.values()), cluster.rank_input_rate) + cluster.rank_batch_seconds,
        )
        handing = _seconds(len(read) * cluster.rank_batch_seconds, cluster.host_cores)
        prepared = _seconds(sum(read.values()), cluster.host_input_rate) + handing
        given = (
            (Kind.FETCH, cluster.host_fetch_rate, _seconds(sum(read.values()), cluster.host_fetch_rate)),
            (Kind.PREPARE, prepared, prepared),
            (Kind.DRAW, drawn, drawn),
            (Kind.COPY, True, _seconds(passing, cluster.copy_bandwidth)),
        )  # fmt: skip
        found += [
            Feeding(kind=kind, host=host, meshes=meshes, seconds=seconds)
            for kind, is_there, seconds in given
            if is_there
        ]
    return tuple(found)


def slowest(feeding: Iterable[Feeding]) -> Feeding | None:
    """Return what a batch takes longest in; None of no input."""
    return max(feeding, key=lambda one: one.seconds, default=None)


def input_seconds(feeding: Iterable[Feeding]) -> float:
    """Return the seconds from one batch to the next: while one is copied others are drawn, prepared and fetched."""
    found = slowest(feeding)
    return found.seconds if found else 0.0


def least_input_seconds(batch: int, cluster: Cluster) -> float:
    """Return the seconds that a step's input takes at least, whatever the plan: every sample is read once."""
    hosts = len({device.host for device in cluster.devices})
    return max(
        _seconds(batch, cluster.input_rate),
        _seconds(batch, cluster.rank_input_rate * cluster.num_devices) + cluster.rank_batch_seconds,
        _seconds(batch, cluster.host_input_rate * hosts),
        _seconds(batch, cluster.host_fetch_rate * hosts),
    )


def input_words(
    cluster: Cluster, feeding: Iterable[Feeding], step_seconds: float, devices: tuple[int, ...]
) -> str:
    """Say whether a plan's steps wait for input, and for what; nothing where the cluster has no rates of it."""
    most = slowest(feeding)
    if most is None or not most.seconds:
        return ""
    _, what, remedy = WORDS[most.kind]
    if most.seconds < step_seconds * (1 - 1e-9):
        return (
            f"input takes {most.seconds:.3g} s a step ({what}), beneath a step of {step_seconds:.3g} s: what binds is "
            "what devices compute and send"
        )
    hosts = len({cluster.devices[device].host for device in devices})
    return (
        f"input binds: {what} takes {most.seconds:.3g} s for a step of {len(devices)} "
        f"rank{'s'[: len(devices) > 1]} on {hosts} host{'s'[: hosts > 1]}, and computing takes less; faster devices "
        f"gain nothing, {remedy}"
    )


def _readers(program: Program, cluster: Cluster) -> list[tuple[int, dict[int, list[int]]]]:
    """Return a host of every sort that reads input, by its place among all, with its devices by the meshes that read."""
    places = {
        host: place for place, host in enumerate(sorted({one.host for one in cluster.devices}))
    }
    hosts: dict[int, dict[int, list[int]]] = {}
    for mesh in range(len(program.meshes)):
        if input_bytes(program, mesh):
            for device in program.meshes[mesh].devices:
                own = hosts.setdefault(places[cluster.devices[device].host], {})
                own.setdefault(mesh, []).append(device)
    sorts: dict[object, int] = {}
    for host in sorted(hosts):
        sorts.setdefault(_sort(hosts[host]), host)
    return [(host, hosts[host]) for host in sorts.values()]


def _sort(counts: dict[int, list[int]]) -> object:
    """Return what hosts that read alike have in common: which meshes each of their devices belongs to."""
    meshes: dict[int, list[int]] = {}
    for mesh, devices in counts.items():
        for device in devices:
            meshes.setdefault(device, []).append(mesh)
    return tuple(sorted(map(tuple, meshes.values())))


def _rows(program: Program, graph: OperatorGraph, mesh: int, batch: int) -> int:
    """Return how many samples each device of a mesh reads: those that its shards of the batch are cut from."""
    pieces = program.strategy.pipeline.num_microbatches
    rows = [0]
    for value in _shards(program, mesh):
        shape = graph.tensors[value.tensor].shape
        own = own_shape(value.shape, value.halos)[:1] if shape[:1] == (batch,) else (batch,)
        rows.append(own[0] * (pieces if value.scope == "microbatch" else 1))
    return min(max(rows), batch)


def _seconds(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
