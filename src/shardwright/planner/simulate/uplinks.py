"""Which resources of a Program send between hosts, where several of one group may at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.program import Kind, Program
from shardwright.core.strategy import Mesh


def far_resources(program: Program, cluster: Cluster) -> NDArray[np.bool_] | None:
    """Return for each resource whether its messages leave hosts; None unless some group's collectives do over
    several sets of axes: one at a time has the uplinks, as it is priced, and transfers are short beside those.
    O(instructions)."""
    if len({cluster.devices[one].host for mesh in program.meshes for one in mesh.devices}) == 1:
        return None
    sent = np.flatnonzero((program.kind == Kind.MESSAGE) | (program.kind == Kind.SEND))
    resources, first = np.unique(program.resource[sent], return_index=True)
    found = np.zeros(len(program.resource_names), dtype=np.bool_)
    collectives: list[int] = []  # their groups
    for resource, index in zip(resources.tolist(), sent[first].tolist(), strict=True):
        message = program.messages[program.item[index]]
        here = program.meshes[message.mesh]
        if message.destination >= 0:
            found[resource] = _are_apart(here, program.meshes[message.destination], cluster)
        elif _crosses(here, message.axes, cluster):
            found[resource] = True
            collectives.append(int(program.group[index]))
    return found if len(collectives) > len(set(collectives)) else None


def _crosses(mesh: Mesh, axes: tuple[int, ...], cluster: Cluster) -> bool:
    """Whether a group along these axes has devices of several hosts."""
    hosts = np.array([cluster.devices[one].host for one in mesh.devices]).reshape(mesh.sizes)
    return any(bool((hosts != hosts.take([0], axis=axis)).any()) for axis in axes)


def _are_apart(here: Mesh, there: Mesh, cluster: Cluster) -> bool:
    """Whether two meshes have no host in common."""
    hosts = {cluster.devices[one].host for one in here.devices}
    return hosts.isdisjoint(cluster.devices[one].host for one in there.devices)
