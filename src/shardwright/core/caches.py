"""What keeping raw data in memory gains: of one host or several, for one job or several.

Closed forms for a data set that is read once an epoch in a new random order each time. The rates and the
caches are those of Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training" (PVLDB 14(5), 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_HOSTS = 1024


def page_cache_hits(cached: float, *, hosts: int = 1, jobs: int = 1) -> float:
    """Return the share of hits of a least-recently-used cache that holds the share ``cached`` of a data set.

    ``hosts`` share out every epoch anew, so that a host reads an item in an epoch with probability 1 / hosts;
    ``jobs`` of one host read all of it, in orders of their own, at one pace. With u and v the places of an item
    in one epoch and the next, what lies between them are 1 - u (1 - v) of all items (one host, one job);
    integrated, c + (1 - c) ln(1 - c). A cache that never evicts hits with c.

    Raises ValueError where both are more than 1, and for a share outside 0 to 1.
    """
    if not 0 <= cached <= 1:
        raise ValueError(f"a share is between 0 and 1, not {cached}")
    if hosts > 1 and jobs > 1:
        raise ValueError(f"several jobs are those of one host, not of {hosts}")
    if cached == 1:
        return 1.0
    if hosts == 1:
        # Between two of its own reads the others read it too: only what none of k did must be fetched.
        return cached + (1 - cached) * math.log1p(-cached) / jobs
    idle, hits, likely = 1 - 1 / hosts, 0.0, 1 / hosts
    untouched = 1.0  # the share of items that epochs in between leave alone
    while untouched > 1 - cached:
        hits += likely * _above((1 - cached) / untouched, idle)
        likely, untouched = likely * idle, untouched * idle
    return hits


def _above(bound: float, least: float) -> float:
    """Return how likely the product of two numbers, each even between ``least`` and 1, is above a bound."""
    square = (1 - least) ** 2
    if bound <= least * least:
        return 1.0
    if bound <= least:
        below = bound * math.log(bound / least**2) - bound + least**2
        return 1 - below / square
    return (1 - bound + bound * math.log(bound)) / square


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where samples come from: shares of the own memory, other hosts' and storage. They add up to 1."""

    memory: float
    hosts: float = 0.0

    @property
    def storage(self) -> float:
        """The share that is read from storage."""
        return max(0.0, 1 - self.memory - self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedInput:
    """What is trained, and what a host has for its input.

    ``compute`` (G, of one job) and ``prepare`` (P, of all its cores) are a host's samples per second, ``storage`` and
    ``network`` its bytes per second (the network's in each direction), ``memory`` the bytes of its cache.
    ``jobs`` train on one host each for itself, or one job trains on ``hosts``.
    """

    dataset_bytes: float
    samples: float
    memory: float
    storage: float
    compute: float = math.inf
    prepare: float = math.inf
    network: float = math.inf
    hosts: int = 1
    jobs: int = 1

    @property
    def cached(self) -> float:
        """The share of the data set that a host's memory holds."""
        return min(1.0, self.memory / self.dataset_bytes)

    def page_cache(self) -> Sources:
        """Return where samples come from with the page cache, by the closed form of least recently used."""
        return Sources(memory=page_cache_hits(self.cached, hosts=self.hosts, jobs=self.jobs))

    def page_cache_apart(self) -> Sources:
        """Return the same of jobs that find nothing of each other's: the least that they may hit, where
        ``page_cache``, at one pace, is the most."""
        return Sources(memory=page_cache_hits(self.cached, hosts=self.hosts))

    def kept(self) -> Sources:
        """Return the same of a cache on each host that never evicts (MinIO, section 6.1)."""
        return Sources(memory=self.cached)

    def partitioned(self) -> Sources:
        """Return the same of caches that hold an item once in the job (section 6.2)."""
        held = min(1.0, self.hosts * self.cached)
        return Sources(memory=held / self.hosts, hosts=held - held / self.hosts)

    def rates(self, sources: Sources, *, shared: bool = False) -> dict[str, float]:
        """Return samples per second that one job on a host gets of each part; the least is its speed.

        ``shared``: what is fetched and prepared serves all jobs of the host (section 6.3).
        """
        times = 1 if shared else self.jobs
        size = self.dataset_bytes / self.samples
        fetched = size * (sources.hosts / self.network + sources.storage / self.storage)
        return {
            "computation": self.compute,
            "preparation": self.prepare / times,
            "fetching": 1 / (times * fetched) if fetched else math.inf,
        }

    def read_bytes(self, sources: Sources, *, shared: bool = False) -> float:
        """Return what all hosts and jobs read from storage in an epoch."""
        return sources.storage * self.dataset_bytes * (1 if shared else self.jobs)
