"""What the tests' other processes do to a cache."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardwright.caching import CacheServer, MinIOCache

CONTEXT = multiprocessing.get_context("forkserver")
MOST_SECONDS = 60.0
ALONE = ["unshare", "--mount", "--map-root-user"]  # with file systems that nobody else sees


def can_mount() -> bool:
    """Whether a process may have file systems of its own here."""
    return (
        bool(shutil.which(ALONE[0]))
        and not subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode
    )


def content(key: int) -> bytes:
    """Return bytes that only this key has: 8 of them again and again, 1 to 20,000 in all."""
    return (key.to_bytes(8, "little") * 2500)[: key * 7919 % 20_000 + 1]


def start(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that does some work, and ends with this one."""
    process = CONTEXT.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def ended(process: BaseProcess) -> int:
    """Wait for the end of a process, and return how it ended."""
    process.join(MOST_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a process did not end")
    return process.exitcode


def hammer(name: str, folder: Path, capacity: int, seed: int, keys: int) -> None:
    """Get random items until there is a file ``stop``, and end with 1 at the first wrong byte."""
    draw = random.Random(seed)
    with MinIOCache(capacity, name=name, folder=folder, items=4 * keys) as cache:
        while not (folder / "stop").exists():
            for _ in range(200):
                key = draw.randrange(keys)
                if cache.get(f"{key}", lambda key=key: content(key)) != content(key):
                    os._exit(1)


def fill(name: str, folder: Path, capacity: int, keys: range) -> None:
    """Put items in and go."""
    cache = MinIOCache(capacity, name=name, folder=folder)
    for key in keys:
        cache.get(f"{key}", lambda key=key: content(key))


def die_filling(name: str, folder: Path, capacity: int, key: int, line: int) -> None:
    """Put an item in, and be killed before the n-th line of what fills a slot."""
    cache = MinIOCache(capacity, name=name, folder=folder)
    left = [line]

    def trace(frame, event, _):
        if frame.f_code.co_name != "_fill":
            return (
                None if frame.f_code.co_filename != MinIOCache.put.__code__.co_filename else trace
            )
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    cache.get(f"{key}", lambda: content(key))
    sys.settrace(None)


def wait_for_ever(name: str, folder: Path, capacity: int, ready: Path) -> None:
    """Hold a cache until killed."""
    cache = MinIOCache(capacity, name=name, folder=folder)
    cache.get("1", lambda: content(1))
    ready.touch()
    with suppress(KeyboardInterrupt):
        signal.pause()


def serve(name: str, folder: Path, capacity: int, address: str, key: str) -> None:
    """Answer for a host's cache until killed; a file beside it says where."""
    cache = MinIOCache(capacity, name=name, folder=folder)
    server = CacheServer(cache, address, key=key)
    fresh = folder / f"{name}.new"
    fresh.write_text(server.address)
    fresh.rename(folder / f"{name}.address")
    while True:
        signal.pause()
