"""A host's cache, for the other hosts of the job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib

from shardwright.caching import frames
from shardwright.caching.minio import MinIOCache
from shardwright.core.counts import read_count
from shardwright.errors import InputError

_MOST_LINKS = 1024
_MOST_PORT = 2**16 - 1
_PATIENCE = 10.0  # seconds that a request may take, besides what its bytes take


class CacheServer:
    """Answers for one host's cache from threads of this process, until it is closed or the process ends.

    ``address`` is ``host:port`` to listen at, port 0 for any that is free; the attribute says which it became.
    ``key`` is the job's, the same on all hosts: who has another is turned away.
    """

    def __init__(self, cache: MinIOCache, address: str, *, key: str | bytes) -> None:
        self._cache, self._key = cache, key_bytes(key)
        host, port = split_address(address)
        self._listener = socket.create_server((host, port), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._links: set[socket.socket] = set()
        self._turn, self._open = threading.Lock(), True
        self._thread = threading.Thread(target=self._accept, name="cache server", daemon=True)
        self._thread.start()

    def __enter__(self) -> CacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Answer nobody any more."""
        with self._turn:
            self._open = False
            links = [self._listener, *self._links]
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                link, _ = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # out of file descriptors, perhaps
                continue
            with self._turn:
                if not self._open or len(self._links) >= _MOST_LINKS:
                    link.close()
                    continue
                self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Answer one client until it leaves, or says something that none should say."""
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frames.prove_to_client(link, self._key, frames.Patience(_PATIENCE))
            while True:
                link.settimeout(None)
                if not link.recv(1, socket.MSG_PEEK):
                    return
                self._answer(link, frames.Patience(_PATIENCE))
        except OSError:
            return
        finally:
            with self._turn:
                self._links.discard(link)
            link.close()

    def _answer(self, link: socket.socket, patience: frames.Patience) -> None:
        what, digest, nowhere, start, end = frames.ASKED.unpack(
            frames.receive(link, frames.ASKED.size, patience)
        )
        if what not in (frames.GET, frames.PUT):
            raise frames.FrameError("a client asks for what there is not")
        found = self._cache.find(digest)
        if what == frames.GET:
            if found is None:
                _say(link, patience, lacking(self._cache, nowhere))
            else:
                _give(link, patience, found, (start, end))
        elif found is not None:
            _say(link, patience, frames.KEPT)
        elif not self._cache.has_room(end):
            self._cache.decline()
            _say(link, patience, frames.DECLINED)
        else:
            _say(link, patience, frames.GO)
            _, length, check = frames.ANSWERED.unpack(
                frames.receive(link, frames.ANSWERED.size, patience)
            )
            if length != end:
                raise frames.FrameError("a client sends other bytes than it said")
            data = frames.checked(link, length, check, patience)
            kept = self._cache.put(digest, data)
            _say(link, patience, frames.KEPT if kept else frames.DECLINED)


def lacking(cache: MinIOCache, nowhere: bytes) -> int:
    """Return what a host says whose cache lacks an item: there may be room, others may have it, or nobody has."""
    if not cache.has_declined:
        return frames.MISS
    return frames.FULL if cache.find(nowhere) is None else frames.NOWHERE


def _give(
    link: socket.socket, patience: frames.Patience, found: memoryview, part: tuple[int, int]
) -> None:
    data = found[part[0] : min(part[1], len(found))]
    head = frames.ANSWERED.pack(frames.HIT, len(data), zlib.crc32(data))
    frames.send(link, patience, head, data)


def _say(link: socket.socket, patience: frames.Patience, what: int) -> None:
    frames.send(link, patience, frames.ANSWERED.pack(what, 0, 0))


def key_bytes(key: str | bytes) -> bytes:
    """Return a job's key as bytes; an empty one would let everybody in."""
    found = key.encode() if isinstance(key, str) else key
    if not found:
        raise InputError(
            "hosts of a job have a key that nobody else has, not an empty one; give one"
        )
    return found


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``."""
    host, _, port = address.rpartition(":")
    number = read_count(port, _MOST_PORT)
    if not host or not (number or port == "0"):
        raise InputError(f"an address is host:port, not {address[:80]!r}; write it so")
    return host.strip("[]"), number
