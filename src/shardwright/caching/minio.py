"""A cache of raw bytes that never evicts, shared by all processes of a host.

An item of a data set is read once an epoch, in random order: whatever is evicted was going to be read as soon as what
stays. So a cache that keeps what it has hits with its share of the data, and the page cache with far less (Mohan et
al., PVLDB 14(5), 2021, section 6.1).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, cast

from shardwright.caching.home import NO_SPACE, Home, open_home
from shardwright.errors import InputError, ShardwrightWarning

KIND = "cache"
MOST_BYTES, MOST_ITEMS = 1 << 46, 1 << 30
_MAGIC = b"SWMINIO1"
_HEAD = struct.Struct("<8sQQ")  # magic, slots, capacity
# Numbers that change under the lock, each written at once: a process may be killed between two of them. End of the
# last item with its check, end of what is reserved, items, and while a slot is filled its place + 1 and the items
# before it << 32.
_COUNTS_AT, _END, _RESERVED, _ITEMS, _PENDING = 64, 0, 1, 2, 3
_DECLINED_AT, _CORRUPT_AT = 96, 97
_END_BITS = 47  # of MOST_BYTES
_INDEX_AT, _SLOT_BYTES, _ALIGNED = 4096, 64, 64
# State, check of the fields, digest, offset, length, check of the item. The state is read first and written last.
_SLOT = struct.Struct("<B3xI16sQQI")
_FIELDS = struct.Struct("<16sQQI")
_EMPTY, _FILLING, _READY, _BAD = range(4)
_RESERVE = 8 << 20  # bytes that are asked of the file system at a time
_PATIENCE = 2.0  # seconds to wait for who fills; then the item is not cached this time
_BYTES_PER_SLOT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """What a cache holds (all processes together), and what this process found in it.

    ``items``: with notes, of no bytes, that no host has room for one. ``declined``: some item had no room. ``hits``, ``misses``: look-ups of this process, ``read_bytes`` what it read
    from storage.
    """

    items: int
    bytes: int
    capacity: int
    declined: bool
    corrupt: int
    hits: int
    misses: int
    read_bytes: int
    place: str


class Misses:
    """How often, and how much, a cache read from storage in this process."""

    misses = read_bytes = 0

    def read_storage(self, read: Callable[[], bytes]) -> bytes:
        """Return what storage gives of an item."""
        self.misses += 1
        data = read()
        if not isinstance(cast(object, data), bytes | bytearray | memoryview):
            raise InputError(
                f"what is cached of an item are bytes as they were read, but what reads gave {type(data).__name__}; "
                "return bytes, and decode what get returns"
            )
        self.read_bytes += len(data)
        return data


class MinIOCache(Misses):
    """Bytes of items by key; what is once in stays until the last process has closed it.

    ``capacity``: bytes of items, each rounded up to 64. ``name``: processes that give the same one share the cache; a
    cache without one is shared with those it is pickled or forked to. ``folder``: where it lies, instead of shared
    memory or, where that is too small, the folder for temporary files. ``items``: how many to expect, else one for
    each 4 kB. ``always``: check an item at every hit, not only when this process sees it first.
    """

    def __init__(
        self,
        capacity: float,
        *,
        name: str = "",
        folder: str | Path | None = None,
        items: int = 0,
        always: bool = False,
    ) -> None:
        room = _whole(capacity, MOST_BYTES, "capacity", "0 to 2^46 bytes")
        expected = _whole(items, MOST_ITEMS, "items", "1 to 2^30 items")
        expected = expected or min(MOST_ITEMS, max(256, room // _BYTES_PER_SLOT))
        slots = 1 << (expected * 3 // 2).bit_length()
        start = _INDEX_AT + slots * _SLOT_BYTES
        self._home = open_home(
            name, start + room, lambda at: _make(at, slots, room), kind=KIND, folder=folder
        )
        self.place = self._home.place
        self._always = always
        try:
            self._file, self._map, self._slots = _opened(self._home.path / "arena", room)
        except InputError:
            self._home.close()
            raise
        self.capacity = room
        self._start = _INDEX_AT + self._slots * _SLOT_BYTES
        self._counts = memoryview(self._map)[_COUNTS_AT : _COUNTS_AT + 32].cast("Q")
        self._bytes = memoryview(self._map).toreadonly()[self._start :]
        self._checked = bytearray(self._slots)
        self.hits = 0
        try:
            self._enter_process()
        except OSError as error:
            _end(self._home, self._file)
            raise _torn(self._home.path / "lock", error) from None
        self._end = weakref.finalize(self, _end, self._home, self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        path = self._home.path
        name = path.name.split("-", 3)[3]
        return _joined, (self.capacity, name, path.parent, self._always, self.place)

    def __enter__(self) -> MinIOCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cache; the last process removes it. Views of items stay good."""
        self._end()

    def get(self, key: str | bytes, read: Callable[[], bytes]) -> bytes:
        """Return the bytes of an item: from the cache, or what ``read`` returns, which is kept where there is room."""
        view = self.view(key, read)
        return view if isinstance(view, bytes) else bytes(view)

    def view(self, key: str | bytes, read: Callable[[], bytes]) -> memoryview | bytes:
        """Return the same without a copy of what is cached: read-only, and good for as long as it is held."""
        digest = digest_of(key)
        found = self.find(digest)
        if found is not None:
            self.hits += 1
            return found
        data = self.read_storage(read)
        self.put(digest, data)
        return data

    def part_of(
        self,
        key: str | bytes,
        length: int,
        part: tuple[int, int],
        read: Callable[[int, int], bytes],
    ) -> bytes:
        """Return bytes ``part[0]`` to ``part[1]`` of an item of this length; ``read(start, end)`` reads storage,
        the whole item where there is room for it."""
        if not self.has_room(length) and self.find(digest_of(key)) is None:
            return self.read_storage(lambda: read(*part))
        return bytes(self.view(key, lambda: read(0, length))[part[0] : part[1]])

    def find(self, digest: bytes) -> memoryview | None:
        """Return an item by its digest, None where it is not cached, or no longer what was put in."""
        for place in self._places(digest):
            at = _INDEX_AT + place * _SLOT_BYTES
            state, check, found, offset, length, item = _SLOT.unpack_from(self._map, at)
            if state == _EMPTY:
                return None
            if state == _READY and found == digest:
                view = self._bytes[offset : offset + length]
                if self._checked[place] and not self._always:
                    return view
                fields = zlib.crc32(_FIELDS.pack(found, offset, length, item))
                if check == fields and len(view) == length and zlib.crc32(view) == item:
                    self._checked[place] = 1
                    return view
                self._condemn(place, at)
        return None

    def _places(self, digest: bytes) -> Iterable[int]:
        """Return all slots in the order in which an item is looked for."""
        first = int.from_bytes(digest[:8], "little") % self._slots
        return chain(range(first, self._slots), range(first))

    def has_room(self, length: int) -> bool:
        """Whether an item of so many bytes would be kept."""
        counts = self._counts
        return self._used() + length <= self.capacity and counts[_ITEMS] < self._slots * 3 // 4

    def _used(self) -> int:
        """Return where the next item goes: nowhere, where that is not what a process wrote, or it overwrites others."""
        cell = self._counts[_END]
        end = cell & (1 << _END_BITS) - 1
        return end if cell == _checked_end(end) else self.capacity

    @property
    def has_declined(self) -> bool:
        """Whether some item had no room."""
        return bool(self._map[_DECLINED_AT])

    def decline(self) -> None:
        """Note that an item had no room."""
        self._map[_DECLINED_AT] = 1

    def put(self, digest: bytes, data: bytes | memoryview) -> bool:
        """Keep an item by its digest; return whether it is in the cache now."""
        if not self._end.alive:
            return False
        if not self.has_room(len(data)):
            self.decline()
            return False
        with self._filling() as held:
            if not held:
                return False
            if self.find(digest) is not None:
                return True
            if self.has_room(len(data)) and self._reserve(len(data)) and self._fill(digest, data):
                return True
        self.decline()
        return False

    def state(self) -> CacheState:
        """Return what the cache holds now."""
        return CacheState(
            items=self._counts[_ITEMS], bytes=self._used(), capacity=self.capacity, declined=self.has_declined,
            corrupt=self._map[_CORRUPT_AT], hits=self.hits, misses=self.misses,
            read_bytes=self.read_bytes, place=self.place,
        )  # fmt: skip

    def _enter_process(self) -> None:
        """Take a lock file of this process's own: a forked child has the lock that its parent has."""
        path = self._home.path / "lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._process = os.getpid()
        self._turn = threading.Lock()
        weakref.finalize(self, _close_of, self._lock, self._process)

    @contextmanager
    def _filling(self) -> Iterator[bool]:
        """Hold the cache's lock, which ends with its process; False where it was not to be had in time."""
        if os.getpid() != self._process:
            try:
                self._enter_process()
            except FileNotFoundError:  # the parent, the last to share it, has closed it
                yield False
                return
        if not self._turn.acquire(timeout=_PATIENCE):
            yield False
            return
        try:
            held = locked(self._lock)
            try:
                if held:
                    self._recover()
                yield held
            finally:
                if held:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._turn.release()

    def _recover(self) -> None:
        """Finish what a process that was killed while it filled a slot had begun, or take it back."""
        counts = self._counts
        if not counts[_PENDING]:
            return
        items, place = counts[_PENDING] >> 32, (counts[_PENDING] & 0xFFFFFFFF) - 1
        if not 0 <= place < self._slots:  # no process wrote that
            counts[_PENDING] = 0
            return
        at = _INDEX_AT + place * _SLOT_BYTES
        state, _, _, offset, length, _ = _SLOT.unpack_from(self._map, at)
        if state in (_READY, _BAD):
            counts[_END] = _checked_end(max(self._used(), offset + _rounded(length)))
            counts[_ITEMS] = items + 1
        else:
            self._map[at] = _EMPTY
        counts[_PENDING] = 0

    def _reserve(self, length: int) -> bool:
        """Have the file system give room for the next item: memory that is not there would end the process."""
        end, reserved = self._used(), self._counts[_RESERVED]
        need = min(end + _rounded(length), self.capacity)
        if need <= reserved:
            return True
        for goal in (min(self.capacity, max(need, reserved + _RESERVE)), need):
            try:
                os.posix_fallocate(self._file, self._start + reserved, goal - reserved)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
            else:
                self._counts[_RESERVED] = goal
                return True
        if not self._map[_DECLINED_AT]:
            warnings.warn(
                f"a cache of {self.capacity:,} bytes stops at {end:,}: no more room in {self.place}; "
                "the rest is read from storage",
                ShardwrightWarning,
                stacklevel=5,
            )
        return False

    def _fill(self, digest: bytes, data: bytes | memoryview) -> bool:
        counts = self._counts
        end, items = self._used(), counts[_ITEMS]
        for place in self._places(digest):
            if self._map[_INDEX_AT + place * _SLOT_BYTES] == _EMPTY:
                break
        else:
            return False
        at = _INDEX_AT + place * _SLOT_BYTES
        length, item = len(data), zlib.crc32(data)
        fields = zlib.crc32(_FIELDS.pack(digest, end, length, item))
        counts[_PENDING] = items << 32 | place + 1
        self._map[self._start + end : self._start + end + length] = data
        _SLOT.pack_into(self._map, at, _FILLING, fields, digest, end, length, item)
        self._map[at] = _READY
        counts[_END], counts[_ITEMS] = _checked_end(end + _rounded(length)), items + 1
        counts[_PENDING] = 0
        return True

    def _condemn(self, place: int, at: int) -> None:
        """Take an item out whose bytes are no longer those that were put in; its room is lost."""
        self._map[at], self._checked[place] = _BAD, 0
        self._map[_CORRUPT_AT] = min(255, self._map[_CORRUPT_AT] + 1)
        warnings.warn(
            f"an item in {self._home.path} is not what was put in; it is read from storage again",
            ShardwrightWarning,
            stacklevel=4,
        )


