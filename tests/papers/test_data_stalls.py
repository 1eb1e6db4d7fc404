"""Figures of Mohan et al. (PVLDB 14(5), 2021) out of their own settings: what our model of caches says of each.

Rates of the models on their machines are not in the text; so these are the figures that follow from sizes and shares.
"""

from __future__ import annotations

import math

import pytest

from shardwright.core.stalls import InputRates, page_cache_hits

DISK = 100.0  # samples/s: of what only the disk binds, only ratios count


def of_disk(cached: float) -> float:
    """Return the speed where nothing but storage is waited for and this share of samples is in memory."""
    return InputRates(compute=math.inf, prepare=math.inf, storage=DISK).speed(cached)


@pytest.mark.parametrize(
    ("gigabytes", "cached", "read"),
    [
        (645, 0.65, 225),  # section 7.1: ShuffleNet, OpenImages
        (146, 0.35, 95),  # section 4.3: ImageNet-1k
        (950, 0.45, 550),  # section 7.3: audio, all jobs together
    ],
)
def test_what_a_cache_that_never_evicts_reads_in_an_epoch(
    gigabytes: float, cached: float, read: float
) -> None:
    assert gigabytes * DISK / of_disk(cached) == pytest.approx(read, rel=0.06)


@pytest.mark.parametrize(("cached", "missed"), [(0.5, 0.91), (0.35, 0.94), (0.25, 0.97)])
def test_misses_of_records_read_through_the_page_cache(cached: float, missed: float) -> None:
    """Figure 10b: records in files, which the page cache treats as badly as a pure least-recently-used one."""
    assert 1 - page_cache_hits(cached) == pytest.approx(missed, rel=0.07)


@pytest.mark.parametrize(
    ("hits", "cached", "gain"),
    [(1 - 0.53, 0.65, 1.53), (1 - 0.66, 0.65, 2.1)],  # shuffled, and in sequence
)
def test_gains_on_a_hard_disk_follow_from_the_misses_that_were_measured(
    hits: float, cached: float, gain: float
) -> None:
    """Section 7.1: ResNet50, OpenImages."""
    assert of_disk(cached) / of_disk(hits) == pytest.approx(gain, rel=0.11)


def test_linux_keeps_more_than_a_least_recently_used_cache_and_less_than_one_that_never_evicts() -> (
    None
):
    """Its two lists: misses of files, shuffled, at 35 % and 65 % cached (sections 4.3, 7.1)."""
    for cached, missed in ((0.35, 0.85), (0.65, 0.53)):
        assert 1 - cached < missed < 1 - page_cache_hits(cached)
