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
    (``slack``), NCCL's buffers (``communicators``), and the process with its kernels (``context``).

    ``fits``: the allocator gets by with what the others leave of the device, giving back what it can.
    """

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
    others: float = 0.0,
    streams: bool = False,
    software_date: str = "",
) -> Surroundings:
    """Return what lies around the tensors of a mesh's devices; nothing on CPUs.

    ``others`` are bytes of buffers that the Program does not list; ``streams``: see ``replay``;
    ``software_date``: see ``context_bytes``.
    """
    context = context_bytes(cluster, software_date)
    if not context:
        return Surroundings()
    communicators = communicator_bytes(program, cluster, mesh)
    memory = min(cluster.kind_of(device).memory_bytes for device in program.meshes[mesh].devices)
    limit = memory - context - communicators - others
    found = replay(program, graph, mesh, streams=streams, limit=limit)
    return Surroundings(
        slack=found.slack, communicators=communicators, context=context, fits=found.fits
    )
