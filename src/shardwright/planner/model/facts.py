"""Facts about a graph and its cluster that the additive model asks for once."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.planner.model.ties import Ties


def slowest(cluster: Cluster) -> int:
    """Return a device of the kind that computes slowest in float32: a group waits for it."""
    return min(
        range(cluster.num_devices), key=lambda device: cluster.kind_of(device).flops_for("float32")
    )


def read_last(graph: OperatorGraph, ties: Ties) -> frozenset[int]:
    """Return the parameters that only the last block with any reads, if no other block is alike:
    backward begins with them.
    """
    last = max((ties.block[r] for t in graph.parameters for r in graph.consumers[t]), default=-1)
    if len(ties.classes.get(last, ())) != 1:
        return frozenset()
    return frozenset(
        tensor
        for tensor in graph.parameters
        if {ties.block[reader] for reader in graph.consumers[tensor]} == {last}
    )
