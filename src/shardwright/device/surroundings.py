"""What the driver of a GPU sees of a plan: its tensors, and what lies around them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.device.driver import communicator_bytes, context_bytes
from shardwright.device.replay import replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Bytes on one device beside its tensors: what PyTorch's allocator reserves beyond them
    (``slack``), NCCL's buffers (``communicators``), and the process with its kernels (``context``).
    ``fits``: the device has room for all, once the allocator has given back what it can."""

    slack: int = 0
    communicators: int = 0
    context: int = 0
    fits: bool = True

    @property
    def total(self) -> int:
        """All of them together."""
        return self.slack + self.communicators + self.context


def surroundings(
    program: Program,
    graph: OperatorGraph,
    cluster: Cluster,
    mesh: int,
    *,
    streams: bool = False,
    software_date: str = "",
    room: float = math.inf,
) -> Surroundings:
    """Return what lies around the tensors of a mesh's devices; nothing on CPUs.

    ``streams``: see ``replay``; ``software_date``: see ``context_bytes``; ``room``: the bytes of a device.
    """
    context = context_bytes(cluster, software_date)
    if not context:
        return Surroundings()
    found = replay(program, graph, mesh, streams=streams)
    communicators = communicator_bytes(program, cluster, mesh)
    room -= communicators + context
    slack = found.reserved - found.allocated
    fits = found.reserved <= room
    if found.allocated <= room < found.reserved:
        # When blocks of several streams come free is not modelled: played without memory, some 25
        # published runs of FSDP that fitted would not. With half of the slack they do.
        fits = (
            found.allocated + slack / 2 <= room
            if streams
            else not replay(program, graph, mesh, limit=room).is_short
        )
    return Surroundings(
        slack=slack,
        communicators=communicators,
        context=context,
        fits=fits,
    )
