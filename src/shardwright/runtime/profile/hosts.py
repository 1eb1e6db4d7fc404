"""Measure where a plan is to run: in the ranks of a cluster, which have joined a world already.

What measures this machine in processes of its own measures here in all ranks at once, each calling the
same functions with equal arguments. Whoever has more ranks than cores has ranks that compute more slowly
than their own clocks say while others compute: on how many cores they do is measured first, and the
simulator shares these among those that compute at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.core.cluster import Cluster
from shardwright.core.costs import Record, link_label
from shardwright.core.legality import divisors
from shardwright.runtime.clocks import clock_offset
from shardwright.runtime.place import device_of, this_host
from shardwright.runtime.profile import operators
from shardwright.runtime.profile.clock import Timing
from shardwright.runtime.profile.collectives import (
    PRIMITIVES,
    SIZES,
    Probe,
    name_records,
    scalar,
    time_alone,
    time_busy,
    time_crowding,
)
from shardwright.runtime.profile.crowds import shared_cores
from shardwright.runtime.profile.machine import resident_bytes
from shardwright.runtime.profile.overheads import time_overheads
from shardwright.runtime.profile.passes import time_in_passes
from shardwright.runtime.profile.shards import Wanted
from shardwright.runtime.workers import Progress

if TYPE_CHECKING:
    from shardwright.runtime.capture import Captured

Groups = tuple[tuple[int, ...], ...]


class Means(NamedTuple):
    """With what a rank measures: its device, the cores that ranks share (infinitely many where each has its own), and
    what is added to its clock to have the first rank's."""

    place: torch.device
    cores: float
    offset: float


# Networks go on as they are at 4 MiB; larger messages of slow ones would take all the time there is.
PROBE = Probe(primitives=PRIMITIVES, sizes=SIZES[:-1])
# To see whether what was measured still holds.
BRIEF = Probe(primitives=("all_reduce", "transfer"), sizes=(SIZES[3], SIZES[5]), overheads=False)


def group_shapes(cluster: Cluster) -> tuple[Groups, ...]:
    """Return the groups that are measured at the same time, for each shape that divides the cluster.

    Groups of one shape are so many devices on each of so many hosts, and each host is in one of them.
    All devices together are the last.
    """
    on: dict[int, list[int]] = {}
    for number, device in enumerate(cluster.devices):
        on.setdefault(device.host, []).append(number)
    hosts = list(on.values())
    found: dict[Groups, None] = {}
    for across in divisors(len(hosts)):
        for inside in divisors(min(map(len, hosts))):
            if across * inside > 1:
                parts = (hosts[at : at + across] for at in range(0, len(hosts), across))
                found[tuple(tuple(d for one in part for d in one[:inside]) for part in parts)] = (
                    None
                )
    found[(tuple(range(cluster.num_devices)),)] = None
    return tuple(found)


def measure_links(
    cluster: Cluster,
    *,
    environment: str,
    budget_seconds: float,
    report: Progress,
    probe: Probe = PROBE,
) -> list[Record]:
    """Measure messages of all shapes of groups, alone and beneath computation, and what running a rank
    costs besides; a collective call. Rank 0's clock counts, and its ``report`` is told."""
    place = own_place()
    found = _overheads() if place.type == "cpu" and probe.overheads else {}
    offset = clock_offset(torch.device("cpu")) if place.type == "cpu" else 0.0
    cores = shared_cores(offset) if place.type == "cpu" else float(cluster.num_devices)
    found["overhead|cores"] = scalar(cores)
    means = Means(place, cores if cores < dist.get_world_size() else math.inf, offset)
    records: list[Record] = []
    shapes = group_shapes(cluster)
    for number, shape in enumerate(shapes):
        found |= _time_shape(shape, probe, budget_seconds / len(shapes), means)
        report(number + 1, len(shapes))
        first = shape[0]
        hosts = len({cluster.devices[device].host for device in first})
        label = link_label(cluster, first)
        records += name_records(found, hosts, len(first), label, environment)
        found = {}
    return records


def _overheads() -> dict[str, Timing]:
    """Measure what running a rank costs, all ranks busy at the same time."""
    occupied = scalar(float(resident_bytes()))
    dist.barrier()
    return {"overhead|process_bytes": occupied, **time_overheads(meet=dist.barrier)}


def _time_shape(shape: Groups, probe: Probe, seconds: float, means: Means) -> dict[str, Timing]:
    """Measure messages alone in all groups of a shape at once; nothing on a rank that is in none.

    What they cost who computes is measured at once, too, unless ranks share cores: then only in the first group, since the
    simulator knows of the others, and in all at once how long messages wait for cores.
    """
    place, cores = means.place, means.cores
    groups, found = _own_groups(shape), dict[str, Timing]()
    for group in groups.values():
        found = time_alone(group, probe, seconds, lambda *_: None, place)
    dist.barrier()
    for group in groups.values() if cores < math.inf and probe.overheads else ():
        found |= time_crowding(group, found, means.offset)
    dist.barrier()
    for number, group in groups.items():
        if number == 0 or cores == math.inf:
            found |= time_busy(group, probe, found, place, cores=cores)
    dist.barrier()
    for group in groups.values():
        dist.destroy_process_group(group)
    return found


def _own_groups(shape: Groups) -> dict[int, ProcessGroup]:
    """Make all groups of a shape, and return that of this rank, if it is in one, by its number."""
    groups: list[Any] = [dist.new_group(list(devices)) for devices in shape]
    return {n: groups[n] for n, devices in enumerate(shape) if dist.get_rank() in devices}


def measure_operators(
    captured: Captured,
    wanted: Wanted,
    setting: operators.Setting,
    *,
    budget_seconds: float,
    report: Progress,
) -> list[Record]:
    """Measure operator shards on all ranks at once; every rank returns what all have seen."""
    place = own_place()
    job = operators.job_of(captured, wanted, replace(setting, device=place.type), budget_seconds)
    if not job.runs:
        return []
    if place.type == "cpu":  # with as many threads as it trains with
        mine = time_in_passes(job.runs, budget_seconds, report, from_memory=job.from_memory)
    else:
        mine = operators.work(place.index or 0, job, Path(), report)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return operators.merged(wanted, ranks, setting.environment)


def own_place() -> torch.device:
    """Return this rank's device, as it trains."""
    return torch.device(device_of("", "", this_host()))
