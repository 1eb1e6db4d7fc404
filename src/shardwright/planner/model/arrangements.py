"""The outer choices: how many devices, stages, mesh axes and microbatches.

Devices are taken in rank order, stages outermost, then the data axis, then the tensor axis, so that
the heaviest talkers are neighbours on the fastest links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.legality import divisors
from shardwright.core.schedules import SCHEDULES, ScheduleName
from shardwright.core.strategy import Mesh
from shardwright.operators.splitting.samples import batch_size
from shardwright.planner.model.context import Context

# A tensor axis beyond one host pays for every operator on the slow links; small clusters may try,
# and others where little else helps (``free_axes``).
SMALL_GROUP = 8
# Two free axes square the number of configs; that is tried in graphs of no more operators.
SMALL_GRAPH = 100
# More than so many doublings of the microbatches beyond the stages shrink the bubble below 6 %.
MAX_FILLS = 5


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Arrangement:
    """Stages x data x outer x tensor devices, and how many microbatches pass through.

    The data axis splits samples alone; the other two whatever each operator likes, the outer one
    between hosts where there are several.
    """

    stages: int
    data: int
    tensor: int
    microbatches: int
    schedule: ScheduleName = "1f1b"
    outer: int = 1

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.stages * self.width

    @property
    def width(self) -> int:
        """Devices of a stage."""
        return self.data * self.outer * self.tensor

    def place(self, chunk: int) -> int:
        """Return the stage whose devices hold a chunk: all in turn, or down a V and up again."""
        turn, stage = divmod(chunk, self.stages)
        is_back = turn > 0 and SCHEDULES[self.schedule].folds
        return self.stages - 1 - stage if is_back else stage

    def mesh(self, stage: int) -> Mesh:
        """Return a stage's mesh."""
        axes = [("data", self.data), ("outer", self.outer), ("tensor", self.tensor)]
        kept = [axis for axis in axes if axis[1] > 1] or axes[:1]
        width = self.width
        return Mesh(
            axes=tuple(name for name, _ in kept),
            sizes=tuple(size for _, size in kept),
            devices=tuple(range(stage * width, (stage + 1) * width)),
        )


def global_batch(context: Context) -> int:
    """Return the number of samples in a step."""
    return batch_size(context.graph, context.facts.samples)


# Arrangements that differ in nothing but the number of microbatches, fewest first.
Shape = tuple[Arrangement, ...]


def shape_of(
    stages: int, data: int, tensor: int, microbatches: Iterable[int], outer: int = 1
) -> Shape:
    """Return an arrangement per number of microbatches."""
    return tuple(
        Arrangement(stages=stages, data=data, outer=outer, tensor=tensor, microbatches=count)
        for count in microbatches
    )


def shapes(context: Context, num_devices: int) -> Iterator[Shape]:
    """Yield every shape of so many devices that divides the batch, in a fixed order."""
    widest = _widest(context.cluster)
    for stages in divisors(num_devices, len(context.facts.ties.ranges)):
        width = num_devices // stages
        for tensor in divisors(width, widest):
            data = width // tensor
            counts = microbatch_counts(context, data, stages)
            if counts:
                yield shape_of(stages, data, tensor, counts)


def free_axes(context: Context, num_devices: int) -> Iterator[Shape]:
    """Yield the shapes in which every operator splits what it likes over all devices, if ``shapes``
    does not: over one axis, and in graphs of few operators over two."""
    counts = microbatch_counts(context, 1, 1)
    if num_devices > _widest(context.cluster):
        yield shape_of(1, 1, num_devices, counts)
    if len(context.graph.operators) <= SMALL_GRAPH:
        for outer in divisors(num_devices, num_devices // 2)[1:]:
            yield shape_of(1, 1, num_devices // outer, counts, outer)


def microbatch_counts(context: Context, data: int, stages: int) -> tuple[int, ...]:
    """Return powers of two that divide a device's samples, then whatever divides them, in steps of two and more; at
    most ``MOST_MICROBATCHES``, and enough to fill the stages where possible, else the most; none where the batch
    does not divide."""
    samples, rest = divmod(global_batch(context), data)
    if rest:
        return ()
    if context.facts.samples.blocker:
        return (1,)
    counts, samples = [1], math.gcd(samples, context.facts.samples.common)
    for count in sorted(divisors(samples), key=lambda one: one & (one - 1) > 0):  # powers first
        if count >= 2 * counts[-1]:
            counts.append(count)
    full = tuple(count for count in counts if count >= stages)
    return (full[:MAX_FILLS] or (counts[-1],)) if stages > 1 else tuple(counts)


def device_counts(context: Context) -> tuple[int, ...]:
    """Return all devices and those of the first host, both halved as often as they divide, and one; most first."""
    devices = context.cluster.devices[: context.num_devices]
    counts = {1}
    for count in (len(devices), sum(one.host == devices[0].host for one in devices)):
        counts.add(count)
        while count % 2 == 0:
            count //= 2
            counts.add(count)
    return tuple(sorted(counts, reverse=True))


def _widest(cluster: Cluster) -> int:
    """Return the most devices that a tensor axis beside a data axis has."""
    hosts = Counter(device.host for device in cluster.devices)
    return max(SMALL_GROUP, *hosts.values())
