"""Data sets that read through a cache: whole files, samples of tar shards, windows of token files.

They are map-style: torch's DataLoader takes them with any sampler, and any number of workers.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwright.errors import InputError, RunError

Transform = Callable[[Any], Any]


class Cache(Protocol):
    """Whatever items are read through."""

    def get(self, key: str | bytes, read: Callable[[], bytes]) -> bytes:
        """Return an item."""
        ...

    def part_of(
        self,
        key: str | bytes,
        length: int,
        part: tuple[int, int],
        read: Callable[[int, int], bytes],
    ) -> bytes:
        """Return a part of an item of this length."""
        ...


_BLOCK = 4 << 20  # bytes of a token file that are cached as one item
_TRIES = 3  # readings of a file that changes while it is read
_FRESH = 20_000_000  # nanoseconds within which a second change may bear the same time


class CachedFiles:
    """Whole files, one a sample: ``transform`` of its bytes.

    A file that is written anew is read anew; what was cached of it stays, unused.
    """

    def __init__(
        self, paths: Iterable[str | Path], cache: Cache, transform: Transform = bytes
    ) -> None:
        self.paths = [os.path.abspath(path) for path in paths]
        self.cache, self.transform = cache, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        for _ in range(_TRIES):
            about = os.stat(path)
            try:
                return self.transform(self._bytes(path, about))
            except _Changed:
                continue
        raise RunError(
            f"a file stays as it is while it is read, but {path} changed {_TRIES} times; write it elsewhere and rename"
        )

    def _bytes(self, path: str, about: os.stat_result) -> bytes:
        def read() -> bytes:
            return _read(path, about, 0, about.st_size)

        if time.time_ns() - about.st_mtime_ns < _FRESH:
            return read()
        return self.cache.get(_version(path, about), read)


class CachedShards:
    """Samples of tar shards in WebDataset's layout: files next to each other with one name up to its first dot.

    A sample is ``transform`` of a dict: ``__key__``, ``__url__``, and the bytes of each file by the rest of its name.
    A shard is cached whole, when its first sample is read; where there is no room for it, samples are read one by
    one. Only the headers are read at the start. Shards may not change then.
    """

    def __init__(
        self, paths: Iterable[str | Path], cache: Cache, transform: Transform = dict
    ) -> None:
        self.cache, self.transform = cache, transform
        self._files = [_Ranges(path, cache) for path in paths]
        self._samples = [
            (shard, sample)
            for shard, file in enumerate(self._files)
            for sample in _samples(file.path)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        shard, (key, members) = self._samples[index]
        file = self._files[shard]
        found: dict[str, Any] = {"__key__": key, "__url__": file.path}
        for name, start, length in members:
            found[name] = file.read(start, length)
        return self.transform(found)


class CachedTokens:
    """Windows of a file of tokens: sample i is ``transform`` of tokens i * window to (i + 1) * window, both included.

    So the last token of one sample is the first of the next: inputs and, one further, targets. Blocks of 4 MiB are
    cached. The file may not change.
    """

    def __init__(
        self,
        path: str | Path,
        cache: Cache,
        *,
        window: int,
        dtype: Any = np.uint16,
        transform: Transform = np.asarray,
    ) -> None:
        self.cache, self.transform = cache, transform
        self.window, self.dtype = window, np.dtype(dtype)
        self._file = _Ranges(path, cache, _BLOCK)
        if window < 1 or self._file.size % self.dtype.itemsize:
            raise InputError(
                f"windows have at least one token and files whole ones, but window is {window}, and "
                f"{self._file.path} has {self._file.size:,} bytes of {self.dtype}; change window or dtype"
            )

    def __len__(self) -> int:
        return max(0, self._file.size // self.dtype.itemsize - 1) // self.window

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        width = self.dtype.itemsize
        start = index % len(self) * self.window * width
        raw = bytearray(
            self._file.read(start, (self.window + 1) * width)
        )  # writable, as torch wants it
        return self.transform(np.frombuffer(raw, self.dtype))


class _Changed(Exception):
    """A file is not the one that was asked for."""


class _Ranges:
    """Ranges of one file, by way of whole blocks that are cached; a block of 0 is the whole file."""

    def __init__(self, path: str | Path, cache: Cache, block: int = 0) -> None:
        self.path, self._cache = os.path.abspath(path), cache
        self._about = os.stat(self.path)
        self.size = self._about.st_size
        self._block = block or max(1, self.size)
        self._key = _version(self.path, self._about)

    def read(self, start: int, length: int) -> bytes:
        end, parts = start + length, []
        while start < end:
            block = start // self._block
            stop = min(end, (block + 1) * self._block)
            parts.append(self._part(block, start, stop))
            start = stop
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, block: int, start: int, stop: int) -> bytes:
        """Return a range within one block."""
        first = block * self._block
        return self._cache.part_of(
            f"{self._key}\0{block}",
            min(self._block, self.size - first),
            (start - first, stop - first),
            lambda at, to: self._read(first + at, to - at),
        )

    def _read(self, start: int, length: int) -> bytes:
        try:
            return _read(self.path, self._about, start, length)
        except _Changed:
            raise InputError(
                f"{self.path} may not change while it is a data set's, but it did; make the data set again"
            ) from None


def _version(path: str, about: os.stat_result) -> str:
    return f"{path}\0{about.st_size}\0{about.st_mtime_ns}"


def _read(path: str, about: os.stat_result, start: int, length: int) -> bytes:
    """Read from a file that is the same before and after."""
    with open(path, "rb", buffering=0) as file:
        found = bytearray(length)
        view, done = memoryview(found), 0
        while done < length:
            count = os.preadv(file.fileno(), [view[done:]], start + done)
            if not count:
                raise _Changed
            done += count
        now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (about.st_size, about.st_mtime_ns):
        raise _Changed
    return bytes(found)


# Key and members: rest of the name, offset, length.
_Sample = tuple[str, list[tuple[str, int, int]]]


def _samples(path: str) -> list[_Sample]:
    """Return the samples of a tar shard."""
    found: list[_Sample] = []
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                if not member.isreg() or member.issparse():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, rest = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if not found or found[-1][0] != key:
                    found.append((key, []))
                found[-1][1].append((rest, member.offset_data, member.size))
    except tarfile.TarError as error:
        raise InputError(
            f"shards are tar files that are not compressed, but {path} is not ({error}); unpack it, or copy it again "
            "where it was cut off"
        ) from None
    return found
