"""What caches gain on a slow disk, predicted by min(F, P, G) beside measured.

    python benchmarks/throttled.py [--folder /mnt/slow] [--only one,hosts,jobs]

The disk is a reader of 64 kB files that lets so many bytes a second through, for all processes together; with ``--folder`` it
is the file system there, whose reads somebody else has to throttle, and whose rate is measured first.

* one: MinIO against a plain DataLoader whose page cache is of the same size, pure LRU: what falls out of it is put out of
  memory (posix_fadvise).
* hosts: caches of 2 and 3 hosts as one against each host's own; with root each is in a network namespace behind a
  link of 1 Gbit/s, else all are processes that talk over loopback. What a sample takes from another host is measured
  by the first two, who hold all of them together, as the disk's rate is.
* jobs: 4 jobs that share what is read and prepared, against 4 for themselves; bound by the disk, and by cores.

The first epoch fills caches and is not timed. What one host trains at with all data in memory, min(P, G), is measured first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from shardwright.caching import (
    CacheServer,
    MinIOCache,
    PartitionedCache,
    SharedLoader,
    Sharing,
)
from shardwright.core.caches import page_cache_hits
from tests.hosts import hosts, why_not

SIZE, ITEMS, BATCH, EPOCHS = 64_000, 300, 10, 3
RATE = 150 * SIZE  # bytes/s of the disk
COMPUTE = 300.0  # samples/s
PREPARE = 0.0005  # seconds of a core, a sample


def drop(path: Path) -> None:
    """Put a file's pages out of memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Disk:
    """Files, read one after the other at so many bytes a second; a rate of 0: as fast as they come."""

    def __init__(self, folder: Path, clock: Path, rate: float) -> None:
        self.paths = [folder / f"{item}" for item in range(ITEMS)]
        self.clock, self.rate = clock, rate
        clock.write_bytes(struct.pack("d", 0.0))

    def read(self, item: int) -> bytes:
        data = self.paths[item].read_bytes()
        if self.rate:
            with self.clock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                free = max(time.monotonic(), struct.unpack("d", file.read(8))[0])
                free += len(data) / self.rate
                file.seek(0)
                file.write(struct.pack("d", free))
            time.sleep(max(0.0, free - time.monotonic()))
        else:
            drop(self.paths[item])
        return data


class PageCache:
    """A disk behind a least-recently-used cache of so many items, one for all processes."""

    def __init__(self, disk: Disk, folder: Path, room: int) -> None:
        self.disk, self.room, self.lock = disk, room, folder / "lock"
        self.lock.touch()
        self.used = np.memmap(folder / "used", np.int64, "w+", shape=(ITEMS + 1,))

    def read(self, item: int) -> bytes:
        with self.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            used = self.used
            hit = used[item] > 0
            used[ITEMS] += 1
            if not hit and np.count_nonzero(used[:ITEMS]) >= self.room:
                oldest = int(np.argmin(np.where(used[:ITEMS] > 0, used[:ITEMS], used[ITEMS])))
                used[oldest] = 0
                drop(self.disk.paths[oldest])
            used[item] = used[ITEMS]
        if hit or not self.disk.rate:
            return self.disk.paths[item].read_bytes()
        return self.disk.read(item)


class Items(Dataset):
    """Items that are read, then keep a core busy."""

    def __init__(self, read: Callable[[int], bytes], prepare: float) -> None:
        self.read, self.prepare = read, prepare

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, item: int) -> int:
        size = len(self.read(item))
        end = time.thread_time() + self.prepare
        while time.thread_time() < end:
            pass
        return size


def told(name: str, predicted: float, measured: float) -> None:
    print(
        f"{name:<52} predicted {predicted:5.2f}x  measured {measured:5.2f}x  {measured / predicted - 1:+6.1%}",
        flush=True,
    )


# -- one host --------------------------------------------------------------------------------------


def batches() -> Iterator[list[int]]:
    """Yield the items of all epochs, one behind the other: workers go on into the next."""
    for epoch in range(1 + EPOCHS):
        order = random.Random(epoch).sample(range(ITEMS), ITEMS)
        yield from (order[place : place + BATCH] for place in range(0, ITEMS, BATCH))


