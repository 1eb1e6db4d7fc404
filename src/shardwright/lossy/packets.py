"""Packets: a header, whole values, and a keyed checksum over both.

The checksum is SipHash-2-4 (Aumasson, Bernstein, 2012) with the job's key: damaged, forged and foreign
packets look alike and are dropped. A packet says where its values belong, so that order does not
matter. Numbers are little-endian; sequence numbers, counts and microseconds wrap at 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner

Bytes = NDArray[np.uint8]
Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]
Word = np.uint64
Words = tuple[Word, Word, Word, Word]

MAGIC = 0xD1C9
HEADER_BYTES = 48
# Control packets have counts where data has places: both name the same bytes.
_FIELDS = {
    "checksum": ("<u8", 0), "message": ("<u8", 8), "magic": ("<u2", 16), "kind": ("u1", 18),
    "important": ("u1", 19), "source": ("<u2", 20), "size": ("<u2", 22), "elements": ("<u4", 24),
    "round": ("<u4", 28), "itemsize": ("<u4", 28), "offset": ("<u4", 32), "received": ("<u4", 32), "need": ("<u4", 36),
    "marked": ("<u4", 36), "sequence": ("<u4", 40), "highest": ("<u4", 40), "time": ("<u4", 44),
    "echo": ("<u4", 44),
}  # fmt: skip
HEADER = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [form for form, _ in _FIELDS.values()],
        "offsets": [place for _, place in _FIELDS.values()],
        "itemsize": HEADER_BYTES,
    }  # type: ignore[call-overload]
)
WRAP = 2**32


class PacketKind(IntEnum):
    """What a packet is. All but data are control packets, which no switch may drop first."""

    DATA = 1
    END = 2
    NACK = 3
    STOP = 4
    FEEDBACK = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A message cut into packets: ``elements`` of ``itemsize`` bytes, ``values`` of them a packet."""

    elements: int
    itemsize: int
    values: int

    @property
    def packets(self) -> int:
        """How many packets it takes."""
        return -(-self.elements // self.values)


@dataclass(slots=True)
class Packets:
    """Packets in rows, of which only ``lengths`` bytes count. ``to`` are ranks, ``tos`` IP's byte."""

    rows: Bytes
    lengths: Whole
    to: Whole
    tos: Bytes

    @property
    def heads(self) -> NDArray[np.void]:
        """Their headers, as fields that may be written."""
        return heads_of(self.rows)

    def __len__(self) -> int:
        return len(self.lengths)


def blank(count: int, packet_bytes: int) -> Packets:
    """Return packets to be filled."""
    width = -(-packet_bytes // 8) * 8
    rows = np.zeros((count, width), np.uint8)
    lengths = np.full(count, HEADER_BYTES, np.int64)
    packets = Packets(rows, lengths, np.zeros(count, np.int64), np.zeros(count, np.uint8))
    packets.heads["magic"] = MAGIC
    return packets


def heads_of(rows: Bytes) -> NDArray[np.void]:
    """Return the headers of rows as a structured view."""
    return rows[:, :HEADER_BYTES].view(HEADER)[:, 0]


def joined(parts: list[Packets]) -> Packets:
    """Return packets in one batch."""
    if len(parts) == 1:
        return parts[0]
    return Packets(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.to for part in parts]),
        np.concatenate([part.tos for part in parts]),
    )


def seal(packets: Packets, key: bytes) -> None:
    """Write checksums."""
    packets.heads["checksum"] = _checksums(
        packets.rows.view(np.uint64), packets.rows, packets.lengths, *_halves(key)
    )


def genuine(rows: Bytes, lengths: Whole, key: bytes) -> Mask:
    """Return which packets are whole and of this job."""
    heads = heads_of(rows)
    fits = (lengths >= HEADER_BYTES) & (heads["magic"] == MAGIC)
    fits &= lengths == HEADER_BYTES + heads["size"].astype(np.int64)
    known = _checksums(
        rows.view(np.uint64), rows, np.where(fits, lengths, HEADER_BYTES), *_halves(key)
    )
    return fits & (heads["checksum"] == known)


def _halves(key: bytes) -> tuple[np.uint64, np.uint64]:
    first, second = np.frombuffer(key, "<u8", 2)
    return np.uint64(first), np.uint64(second)


@inner
def _turn(v0: Word, v1: Word, v2: Word, v3: Word) -> Words:
    v0 += v1
    v1 = ((v1 << np.uint64(13)) | (v1 >> np.uint64(51))) ^ v0
    v0 = (v0 << np.uint64(32)) | (v0 >> np.uint64(32))
    v2 += v3
    v3 = ((v3 << np.uint64(16)) | (v3 >> np.uint64(48))) ^ v2
    v0 += v3
    v3 = ((v3 << np.uint64(21)) | (v3 >> np.uint64(43))) ^ v0
    v2 += v1
    v1 = ((v1 << np.uint64(17)) | (v1 >> np.uint64(47))) ^ v2
    v2 = (v2 << np.uint64(32)) | (v2 >> np.uint64(32))
    return v0, v1, v2, v3


@inner
def _absorbed(v0: Word, v1: Word, v2: Word, v3: Word, word: Word) -> Words:
    v3 ^= word
    v0, v1, v2, v3 = _turn(v0, v1, v2, v3)
    v0, v1, v2, v3 = _turn(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@compiled
def _checksums(
    words: NDArray[np.uint64], rows: Bytes, lengths: Whole, key0: np.uint64, key1: np.uint64
) -> NDArray[np.uint64]:
    """SipHash-2-4 of each row behind its first eight bytes, where the checksum itself stands."""
    found = np.empty(len(lengths), np.uint64)
    for row in range(len(lengths)):
        v0 = key0 ^ np.uint64(0x736F6D6570736575)
        v1 = key1 ^ np.uint64(0x646F72616E646F6D)
        v2 = key0 ^ np.uint64(0x6C7967656E657261)
        v3 = key1 ^ np.uint64(0x7465646279746573)
        length = lengths[row]
        whole = length // 8
        for place in range(1, whole):
            v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, words[row, place])
        last = np.uint64((length - 8) % 256) << np.uint64(56)
        for place in range(whole * 8, length):
            last |= np.uint64(rows[row, place]) << np.uint64(8 * (place - whole * 8))
        v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, last)
        v2 ^= np.uint64(0xFF)
        for _ in range(4):
            v0, v1, v2, v3 = _turn(v0, v1, v2, v3)
        found[row] = v0 ^ v1 ^ v2 ^ v3
    return found


@compiled
def lay(rows: Bytes, data: Bytes, starts: Whole, sizes: Whole) -> None:
    """Copy pieces of a message behind the headers of rows."""
    for row in range(len(starts)):
        for place in range(sizes[row]):
            rows[row, HEADER_BYTES + place] = data[starts[row] + place]


@compiled
def place(
    rows: Bytes, which: Whole, indices: Whole, stride: int, memory: Bytes, seen: Mask
) -> Mask:
    """Copy values of some rows to where they belong; return which of the packets are new."""
    fresh = np.zeros(len(which), np.bool_)
    for one in range(len(which)):
        index = indices[one]
        if seen[index]:
            continue
        seen[index] = fresh[one] = True
        start = index * stride
        for byte in range(min(stride, len(memory) - start)):
            memory[start + byte] = rows[which[one], HEADER_BYTES + byte]
    return fresh
