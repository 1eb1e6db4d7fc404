"""Which resources of a Program send between hosts, where several of one group may at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.program import Kind, Message, Program, ResourceClass
from shardwright.core.strategy import Mesh


def far_resources(program: Program, cluster: Cluster) -> NDArray[np.bool_] | None:
    """Return for each resource whether its messages leave hosts; None unless some group's collectives do over
    several sets of axes: one at a time has the uplinks, as it is priced, and transfers are short beside those.
    O(instructions)."""
    if len({device.host for device in cluster.devices}) == 1:
        return None
    meshes, sent = program.meshes, one_of_each(program)  # transfers span no axes
    far = [(one, item) for one, item in sent if _crosses(meshes[item.mesh], item.axes, cluster)]
    if len(far) == len({item.mesh for _, item in far}):
        return None
    found = np.zeros(len(program.resource_names), dtype=np.bool_)
    found[[resource for resource, _ in far]] = True
    for resource, item in sent:
        found[resource] |= item.destination >= 0 and _are_apart(
            meshes[item.mesh], meshes[item.destination], cluster
        )
    return found


def one_of_each(program: Program) -> list[tuple[int, Message]]:
    """Return every resource that sends, with a message of it: all go the same way. What is sliced or copied is
    a message, too, but a computation of its devices."""
    is_sent = (program.kind == Kind.MESSAGE) | (program.kind == Kind.SEND)
    sent = np.flatnonzero(
        is_sent & (program.resource_class[program.resource] == ResourceClass.LINK)
    )
    resources, first = np.unique(program.resource[sent], return_index=True)
    items: list[int] = program.item[sent[first]].tolist()
    return list(zip(resources.tolist(), map(program.messages.__getitem__, items), strict=True))


def _crosses(mesh: Mesh, axes: tuple[int, ...], cluster: Cluster) -> bool:
    """Whether a group along these axes has devices of several hosts; remembered, since every simulation asks."""
    key = ("crosses", mesh, axes)
    known = cluster.remembered.get(key)
    if not isinstance(known, bool):
        hosts = np.array([cluster.devices[one].host for one in mesh.devices]).reshape(mesh.sizes)
        known = any(bool((hosts != hosts.take([0], axis=axis)).any()) for axis in axes)
        cluster.remembered[key] = known
    return known


def _are_apart(here: Mesh, there: Mesh, cluster: Cluster) -> bool:
    """Whether two meshes have no host in common."""
    hosts = {cluster.devices[one].host for one in here.devices}
    return hosts.isdisjoint(cluster.devices[one].host for one in there.devices)
