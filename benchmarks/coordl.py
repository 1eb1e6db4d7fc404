"""What the paper on CoorDL reports, predicted from its settings: ``python benchmarks/coordl.py``.

Bytes of data sets and of caches, hosts and jobs are those of Mohan et al. (PVLDB 14(5), 2021; sections 3, 4 and 7), and nothing is
fitted. The page cache is once a pure least-recently-used one (a closed form), once what the paper measured of it. Where
storage binds, training is as fast as there is less to read. ``reported`` is looked at last.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.caches import CachedInput, Sources

Row = tuple[str, float, float]  # what, predicted, reported


def setting(dataset: float, share: float, hosts: int = 1, jobs: int = 1) -> CachedInput:
    """Return a data set of so many (binary or decimal) gigabytes, of which a host caches a share."""
    return CachedInput(
        dataset_bytes=dataset, samples=1, memory=share * dataset, storage=1.0, hosts=hosts, jobs=jobs,
    )  # fmt: skip


def reads() -> Iterator[Row]:
    """Yield gigabytes that are read from storage in an epoch."""
    imagenet, jobs = setting(146, 0.35), setting(146, 0.35, jobs=8)
    servers = setting(146, 75 / 146, hosts=2)
    openimages, music = setting(645, 0.65), setting(950, 0.45, jobs=8)
    yield "ImageNet-1k, 35 %, page cache", imagenet.read_bytes(imagenet.page_cache()), 125
    yield "the same, MinIO", imagenet.read_bytes(imagenet.kept()), 95
    yield (
        "the same of two servers, page cache, each",
        servers.read_bytes(servers.page_cache()) / 2,
        45,
    )
    yield "8 jobs, page cache, at one pace", jobs.read_bytes(jobs.page_cache()), 884
    yield "8 jobs, page cache, each for itself", jobs.read_bytes(jobs.page_cache_apart()), 884
    yield "OpenImages, 65 %, page cache", openimages.read_bytes(openimages.page_cache()), 340
    yield "the same, MinIO", openimages.read_bytes(openimages.kept()), 225
    yield "FMA, 45 %, 8 jobs, page cache", music.read_bytes(music.page_cache()), 3500
    yield "the same, together", music.read_bytes(music.kept(), shared=True), 550


def speed_ups() -> Iterator[Row]:
    """Yield how many times as fast training is that waits for storage."""
    openimages, music = setting(645, 0.65), setting(950, 0.45, jobs=8)

    def gain(one: CachedInput, before: Sources, *, shared: bool = False) -> float:
        after = one.rates(one.kept(), shared=shared)["fetching"]
        return after / one.rates(before)["fetching"]

    shuffled, in_order = Sources(memory=0.47), Sources(memory=0.34)  # hits that the paper measured
    yield "ResNet50, OpenImages, disk, over shuffled", gain(openimages, shuffled), 1.53
    yield "the same, of a closed form's hits", gain(openimages, openimages.page_cache()), 1.53
    yield "the same, over in order", gain(openimages, in_order), 2.1
    yield "ShuffleNet, OpenImages, SSD, over in order", gain(openimages, in_order), 1.8
    read = 3500 / (8 * 950)
    yield (
        "audio, FMA, 8 jobs, over each for itself",
        gain(music, Sources(memory=1 - read), shared=True),
        5.6,
    )


def main() -> None:
    for title, rows in (("gigabytes read in an epoch", reads()), ("times as fast", speed_ups())):
        print(f"{title:<44} predicted  reported")
        for what, predicted, reported in rows:
            print(f"{what:<44} {predicted:9.4g} {reported:9.4g}  {predicted / reported - 1:+6.1%}")


if __name__ == "__main__":
    main()
