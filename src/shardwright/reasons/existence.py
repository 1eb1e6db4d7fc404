"""Whether there is a plan at all: with more memory, more devices or a later deadline.

Many questions of the kind "and with twice the devices?" are answered by a walk from the corners of the shapes to less
memory, which simulates only what may fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Unpack

from shardwright.core.cluster import Cluster, Device, Switch
from shardwright.core.costs import CostTable
from shardwright.core.graph import OperatorGraph
from shardwright.core.plan import Plan
from shardwright.planner.model.arrangements import shapes
from shardwright.planner.remember import remembered
from shardwright.planner.search.answer import make_plan
from shardwright.planner.search.candidates import Candidate
from shardwright.planner.search.loop import Proposals, run
from shardwright.planner.search.pool import Pool
from shardwright.planner.search.proposers.additive import on_fewer
from shardwright.planner.search.proposers.known import known
from shardwright.planner.search.proposers.smallest import ends, until_one_fits
from shardwright.planner.search.search import How, begun, explore
from shardwright.planner.search.steering import CLOSE, HOPELESS

Place = tuple[int, int]  # stages and width of the tensor axis


def some_plan(
    graph: OperatorGraph,
    cluster: Cluster,
    table: CostTable,
    *,
    deadline: float = math.inf,
    **how: Unpack[How],
) -> Plan | None:
    """Return a plan within the memory limit and the deadline, the first one found, or None where none was.

    Where memory is the question, plans that use as little as the additive model can are simulated first;
    where time is, the search runs until something is fast enough.
    """
    stop = how.get("stop")

    def is_met() -> bool:
        return pool.fastest <= deadline or (stop is not None and stop())

    if deadline < math.inf:
        how["stop"] = is_met
    pool = begun(graph, cluster, table, **how)
    if deadline == math.inf:
        run(pool, descended)
    elif pool.even_split(cluster.num_devices) <= deadline:  # else not even if all work divided so
        explore(pool, on_fewer)
    fits = [one for one in pool.fitting if one.seconds <= deadline]
    return make_plan(pool.findings(), fits[0], 0) if fits else None


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


def descended(pool: Pool) -> Proposals:
    """Propose plans where the additive model finds the least memory, until one fits; strategies people
    know where it finds none.

    From the shape of one stage and of the widest tensor axis to ever smaller neighbours, then from
    other corners, unless the first descent ended far above the limit, or below it. A minimum that no
    descent reaches is missed.
    """
    descent = _Descent(pool)
    for start in dict.fromkeys(_corners(descent.known)):
        size = descent.least
        if pool.stopped() or size <= pool.room or HOPELESS * pool.room < size < math.inf:
            break
        descent.run(start)
    every = descent.candidates
    likely = [c for c in every if c.bytes <= CLOSE * pool.room]
    yield from until_one_fits(pool, likely) if every else known(pool)


class _Descent:
    """Places and what was found there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        every = shapes(pool.context, pool.context.num_devices)
        self.known = {(shape[0].stages, shape[0].tensor): shape for shape in every}
        self.candidates: list[Candidate] = []

    @property
    def least(self) -> float:
        """The least bytes found so far."""
        return min((one.bytes for one in self.candidates), default=math.inf)

    @remembered
    def _least_at(self, place: Place) -> float:
        found = ends(self._pool, self.known[place][-1])
        self.candidates += found
        return min((one.bytes for one in found), default=math.inf)

    def run(self, place: Place) -> None:
        """Go on to ever smaller neighbours until one fits or none is smaller."""
        size = self._least_at(place)
        while size > self._pool.room and not self._pool.stopped():
            place = min(_neighbours(place, self.known), key=self._least_at, default=place)
            if self._least_at(place) >= size:
                return
            size = self._least_at(place)


def _corners(known: Collection[Place]) -> list[Place]:
    """One stage of the widest tensor axis, of the narrowest, and the most stages of the narrowest."""
    if not known:
        return []
    few, many = min(stages for stages, _ in known), max(stages for stages, _ in known)
    widths = [tensor for stages, tensor in known if stages == few]
    return [
        (few, max(widths)),
        (few, min(widths)),
        (many, min(tensor for stages, tensor in known if stages == many)),
    ]


def _neighbours(place: Place, known: Collection[Place]) -> list[Place]:
    """The nearest shapes with more or fewer stages, or a wider or narrower tensor axis."""
    found: list[Place] = []
    for axis in (0, 1):
        line = sorted(other for other in known if other[1 - axis] == place[1 - axis])
        at = line.index(place)
        found += line[max(at - 1, 0) : at] + line[at + 1 : at + 2]
    return found
