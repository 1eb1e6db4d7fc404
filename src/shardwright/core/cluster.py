"""The cluster: devices on a tree of links, with rates, memory and prices.

Devices hang under hosts, hosts may hang under switches. Every device, and every host or switch but
the root, has a link to its parent; two devices talk through the links between them. All numbers are
SI: seconds, bytes, bytes per second, flop per second, dollars per second. Units and presets are read
at the border (``shardwright.files.clusterfile``).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.core.graph import Backend

Source = Literal["measured", "published", "modelled"]

# What runs on GPUs, by name; ``planner.cost.software`` has the constants of each.
SOFTWARE = (
    "eager-2023", "eager", "compiled", "compiled-async", "megatron", "megatron-core", "internevo",
)  # fmt: skip

MOST_SLOWDOWN = 100.0  # of computation and messages that run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a full-duplex connection to the parent."""

    latency: float
    bandwidth: float
    source: Source = "modelled"

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link needs latency >= 0 and bandwidth > 0, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What one sort of processor can do.

    ``peak_flops`` maps dtype names to flop/s (dense). ``backend`` is the torch device type.
    ``launch_seconds`` is the fixed cost of starting one operator.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    backend: Backend = "cuda"
    launch_seconds: float = 5e-6
    source: Source = "published"

    def flops_for(self, dtype: str) -> float:
        """Return the peak rate for a dtype, falling back to float32's, then to the slowest known."""
        rates = dict(self.peak_flops)
        return rates.get(dtype) or rates.get("float32") or min(rates.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A host or a switch above hosts. ``parent`` is -1 and ``link`` None for the root."""

    name: str
    parent: int = -1
    link: Link | None = None
    address: str = ""
    dollars_per_second: float = 0.0
    is_host: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One processor: its kind, its host (an index into ``switches``) and its link to that host."""

    kind: int
    host: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order on a tree of switches.

    ``overlap_slowdown`` is the factor by which computation and communication each stretch while both
    run on one device (1 = free overlap). ``software`` is one of ``SOFTWARE``: which kernels GPUs run;
    it means nothing for CPUs. ``input_rate``: samples of the global batch per second that the ranks of a host
    are given by their loaders, all at once; ``rank_input_rate`` and ``host_input_rate``: samples per second that one
    rank's loader gives, and those of all ranks of a host together, where each rank reads only the samples that it
    needs; ``rank_batch_seconds``: what its loader takes for a batch besides, however few its samples are; ``host_fetch_rate``: samples per second that a host's storage gives to all of them; ``copy_bandwidth``: bytes/s from a host's memory to those of its
    devices together; 0 where input is never waited for. ``host_cores``: on how many cores the devices of a host compute
    and its loaders prepare at once; 0 where devices compute elsewhere. ``notes`` are sentences about what was assumed.
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    switches: tuple[Switch, ...]
    devices: tuple[Device, ...]
    overlap_slowdown: float = 1.0
    notes: tuple[str, ...] = ()
    software: str = "eager"
    input_rate: float = 0.0
    copy_bandwidth: float = 0.0
    rank_input_rate: float = 0.0
    host_input_rate: float = 0.0
    host_fetch_rate: float = 0.0
    rank_batch_seconds: float = 0.0
    host_cores: float = 0.0

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a cluster needs at least one device")
        if self.software not in SOFTWARE:
            raise ValueError(f"software is one of {', '.join(SOFTWARE)}, not {self.software!r}")
        if not 1 <= self.overlap_slowdown <= MOST_SLOWDOWN:
            raise ValueError(
                f"overlap_slowdown is a factor from 1 to {MOST_SLOWDOWN:g}, not {self.overlap_slowdown:g}"
            )
        if not all(0 <= rate < math.inf for rate in self.input_rates):
            raise ValueError("rates and seconds of input are finite and 0 or more")
        if not 0 <= self.host_cores < math.inf:
            raise ValueError(
                f"a host has a finite number of cores, 0 or more, not {self.host_cores}"
            )
        self._check_tree()

    def _check_tree(self) -> None:
        roots = [switch for switch in self.switches if switch.parent < 0]
        if len(roots) != 1:
            raise ValueError(f"a cluster is one tree, but {len(roots)} switches have no parent")
        for index, switch in enumerate(self.switches):
            if switch.parent >= index or (switch.parent >= 0) != (switch.link is not None):
                raise ValueError(
                    f"switch {switch.name!r} must follow its parent and have a link to it"
                )

    @property
    def input_rates(self) -> tuple[float, ...]:
        """All rates of input, and a loader's seconds for a batch; 0 of each where it is never waited for."""
        alone = self.input_rate, self.rank_input_rate, self.rank_batch_seconds
        return *alone, self.host_input_rate, self.host_fetch_rate, self.copy_bandwidth

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.devices)

    @cached_property
    def sizes_of_hosts(self) -> Counter[int]:
        """How many devices each host has."""
        return Counter(device.host for device in self.devices)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the devices, their memory and the tree they hang on: what a plan belongs to.

        Rates, latencies and prices only say how fast and how dear it is predicted to be, and those
        that are measured are not the same twice; names and addresses of hosts say nothing.
        """
        kinds = [(kind.name, kind.backend, kind.memory_bytes) for kind in self.kinds]
        tree = [(switch.parent, switch.is_host) for switch in self.switches]
        text = repr((kinds, tree, [(device.kind, device.host) for device in self.devices]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def remembered(self) -> dict[object, object]:
        """Facts about groups of devices, by their question: with thousands of devices they take
        longer to find out than all else about a message."""
        return {}

    @property
    def scatter_copies(self) -> float:
        """Copies of its payload that a reduce-scatter needs beside the buffers of its caller.

        gloo, the backend of CPUs, has none of its own: the terms of all ranks are exchanged, then
        added up. NCCL reduces on the way, in channel buffers of constant size.
        """
        return 1.0 if self.has_cpus else 0.0

    @property
    def backend(self) -> Backend:
        """The torch device type of its devices."""
        return "cpu" if self.has_cpus else "cuda"

    @property
    def has_cpus(self) -> bool:
        """Whether devices are CPUs: gloo sends what they exchange, and no driver stands between."""
        return any(kind.backend == "cpu" for kind in self.kinds)

    def slowest_bandwidth(self, devices: tuple[int, ...]) -> float:
        """Return the bytes/s of the slowest link that devices talk over, those of their hosts included
        where they have several."""
        links = [self.devices[device].link for device in devices]
        hosts = {self.devices[device].host for device in devices}
        if len(hosts) > 1:
            links += [link for host in hosts if (link := self.switches[host].link) is not None]
        return min(link.bandwidth for link in links)

    def kind_of(self, device: int) -> DeviceKind:
        """Return what a device is."""
        return self.kinds[self.devices[device].kind]

    @cached_property
    def least_memory(self) -> float:
        """Return the bytes of the smallest device."""
        return self.memory_of(range(self.num_devices))

    def memory_of(self, devices: Iterable[int]) -> float:
        """Return the bytes that every one of some devices has."""
        return min(self.kind_of(device).memory_bytes for device in devices)

    def path_to_root(self, host: int) -> tuple[int, ...]:
        """Return a host and the switches above it."""
        path = [host]
        while self.switches[path[-1]].parent >= 0:
            path.append(self.switches[path[-1]].parent)
        return tuple(path)

    def dollars_per_second(self, devices: tuple[int, ...]) -> float:
        """Return what renting the hosts of these devices costs: whole hosts, used devices or not."""
        hosts = {self.devices[device].host for device in devices}
        return sum(self.switches[host].dollars_per_second for host in hosts)
