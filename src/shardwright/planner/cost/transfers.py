"""Seconds of what is sent from one mesh to another: of the slowest pair of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Cost, CostTable
from shardwright.core.crossing import elements_between
from shardwright.core.graph import DTYPE_BYTES
from shardwright.core.program import Message, Program, Value
from shardwright.core.strategy import Mesh
from shardwright.planner.cost.collective import collective_seconds


def transfer_cost(
    program: Program,
    item: int,
    cluster: Cluster,
    table: CostTable,
    known: dict[tuple[object, ...], Cost],
) -> Cost:
    """Price the slowest pair; pairs that leave one host, or come to one, share its link, others their
    devices' ports. So what many push to one server comes in as fast as its link lets it.

    ``known`` are prices of what travelled between equal meshes before (chunks share theirs); this one is added.
    """
    message, values = program.messages[item], program.values
    meshes = program.meshes[message.mesh], program.meshes[message.destination]
    ends = [
        (values[source], values[result])
        for source, result in zip(message.sources, message.results, strict=True)
    ]
    sent = tuple([(one.shape, one.layout, one.dtype, other.layout) for one, other in ends])
    key = (*meshes, sent)
    if key not in known:
        known[key] = _slowest(moved_bytes(ends, *meshes), cluster, table)
    return known[key]


def paired_seconds(
    mesh: Mesh,
    axes: tuple[int, ...],
    pairs: Sequence[tuple[int, int]],
    num_bytes: int,
    ends: tuple[Cluster, CostTable],
) -> Cost:
    """Price so many bytes from one place along axes to another, for each of the pairs and in every group."""
    groups = {mesh.peers(device, axes) for device in mesh.devices}
    moved = {(peers[one], peers[other]): num_bytes for peers in groups for one, other in pairs}
    return _slowest(moved, *ends)


def _slowest(moved: Mapping[tuple[int, int], int], cluster: Cluster, table: CostTable) -> Cost:
    pairs = np.array(list(moved), dtype=np.int64).reshape(-1, 2)
    sizes = np.array(list(moved.values()), dtype=np.int64)
    hosts = np.array([[cluster.devices[one].host for one in pair] for pair in moved]).reshape(-1, 2)
    crosses = hosts[:, 0] != hosts[:, 1]
    inside = np.where(crosses[:, None], -1, pairs)  # through a device's port, not a host's
    share = np.maximum(_alike(inside[:, 0]), _alike(inside[:, 1]))
    share[crosses] = np.maximum(_alike(hosts[crosses, 0]), _alike(hosts[crosses, 1]))
    # Through one device's port pieces follow each other.
    follow = np.where(crosses, 1, share)
    kinds = np.stack([np.where(crosses, share, 1), sizes * follow, crosses], axis=1)
    first = np.sort(np.unique(kinds, axis=0, return_index=True)[1]).tolist()
    costs = [
        collective_seconds(
            "transfer", int(kinds[at, 1]), tuple(pairs[at].tolist()), cluster, table, int(kinds[at, 0])
        )
        for at in first
    ]  # fmt: skip
    return max(costs, key=lambda cost: cost.seconds, default=Cost(seconds=0.0))


def halo_bytes(program: Program, message: Message) -> int:
    """Return the bytes of the shard that halos are joined to or cut from, 0 where none are sent."""
    if message.primitive not in {"halo", "halo_sum"}:
        return 0
    return max(program.values[value].bytes for value in (*message.sources, *message.results))


def moved_bytes(
    ends: Iterable[tuple[Value, Value]], here: Mesh, there: Mesh
) -> dict[tuple[int, int], int]:
    """Return the bytes that go from one device to another where values on one mesh become others on another; what
    stays on its device is no traffic."""
    whole, moved = 0, dict[tuple[int, int], int]()
    for source, result in ends:
        if here.sizes == there.sizes and source.layout == result.layout:
            whole += source.bytes  # every device sends its shard to the one at its place
            continue
        width = DTYPE_BYTES[source.dtype]
        ends_of = (source.shape, source.layout, here), (result.shape, result.layout, there)
        for sender, receiver, count in elements_between(*ends_of):
            if sender != receiver:
                moved[sender, receiver] = moved.get((sender, receiver), 0) + count * width
    for pair in zip(here.devices, there.devices, strict=True) if whole else ():
        if pair[0] != pair[1]:
            moved[pair] = moved.get(pair, 0) + whole
    return moved


def _alike(ports: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each port how often it is listed."""
    _, place, counts = np.unique(ports, return_inverse=True, return_counts=True)
    return counts[place]
