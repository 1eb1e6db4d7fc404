"""Does any plan satisfy the limits? Answered by the first one found, without looking for the best.

Where memory is the question, plans that use as little as the additive model can are simulated first;
where time is, the search runs until something is fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.core.cluster import Cluster, Device, Switch
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.errors import NoPlan
from shardwright.planner.model.context import Context
from shardwright.planner.model.training import Training
from shardwright.planner.search.answer import make_plan
from shardwright.planner.search.goals import FASTEST, Goal
from shardwright.planner.search.limits import NO_LIMITS, Limits, room
from shardwright.planner.search.loop import run
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.progress import Progress
from shardwright.planner.search.proposers.smallest import descended
from shardwright.planner.search.search import search


def small_plan(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    *,
    training: Training,
    limit: float,
    stop: Callable[[], bool] | None = None,
) -> Plan | None:
    """Return the first plan found within ``limit`` bytes per device, None where none was."""
    pool = Pool(Context.of(graph, cluster, table, training), limit, stop=stop)
    run(pool, descended)
    return make_plan(pool.findings(), pool.fitting[0], 0) if pool.fitting else None


def some_plan(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    *,
    training: Training,
    limits: Limits = NO_LIMITS,
    goal: Goal = FASTEST,
    stop: Callable[[], bool] | None = None,
) -> Plan | None:
    """Return a plan within the memory limit and the deadline, or None where none was found."""
    if goal.deadline == math.inf:
        limit = room(cluster, limits)
        return small_plan(graph, cluster, table, training=training, limit=limit, stop=stop)
    context = Context.of(graph, cluster, table, training)
    if context.prices.serial_seconds / cluster.num_devices > goal.deadline:
        return None  # not even if all work divided evenly
    is_met = False

    def note(progress: Progress) -> None:
        nonlocal is_met
        is_met = is_met or progress.best_seconds <= goal.deadline

    def enough() -> bool:
        return is_met or (stop is not None and stop())

    try:
        fastest = Goal(deadline=goal.deadline)
        return search(
            graph, cluster, table, training=training, limits=limits, goal=fastest,
            progress=note, stop=enough,
        ).best  # fmt: skip
    except NoPlan:
        return None


def grown(cluster: Cluster, num_devices: int) -> Cluster | None:
    """Return the cluster with devices like its last ones up to so many: whole hosts like the last
    host, or more devices in the only one. None where whole hosts do not add up to that number."""
    extra = num_devices - cluster.num_devices
    last = cluster.devices[-1]
    host = cluster.switches[last.host]
    if host.parent < 0:
        return replace(cluster, devices=cluster.devices + (last,) * extra)
    members = [device for device in cluster.devices if device.host == last.host]
    if extra < 0 or extra % len(members):
        return None
    switches: list[Switch] = list(cluster.switches)
    devices: list[Device] = list(cluster.devices)
    for _ in range(extra // len(members)):
        switches.append(replace(host, name=f"{host.name}+{len(switches)}", address=""))
        devices += [replace(member, host=len(switches) - 1) for member in members]
    return replace(cluster, switches=tuple(switches), devices=tuple(devices))
