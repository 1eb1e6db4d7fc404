"""Caches of several hosts as one: each item is cached once in the job, by a host that all work out alike.

The best host for an item is the first by a hash of both (rendezvous hashing): when a host leaves, only its items move,
and when it comes back, they are its again. One that has no room sends to the next; where none has, the first notes so,
and nobody is asked after it. Whatever fails, the item is read from storage.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwright.caching import frames
from shardwright.caching.minio import MinIOCache, Misses, digest_of
from shardwright.caching.server import key_bytes, lacking, split_address
from shardwright.errors import InputError, ShardwrightWarning

_MOST_REST = 300.0  # seconds after which a host that failed again and again is asked once more
_FOUND = frames.HIT, frames.MISS, frames.FULL, frames.NOWHERE


class PartitionedCache(Misses):
    """This host's cache and those of the other hosts of a job.

    ``members`` are the addresses of the hosts' servers, this host's ``me`` among them, alike on all hosts. A host that
    has not answered within ``patience`` seconds (longer by what an item's bytes take at 8 MB/s), or not rightly, is
    left alone for ``rest`` seconds, twice as long each time; meanwhile its items are those of others. ``local_hits``, ``remote_hits``, ``misses``, ``read_bytes``,
    ``exchanges`` with other hosts and ``failures`` count in this process.
    """

    def __init__(
        self,
        cache: MinIOCache,
        members: Sequence[str],
        me: str,
        *,
        key: str | bytes,
        patience: float = 1.0,
        rest: float = 10.0,
    ) -> None:
        if not patience > 0 or not rest >= 0:
            raise InputError(
                f"hosts are waited for more than 0 s and left alone for 0 s or more, not {patience} and {rest}; "
                "change patience or rest"
            )
        self.cache, self.me = cache, me
        self._key, self._patience, self._rest = key_bytes(key), patience, rest
        self._peers: dict[str, _Peer] = {}
        self.local_hits = self.remote_hits = self.exchanges = self.failures = 0
        self.set_members(members)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.cache, self.members, self.me, self._key, self._patience, self._rest)

    def set_members(self, members: Sequence[str]) -> None:
        """Share the items out among other hosts from now on."""
        if self.me not in members or len(set(members)) < len(members):
            raise InputError(
                f"members are all hosts of the job, each once, {self.me} among them, not {', '.join(members)}"
            )
        before, self.members = self._peers, tuple(members)
        # What these have no room for, others may have.
        self._job = digest_of("\n".join(sorted(members)))
        self._peers = {
            address: before.pop(address, None) or _Peer(address, self._key, self._patience)
            for address in members
            if address != self.me
        }
        for peer in before.values():
            peer.close()

    def close(self) -> None:
        """Leave the other hosts; this host's cache stays open."""
        for peer in self._peers.values():
            peer.close()

    def get(self, key: str | bytes, read: Callable[[], bytes]) -> bytes:
        """Return the bytes of an item: from this host, from another, or what ``read`` returns."""
        digest = digest_of(key)
        found, room = self._look(digest, 0, frames.END)
        if found is None:
            found = self.read_storage(read)
            self._place(digest, found, room)
        return found

    def part_of(
        self,
        key: str | bytes,
        length: int,
        part: tuple[int, int],
        read: Callable[[int, int], bytes],
    ) -> bytes:
        """Return bytes ``part[0]`` to ``part[1]`` of an item of this length; ``read(start, end)`` reads storage."""
        digest = digest_of(key)
        found, room = self._look(digest, *part)
        if found is not None:
            return found
        if not room:
            return self.read_storage(lambda: read(*part))
        data = self.read_storage(lambda: read(0, length))
        self._place(digest, data, room)
        return data[part[0] : part[1]]

    def _look(self, digest: bytes, start: int, end: int) -> tuple[bytes | None, list[str]]:
        """Return the bytes, or else the hosts that may have room for them, the best first."""
        here = self.cache.find(digest)
        if here is not None:
            self.local_hits += 1
            return bytes(here[start : min(end, len(here))]), []
        order, nowhere, full = list(self._order(digest)), digest_of(digest + self._job), 0
        for place, address in enumerate(order):
            try:
                if address == self.me:
                    answer, data = lacking(self.cache, nowhere), b""
                else:
                    self.exchanges += 1
                    answer, data = self._peers[address].get(digest, nowhere, (start, end))
            except frames.BusyError:
                return None, []
            except OSError as error:
                self._fail(address, error)
                continue
            if answer == frames.HIT:
                self.remote_hits += 1
                return data, []
            if answer == frames.MISS:
                return None, order[place:]
            if answer == frames.NOWHERE:
                return None, []
            full += 1
        if full == len(self.members) > 1:
            self._place(nowhere, b"", order[:1])
        return None, []

    def _order(self, digest: bytes) -> Iterator[str]:
        now = time.monotonic()
        awake = [
            one for one in self.members if one == self.me or self._peers[one].rests_until <= now
        ]
        awake.sort(key=lambda one: hashlib.blake2b(digest + one.encode(), digest_size=8).digest())
        return iter(awake)

    def _place(self, digest: bytes, data: bytes, room: list[str]) -> None:
        """Have the first host keep an item that has room for it."""
        for address in room:
            if address == self.me:
                if self.cache.put(digest, data):
                    return
                continue
            try:
                self.exchanges += 1
                if self._peers[address].put(digest, data):
                    return
            except frames.BusyError:
                return
            except OSError as error:
                self._fail(address, error)

    def _fail(self, address: str, error: OSError) -> None:
        peer = self._peers[address]
        first = not peer.failed
        self.failures += 1
        peer.failed += 1
        peer.rests_until = time.monotonic() + min(
            _MOST_REST, self._rest * 2 ** min(peer.failed - 1, 16)
        )
        if first:
            warnings.warn(
                f"the cache of {address} does not answer ({error}); its items are read from storage and cached elsewhere",
                ShardwrightWarning,
                stacklevel=5,
            )


def _again(
    cache: MinIOCache, members: Sequence[str], me: str, key: bytes, patience: float, rest: float
) -> PartitionedCache:
    return PartitionedCache(cache, members, me, key=key, patience=patience, rest=rest)


class _Peer:
    """One connection of this process to another host's server, made when it is needed."""

    def __init__(self, address: str, key: bytes, patience: float) -> None:
        self._where, self._key, self._patience = split_address(address), key, patience
        self.failed, self.rests_until = 0, 0.0
        self._link: socket.socket | None = None
        self._process, self._turn = os.getpid(), threading.Lock()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def get(self, digest: bytes, nowhere: bytes, part: tuple[int, int]) -> tuple[int, bytes]:
        """Return the answer, and the bytes of a HIT."""

        def ask(link: socket.socket, patience: frames.Patience) -> tuple[int, bytes]:
            frames.send(link, patience, frames.ASKED.pack(frames.GET, digest, nowhere, *part))
            what, length, check = _answer(link, patience)
            if what not in _FOUND or length > part[1] - part[0]:
                raise frames.FrameError("an answer that none should give")
            return what, frames.checked(
                link, length, check, patience
            ) if what == frames.HIT else b""

        return self._talk(ask)

    def put(self, digest: bytes, data: bytes) -> bool:
        """Return whether the host keeps an item."""

        def ask(link: socket.socket, patience: frames.Patience) -> bool:
            frames.send(link, patience, frames.ASKED.pack(frames.PUT, digest, b"", 0, len(data)))
            what, _, _ = _answer(link, patience)
            if what == frames.GO:
                head = frames.ANSWERED.pack(frames.GO, len(data), zlib.crc32(data))
                frames.send(link, patience, head, data)
                what, _, _ = _answer(link, patience)
            return what == frames.KEPT

        return self._talk(ask)

    def _talk(self, ask: Callable[[socket.socket, frames.Patience], Any]) -> Any:
        """Ask over this process's connection; after a failure nobody knows where in a frame it is, so it is closed."""
        if os.getpid() != self._process:
            self._process, self._turn = os.getpid(), threading.Lock()
            self.close()
        if not self._turn.acquire(timeout=self._patience):
            raise frames.BusyError
        patience = frames.Patience(self._patience)
        try:
            found = self._ask(ask, patience)
        except BaseException:
            self.close()
            raise
        else:
            self.failed = 0
            return found
        finally:
            self._turn.release()

    def _ask(
        self, ask: Callable[[socket.socket, frames.Patience], Any], patience: frames.Patience
    ) -> Any:
        if self._link is not None:
            try:
                return ask(self._link, patience)
            except OSError:  # the host may have been started again since
                self.close()
        return ask(self._connect(patience), patience)

    def _connect(self, patience: frames.Patience) -> socket.socket:
        self._link = socket.create_connection(self._where, timeout=patience.left())
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames.prove_to_server(self._link, self._key, patience)
        return self._link


def _answer(link: socket.socket, patience: frames.Patience) -> tuple[int, int, int]:
    return frames.ANSWERED.unpack(frames.receive(link, frames.ANSWERED.size, patience))
