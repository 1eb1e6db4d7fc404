"""How long messages wait for a core while more ranks compute than there are cores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import CostTable
from shardwright.core.program import Message, Program
from shardwright.planner.cost.burden import crowding_seconds
from shardwright.planner.simulate.columns import ranks_of_groups
from shardwright.planner.simulate.uplinks import one_of_each


def waits_for_cores(
    program: Program, cluster: Cluster, table: CostTable
) -> NDArray[np.float64] | None:
    """Return for each resource by how many seconds a message on it takes longer while ranks crowd on cores; None where
    each has one. O(instructions)."""
    cores = table.overhead_map.get("cores")
    if cores is None or ranks_of_groups(program).sum() <= cores:
        return None
    found = np.zeros(len(program.resource_names))
    for resource, message in one_of_each(program):
        ends = _group_of(program, message)
        found[resource] = crowding_seconds(message.primitive, ends, cluster, table)
    return found


def _group_of(program: Program, message: Message) -> tuple[int, ...]:
    """Return the devices of one of the groups that a message goes between."""
    mesh = program.meshes[message.mesh]
    if message.destination >= 0:
        return mesh.devices[0], program.meshes[message.destination].devices[0]
    return mesh.peers(mesh.devices[0], message.axes)
