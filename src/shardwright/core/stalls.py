"""What the input of a training step can give, and where its time goes.

The model is that of Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training" (PVLDB 14(5), 2021,
section 5): four rates, and the step goes as fast as the slowest of them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from shardwright.core.caches import page_cache_hits


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRates:
    """Rates in samples per second of one rank, inf where something takes no time.

    ``compute`` (G) with the batch at hand; ``prepare`` (P) of a loader whose data are in memory; ``storage`` (S) and
    ``cache`` (C) of fetching alone, from storage and from memory. ``crowd``: how many workers share a core. Each does one after
    the other, as torch's DataLoader has it, so with 1 to a core the core is idle while it waits; with more the
    others prepare meanwhile, and with inf one sample is fetched while another is prepared, always. ``is_ahead``:
    the loader works while the step computes; else they take turns, as without workers. ``taking``: seconds of the step's
    own for each sample of a batch that lies ready, which is taken over from another process.
    """

    compute: float
    prepare: float
    storage: float = math.inf
    cache: float = math.inf
    crowd: float = math.inf
    is_ahead: bool = True
    taking: float = 0.0

    def fetch(self, cached: float) -> float:
        """Return the rate of fetching where this share of the samples is cached (equation 2)."""
        return _rate(cached / self.cache + (1 - cached) / self.storage)

    def load(self, cached: float) -> float:
        """Return the rate of the loader alone."""
        return min(self.prepare, _rate(1 / self.fetch(cached) + 1 / self._uncrowded))

    def speed(self, cached: float) -> float:
        """Return the rate of training."""
        if self.is_ahead:
            return min(self.load(cached), self.stepping)
        return _rate(1 / self.load(cached) + 1 / self.compute)

    @property
    def stepping(self) -> float:
        """The rate of steps whose batches lie ready."""
        return _rate(1 / self.compute + self.taking)

    @property
    def _uncrowded(self) -> float:
        """The rate of preparing if every worker had a core of its own."""
        return self.prepare * self.crowd if math.isfinite(self.crowd) else math.inf

    def core_seconds(self, workers: int) -> float:
        """Return the seconds of a core that preparing a sample takes, where these are the rates of so many workers."""
        return max(1, workers) / (self._uncrowded if math.isfinite(self.crowd) else self.prepare)

    def binding(self, cached: float) -> str:
        """Return what training waits for: ``computation``, ``preparation`` or ``fetching``."""
        if self.is_ahead and self.load(cached) >= self.stepping:
            return "computation"
        if self.load(cached) >= self.prepare * (1 - 1e-12):
            return "preparation" if self.is_ahead or self.prepare < self.compute else "computation"
        rates = {"fetching": self.fetch(cached), "preparation": self._uncrowded}
        if not self.is_ahead:
            rates["computation"] = self.compute
        return min(rates, key=lambda name: rates[name])

    def nearly_binding(self, cached: float) -> tuple[str, ...]:
        """Return what would bind if it took ALIKE times as long: rates do not tell these from what binds."""
        less = 1 / ALIKE
        longer = (
            replace(self, compute=self.compute * less, taking=self.taking * ALIKE),
            replace(self, prepare=self.prepare * less),
            replace(self, storage=self.storage * less, cache=self.cache * less),
        )
        binding = self.binding(cached)
        found = dict.fromkeys(one.binding(cached) for one in longer)
        return tuple(name for name in found if name != binding)

    def least_cache(self) -> float | None:
        """Return the least share to cache beyond which training is no faster (x* of section 5), None where
        even a cache of everything leaves fetching in front."""
        most = min(self.prepare, self.stepping if self.is_ahead else math.inf)
        enough = _rate(1 / most - 1 / self._uncrowded)
        if self.storage >= enough:
            return 0.0
        if math.isinf(enough):
            return 1.0  # every hit shortens the step
        if self.cache < enough:
            return None
        return min(1.0, (1 / self.storage - 1 / enough) / (1 / self.storage - 1 / self.cache))

    def with_workers(self, now: int, count: int, cores: float) -> InputRates:
        """Return the rates with ``count`` workers instead of ``now``, which work ahead of the step. Preparing takes
        cores and has so many; waiting for storage takes none."""
        scale, cores = count / max(1, now), max(cores, 1.0)
        busy = max(self.core_seconds(now), sys.float_info.min)
        return replace(
            self,
            prepare=min(count, cores) / busy,
            storage=self.storage * scale,
            cache=self.cache * scale,
            crowd=max(1.0, count / cores),
            is_ahead=True,
        )


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


# Batches of a phase from which a rate is taken.
LEAST_BATCHES = 8
# What takes so much longer is told from what does not: each rate is some 5 % off at most.
ALIKE = 1.1
# Steps longer than the rates allow by this factor wait for batches that come in fits.
FITS = 1.15
# As many workers as a what-if curve goes to.
MOST_WORKERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing to change: what it is, to what, samples per second expected of a rank then, and how many times as
    many these are."""

    name: str
    change: str
    speed: float
    gain: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """Files that a loader was seen to read: how many, their bytes, and the share of their pages that was out of
    memory when the cold phase began."""

    count: int
    bytes: int
    evicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """What an analysis of a loader found; times in seconds per step, the slowest rank's.

    ``resident_seconds`` with one batch again and again, ``cached_seconds`` with the loader and its data in memory,
    ``cold_seconds`` with its data out of memory (paper, section 4.2: T1, T2, T3), each in its least turn; ``usual_seconds``
    as ``cold_seconds`` in the mean of turns. ``rates`` are one rank's.
    ``dataset_samples`` and ``dataset_bytes`` are 0 where nobody could tell, ``prefetch``, how many batches of each worker
    may lie ready, where nobody works ahead, ``pinning_seconds``, by which a batch would be copied to the accelerator
    sooner from pinned memory, where it is pinned, or there is none. ``cached_by`` says how ``cached_seconds`` are known: by a
    ``phase`` with data in memory, by a ``replay`` of what preparing costs, or from ``rates`` alone.
    """

    ranks: int
    workers: int
    cores: int
    batch_samples: int
    steps: int
    resident_seconds: float
    cached_seconds: float
    cold_seconds: float
    usual_seconds: float
    rates: InputRates
    files: DataFiles | None = None
    dataset_samples: int = 0
    dataset_bytes: int = 0
    prefetch: int = 0
    pinning_seconds: float = 0.0
    cached_by: str = "phase"
    notes: tuple[str, ...] = ()

    @property
    def prep_stall(self) -> float:
        """Seconds of a step that wait for preparation."""
        return max(0.0, self.cached_seconds - self.resident_seconds)

    @property
    def taking_seconds(self) -> float:
        """Seconds of a step in which a batch that lies ready is taken over: of the prep stall what is no waiting."""
        return self.rates.taking * self.batch_samples

    @property
    def fetch_stall(self) -> float:
        """Seconds of a step that wait for storage."""
        return max(0.0, self.cold_seconds - max(self.cached_seconds, self.resident_seconds))

    @property
    def speed(self) -> float:
        """Samples per second of one rank, with cold data."""
        return self.batch_samples / self.cold_seconds

    @property
    def given(self) -> float:
        """Samples per second that the loader gives one rank in the long run, where the step takes nothing: what disturbs
        a turn disturbs training, too."""
        return min(self.rates.load(0.0), self.batch_samples / self.usual_seconds)

    @property
    def cache_bytes(self) -> int | None:
        """The least cache that takes waiting for storage away, in bytes; None where none does or nobody knows."""
        share = self.rates.least_cache()
        if share is None or not self.dataset_bytes:
            return None
        return math.ceil(share * self.dataset_bytes)

    def knobs(self) -> tuple[Knob, ...]:
        """Return what would help by more than 5 %, the best first."""
        rates, now = self.rates, self.rates.speed(0.0)
        found = [*self._more_workers(), *self._better_storage()]
        cheaper = replace(rates, prepare=math.inf).speed(0.0)
        found.append(
            Knob(
                name="cheaper preparation",
                change="decode on the device, or ahead of time",
                speed=cheaper,
            )
        )
        found += [*self._pinning(), *self._cheaper_taking()]
        found = [replace(one, gain=one.speed / now) for one in found]
        found = [one for one in (*found, *self._longer_queue()) if one.gain > 1.05]
        return tuple(sorted(found, key=lambda one: -one.speed))

    def worker_curve(self) -> tuple[tuple[int, float], ...]:
        """Return the expected speed by the number of workers of a rank, up to MOST_WORKERS."""
        most = max(MOST_WORKERS, self.workers)
        return tuple((count, self._with(count).speed(0.0)) for count in range(1, most + 1))

    def _with(self, count: int) -> InputRates:
        return self.rates.with_workers(self.workers, count, self.cores / self.ranks)

    def cache_curve(self, points: int = 21) -> tuple[tuple[float, float, float], ...]:
        """Return (share cached, speed with a cache that never evicts, speed with the page cache)."""
        shares = [place / (points - 1) for place in range(points)]
        return tuple(
            (share, self.rates.speed(share), self.rates.speed(page_cache_hits(share)))
            for share in shares
        )

    def _more_workers(self) -> list[Knob]:
        curve = self.worker_curve()
        best = max(speed for _, speed in curve)
        count, speed = next((k, v) for k, v in curve if v >= best * 0.99)
        found: list[Knob] = []
        has_own = self.rates.is_ahead and not self.workers  # threads that nobody can count
        if count > self.workers and not has_own:
            found.append(Knob(name="workers", change=f"num_workers={count}", speed=speed))
        # Seconds of a core that the samples of a second at the speed of steps take.
        needed = math.ceil(self.rates.stepping * self.rates.core_seconds(self.workers) - 1e-9)
        if needed > self.cores / self.ranks and math.isfinite(self.rates.stepping):
            more = self.rates.with_workers(self.workers, max(count, needed), needed).speed(0.0)
            found.append(Knob(name="cores", change=f"{needed} cores for each rank", speed=more))
        return found

    def _cheaper_taking(self) -> list[Knob]:
        """What taking batches from other processes costs, no number of them and no queue takes away."""
        if not self.rates.taking:
            return []
        fewer = "fewer bytes a batch (integers rather than floats, a smaller type), made larger in the step"
        free = replace(self.rates, taking=0.0).speed(0.0)
        alone = replace(self._with(1), crowd=1.0, is_ahead=False, taking=0.0).speed(0.0)
        here = Knob(
            name="workers", change="num_workers=0: in turns, nothing to take over", speed=alone
        )
        return [*[here] * bool(self.workers), Knob(name="taking batches", change=fewer, speed=free)]

    def _pinning(self) -> list[Knob]:
        """A step that copies its batch from pinned memory is shorter; one that copies meanwhile is, too."""
        shorter = self.resident_seconds - self.pinning_seconds
        if not self.pinning_seconds or shorter <= 0:
            return []
        compute = self.rates.compute * self.resident_seconds / shorter
        change = "pin_memory=True, and .to(device, non_blocking=True) in the step"
        return [
            Knob(
                name="pinning", change=change, speed=replace(self.rates, compute=compute).speed(0.0)
            )
        ]

    def _longer_queue(self) -> list[Knob]:
        """A longer queue evens out batches that take unlike times, at most to what rates allow."""
        smooth = self.rates.speed(0.0)
        if not self.prefetch or self.speed * FITS > smooth:
            return []
        change = f"prefetch_factor={2 * self.prefetch}: batches come in fits"
        return [Knob(name="prefetch", change=change, speed=smooth, gain=smooth / self.speed)]

    def _better_storage(self) -> list[Knob]:
        share = self.rates.least_cache()
        if math.isinf(self.rates.storage):
            return []
        share = 1.0 if share is None else share
        size = f" ({self.cache_bytes / 2**30:.3g} GiB)" if self.cache_bytes else ""
        change = f"keep {share:.0%} of the data set{size} in memory, never evicted"
        faster = replace(self.rates, storage=math.inf)
        return [
            Knob(name="cache", change=change, speed=self.rates.speed(share)),
            Knob(name="storage", change="storage as fast as memory", speed=faster.speed(0.0)),
        ]
