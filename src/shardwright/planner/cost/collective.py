"""Seconds of collectives: measured points, else latency-bandwidth formulas on the link tree.

Within a host of known GPUs NCCL's measured times are read (``kernels``), in-switch reduction with
them. Measured points are interpolated on straight lines between neighbours and continued with the last
slope. The model knows ring, double binary tree and hierarchical (within hosts, between hosts) forms
and takes the fastest that the back-end has, as NCCL's tuner would. A host's uplink is shared by all
groups crossing it at once. Constants from ``files/hardware.csv``: all-reduce on eight A100 over NVSwitch fits ``40 us + 2
us per hop + bytes at 0.75 of the link`` with 6 % mean error above 1 MiB; on four InfiniBand hosts
0.92 of the wire is reached. The model is wrong on oversubscribed fabrics.

Bytes follow ``core.program.Message``: the full local input, for all_gather the full local output.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from shardwright.core.cluster import Cluster, Link
from shardwright.core.costs import ADD, Cost, CostTable, collective_key, link_label
from shardwright.core.program import LOCAL
from shardwright.planner.cost.kernels import kernels_of
from shardwright.planner.cost.software import PROFILES

Points = tuple[tuple[float, float, float], ...]

# Fixed cost of starting one collective, and the share of a nominal link that a stream reaches.
LAUNCH_SECONDS = {"cuda": 4e-5, "cpu": 1e-4}
# What issuing a collective adds to its time in the measured tables.
ISSUE_SECONDS = 3e-5
INTRA_EFFICIENCY = 0.75
INTER_EFFICIENCY = 0.9
COPY_EFFICIENCY = 0.7
# Devices that are wired to each other, without a switch, in hosts of up to so many (DGX-2, of 16, has one):
# a group has the links between its own devices only. Of four, each pair has a third of a device's links, of
# which 0.9 is reached; of eight, a cube mesh, groups of 2 to 8 reach so much of all a device's links
# (files/hardware.csv, "V100 node", 512 MiB).
WIRED, PAIRS = {"V100": 8}, 4
PAIR_EFFICIENCY = 0.9
CUBE_MESH = (0.15, 0.30, 0.57, 0.25, 0.30, 0.58, 0.89)
MODEL_SPREAD = 0.25


def collective_seconds(
    primitive: str,
    num_bytes: float,
    devices: tuple[int, ...],
    cluster: Cluster,
    table: CostTable,
    concurrent: int = 1,
) -> Cost:
    """Return how long one group takes. ``transfer`` goes from the first device to the second.

    ``concurrent`` groups do the same at the same time through the same hosts' uplinks (or, on one
    CPU host, the same memory); their bytes share the bandwidth, not the latency.
    """
    is_local = primitive in LOCAL
    if num_bytes <= 0 or not devices or (len(devices) == 1 and not is_local):
        return Cost(seconds=0.0)
    if is_local:
        return _local_copy(num_bytes, cluster, devices[0], table)
    return _on_wire(primitive, num_bytes, (devices, len(devices)), cluster, table, concurrent)


def _on_wire(
    primitive: str,
    num_bytes: float,
    group_of: tuple[tuple[int, ...], int],
    cluster: Cluster,
    table: CostTable,
    concurrent: int,
) -> Cost:
    """Return what devices take that are measured as so many: measured, tabled or modelled."""
    devices, count = group_of
    group = _group(cluster, devices, concurrent)
    points = table.collective_map.get(collective_key(primitive, group.hosts, count, group.label))
    if points:
        return table.fitted(primitive, on_the_wire(points, num_bytes * concurrent))
    seconds = _tabled(primitive, num_bytes, devices, cluster) if group.hosts == 1 else None
    if seconds is None:
        seconds = _modelled(primitive, num_bytes, group)
    cost = Cost(seconds=seconds, spread=MODEL_SPREAD * seconds, source="modelled")
    return table.fitted(primitive, cost)


def _tabled(
    primitive: str, num_bytes: float, devices: tuple[int, ...], cluster: Cluster
) -> float | None:
    """Return what NCCL takes within a host of known GPUs, slowed down by what runs beside it."""
    kind, link = cluster.kind_of(devices[0]), cluster.devices[devices[0]].link
    tables = kernels_of(kind.name) if kind.backend == "cuda" else None
    if tables is None or link.source == "measured":
        return None
    alone = tables.collective(primitive, len(devices), num_bytes, link.bandwidth)
    if alone is None:
        return None
    return ISSUE_SECONDS + alone / PROFILES[cluster.software].collective


def halo_seconds(
    num_bytes: float,
    copied: float,
    devices: tuple[int, ...],
    cluster: Cluster,
    table: CostTable,
    concurrent: int = 1,
) -> Cost:
    """Return how long an exchange of halos takes: rows to and from both neighbours at once, and a
    copy of ``copied`` bytes, the shard that they are joined to or cut from.

    Costs what a transfer of ``num_bytes`` between two devices does, since neither direction nor
    neighbour waits for the other.
    """
    wire = _on_wire("transfer", num_bytes, (devices, 2), cluster, table, concurrent)
    copy = _local_copy(copied, cluster, devices[0], table)
    source = wire.source if wire.seconds >= copy.seconds else copy.source
    return Cost(
        seconds=wire.seconds + copy.seconds, spread=wire.spread + copy.spread, source=source
    )


def interpolate(points: Points, num_bytes: float) -> Cost:
    """Read measured (bytes, seconds, spread) points, ascending in bytes; never falling in bytes.

    One straight line is not enough: algorithms switch with size (dag_model.md section 6).
    """
    sizes = [point[0] for point in points]
    # Noise must not make a larger message cheaper.
    seconds = list(accumulate([point[1] for point in points], max))
    spreads = [point[2] for point in points]
    place = bisect_left(sizes, num_bytes)
    if place == 0:
        return Cost(seconds=seconds[0], spread=spreads[0], source="measured")
    last = len(points) - 1
    right = min(place, last)
    if last == 0:
        return Cost(seconds=seconds[0] * num_bytes / sizes[0], spread=spreads[0], source="measured")
    left = right - 1
    share = (num_bytes - sizes[left]) / (sizes[right] - sizes[left])
    value = seconds[left] + share * (seconds[right] - seconds[left])
    deviation = spreads[left] + min(share, 1.0) * (spreads[right] - spreads[left])
    if place > last:
        # Beyond the last point the error grows with what is extrapolated.
        value = max(value, seconds[last])
        deviation = spreads[last] * value / seconds[last] if seconds[last] else spreads[last]
    return Cost(seconds=value, spread=max(deviation, 0.0), source="measured")


def on_the_wire(points: Points, num_bytes: float) -> Cost:
    """Read measured points of messages. Beyond the largest a byte takes no less than on the whole way
    from the smallest: a last line that is flatter, as between two algorithms, ends there."""
    cost, first, last = interpolate(points, num_bytes), points[0], points[-1]
    if num_bytes <= last[0] or len(points) < 2:
        return cost
    least = last[1] + (last[1] - first[1]) / (last[0] - first[0]) * (num_bytes - last[0])
    if cost.seconds >= least:
        return cost
    spread = cost.spread * least / cost.seconds if cost.seconds else cost.spread
    return Cost(seconds=least, spread=spread, source=cost.source)


def _local_copy(num_bytes: float, cluster: Cluster, device: int, table: CostTable) -> Cost:
    """Price a copy where adding was measured as such a sum: what is written to is fetched first there, too."""
    if points := table.collective_map.get(ADD):
        return interpolate(points, num_bytes)
    kind = cluster.kind_of(device)
    seconds = kind.launch_seconds + 2 * num_bytes / (COPY_EFFICIENCY * kind.memory_bandwidth)
    return Cost(seconds=seconds, spread=MODEL_SPREAD * seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group on the tree. ``wide`` is what each *host* can send out, shared already."""

    label: str
    size: int
    hosts: int
    per_host: int
    launch: float
    near_latency: float
    near: float
    far_latency: float
    wide: float
    is_nccl: bool = False

    @property
    def ring_latency(self) -> float:
        """Seconds of one way round: a hop to every host but one and, within each, to every other device."""
        inside = self.size - self.hosts
        return inside * 2 * self.near_latency + (self.hosts - 1) * self.far_latency


