"""What the input of a step costs: drawn from the loader and copied to devices."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.halo import own_shape
from shardwright.core.program import Program
from shardwright.planner.space.samples import Samples, batch_size


def input_bytes(program: Program, mesh: int) -> int:
    """Return one device's bytes of the batch."""
    pieces = program.strategy.pipeline.num_microbatches
    return sum(
        value.bytes * (pieces if value.scope == "microbatch" else 1)
        for value in program.values
        if value.role == "input" and value.mesh == mesh and value.alias < 0
    )


def input_costs(
    program: Program, graph: OperatorGraph, samples: Samples, cluster: Cluster
) -> dict[int, tuple[float, float]]:
    """Return the seconds of fetching a batch and of copying it, by the meshes that read it; nothing where
    the cluster has no rates of input.

    Devices of one host share its bus, its cores and its storage. A loader works ahead of who copies, so that of
    reading by ranks only what copying does not hide is fetched.
    """
    if not any(cluster.input_rates):
        return {}
    sizes = {mesh: input_bytes(program, mesh) for mesh in range(len(program.meshes))}
    batch = batch_size(graph, samples)
    rows = {mesh: _rows(program, graph, mesh, batch) for mesh in sizes}
    passing: dict[int, int] = {}  # bytes, by host
    read: dict[int, dict[int, int]] = {}  # samples, by host and device
    hosts: dict[int, set[int]] = {}
    for mesh, size in sizes.items():
        for device in program.meshes[mesh].devices:
            host = cluster.devices[device].host
            passing[host] = passing.get(host, 0) + size
            mine = read.setdefault(host, {})
            mine[device] = max(mine.get(device, 0), rows[mesh])
            hosts.setdefault(mesh, set()).add(host)
    whole = _seconds(batch, cluster.input_rate)
    found: dict[int, tuple[float, float]] = {}
    for mesh in (mesh for mesh, size in sizes.items() if size):
        copy = _seconds(max(passing[host] for host in hosts[mesh]), cluster.copy_bandwidth)
        one = _seconds(rows[mesh], cluster.rank_input_rate)
        most = max(sum(read[host].values()) for host in hosts[mesh])
        ahead = max(one, _seconds(most, cluster.host_input_rate))
        found[mesh] = max(whole, ahead - copy), copy
    return found


def least_input_seconds(batch: int, cluster: Cluster) -> float:
    """Return the seconds that a step's input takes at least, whatever the plan: every sample is read once."""
    hosts = len({device.host for device in cluster.devices})
    return max(
        _seconds(batch, cluster.input_rate),
        _seconds(batch, cluster.rank_input_rate * cluster.num_devices),
        _seconds(batch, cluster.host_input_rate * hosts),
    )


def input_words(
    cluster: Cluster, input_seconds: float, step_seconds: float, devices: tuple[int, ...]
) -> str:
    """Say whether a plan's steps wait for input; nothing where the cluster has no rates of it."""
    if not input_seconds:
        return ""
    if input_seconds < step_seconds * (1 - 1e-9):
        return (
            f"input takes {input_seconds:.3g} s a step, beneath a step of {step_seconds:.3g} s: what binds is what "
            "devices compute and send"
        )
    hosts = len({cluster.devices[device].host for device in devices})
    return (
        f"input binds: the loaders of {len(devices)} rank{'s'[: len(devices) > 1]} on {hosts} "
        f"host{'s'[: hosts > 1]} take {input_seconds:.3g} s for a step, and computing takes less; faster devices "
        "gain nothing, faster loaders do"
    )


def _rows(program: Program, graph: OperatorGraph, mesh: int, batch: int) -> int:
    """Return how many samples each device of a mesh reads: those that its shards of the batch are cut from."""
    pieces = program.strategy.pipeline.num_microbatches
    rows = [0]
    for value in program.values:
        if value.role == "input" and value.mesh == mesh and value.alias < 0:
            shape = graph.tensors[value.tensor].shape
            own = own_shape(value.shape, value.halos)[:1] if shape[:1] == (batch,) else (batch,)
            rows.append(own[0] * (pieces if value.scope == "microbatch" else 1))
    return min(max(rows), batch)


def _seconds(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
