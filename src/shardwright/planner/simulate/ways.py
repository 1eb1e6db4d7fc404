"""The resources of a Program that send: which of them share what a group can send between hosts at once, and how
long messages wait for a core while more ranks compute than there are cores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.program import Kind, Message, Program, ResourceClass
from shardwright.core.strategy import Mesh
from shardwright.planner.cost.burden import crowding_seconds
from shardwright.planner.simulate.columns import Ways, ranks_of_groups


def ways_of(program: Program, cluster: Cluster, table: CostTable) -> Ways:
    """Return both. O(instructions)."""
    return Ways(far_resources(program, cluster), waits_for_cores(program, cluster, table))


def far_resources(program: Program, cluster: Cluster) -> NDArray[np.bool_] | None:
    """Return for each resource whether its messages leave hosts; None unless some group's collectives do over
    several sets of axes: one at a time has the uplinks, as it is priced, and transfers are short beside those."""
    if len({device.host for device in cluster.devices}) == 1:
        return None
    meshes, sent = program.meshes, _one_of_each(program)  # transfers span no axes
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


def waits_for_cores(
    program: Program, cluster: Cluster, table: CostTable
) -> NDArray[np.float64] | None:
    """Return for each resource by how many seconds a message on it takes longer while ranks crowd on cores; None where
    each has one."""
    cores = table.overhead_map.get("cores")
    if cores is None or ranks_of_groups(program).sum() <= cores:
        return None
    found = np.zeros(len(program.resource_names))
    for resource, message in _one_of_each(program):
        mesh = program.meshes[message.mesh]
        ends = mesh.peers(mesh.devices[0], message.axes)  # one of the groups that it goes between
        if message.destination >= 0:
            ends = mesh.devices[0], program.meshes[message.destination].devices[0]
        found[resource] = crowding_seconds(message.primitive, ends, cluster, table)
    return found


def _one_of_each(program: Program) -> list[tuple[int, Message]]:
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
