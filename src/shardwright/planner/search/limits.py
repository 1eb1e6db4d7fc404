"""What a plan may use, and how hard to look for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.planner.search.steering import CANDIDATES

# Kept free of what plans count: the allocator's slack and, on GPUs, the process and NCCL.
RESERVE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use and how hard to look.

    ``memory_bytes`` per device; None means the smallest device's memory less ``RESERVE``.
    ``max_candidates`` plans of the additive model are simulated besides the named ones (three times
    as many in graphs of at most 100 operators, a third in those of more than 1,000). ``spacing``:
    plans are looked for between neighbours on the frontier further apart than this share of both
    time and memory; None means 10 % in graphs of up to 1,000 operators, and not at all in larger ones.
    ``staleness``: asynchronous pipelines are looked at, whose gradients are at most so many updates late.
    """

    memory_bytes: float | None = None
    max_candidates: int = CANDIDATES
    spacing: float | None = None
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError("a memory limit must be positive")
        if self.max_candidates < 1:
            raise ValueError("at least one candidate must be simulated")
        if self.spacing is not None and not 0 < self.spacing < math.inf:
            raise ValueError("the spacing of a frontier must be positive")


NO_LIMITS = Limits()


def room(cluster: Cluster, limits: Limits = NO_LIMITS) -> float:
    """Return the bytes of a device that plans may use."""
    return limits.memory_bytes or cluster.least_memory * (1 - RESERVE)
