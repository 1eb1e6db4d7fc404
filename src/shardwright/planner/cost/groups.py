"""Which devices of a mesh talk to each other, and how many such groups share a host's uplink."""

from __future__ import annotations

import numpy as np

from shardwright.core.cluster import Cluster
from shardwright.core.strategy import Mesh


def peer_groups(
    cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """Return one group of each shape over hosts, with the number of groups sharing its uplinks.

    On one CPU host all groups share the memory, so all of them count.
    """
    kept = [axis for axis in range(len(mesh.sizes)) if axis not in axes]
    length = int(np.prod([mesh.sizes[axis] for axis in axes], dtype=np.int64))
    groups, hosts = (
        np.array(listed).reshape(mesh.sizes).transpose(*kept, *axes).reshape(-1, length)
        for listed in (mesh.devices, [cluster.devices[one].host for one in mesh.devices])
    )
    hosts = np.sort(hosts, axis=1)
    fresh = np.ones(hosts.shape, dtype=np.bool_)  # each host where it comes first in its group
    fresh[:, 1:] = hosts[:, 1:] != hosts[:, :-1]
    num_hosts = fresh.sum(axis=1)
    shares = (num_hosts > 1) | (cluster.kind_of(mesh.devices[0]).backend == "cpu")
    crossing = np.bincount(hosts[fresh & shares[:, None]], minlength=len(cluster.switches))
    concurrent = np.maximum(crossing, 1)[hosts].max(axis=1)
    runs = np.cumsum(fresh, axis=1) - 1 + length * np.arange(len(hosts))[:, None]
    per_host = np.bincount(runs.reshape(-1), minlength=hosts.size).reshape(hosts.shape).max(axis=1)
    shapes = np.column_stack([num_hosts, per_host, concurrent])
    _, first = np.unique(shapes, axis=0, return_index=True)
    return [(tuple(groups[row].tolist()), int(concurrent[row])) for row in np.sort(first).tolist()]
