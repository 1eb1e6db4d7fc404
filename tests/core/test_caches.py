"""Closed forms of caches, against caches that are simulated item by item."""

from collections import OrderedDict
from random import Random

import pytest

from shardwright.core.caches import CachedInput, Sources, page_cache_hits


def simulated_hits(share, *, hosts=1, jobs=1, items=20_000):
    """Count the hits of a least-recently-used cache at one host, once it is full."""
    draw, cache, hits, reads = Random(0), OrderedDict(), 0, 0
    fill = 1 if hosts == 1 else 4 * hosts  # epochs
    for epoch in range(fill + hosts):
        full = epoch >= fill
        orders = [draw.sample(range(items), items // hosts) for _ in range(jobs)]
        for together in zip(*orders, strict=True):
            for item in together:
                reads += full
                hits += full and item in cache
                cache[item] = None
                cache.move_to_end(item)
                if len(cache) > share * items:
                    cache.popitem(last=False)
    return hits / reads


@pytest.mark.parametrize(
    ("share", "hosts", "jobs"),
    [(0.1, 1, 1), (0.35, 1, 1), (0.65, 1, 1), (0.9, 1, 1), (0.35, 1, 4), (0.7, 1, 2), (0.2, 3, 1),
     (0.5, 2, 1), (0.8, 2, 1)],
)  # fmt: skip
def test_the_page_cache_hits_as_a_simulated_one_does(share, hosts, jobs):
    counted = simulated_hits(share, hosts=hosts, jobs=jobs)
    assert page_cache_hits(share, hosts=hosts, jobs=jobs) == pytest.approx(counted, abs=0.01)


def test_the_page_cache_hits_at_the_ends_and_in_between():
    for words in ({}, {"hosts": 3}, {"jobs": 3}):
        hits = [page_cache_hits(share / 20, **words) for share in range(21)]
        assert hits[0] == pytest.approx(0, abs=1e-12)
        assert hits[-1] == 1
        assert hits == sorted(hits)
    for share, words in ((1.1, {}), (0.5, {"hosts": 2, "jobs": 2})):
        with pytest.raises(ValueError, match=r"between 0 and 1|of one host"):
            page_cache_hits(share, **words)


def test_sources_and_rates_by_hand():
    """1,000 samples of 1 MB; of each host 250 MB cached, 10 MB/s from storage and 100 MB/s from others."""
    one = CachedInput(
        dataset_bytes=1e9, samples=1000, memory=250e6, storage=10e6, network=100e6, hosts=2, prepare=90.0,
    )  # fmt: skip
    assert one.partitioned() == Sources(memory=0.25, hosts=0.25)
    seconds = 0.25 * 1e6 / 100e6 + 0.5 * 1e6 / 10e6
    assert one.rates(one.partitioned())["fetching"] == pytest.approx(1 / seconds)
    assert one.read_bytes(one.kept()) == pytest.approx(750e6)
    assert one.read_bytes(one.partitioned()) == pytest.approx(500e6)
    several = CachedInput(
        dataset_bytes=1e9, samples=1000, memory=1e9, storage=10e6, prepare=90.0, jobs=3
    )
    assert several.rates(several.kept())["preparation"] == pytest.approx(30)
    assert several.rates(several.kept(), shared=True)["preparation"] == pytest.approx(90)


def test_what_all_hosts_hold_together_is_never_read_again():
    one = CachedInput(dataset_bytes=645e9, samples=1e6, memory=420e9, storage=15e6, hosts=2)
    assert one.partitioned() == Sources(memory=0.5, hosts=0.5)
    assert one.read_bytes(one.partitioned()) == 0
