"""Seconds of what is sent from one mesh to another: of the slowest pair of devices."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Program
from shardwright.planner.cost.collective import collective_seconds


def transfer_cost(program: Program, item: int, cluster: Cluster, table: CostTable) -> Cost:
    """Price the slowest pair; pairs leaving one host share its uplink, others their devices."""
    message, hosts = program.messages[item], cluster.devices
    moved: dict[tuple[int, int], int] = {}
    for source, pieces in zip(message.sources, program.pieces(item), strict=True):
        width = DTYPE_BYTES[program.values[source].dtype]
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
        collective_seconds("transfer", size, pair, cluster, table, share)
        for (share, size, _), pair in seen.items()
    ]
    return max(costs, key=lambda cost: cost.seconds, default=Cost(seconds=0.0))
