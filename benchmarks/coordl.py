"""What the paper on CoorDL reports, predicted from its settings: ``python benchmarks/coordl.py``.

Bytes of data sets and of caches, hosts and jobs are those of Mohan et al. (PVLDB 14(5), 2021; sections 3, 4 and 7), and nothing is
fitted. The page cache is a least-recently-used one (a closed form) and, in the last column, the two lists of Linux,
simulated; ``page_cache.py`` lays both beside this machine's kernel. Where storage binds, training is as fast as there is less to read.
``reported`` is looked at last.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from shardwright.core.caches import CachedInput, Sources

Row = tuple[str, float, float, float]  # what, by the closed form, reported, by two lists or NaN
ITEMS, EPOCHS, WARM = 4000, 14, 8  # of a simulation
NONE = float("nan")


def setting(dataset: float, share: float, hosts: int = 1, jobs: int = 1) -> CachedInput:
    """Return a data set of so many (binary or decimal) gigabytes, of which a host caches a share."""
    return CachedInput(
        dataset_bytes=dataset, samples=1, memory=share * dataset, storage=1.0, hosts=hosts, jobs=jobs,
    )  # fmt: skip


class TwoLists:
    """Linux's page cache since 4.12, of files that are read once and closed (mm/workingset.c, mm/vmscan.c).

    What is read enters the inactive list; read again there, it goes to the active one, and so it does when it was
    evicted no more evictions ago than the active list is long. The oldest inactive file is evicted. The active list
    is aged as fast as the inactive one where it is ``ratio`` times as long, or files came back since the last eviction.
    """

    def __init__(self, room: int, ratio: float) -> None:
        self.room, self.ratio = room, ratio
        self.inactive, self.active = OrderedDict[int, None](), OrderedDict[int, None]()
        self.age, self.owed, self.came_back = 0, 0.0, False
        self.evicted: dict[int, int] = {}

    def read(self, item: int) -> bool:
        """Read an item; return whether it was there."""
        if item in self.active:
            return True
        if item in self.inactive:
            del self.inactive[item]
            self._activate(item)
            return True
        if len(self.inactive) + len(self.active) >= self.room:
            self._evict()
        since = self.age - self.evicted.pop(item, -ITEMS * EPOCHS)
        if since <= len(self.active):
            self.came_back = True
            self._activate(item)
        else:
            self.inactive[item] = None
        return False

    def _activate(self, item: int) -> None:
        self.active[item] = None
        self.age += 1

    def _evict(self) -> None:
        low = len(self.inactive) * (0 if self.came_back else self.ratio)
        self.came_back = False
        if low < len(self.active):
            self.owed = min(
                self.owed + len(self.active) / max(1, len(self.inactive)), len(self.active)
            )
            while self.owed >= 1 or not self.inactive:
                self.inactive[self.active.popitem(last=False)[0]] = None
                self.owed = max(0.0, self.owed - 1)
        item, _ = self.inactive.popitem(last=False)
        self.evicted[item] = self.age
        self.age += 1


def orders(hosts: int, jobs: int) -> Iterator[Iterable[int]]:
    """Yield what one host reads in each epoch."""
    chance = random.Random(0)
    for _ in range(EPOCHS):
        each = [chance.sample(range(ITEMS), ITEMS // hosts) for _ in range(jobs)]
        yield (item for turn in zip(*each, strict=True) for item in turn)  # jobs at one pace


def missed(one: CachedInput) -> float:
    """Return the share of reads that two lists miss. A cache of g gigabytes may have sqrt(10 g) times as many active
    files as others."""
    cache = TwoLists(round(one.cached * ITEMS), max(1, math.isqrt(10 * int(one.memory))))
    epochs = [[cache.read(item) for item in order] for order in orders(one.hosts, one.jobs)]
    found = [was_there for epoch in epochs[WARM:] for was_there in epoch]
    return 1 - sum(found) / len(found)


def reads() -> Iterator[Row]:
    """Yield gigabytes that are read from storage in an epoch."""
    imagenet, jobs = setting(146, 0.35), setting(146, 0.35, jobs=8)
    servers = setting(146, 75 / 146, hosts=2)
    openimages, music = setting(645, 0.65), setting(950, 0.45, jobs=8)

    def page_cache(one: CachedInput) -> tuple[float, float]:
        """Return what one host reads, both ways."""
        every = one.dataset_bytes / one.hosts * one.jobs
        return one.read_bytes(one.page_cache()) / one.hosts, missed(one) * every

    for what, one, reported in (
        ("ImageNet-1k, 35 %, page cache", imagenet, 125),
        ("two servers, 75 GiB each, page cache, each", servers, 45),
        ("8 jobs, 35 %, page cache, at one pace", jobs, 884),
        ("OpenImages, 65 %, page cache", openimages, 340),
        ("FMA, 45 %, 8 jobs, page cache", music, 3500),
    ):
        closed, simulated = page_cache(one)
        yield what, closed, reported, simulated
    yield "8 jobs, 35 %, each for itself", jobs.read_bytes(jobs.page_cache_apart()), 884, NONE
    yield "ImageNet-1k, 35 %, MinIO", imagenet.read_bytes(imagenet.kept()), 95, NONE
    yield "OpenImages, 65 %, MinIO", openimages.read_bytes(openimages.kept()), 225, NONE
    yield "FMA, 45 %, 8 jobs, together", music.read_bytes(music.kept(), shared=True), 550, NONE


def speed_ups() -> Iterator[Row]:
    """Yield how many times as fast training is that waits for storage."""
    openimages, music = setting(645, 0.65), setting(950, 0.45, jobs=8)

    def gain(one: CachedInput, before: Sources, *, shared: bool = False) -> float:
        after = one.rates(one.kept(), shared=shared)["fetching"]
        return after / one.rates(before)["fetching"]

    listed = gain(openimages, Sources(memory=1 - missed(openimages)))
    yield "ResNet50, OpenImages, disk", gain(openimages, openimages.page_cache()), 1.53, listed
    shuffled, in_order = Sources(memory=0.47), Sources(memory=0.34)  # hits that the paper measured
    yield "the same, of the hits it measured", gain(openimages, shuffled), 1.53, NONE
    yield "the same, over in order", gain(openimages, in_order), 2.1, NONE
    yield "ShuffleNet, OpenImages, SSD, over in order", gain(openimages, in_order), 1.8, NONE
    read = 3500 / (8 * 950)
    together = gain(music, Sources(memory=1 - read), shared=True)
    yield "audio, FMA, 8 jobs, of what it read before", together, 5.6, NONE


def main() -> None:
    for title, rows in (("gigabytes read in an epoch", reads()), ("times as fast", speed_ups())):
        print(f"{title:<44} reported predicted         two lists")
        for what, predicted, reported, listed in rows:
            last = "" if math.isnan(listed) else f"{listed:9.4g} {listed / reported - 1:+7.1%}"
            error = predicted / reported - 1
            print(f"{what:<44} {reported:8.4g} {predicted:9.4g} {error:+7.1%} {last}")


if __name__ == "__main__":
    main()