def digest_of(key: str | bytes) -> bytes:
    """Return the 16 bytes by which an item is known; a name that is not UTF-8, as files may have, is one too."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    try:
        return hashlib.blake2b(data, digest_size=16).digest()
    except TypeError:
        raise InputError(
            f"an item is known by text or bytes, not {type(key).__name__}; make it text"
        ) from None


def _whole(number: float, most: int, name: str, rule: str) -> int:
    """Return a whole number, also of one written as 50e9."""
    is_number = isinstance(number, Real)
    if not is_number or not 0 <= number <= most or number != int(number):
        said = f"{number:,}" if is_number else f"{number!r:.40}"
        raise InputError(f"a cache has {rule}, a whole number, not {said}; change {name}")
    return int(number)


def _checked_end(end: int) -> int:
    """Return the end of the last item with its check in the bits above; 0 for a new cache."""
    end = min(end, MOST_BYTES)
    return end and end | zlib.crc32(end.to_bytes(8, "little")) >> 15 << _END_BITS


def _rounded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _make(folder: Path, slots: int, capacity: int) -> None:
    start = _INDEX_AT + slots * _SLOT_BYTES
    file = os.open(folder / "arena", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(file, start + capacity)
        os.posix_fallocate(file, 0, start)
        os.pwrite(file, _HEAD.pack(_MAGIC, slots, capacity), 0)
    finally:
        os.close(file)


def _opened(path: Path, capacity: int) -> tuple[int, mmap.mmap, int]:
    """Return a cache's file, its bytes, and how many slots they have. Raises InputError unless they are whole."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        data = mmap.mmap(file, 0)
        magic, slots, found = _HEAD.unpack_from(data)
        if magic != _MAGIC or not slots or len(data) != _INDEX_AT + slots * _SLOT_BYTES + found:
            raise ValueError("its head and its length disagree")
    except (OSError, ValueError, struct.error) as error:
        if file >= 0:
            os.close(file)
        raise _torn(path, error) from None
    if found != capacity:
        os.close(file)
        raise InputError(
            f"processes share a cache of one capacity; {path} has {found:,} bytes, not {capacity:,}: "
            "give all of them the same, or another name"
        )
    return file, data, slots


def _torn(path: Path, error: Exception) -> InputError:
    return InputError(
        f"processes share a cache that is whole, but {path} is not ({error}); end those that use it, or choose "
        "another name"
    )


def _joined(capacity: int, name: str, folder: Path, always: bool, place: str) -> MinIOCache:
    """Return the cache in another process; its reason for lying there is the first one's."""
    cache = MinIOCache(capacity, name=name, folder=folder, always=always)
    cache.place = place
    return cache


def locked(file: int) -> bool:
    """Lock a file, waiting for a while; return whether it is locked."""
    deadline, pause = time.monotonic() + _PATIENCE, 1e-4
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR) or time.monotonic() > deadline:
                return False
        else:
            return True
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _end(home: Home, file: int) -> None:
    home.close()
    os.close(file)


def _close_of(file: int, process: int) -> None:
    if os.getpid() == process:
        os.close(file)
