"""What is wanted of the answer: the fastest plan, the fewest devices, the least money, a curve; and on how many
devices.

TensorOpt's modes (section 4.1 there): fastest under a memory limit, fewest devices, and the curve of
time against devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.core.cluster import Cluster
from shardwright.planner.model.arrangements import SMALL_GROUP

Mode = Literal["min-time", "min-devices", "min-money", "curve"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What to look for. ``deadline`` is the most seconds that a step may take.

    ``min-time`` is the fastest plan; ``min-devices`` the fastest on the fewest devices that fit and
    meet the deadline; ``min-money`` the fewest dollars per step that meet it; ``curve`` the fastest
    plan for every number of devices tried.
    """

    mode: Mode = "min-time"
    deadline: float = math.inf

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"a mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not self.deadline > 0:
            raise ValueError("a deadline must be positive")


FASTEST = Goal()


def device_numbers(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of devices that are tried, fewest first: all up to ``SMALL_GROUP``, 2^a and 3 * 2^a,
    whole hosts likewise, and the whole cluster."""
    total = cluster.num_devices
    hosts = [device.host for device in cluster.devices]
    per_host = hosts.count(hosts[0])
    small = range(1, min(SMALL_GROUP, total) + 1)
    rounds = [factor << power for factor in (1, 3) for power in range(total.bit_length())]
    numbers = {total, *small, *rounds, *(per_host * number for number in rounds)}
    return tuple(sorted(number for number in numbers if number <= total))
