"""How many devices and parameter servers a step is worth: closed forms, checked by hand and quick to answer.

Zou et al., "Distributed Training Large-Scale Deep Architectures" (arXiv 1709.06622), whose lemmas are derived
here again; all times are those of one step with the same global batch on any number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Two numbers closer than this are the same: what should be whole stays so after division.
ROUNDING = 1e-9
# Of a step without communication that is backward, behind which gradients travel: twice as many products.
BACKWARD_SHARE = 2 / 3


def rounded_up(value: float) -> int:
    """Return the least whole number that is not below a value, but for rounding."""
    return math.ceil(value - ROUNDING * max(1.0, abs(value)))


def rounded_down(value: float) -> int:
    """Return the largest whole number that is not above a value, but for rounding."""
    return math.floor(value + ROUNDING * max(1.0, abs(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """A step of T(G) = T_C / G + T_O seconds: what more devices share, and what each of them has in full."""

    compute_seconds: float
    overhead_seconds: float

    @property
    def ratio(self) -> float:
        """R_O = T_O / T_C, infinite where nothing is shared."""
        return self.overhead_seconds / self.compute_seconds if self.compute_seconds else math.inf

    @property
    def limit(self) -> float:
        """The speed-up that no number of devices exceeds, 1 + 1 / R_O."""
        if not self.overhead_seconds:
            return math.inf
        return 1 + self.compute_seconds / self.overhead_seconds

    def seconds(self, devices: int) -> float:
        """Return T(G)."""
        return self.compute_seconds / devices + self.overhead_seconds

    def speedup(self, devices: int) -> float:
        """Return T(1) / T(G) = (1 + R_O) / (1 / G + R_O)."""
        return self.seconds(1) / self.seconds(devices)

    def efficiency(self, devices: int) -> float:
        """Return the speed-up's share of the devices, (1 + R_O) / (1 + G R_O)."""
        return self.speedup(devices) / devices

    def most_devices(self, efficiency: float) -> int | None:
        """Return the largest G of at least this efficiency, ((1 + R_O) / alpha - 1) / R_O; None: any number."""
        if not self.overhead_seconds:
            return None
        shared = self.seconds(1) - efficiency * self.compute_seconds
        return max(1, rounded_down(shared / (efficiency * self.overhead_seconds)))


def largest_ratio(devices: int, efficiency: float) -> float:
    """Return the largest R_O with which so many devices are so efficient, (1 - alpha) / (alpha G - 1); infinite
    where one over their number is enough."""
    spare = efficiency * devices - 1
    return (1 - efficiency) / spare if spare > 0 else math.inf


def fit_overhead(
    points: Sequence[tuple[int, float]], known: Callable[[int], float] = lambda devices: 0.0
) -> Overhead:
    """Return the overhead through measured (devices, seconds): exactly of two, by least squares of more.

    ``known`` seconds of a number of devices are taken off first. Neither part is below 0: where a step gets no
    shorter all is overhead, and where it gets shorter by more than its share nothing is.
    """
    inverse = np.array([1 / devices for devices, _ in points])
    seconds = np.array([max(0.0, time - known(devices)) for devices, time in points])
    spread = inverse - inverse.mean()
    shared = float(spread @ seconds / (spread @ spread))
    rest = float(seconds.mean() - shared * inverse.mean())
    if shared < 0:
        shared, rest = 0.0, float(seconds.mean())
    elif rest < 0:
        shared, rest = float(inverse @ seconds / (inverse @ inverse)), 0.0
    return Overhead(compute_seconds=shared, overhead_seconds=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What synchronising gradients every step has to carry: ``bytes`` of all parameters (one direction), of ``largest`` the
    largest tensor's; ``bandwidth`` of a server's link and ``worker_bandwidth`` of a worker's, bytes per second; and
    the ``compute_seconds`` to hide it behind."""

    bytes: float
    workers: int
    bandwidth: float
    worker_bandwidth: float
    compute_seconds: float
    largest: float = 0.0

    def servers(self, *, full_duplex: bool) -> int:
        """Return how many parameter servers hide all pushes and pulls behind computation: 2 S N / (B T_C), half of
        that where a link carries both directions at once."""
        moved = self._ways(full_duplex) * self.bytes * self.workers
        return max(1, rounded_up(moved / (self.bandwidth * self.compute_seconds)))

    def server_seconds(self, servers: int, *, full_duplex: bool) -> float:
        """Return the least seconds that the busiest of so many servers works: tensors that are not split make
        one carry the largest of them."""
        share = max(self.largest, self.bytes / servers)
        return self._ways(full_duplex) * share * self.workers / self.bandwidth

    def worker_seconds(self, *, full_duplex: bool) -> float:
        """Return how long a worker's own link works, however many servers there are."""
        return self._ways(full_duplex) * self.bytes / self.worker_bandwidth

    def all_reduce_seconds(self) -> float:
        """Return how long a worker's link works for a ring in place of servers, 2 S (n - 1) / (n B): in full
        duplex, without latency."""
        return 2 * self.bytes * (self.workers - 1) / (self.workers * self.worker_bandwidth)

    def _ways(self, full_duplex: bool) -> int:
        return 1 if full_duplex else 2
