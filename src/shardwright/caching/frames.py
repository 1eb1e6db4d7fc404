"""What hosts say to each other about cached items: frames of fixed heads over TCP, none longer than its head says.

Who connects proves first that it has the job's key, and so does who is asked; what follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
import zlib

# Asked: what, digest, and of a GET the note that no host has it, start and end, of a PUT nothing, 0 and length.
# Answered: what, length, check of the bytes.
ASKED, ANSWERED = struct.Struct("<B16s16sQQ"), struct.Struct("<BQI")
GET, PUT = 1, 2
HIT, MISS, FULL, GO, KEPT, DECLINED, NOWHERE = range(10, 17)
END = (1 << 64) - 1  # as the end of a GET: of the item
MOST_LENGTH = 1 << 40
# Bytes/s below which the other side is too slow: half a hard disk's, read at random.
LEAST_PACE = 8e6
_PIECE = 1 << 20
_HELLO = b"SWCACHE2"
_NONCE = 32


class FrameError(OSError):
    """The other side is not what it should be, or too slow."""


class BusyError(OSError):
    """This process's connection is another thread's."""


class Patience:
    """How long one exchange may take: so many seconds, and what the bytes that went either way take at LEAST_PACE.

    So an item that is large is not too slow, and one of whom a byte comes now and then is.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise FrameError("the other side is too slow")
        return left

    def moved(self, count: int) -> None:
        """Say that so many bytes went."""
        self._until += count / LEAST_PACE


def receive(link: socket.socket, length: int, patience: Patience) -> bytearray:
    """Return exactly so many bytes."""
    # Room is taken as bytes come: a head that lies takes none.
    found = bytearray(min(length, _PIECE))
    done = 0
    while done < length:
        if done == len(found):
            found.extend(bytes(min(length - done, max(done, _PIECE))))
        link.settimeout(patience.left())
        with memoryview(found) as view, view[done:] as rest:
            count = link.recv_into(rest)
        if not count:
            raise FrameError("the other side closed the connection")
        done += count
        patience.moved(count)
    return found


def send(link: socket.socket, patience: Patience, *parts: bytes | memoryview) -> None:
    """Send all bytes."""
    for part in parts:
        with memoryview(part) as view:
            done = 0
            while done < len(view):
                link.settimeout(patience.left())
                count = link.send(view[done : done + _PIECE])
                done += count
                patience.moved(count)


def checked(link: socket.socket, length: int, check: int, patience: Patience) -> bytes:
    """Return the bytes that follow a head, which says how many and their checksum."""
    if length > MOST_LENGTH:
        raise FrameError(f"{length:,} bytes were announced")
    data = bytes(receive(link, length, patience))
    if zlib.crc32(data) != check:
        raise FrameError("the bytes are not those that were sent")
    return data


def prove_to_server(link: socket.socket, key: bytes, patience: Patience) -> None:
    """Show a server that we have the key, and see that it has."""
    hello = receive(link, len(_HELLO) + _NONCE, patience)
    if hello[: len(_HELLO)] != _HELLO:
        raise FrameError("what answers there is no cache")
    theirs, ours = bytes(hello[len(_HELLO) :]), secrets.token_bytes(_NONCE)
    send(link, patience, ours + _proof(key, b"client", theirs, ours))
    proof = receive(link, 32, patience)
    if not hmac.compare_digest(proof, _proof(key, b"server", theirs, ours)):
        raise FrameError("what answers there has another key")


def prove_to_client(link: socket.socket, key: bytes, patience: Patience) -> None:
    """See that a client has the key, and show it that we have."""
    ours = secrets.token_bytes(_NONCE)
    send(link, patience, _HELLO + ours)
    answer = receive(link, _NONCE + 32, patience)
    theirs = bytes(answer[:_NONCE])
    if not hmac.compare_digest(answer[_NONCE:], _proof(key, b"client", ours, theirs)):
        raise FrameError("a client has another key")
    send(link, patience, _proof(key, b"server", ours, theirs))


def _proof(key: bytes, who: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(key, who + of_server + of_client, hashlib.sha256)