def _reached(link: Link, efficiency: float) -> float:
    return link.bandwidth * (1.0 if link.source == "measured" else efficiency)


def _group(cluster: Cluster, devices: tuple[int, ...], concurrent: int) -> _Group:
    key = ("group", devices, concurrent)
    known = cluster.remembered.get(key)
    if not isinstance(known, _Group):
        known = cluster.remembered[key] = _find_group(cluster, devices, concurrent)
    return known


def _find_group(cluster: Cluster, devices: tuple[int, ...], concurrent: int) -> _Group:
    members: dict[int, int] = {}
    for device in devices:
        host = cluster.devices[device].host
        members[host] = members.get(host, 0) + 1
    near = [cluster.devices[device].link for device in devices]
    backend = cluster.kind_of(devices[0]).backend
    shared = concurrent if backend == "cpu" or len(members) > 1 else 1
    share = _intra_efficiency(cluster, devices[0], max(members.values()))
    near_bandwidth = min(_reached(link, share) for link in near)
    far_latency, wide = _uplinks(cluster, tuple(members)) if len(members) > 1 else (0.0, math.inf)
    return _Group(
        label=link_label(cluster, devices),
        size=len(devices),
        hosts=len(members),
        per_host=max(members.values()),
        launch=LAUNCH_SECONDS[backend],
        near_latency=max(link.latency for link in near),
        near=near_bandwidth / (shared if backend == "cpu" else 1),
        far_latency=far_latency,
        wide=wide / shared,
        is_nccl=backend == "cuda",
    )