def speed(read: Callable[[int], bytes]) -> float:
    """Return samples per second of training after the first epoch."""
    loader = DataLoader(Items(read, PREPARE), batch_sampler=list(batches()), num_workers=4)
    begin = 0.0
    for number, _ in enumerate(loader):
        if number == ITEMS // BATCH:
            begin = time.perf_counter()
        time.sleep(BATCH / COMPUTE)
    return (ITEMS * EPOCHS - BATCH) / (time.perf_counter() - begin - BATCH / COMPUTE)


def one_host(disk: Disk, rate: float, work: Path) -> None:
    # The paper's second phase: handing a batch over takes the step's own time, too.
    in_memory = speed(lambda item: b"")
    print(f"{in_memory:.0f} samples/s with all data in memory, {COMPUTE:.0f} computed")
    for share in (0.35, 0.65, 0.9):
        speeds = [
            min(rate / SIZE / max(1e-9, 1 - hit), in_memory)
            for hit in (page_cache_hits(share), share)
        ]
        room = int(share * ITEMS)
        for path in disk.paths:
            drop(path)
        plain = speed(PageCache(disk, work, room).read)
        with MinIOCache(room * SIZE, items=ITEMS) as cache:
            kept = speed(lambda item, cache=cache: cache.get(f"{item}", lambda: disk.read(item)))
        told(
            f"one host, {share:.0%} cached, MinIO / page cache", speeds[1] / speeds[0], kept / plain
        )
        print(
            f"{'':<52} {speeds[0]:.0f} and {speeds[1]:.0f} samples/s predicted, {plain:.0f} and {kept:.0f} measured"
        )


# -- several hosts ---------------------------------------------------------------------------------


def be_host(words: list[str]) -> None:
    """Be one host: fill its cache, then print the seconds of reading a sample of its part of each epoch."""
    place, addresses, share = int(words[0]), words[1].split(","), float(words[2])
    files, work, rate = Path(words[3]), Path(words[4]), float(words[5])
    disk = Disk(files, work / f"clock{place}", rate)
    with (
        MinIOCache(int(share * ITEMS) * SIZE, items=ITEMS) as cache,
        CacheServer(cache, addresses[place], key="k" * 16),
    ):
        meet(work, f"up{place}", len(addresses))
        members = addresses if words[6] == "together" else [addresses[place]]
        shared = PartitionedCache(cache, members, addresses[place], key="k" * 16)
        spent, count = 0.0, 0
        for epoch in range(1 + 2 * EPOCHS):
            order = random.Random(epoch).sample(range(ITEMS), ITEMS)[place :: len(addresses)]
            begin = time.perf_counter()
            for item in order:
                shared.get(f"{item}", lambda item=item: disk.read(item))
            if epoch:
                spent, count = spent + time.perf_counter() - begin, count + len(order)
            else:
                meet(work, f"full{place}", len(addresses))
        print(spent / count)
        meet(work, f"done{place}", len(addresses))


def meet(work: Path, name: str, count: int) -> None:
    """Wait for as many as there are."""
    (work / name).touch()
    while len(list(work.glob(name.rstrip("0123456789") + "*"))) < count:
        time.sleep(0.01)


def several_hosts(disk: Disk, rate: float, work: Path) -> None:
    remote = 0.0  # seconds of a sample from another host, as the first case has them
    for count, share in ((2, 0.5), (2, 0.35), (3, 0.25)):
        with placed(count) as (prefixes, addresses):
            found: list[float] = []
            for how in ("alone", "together"):
                with tempfile.TemporaryDirectory(dir=work) as meeting:
                    words = [
                        ",".join(addresses),
                        str(share),
                        str(disk.paths[0].parent),
                        meeting,
                        str(disk.rate),
                        how,
                    ]
                    running = [
                        subprocess.Popen(
                            [*prefix, sys.executable, __file__, "--host", str(place), *words],
                            stdout=subprocess.PIPE, text=True,
                        )
                        for place, prefix in enumerate(prefixes)
                    ]  # fmt: skip
                    # Of all hosts: how many of an epoch's few uncached items fall to each is chance.
                    each = [float(one.communicate()[0]) for one in running]
                    found.append(len(each) / sum(each))
        where = "namespaces" if prefixes[0] else "processes"
        if count * share >= 1:  # nobody waits for storage: half of the samples come from the other
            remote = 2 / found[1]
            print(
                f"{count} hosts ({where}), {share:.0%} each: storage is read once; {found[1]:.0f} samples/s, "
                f"{found[0]:.0f} without sharing"
            )
            continue
        alone = (1 - share) * SIZE / rate
        together = (1 - count * share) * SIZE / rate + (count - 1) * share * remote
        told(
            f"{count} hosts ({where}), {share:.0%} each, together / alone",
            alone / together,
            found[1] / found[0],
        )


