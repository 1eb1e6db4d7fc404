"""Advice on where raw data should be kept: what each kind of cache makes of a host's input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.core.advice import Advice, Curve
from shardwright.core.caches import CachedInput, Sources
from shardwright.report.units import bytes_text, count_text, seconds_text
from shardwright.verbs.advice.requests import CacheRequest

SAME = 1.05  # as fast: what is gained below it is not worth a change
POINTS = 40  # of the chart's lines
GIVE = "give --compute and --prepare"
WAITS = {"computation": "computation", "preparation": "preparation", "fetching": "data"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep data: its name, where samples come from, whether jobs share what is prepared."""

    name: str
    sources: Callable[[CachedInput], Sources]
    shared: bool = False

    def rates(self, one: CachedInput) -> dict[str, float]:
        """Return samples per second that a job on a host gets of each part."""
        return one.rates(self.sources(one), shared=self.shared)

    def speed(self, one: CachedInput) -> float:
        """Return samples per second of a job on a host."""
        return min(self.rates(one).values())

    def waits_for(self, one: CachedInput) -> str:
        """Return what the job waits for; computation where it waits for nothing."""
        rates = self.rates(one)
        return min(rates, key=lambda name: rates[name])


def advise_caches(request: CacheRequest) -> Advice:
    """Say how fast training is with each way to keep its data, and how much memory that takes."""
    one = request.input()
    ways = tuple(_ways(one, request.page_cache_hits))
    page, *_ = ways
    best = _best(ways, one)
    least = _least_memory(best, one)
    return Advice(
        title="Which cache",
        answers=(
            _verdict(page, best, one),
            *(() if best is page else (*_memory(best, one, least), _cold(one))),
        ),
        inputs=tuple(_inputs(one, request.page_cache_hits)),
        assumptions=(
            "Every sample is read once an epoch, in a new random order; the first epoch, which fills caches, is not counted.",
            "Fetching, preparing and computing work beside each other: a step takes the longest of them.",
            "Cached bytes of the own memory cost nothing; samples are of one size.",
            "The page cache is least recently used; Linux keeps somewhat more (--page-cache-hits takes a measured share).",
            *_paces(one, request.page_cache_hits),
        ),
        sources=(
            "Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (PVLDB 14(5), 2021), sections 5 and 6",
            "hits of the page cache: closed forms, simulated in the tests",
        ),
        columns=("kept by", "from memory", "other hosts", "storage", "read an epoch", "samples/s", "waits for", "gain"),
        rows=tuple(_row(way, one, page, is_best=way is best) for way in ways),
        curves=(_curve(ways, one, best),),
        values={
            "ways": [_values(way, one, page) for way in ways],
            "best": best.name,
            "least_memory_bytes": least,
        },
    )  # fmt: skip


def _ways(one: CachedInput, hits: float | None) -> list[Way]:
    """Return the ways that there are here, what is there without any doing first."""

    def measured(one: CachedInput) -> Sources:
        return one.page_cache() if hits is None else Sources(memory=hits)

    ways = [Way("the page cache", measured), Way("a cache that never evicts", CachedInput.kept)]
    if one.hosts > 1:
        ways.append(Way("caches of all hosts as one", CachedInput.partitioned))
    if one.jobs > 1:
        ways.append(Way("one that all jobs share, prepared once", CachedInput.kept, shared=True))
    return ways


def _best(ways: tuple[Way, ...], one: CachedInput) -> Way:
    """Return the simplest of the ways that are as fast as the fastest."""
    fastest = max(way.speed(one) for way in ways)
    return next(way for way in ways if way.speed(one) * SAME >= fastest)


def _least_memory(way: Way, one: CachedInput) -> float:
    """Return the bytes of a host beyond which the way is no faster."""
    most = way.speed(replace(one, memory=one.dataset_bytes))
    low, high = 0.0, one.dataset_bytes
    for _ in range(60):
        middle = (low + high) / 2
        if way.speed(replace(one, memory=middle)) >= most * (1 - 1e-9):
            high = middle
        else:
            low = middle
    return 0.0 if high < one.dataset_bytes * 1e-12 else high


def _verdict(page: Way, best: Way, one: CachedInput) -> str:
    waits = WAITS[best.waits_for(one)]
    if not math.isfinite(best.speed(one)):
        waits = f"nothing that was given ({GIVE})"
    if best is page:
        return (
            f"No cache gains {SAME - 1:.0%}: with the page cache a job's host takes {_pace(best, one)}, and "
            f"it waits for {waits}."
        )
    return (
        f"{best.name[0].upper()}{best.name[1:]}: {_times(best, page, one)} as fast as the page cache, "
        f"{_pace(best, one)} of a job on a host; it then waits for {waits}."
    )


