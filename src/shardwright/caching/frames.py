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

# Asked: what, digest, and of a GET start and end, of a PUT 0 and length. Answered: what, length, check of the bytes.
ASKED, ANSWERED = struct.Struct("<B16sQQ"), struct.Struct("<BQI")
GET, PUT = 1, 2
HIT, MISS, FULL, GO, KEPT, DECLINED = range(10, 16)
END = (1 << 64) - 1  # as the end of a GET: of the item
MOST_LENGTH = 1 << 40
_HELLO = b"SWCACHE1"
_NONCE = 32


class FrameError(OSError):
    """The other side is not what it should be, or too slow."""


def receive(link: socket.socket, length: int, deadline: float) -> bytearray:
    """Return exactly so many bytes, all of them before the deadline, by time.monotonic()."""
    # Room is taken as bytes come: a head that lies takes none.
    found = bytearray(min(length, 1 << 20))
    done = 0
    while done < length:
        if done == len(found):
            found.extend(bytes(min(length - done, max(done, 1 << 20))))
        link.settimeout(_left(deadline))
        with memoryview(found) as view, view[done:] as rest:
            count = link.recv_into(rest)
        if not count:
            raise FrameError("the other side closed the connection")
        done += count
    return found


def send(link: socket.socket, deadline: float, *parts: bytes | memoryview) -> None:
    """Send all bytes before the deadline."""
    for part in parts:
        link.settimeout(_left(deadline))
        link.sendall(part)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise FrameError("the other side is too slow")
    return left


def checked(link: socket.socket, length: int, check: int, deadline: float) -> bytes:
    """Return the bytes that follow a head, which says how many and their checksum."""
    if length > MOST_LENGTH:
        raise FrameError(f"{length:,} bytes were announced")
    data = bytes(receive(link, length, deadline))
    if zlib.crc32(data) != check:
        raise FrameError("the bytes are not those that were sent")
    return data


def prove_to_server(link: socket.socket, key: bytes, deadline: float) -> None:
    """Show a server that we have the key, and see that it has."""
    hello = receive(link, len(_HELLO) + _NONCE, deadline)
    if hello[: len(_HELLO)] != _HELLO:
        raise FrameError("what answers there is no cache")
    theirs, ours = bytes(hello[len(_HELLO) :]), secrets.token_bytes(_NONCE)
    send(link, deadline, ours + _proof(key, b"client", theirs, ours))
    proof = receive(link, 32, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"server", theirs, ours)):
        raise FrameError("what answers there has another key")


def prove_to_client(link: socket.socket, key: bytes, deadline: float) -> None:
    """See that a client has the key, and show it that we have."""
    ours = secrets.token_bytes(_NONCE)
    send(link, deadline, _HELLO + ours)
    answer = receive(link, _NONCE + 32, deadline)
    theirs = bytes(answer[:_NONCE])
    if not hmac.compare_digest(answer[_NONCE:], _proof(key, b"client", ours, theirs)):
        raise FrameError("a client has another key")
    send(link, deadline, _proof(key, b"server", ours, theirs))


def _proof(key: bytes, who: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(key, who + of_server + of_client, hashlib.sha256)
