"""What the input of a step costs: drawn from the loader and copied to devices."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
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

    Every rank draws the global batch and copies its own shards. Devices of one host share its bus.
    """
    if not (cluster.input_rate or cluster.copy_bandwidth):
        return {}
    sizes = {mesh: input_bytes(program, mesh) for mesh in range(len(program.meshes))}
    passing: dict[int, int] = {}
    hosts: dict[int, set[int]] = {}
    for mesh, size in sizes.items():
        for device in program.meshes[mesh].devices:
            host = cluster.devices[device].host
            passing[host] = passing.get(host, 0) + size
            hosts.setdefault(mesh, set()).add(host)
    rate, bandwidth = cluster.input_rate, cluster.copy_bandwidth
    fetch = batch_size(graph, samples) / rate if rate else 0.0
    return {
        mesh: (fetch, max(passing[host] for host in hosts[mesh]) / bandwidth if bandwidth else 0.0)
        for mesh, size in sizes.items()
        if size
    }
