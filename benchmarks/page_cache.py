"""This kernel's page cache beside closed form and simulation: ``python benchmarks/page_cache.py [share ...]``, as root.

A process in a memory cgroup reads all files once an epoch, in a new random order, or in the same. What it read from storage
(``/proc/self/io``) tells its hits; the page cache's share of the data is the group's own count. It times nothing.
"""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordl import EPOCHS, WARM, missed, setting

from shardwright.core.caches import page_cache_hits
from shardwright.runtime.stalls.pages import evict

FILES, SIZE = 2000, 1 << 16
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def grouped() -> Iterator[Path]:
    """Give the folder of a memory cgroup."""
    group = (CGROUP / "memory" if (CGROUP / "memory").is_dir() else CGROUP) / f"pages-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


def limit(group: Path, more: int) -> None:
    """Let a group have so many bytes more than it has."""
    is_first = (group / "memory.usage_in_bytes").exists()
    used, most = ("usage_in_bytes", "limit_in_bytes") if is_first else ("current", "max")
    bytes_used = int((group / f"memory.{used}").read_text())
    (group / f"memory.{most}").write_text(str(bytes_used + more))


def cached(group: Path) -> int:
    """Return the bytes of a group's page cache."""
    found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(found.get("cache") or found["file"])


def own_reads() -> int:
    """Return the bytes that this process had storage read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def read_all(folder: Path, group: Path, share: float, is_shuffled: bool) -> None:
    """Read all files, epoch by epoch, with room for a share of them; print the share that was in memory, and the page cache's."""
    chance, hits, shares = random.Random(0), list[float](), list[float]()
    buffer, order = bytearray(SIZE), list(range(FILES))
    limit(group, round(share * FILES * SIZE))
    for _ in range(EPOCHS):
        if is_shuffled:
            chance.shuffle(order)
        before = own_reads()
        for number in order:
            with open(folder / str(number), "rb", buffering=0) as file:
                file.readinto(buffer)
        hits.append(1 - (own_reads() - before) / (FILES * SIZE))
        shares.append(cached(group) / (FILES * SIZE))
    for found in hits, shares:
        print(sum(found[WARM:]) / (EPOCHS - WARM))


def measured(folder: Path, share: float, order: str) -> tuple[float, float]:
    """Return hits, and the share that the page cache had."""
    evict(str(folder / str(number)) for number in range(FILES))
    with grouped() as group:
        command = [sys.executable, __file__, "read", str(folder), str(group), str(share), order]
        done = subprocess.run(
            command,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    hits, had = map(float, done.stdout.split())
    return hits, had


def main() -> None:
    print(
        f"Linux {platform.release()}, {FILES} files of {SIZE // 1024} KiB, {EPOCHS - WARM} epochs"
    )
    print("share  order      hits  least recently used  two lists")
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).absolute()
        for number in range(FILES):
            (folder / str(number)).write_bytes(os.urandom(SIZE))
        os.sync()  # what is dirty stays in memory
        for share in map(float, sys.argv[1:] or SHARES):
            hits, had = measured(folder, share, "shuffled")
            lists = 1 - missed(setting(FILES * SIZE / 1e9, had))
            print(
                f"{had:.3f}  shuffled  {hits:.3f}  {page_cache_hits(had):19.3f}  {lists:9.3f}",
                flush=True,
            )
        hits, had = measured(folder, 0.65, "same")
        print(f"{had:.3f}  the same  {hits:.3f}  {0:19.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        _, _, files, group, share, order = sys.argv
        read_all(Path(files), Path(group), float(share), order == "shuffled")
    else:
        main()