def _pace(way: Way, one: CachedInput) -> str:
    """Say how many samples a job takes in a second; of what is in memory, without other rates, as many as it will."""
    speed = way.speed(one)
    return f"{speed:,.4g} samples/s" if math.isfinite(speed) else "as many samples as it will"


def _gain(way: Way, other: Way, one: CachedInput) -> float:
    """Return how many times as fast a way is as another one, 1 where nothing limits either."""
    if way.speed(one) == other.speed(one):
        return 1.0
    return way.speed(one) / other.speed(one)


def _times(way: Way, other: Way, one: CachedInput) -> str:
    gain = _gain(way, other, one)
    return f"{gain:.2f}x" if math.isfinite(gain) else "any number of times"


def _memory(best: Way, one: CachedInput, least: float) -> tuple[str, ...]:
    if best.waits_for(one) == "fetching":
        more = best.speed(replace(one, memory=least)) / best.speed(one)
        if math.isinf(more):
            return (
                f"With {bytes_text(least)} of each host it would wait for no data: {GIVE} for the gain of that.",
            )
        if more > SAME:
            return (
                f"With {bytes_text(least)} of each host it would be {more:.2f}x as fast again.",
            )
        return ("More memory does not help; faster storage or network does.",)
    return (f"{bytes_text(least)} of each host are enough." if least else "It needs no memory.",)


def _paces(one: CachedInput, hits: float | None) -> tuple[str, ...]:
    """Say how much jobs that go at unlike paces may read."""
    if one.jobs == 1 or hits is not None:
        return ()
    together, apart = map(one.read_bytes, (one.page_cache(), one.page_cache_apart()))
    return (
        f"Jobs that read for themselves go at one pace and find in the page cache what others read, which is the most "
        f"that they can: {bytes_text(together)} an epoch. Where they find nothing of each other's it is "
        f"{bytes_text(apart)}; measured ones lay about half-way (section 4.3).",
    )


def _cold(one: CachedInput) -> str:
    seconds = one.dataset_bytes / one.hosts / one.storage
    return f"The first epoch reads all from storage, which takes at least {seconds_text(seconds)}."


def _inputs(one: CachedInput, hits: float | None) -> list[tuple[str, str]]:
    found = [
        ("data set", f"{bytes_text(one.dataset_bytes)}, {one.samples:,.0f} samples"),
        ("memory of a host", f"{bytes_text(one.memory)}, {one.cached:.0%} of the data set"),
        ("storage of a host", f"{count_text(one.storage)}B/s"),
        ("computation", _rate(one.compute) + " of a job on a host"),
        ("preparation", _rate(one.prepare) + " of a host"),
        ("hosts", f"{one.hosts:,}"),
        ("jobs on a host", f"{one.jobs:,}"),
    ]
    if one.hosts > 1:
        found.append(("network of a host", f"{count_text(one.network)}B/s in each direction"))
    if hits is not None:
        found.append(("page cache hits", f"{hits:.1%}, as given"))
    return found


def _rate(rate: float) -> str:
    return f"{rate:,.4g} samples/s" if math.isfinite(rate) else "not limited"


def _row(way: Way, one: CachedInput, page: Way, *, is_best: bool) -> tuple[str, ...]:
    sources, speed = way.sources(one), way.speed(one)
    return (
        way.name + (" ▸" if is_best else ""),
        f"{sources.memory:.1%}",
        f"{sources.hosts:.1%}",
        f"{sources.storage:.1%}",
        bytes_text(one.read_bytes(sources, shared=way.shared)),
        f"{speed:,.4g}" if math.isfinite(speed) else "-",
        WAITS[way.waits_for(one)] if math.isfinite(speed) else "-",
        _times(way, page, one) if math.isfinite(speed) else "-",
    )


def _values(way: Way, one: CachedInput, page: Way) -> dict[str, Any]:
    sources, speed = way.sources(one), way.speed(one)
    return {
        "name": way.name,
        "memory": sources.memory,
        "hosts": sources.hosts,
        "storage": sources.storage,
        "read_bytes": one.read_bytes(sources, shared=way.shared),
        "samples_per_second": speed,
        "epoch_seconds": one.samples / one.hosts / speed,
        "waits_for": way.waits_for(one),
        "gain": _gain(way, page, one),
    }


def _curve(ways: tuple[Way, ...], one: CachedInput, best: Way) -> Curve:
    sizes = [one.dataset_bytes * k / POINTS for k in range(POINTS + 1)]
    gib = 2.0**30
    return Curve(
        title="Speed by memory of a host (modelled)",
        across="GiB",
        up="samples/s of a job on a host",
        lines=tuple(
            (way.name, tuple((size / gib, way.speed(replace(one, memory=size))) for size in sizes))
            for way in ways
        ),
        marked=((min(one.memory, one.dataset_bytes) / gib, best.speed(one)),),
    )