def _intra_efficiency(cluster: Cluster, device: int, size: int) -> float:
    """Return the share of a device's nominal links within its host that a group of so many there reaches."""
    name, host = cluster.kind_of(device).name, cluster.devices[device].host
    most = next((count for part, count in WIRED.items() if part in name), 0)
    count = cluster.sizes_of_hosts[host]
    if not 1 < size <= count <= most:
        return INTRA_EFFICIENCY
    return PAIR_EFFICIENCY * (size - 1) / (count - 1) if count <= PAIRS else CUBE_MESH[size - 2]


def _uplinks(cluster: Cluster, hosts: tuple[int, ...]) -> tuple[float, float]:
    """Return (one-way latency, bytes/s per host) of the slowest links between hosts.

    A switch's uplink is shared by the hosts under it that belong to the group.
    """
    chains = [cluster.path_to_root(host) for host in hosts]
    common = set(chains[0]).intersection(*map(set, chains[1:]))
    users: dict[int, int] = {}
    latency = 0.0
    for chain in chains:
        steps = [switch for switch in chain if switch not in common]
        for switch in steps:
            users[switch] = users.get(switch, 0) + 1
        latency = max(latency, sum(_link_of(cluster, switch).latency for switch in steps))
    rates = [
        _reached(_link_of(cluster, switch), INTER_EFFICIENCY) / count
        for switch, count in users.items()
    ]
    return 2 * latency, min(rates, default=math.inf)


def _link_of(cluster: Cluster, switch: int) -> Link:
    link = cluster.switches[switch].link
    return link if link is not None else Link(latency=0.0, bandwidth=math.inf)


def _modelled(primitive: str, size: float, group: _Group) -> float:
    """Return the fastest form's seconds, launch included."""
    if primitive == "transfer":
        hop = group.near_latency * 2 + group.far_latency
        return group.launch + hop + size / min(group.near, group.wide)
    if primitive == "all_to_all":
        return group.launch + _all_to_all(size, group)
    rounds = 2 if primitive == "all_reduce" else 1
    forms = [_ring(size, group, rounds)]
    # NCCL gathers and scatters in rings only.
    if group.hosts > 1 and group.per_host > 1 and not group.is_nccl:
        forms.append(_hierarchical(size, group, rounds))
    if primitive == "all_reduce":
        forms.append(_double_tree(size, group))
    return group.launch + min(forms)


def _ring(size: float, group: _Group, rounds: int) -> float:
    """``rounds`` x (N-1) hops, each moving size/N; hops between hosts are the slow ones."""
    hops = rounds * (group.size - 1)
    moved = hops / group.size * size / min(group.near, group.wide)
    return rounds * group.ring_latency + moved


def _double_tree(size: float, group: _Group) -> float:
    """Down and up two complementary trees: 2 log2 hops of latency, every byte crosses twice."""
    far = 2 * math.log2(group.hosts) * group.far_latency
    near = 2 * math.log2(max(group.per_host, 1)) * group.near_latency * 2
    return far + near + 2 * size / min(group.near, group.wide)


def _hierarchical(size: float, group: _Group, rounds: int) -> float:
    """Reduce-scatter and all-gather within hosts around a ring of each host's shards."""
    inner = rounds * (group.per_host - 1)
    outer = rounds * (group.hosts - 1)
    near = inner * group.near_latency * 2 + inner / group.per_host * size / group.near
    return near + outer * group.far_latency + outer / group.hosts * size / group.wide


def _all_to_all(size: float, group: _Group) -> float:
    """Every device keeps 1/N; what leaves a host shares its uplink."""
    near = size * (group.size - 1) / group.size / group.near
    leaving = size * group.per_host * (group.size - group.per_host) / group.size
    far = leaving / group.wide if group.hosts > 1 else 0.0
    hop = max(group.near_latency * 2, group.far_latency)
    return math.ceil(math.log2(group.size)) * hop + max(near, far)
