"""Computation and preparation on the same cores: what ranks and their loaders take from each other.

Whoever is ready to run has an equal share of a host's cores. A loader has the fewest workers that keep so many cores
busy as it does alone, each of which waits and prepares in turns too short to be told from a constant mix of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cluster import Cluster
from shardwright.core.program import Kind, Program, ResourceClass
from shardwright.core.timeline import Timeline
from shardwright.planner.cost.feed import Feeding, input_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """Who wants the ``cores`` of a host: ``ranks`` that compute at once, in the mean, for ``computing`` seconds of a
    step, and as many ``loaders`` as read, which keep ``busy`` cores each while nobody else wants any."""

    cores: float
    ranks: float
    computing: float
    loaders: int
    busy: float

    @property
    def crowd(self) -> float:
        """How many times as long everything takes on a core while ranks compute and no loader works."""
        return max(1.0, self.ranks / self.cores)

    @property
    def share(self) -> float:
        """The share of its time that a worker prepares while nobody else wants its core."""
        return min(1.0, self.busy)

    @property
    def stretch(self) -> float:
        """How many times as long everything takes on a core while ranks compute and loaders work.

        Of s times as long, a worker that works for a share v of its time is ready to run for v s / (1 - v + v s) of it.
        """
        share, wanted = self.share, self.loaders * self.busy
        if not share:
            return self.crowd
        square = self.cores * share
        linear = self.cores * (1 - share) - self.ranks * share - wanted
        root = math.sqrt(linear**2 + 4 * square * self.ranks * (1 - share))
        return max(1.0, (root - linear) / (2 * square))

    def step(self, alone: float, given: float) -> tuple[float, float]:
        """Return the seconds of a step that takes ``alone`` without input, and of a batch that takes ``given`` alone.

        Where input binds, steps compute beneath it and both take as long. Else loaders work for a part of each step.
        """
        # What ranks take from each other is known.
        computing = self.computing * self.stretch / self.crowd
        pace = 1 / (1 - self.share + self.share * self.stretch)  # of a loader beneath computation
        longer = alone - self.computing + computing
        bound = given + computing * (1 - pace)
        if bound >= longer:
            return bound, bound
        active = given * longer / (longer - computing * (1 - pace))
        return alone + active * (1 - alone / longer), given


def on_shared_cores(
    program: Program, timeline: Timeline, feeding: Sequence[Feeding], cluster: Cluster
) -> tuple[Timeline, tuple[Feeding, ...]]:
    """Return the timeline with its step, and the input of it with what it takes longest in, as both are on hosts whose
    devices compute on the cores that prepare (``Cluster.host_cores``)."""
    if not cluster.host_cores:
        return timeline, tuple(feeding)
    seconds, found = timeline.step_seconds, list[Feeding]()
    for host, grouped in groupby(feeding, key=lambda one: one.host):
        own = list(grouped)
        given, sharers = input_seconds(own), _sharers(program, timeline, own, host, cluster)
        if sharers.busy:
            step, slower = sharers.step(timeline.step_seconds, given)
            seconds = max(seconds, step)
            own = [replace(one, seconds=slower) if one.seconds == given else one for one in own]
        found += own
    return replace(timeline, step_seconds=seconds), tuple(found)


def _sharers(
    program: Program, timeline: Timeline, feeding: list[Feeding], host: int, cluster: Cluster
) -> Sharers:
    """Return who wants the cores of a host, by its place among all."""
    given, cores = input_seconds(feeding), cluster.host_cores
    prepared = sum(one.seconds for one in feeding if one.kind == Kind.PREPARE)
    there = _devices(program, cluster, host)
    loaders = len(set[int]().union(*(there[mesh] for one in feeding for mesh in one.meshes)))
    counts = np.array([len(one) for one in there], dtype=np.int64)
    computing, ranks = _computing(program, timeline, counts)
    return Sharers(
        cores=cores,
        ranks=ranks,
        computing=computing,
        loaders=loaders,
        busy=prepared * cores / (given * loaders) if given and loaders else 0.0,
    )


def _devices(program: Program, cluster: Cluster, host: int) -> list[set[int]]:
    """Return the devices of each mesh that lie on a host."""
    number = sorted({one.host for one in cluster.devices})[host]
    return [
        {device for device in mesh.devices if cluster.devices[device].host == number}
        for mesh in program.meshes
    ]


def _computing(
    program: Program, timeline: Timeline, ranks: NDArray[np.int64]
) -> tuple[float, float]:
    """Return for how many seconds any of the ranks computes, and how many of them do meanwhile, in the mean."""
    some = program.resource_class[program.resource] == ResourceClass.COMPUTE
    some &= ranks[program.group] > 0
    start, end, weight = timeline.start[some], timeline.end[some], ranks[program.group[some]]
    moments = np.concatenate([start, end])
    order = np.argsort(moments, kind="stable")
    change = np.concatenate([weight, -weight])[order]
    gaps, busy = np.diff(moments[order]), np.cumsum(change)[:-1]
    seconds = float(gaps[busy > 0].sum())
    return seconds, float((gaps * busy).sum()) / seconds if seconds else 0.0
