"""How fast a cache that never evicts is found in, beside a copy of memory.

    python benchmarks/caching.py [--bytes 256000000]

Processor time of one process: look-ups in a second, and bytes in a second of hits of several sizes beside copies
of the same bytes out of one large object. The bars are 100,000 look-ups, and half of a copy from 100 kB on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from shardwright.caching import MinIOCache

SIZES = (1_000, 10_000, 100_000, 1_000_000)
TURNS = 7


def missing() -> bytes:
    raise AssertionError("an item that was cached is not")


def seconds(work: Callable[[int], object], order: list[int]) -> float:
    """Return processor seconds of one call."""
    start = time.process_time()
    for place in order:
        work(place)
    return (time.process_time() - start) / len(order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=256_000_000, help="of items, in all")
    total = parser.parse_args().bytes
    draw = random.Random(0)
    print(
        f"{'bytes of an item':>16}  {'look-ups/s':>10}  {'hits GB/s':>9}  {'copy GB/s':>9}  {'share':>5}"
    )
    for size in SIZES:
        count = min(20_000, total // size)
        whole = memoryview(draw.randbytes(size * count))
        with MinIOCache((size + 64) * count, items=count) as cache:
            print_row(cache, whole, size, count)
        del whole


def print_row(cache: MinIOCache, whole: memoryview, size: int, count: int) -> None:
    keys = [f"item {place}" for place in range(count)]
    for place, key in enumerate(keys):
        cache.get(key, lambda at=place * size: bytes(whole[at : at + size]))

    def find(place: int) -> object:
        return cache.view(keys[place], missing)

    def hit(place: int) -> bytes:
        return cache.get(keys[place], missing)

    def copy(place: int) -> bytes:
        return bytes(whole[place * size : (place + 1) * size])

    order = [random.randrange(count) for _ in range(max(200, min(20_000, 400_000_000 // size)))]
    for place in range(count):  # each is checked when it is first seen
        find(place)
    turns = [[seconds(work, order) for work in (find, hit, copy)] for _ in range(TURNS)]
    found, got, copied = (statistics.median(column) for column in zip(*turns))
    print(
        f"{size:>16,}  {1 / found:>10,.0f}  {size / got / 1e9:>9.2f}  {size / copied / 1e9:>9.2f}  "
        f"{copied / got:>5.0%}"
    )


if __name__ == "__main__":
    main()
