"""What a GPU's driver sees beside the tensors: the process itself, and the buffers of NCCL.

Neither passes through PyTorch's allocator, and both leave less for it. CPUs have neither.

* The context, with the kernels that are loaded: about half a GiB where modules load when they are
  first used (CUDA 11.7 and later, as PyTorch since 2.0 asks for); 1.3 GiB where all do at once
  ("the kernels alone take up 1.3GB", Hugging Face, *Methods and tools for efficient training*, 2022).
* NCCL, per communicator and channel: a connection has buffers of three protocols, of 4 MiB (Simple,
  ``NCCL_BUFFSIZE``), 4.69 MiB (LL128: 120 x 640 threads x 8 steps x 8 bytes) and 0.5 MiB (LL), and a
  channel three connections that receive: from the ring's neighbour, and from a parent and a child of
  the tree. Channels are as many as the slowest link takes ("linearly tied to the number of channels",
  NVIDIA/nccl issues 864 and 986): one for every 12.5 GB/s, from 2 to 32.
"""

from __future__ import annotations

import math

from shardwright.core.cluster import Cluster
from shardwright.core.program import LOCAL, Message, Program

GIB, MIB = 2**30, 2**20
CONTEXT, EAGER_CONTEXT = GIB // 2, 13 * GIB // 10
# Since when modules load lazily in what people run.
LAZY_SINCE = "2023"
CONNECTION = int((4 + 0.5) * MIB) + 120 * 640 * 8 * 8
CONNECTIONS = 3
CHANNEL_RATE, FEWEST_CHANNELS, MOST_CHANNELS = 12.5e9, 2, 32


def context_bytes(cluster: Cluster, software_date: str = "") -> int:
    """Return what a process takes on its device before the first tensor; undated is today's."""
    if cluster.has_cpus:
        return 0
    return EAGER_CONTEXT if "" < software_date < LAZY_SINCE else CONTEXT


def communicator_bytes(program: Program, cluster: Cluster, mesh: int) -> int:
    """Return the bytes of NCCL's buffers on a device of a mesh: one communicator for every group of
    devices that it exchanges messages with."""
    if cluster.has_cpus:
        return 0
    groups = {_group(program, message, mesh) for message in program.messages} - {()}
    return sum(_channels(cluster, group) * CONNECTIONS * CONNECTION for group in groups)


def _group(program: Program, message: Message, mesh: int) -> tuple[int, ...]:
    """Return the devices that exchange a message with the first device of a mesh; () for none."""
    if message.primitive in LOCAL or mesh not in (message.mesh, message.destination):
        return ()
    devices = program.meshes[mesh].devices
    if message.primitive == "transfer":
        ends = program.meshes[message.mesh], program.meshes[message.destination]
        return tuple(sorted({one.devices[0] for one in ends}))
    found = program.meshes[mesh].peers(devices[0], message.axes)
    return tuple(sorted(found)) if len(found) > 1 else ()


def _channels(cluster: Cluster, group: tuple[int, ...]) -> int:
    """Return how many channels the slowest link between devices takes."""
    count = math.ceil(cluster.slowest_bandwidth(group) / CHANNEL_RATE)
    return min(max(count, FEWEST_CHANNELS), MOST_CHANNELS)
