"""What processes that train under DistributedDataParallel on CPUs have in common with ranks of plans."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.runtime.allocator import keep_freed_memory
from shardwright.runtime.cores import settle


def prepare_process(group: ProcessGroup | None) -> None:
    """Where a group talks by gloo alone, let threads wait where they are woken (decision 0083), and keep the memory
    that a step frees for the next one (0029)."""
    if dist.get_backend(group) == "gloo":
        settle()
        keep_freed_memory()
