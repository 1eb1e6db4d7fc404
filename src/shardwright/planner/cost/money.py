"""Device-seconds to dollars."""

from __future__ import annotations

from shardwright.core.cluster import Cluster
from shardwright.core.strategy import Strategy


def dollars_per_step(cluster: Cluster, strategy: Strategy, step_seconds: float) -> float:
    """Return what one step costs: whole hosts are rented, used devices or not."""
    return cluster.dollars_per_second(strategy.devices) * step_seconds
