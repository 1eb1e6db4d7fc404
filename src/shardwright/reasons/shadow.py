"""Shadow prices of the hardware: the same plan simulated again on a cluster that is better in one way.

Measured times have no formula to put a faster link into, so every price is multiplied by how much the
*modelled* price changes; where nothing is measured that is the modelled price itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from shardwright.core.cluster import Cluster, DeviceKind, Link
from shardwright.core.costs import CostTable
from shardwright.core.explanation import ShadowPrice
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.planner.cost import price
from shardwright.planner.simulate import simulate_on


def hardware_prices(
    program: Program, graph: OperatorGraph, cluster: Cluster, table: CostTable
) -> tuple[ShadowPrice, ...]:
    """Return the step with every rate doubled in turn, what helps most first."""
    actual = price(program, graph, cluster, table).seconds
    bare = CostTable(overheads=table.overheads)
    before = price(program, graph, cluster, bare).seconds
    found: list[ShadowPrice] = []
    for what, other in improved(cluster):
        after = price(program, graph, other, bare).seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(before > 0, after / before, 1.0)
        timeline = simulate_on(other, table, program, actual * share)
        found.append(ShadowPrice(what=what, step_seconds=timeline.step_seconds))
    return tuple(sorted(found, key=lambda one: (one.step_seconds, one.what)))


def improved(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with one thing twice as good, and what that is."""
    yield from _links(cluster)
    changes: tuple[tuple[str, Callable[[DeviceKind], DeviceKind]], ...] = (
        ("arithmetic twice as fast", _faster),
        (
            "memory bandwidth of devices x 2",
            lambda kind: replace(kind, memory_bandwidth=2 * kind.memory_bandwidth),
        ),
        (
            "launches of operators twice as fast",
            lambda kind: replace(kind, launch_seconds=kind.launch_seconds / 2),
        ),
    )
    for what, change in changes:
        yield what, replace(cluster, kinds=tuple(map(change, cluster.kinds)))
    if cluster.overlap_slowdown > 1:
        yield "free overlap of computation and messages", replace(cluster, overlap_slowdown=1.0)


def _faster(kind: DeviceKind) -> DeviceKind:
    return replace(kind, peak_flops=tuple((name, 2 * rate) for name, rate in kind.peak_flops))


def _links(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield one cluster per level of links: within hosts, between hosts, and above."""
    if cluster.num_devices > 1:
        devices = tuple(replace(one, link=_wider(one.link)) for one in cluster.devices)
        yield "bandwidth within hosts x 2", replace(cluster, devices=devices)
    for is_host, what in ((True, "between hosts"), (False, "between switches")):
        chosen = [one.link is not None and one.is_host == is_host for one in cluster.switches]
        if any(chosen):
            switches = tuple(
                replace(one, link=_wider(one.link)) if mine and one.link is not None else one
                for one, mine in zip(cluster.switches, chosen, strict=True)
            )
            yield f"bandwidth {what} x 2", replace(cluster, switches=switches)


def _wider(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)