@contextlib.contextmanager
def placed(count: int) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Give so many places to run at, and their addresses."""
    if why_not():
        yield [[]] * count, [f"127.0.0.1:{47310 + place}" for place in range(count)]
        return
    with hosts(count, "1gbit", "swt") as names:
        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield prefixes, [f"10.84.0.{place + 1}:47310" for place in range(count)]


# -- several jobs ----------------------------------------------------------------------------------


def be_job(items: Items, together: str, gate: object, found: object) -> None:
    """Be one job: go through the data, for itself or together with others."""
    sharing = Sharing(name=together, seed=1, jobs=4) if together else None
    loader = SharedLoader(items, sharing, batch_size=BATCH) if sharing else None
    begin = 0.0
    for epoch in range(3):
        if epoch == 1:
            gate.wait()  # type: ignore[attr-defined]
            begin = time.perf_counter()
        if loader:
            for _ in loader:
                pass
        else:
            for item in random.Random(os.getpid() + epoch).sample(range(ITEMS), ITEMS):
                items[item]
    found.put(2 * ITEMS / (time.perf_counter() - begin))  # type: ignore[attr-defined]
    gate.wait()  # type: ignore[attr-defined]
    if loader:
        loader.close()


def four_jobs(disk: Disk, rate: float, work: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    fast = Disk(disk.paths[0].parent, work / "fast", 1e12)
    for name, items, fetch, prepare in (
        ("the disk", Items(disk.read, 0.0002), rate / SIZE, min(4, cores) / 0.0002),
        ("cores", Items(fast.read, 0.006), float("inf"), min(4, cores) / 0.006),
    ):
        found: list[float] = []
        for together in ("", f"throttled-{os.getpid()}-{name.split()[-1]}"):
            context = multiprocessing.get_context("spawn")
            gate, queue = context.Barrier(4), context.Queue()
            jobs = [
                context.Process(target=be_job, args=(items, together, gate, queue))
                for _ in range(4)
            ]
            for job in jobs:
                job.start()
            found.append(min(queue.get(timeout=200) for _ in jobs))
            for job in jobs:
                job.join()
        # For themselves each has a fourth of both.
        predicted = min(fetch, prepare) / min(fetch / 4, prepare / 4)
        told(f"4 jobs, {name} binding, together / each for itself", predicted, found[1] / found[0])
        print(
            f"{'':<52} {min(fetch, prepare):.0f} samples/s predicted together, {found[1]:.0f} measured"
        )


def measured_rate(disk: Disk) -> float:
    """Return the bytes/s of reading files that are not in memory, in random order."""
    for path in disk.paths:
        drop(path)
    begin = time.perf_counter()
    for item in random.Random(7).sample(range(ITEMS), ITEMS):
        disk.read(item)
    return SIZE * ITEMS / (time.perf_counter() - begin)


def main() -> None:
    if sys.argv[1:2] == ["--host"]:
        be_host(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="of a file system that is slow, instead of a slow reader"
    )
    parser.add_argument("--only", default="one,hosts,jobs")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir=given.folder) as where,
    ):
        work, files = Path(name), Path(where)
        for item in range(ITEMS):
            (files / f"{item}").write_bytes(random.Random(item).randbytes(SIZE))
        os.sync()
        disk = Disk(files, work / "clock", 0.0 if given.folder else RATE)
        rate = measured_rate(disk) if given.folder else RATE
        print(
            f"disk: {given.folder or 'a rate-limited reader'}, {rate / 1e6:.2f} MB/s, {rate / SIZE:.0f} samples/s"
        )
        for part, run in (("one", one_host), ("hosts", several_hosts), ("jobs", four_jobs)):
            if part in given.only.split(","):
                run(disk, rate, work)


if __name__ == "__main__":
    main()
