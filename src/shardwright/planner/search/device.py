"""What the driver of a GPU sees of a plan: its tensors, and what lies around them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Program
from shardwright.planner.cost.driver import communicator_bytes, context_bytes
from shardwright.planner.simulate.replay import replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Bytes on one device beside its tensors: what PyTorch's allocator reserves beyond them
    (``slack``; of it ``pinned`` when it finds no memory and gives back the segments that lie free),
    NCCL's buffers (``communicators``), and the process with its kernels (``context``)."""

    slack: int = 0
    pinned: int = 0
    communicators: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return self.slack + self.communicators + self.context

    @property
    def needed(self) -> int:
        """Those without which a plan does not run."""
        return self.pinned + self.communicators + self.context


def surroundings(
    program: Program,
    graph: OperatorGraph,
    cluster: Cluster,
    mesh: int,
    *,
    streams: bool = False,
    software_date: str = "",
) -> Surroundings:
    """Return what lies around the tensors of a mesh's devices; nothing on CPUs.

    ``streams``: see ``replay``; ``software_date``: see ``context_bytes``.
    """
    context = context_bytes(cluster, software_date)
    if not context:
        return Surroundings()
    allocated, reserved, pinned = replay(program, graph, mesh, streams=streams)
    return Surroundings(
        slack=reserved - allocated,
        pinned=pinned - allocated,
        communicators=communicator_bytes(program, cluster, mesh),
        context=context,
    )
