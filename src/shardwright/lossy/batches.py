"""Many UDP packets in one call of Linux, each with its own IP byte, without holding Python's lock.

Python's own ``sendmsg`` takes one packet a call and gives the lock back for each, which in a program
with another busy thread costs milliseconds. Linux with 64-bit addresses only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence

import numpy as np

from shardwright.errors import InputError
from shardwright.lossy.packets import Packets, blank

BATCH = 64
RECEIVE_BYTES = 2**23  # an incast that comes while the thread has no processor
_MESSAGE = np.dtype(
    [
        ("name", "u8"), ("namelen", "u4"), ("pad0", "u4"), ("iov", "u8"), ("iovlen", "u8"),
        ("control", "u8"), ("controllen", "u8"), ("flags", "i4"), ("pad1", "u4"), ("length", "u4"),
        ("pad2", "u4"),
    ]
)  # fmt: skip
_VECTOR = np.dtype([("base", "u8"), ("length", "u8")])
_CONTROL = np.dtype(
    [("length", "u8"), ("level", "i4"), ("type", "i4"), ("data", "i4"), ("pad", "i4")]
)
_ADDRESS = np.dtype([("family", "u2"), ("port", ">u2"), ("address", "u4"), ("zero", "u8")])
_CONTROL_BYTES = 20  # a control message with one int, as CMSG_LEN counts it
_IP_RECVTOS, _SO_RCVBUFFORCE = 13, 33


def why_not() -> str:
    """Say why this machine cannot send batches, or nothing."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or sys.byteorder != "little":
        return f"packets are sent in batches by Linux on 64-bit little-endian machines, not by {sys.platform}"
    return ""


def why_no_address(address: str) -> str:
    """Say why other hosts cannot send to this one by an address that a socket of it was bound to, or nothing."""
    named = ipaddress.ip_address(address)
    is_any = named.is_unspecified or named.is_multicast or named.is_reserved
    return f"{address} stands for any host or many" if is_any else ""


class _Headers:
    """What Linux reads and writes for a batch; its arrays stay where they are."""

    def __init__(self) -> None:
        self.messages = np.zeros(BATCH, _MESSAGE)
        self.vectors = np.zeros(BATCH, _VECTOR)
        self.controls = np.zeros(BATCH, _CONTROL)
        self.addresses = np.zeros(BATCH, _ADDRESS)
        self.messages["name"] = _places(self.addresses)
        self.messages["iov"], self.messages["iovlen"] = _places(self.vectors), 1
        self.messages["control"] = _places(self.controls)

    def point_at(self, rows: np.ndarray) -> None:
        """Let the messages' data be rows."""
        count = len(rows)
        self.vectors["base"][:count] = rows.ctypes.data + np.arange(count) * rows.strides[0]
        self.messages["namelen"] = _ADDRESS.itemsize
        self.messages["controllen"] = _CONTROL.itemsize


def _places(array: np.ndarray) -> np.ndarray:
    return array.ctypes.data + np.arange(len(array), dtype=np.uint64) * array.itemsize


class Sockets:
    """A rank's UDP sockets: the first receives, all send in turns, so that paths that are chosen by
    ports are all used. ``addresses`` are those of the ranks' first sockets."""

    def __init__(self, host: str, ports: int, packet_bytes: int) -> None:
        reason = why_not()
        if reason:
            raise InputError(f"{reason}; train with another transport there")
        self._sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(ports)]
        for one in self._sockets:
            one.setblocking(False)
            try:
                one.bind((host, 0))
                reason = why_no_address(one.getsockname()[0])
            except (OSError, TypeError) as error:
                reason = str(error)
            if reason:
                raise InputError(
                    f"packets come to an IPv4 address of this host, but host={host!r} is none ({reason}); give the one "
                    "that it has in the network that gradients take"
                )
        first = self._sockets[0]
        first.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        with contextlib.suppress(PermissionError):  # beyond the system's limit, for root
            first.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        self.address: tuple[str, int] = first.getsockname()
        self._library = ctypes.CDLL(None, use_errno=True)
        self._out, self._in = _Headers(), _Headers()
        self._turn = 0
        self._packet_bytes = packet_bytes
        self._known = np.zeros(0, _ADDRESS)

    def fileno(self) -> int:
        """Return the descriptor that has what comes."""
        return self._sockets[0].fileno()

    def know(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Learn where the ranks are."""
        self._known = np.zeros(len(addresses), _ADDRESS)
        self._known["family"] = socket.AF_INET
        for place, (host, port) in enumerate(addresses):
            self._known["port"][place] = port
            self._known["address"][place] = np.frombuffer(socket.inet_aton(host), "<u4")[0]

    def send(self, packets: Packets) -> int:
        """Send packets; return how many the system took. What it did not take is lost, as on the way."""
        taken = 0
        for start in range(0, len(packets), BATCH):
            count = min(BATCH, len(packets) - start)
            part, headers = slice(start, start + count), self._out
            headers.point_at(packets.rows[part])
            headers.vectors["length"][:count] = packets.lengths[part]
            headers.addresses[:count] = self._known[packets.to[part]]
            headers.controls["length"] = _CONTROL_BYTES
            headers.controls["level"], headers.controls["type"] = socket.IPPROTO_IP, socket.IP_TOS
            headers.controls["data"][:count] = packets.tos[part]
            self._turn += 1
            taken += self._call("sendmmsg", self._turn % len(self._sockets), headers, count)
        return taken

    def receive(self) -> Packets | None:
        """Return what has come, a batch at most; None where there is nothing."""
        packets = blank(BATCH, self._packet_bytes)
        headers = self._in
        headers.point_at(packets.rows)
        headers.vectors["length"] = packets.rows.shape[1]
        count = self._call("recvmmsg", 0, headers, BATCH)
        if count == 0:
            return None
        lengths = headers.messages["length"][:count].astype(np.int64)
        said = headers.messages["controllen"][:count] >= _CONTROL_BYTES - 3
        tos = np.where(said, headers.controls["data"][:count] & 0xFF, 0).astype(np.uint8)
        return Packets(packets.rows[:count], lengths, packets.to[:count], tos)

    def _call(self, name: str, which: int, headers: _Headers, count: int) -> int:
        place = ctypes.c_void_p(headers.messages.ctypes.data)
        number = self._sockets[which].fileno()
        extra = (None,) if name == "recvmmsg" else ()
        done = getattr(self._library, name)(number, place, count, 0, *extra)
        if done >= 0:
            return done
        code = ctypes.get_errno()
        # A full queue loses packets; a host that is not there says so for the packet before.
        if code in (
            errno.EAGAIN,
            errno.ENOBUFS,
            errno.ECONNREFUSED,
            errno.EINTR,
            errno.EPERM,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
        ):
            return 0
        raise OSError(code, f"{name}: {os.strerror(code)}")

    def close(self) -> None:
        """Give the ports back."""
        for one in self._sockets:
            one.close()
