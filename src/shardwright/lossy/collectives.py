"""Sums over all ranks from messages that may lose values.

Reduce-scatter, then all-gather. Sums are taken in rank order, starting with rank 0 (direct), or along the
ring, starting with the rank behind a piece's owner; with nothing lost they are those sums to the last
bit. Each rank calls the same collectives in the same order. Functions are generators: they yield
messages to wait for, and whoever drives them goes on when all of these are done.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import numpy as np

from shardwright.errors import InputError
from shardwright.lossy.endpoint import Endpoint
from shardwright.lossy.labels import labelled
from shardwright.lossy.messages import (
    Allowance,
    Incoming,
    Labels,
    Outgoing,
    elements_of,
    uniform,
)
from shardwright.lossy.packets import Mask, Shape
from shardwright.lossy.settings import Tolerance, lost_at_most

Steps = Generator[Sequence[Incoming | Outgoing], None, None]
PUSH, PULL = 0, 1


class Rank(Protocol):
    """A rank of some network."""

    @property
    def endpoint(self) -> Endpoint:
        """What is asked how messages are cut."""
        ...

    @property
    def rank(self) -> int:
        """This rank's place."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def post(
        self, to: int, number: int, data: np.ndarray, allowance: Allowance, labels: Labels
    ) -> Outgoing:
        """Begin to send."""
        ...

    def expect(self, source: int, number: int, like: np.ndarray, allowance: Allowance) -> Incoming:
        """Begin to await."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Which elements of a flat tensor belong to which parameter: names and sizes, in order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True)
class _Sent:
    """Elements from ``start`` on, as they were sent to one rank."""

    start: int
    values: np.ndarray
    messages: list[Outgoing]

    def lost(self) -> Mask:
        """Return which elements did not come."""
        none = np.zeros(0, np.bool_)  # a rank has no piece of what is shorter than there are ranks
        return np.concatenate([none, *(elements_of(one.lost, one.shape) for one in self.messages)])


@dataclass(slots=True)
class _Received:
    """Elements as they came from one rank."""

    dtype: np.dtype
    messages: list[Incoming]

    def values(self) -> np.ndarray:
        """Return what came, and zeros."""
        none = np.zeros(0, self.dtype)
        return np.concatenate([none, *(one.memory.view(self.dtype) for one in self.messages)])

    def seen(self) -> Mask:
        """Return which elements came."""
        none = np.zeros(0, np.bool_)
        return np.concatenate([none, *(elements_of(one.seen, one.shape) for one in self.messages)])


@dataclass(slots=True)
class Sums:
    """One rank's sums; keeps what was lost of each parameter, and with ``stale`` what was last.

    ``num_values`` were to come to this rank, ``num_lost`` of them did not.
    """

    rank: Rank
    tolerance: Tolerance
    residuals: dict[str, np.ndarray] = field(default_factory=dict)
    num_values: int = 0
    num_lost: int = 0
    _owed: dict[Parts, list[_Sent]] = field(default_factory=dict)
    _last: dict[tuple[Parts, object], np.ndarray] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.rank.endpoint.describe = _described

    def sum(self, flat: np.ndarray, parts: Parts | None = None, priority: int = 0) -> Steps:
        """Sum a flat tensor over all ranks, in place. Priority 0 is the most urgent, 7 the least. Raises InputError."""
        parts = parts or Parts(("",), (np.size(flat),))
        _check(flat, parts)
        if self.rank.size == 1 or len(flat) == 0:
            return
        if self.tolerance.error_feedback:
            yield from self.settle(parts)
            self._pay(flat, parts)
        work = _Sum(self, parts, priority, self._count)
        self._count += 1
        sent: list[_Sent] = []
        yield from (
            work.ring(flat, sent) if self.tolerance.form == "ring" else work.direct(flat, sent)
        )
        if self.tolerance.error_feedback:
            self._owed[parts] = sent

    def settle(self, parts: Parts | None = None) -> Steps:
        """Wait until what was sent of some parameters, or of all, is confirmed; keep what was lost of it."""
        for group in list(self._owed):
            if parts is not None and not set(group.names) & set(parts.names):
                continue
            owed = self._owed.pop(group)
            yield [one for sent in owed for one in sent.messages]
            residual = np.zeros(sum(group.sizes), owed[0].values.dtype)
            for sent in owed:
                lost = sent.lost()
                residual[sent.start : sent.start + len(lost)][lost] += sent.values[lost]
            residual[~np.isfinite(residual)] = 0
            for name, piece in _cut(residual, group):
                if piece.any():
                    self.residuals[name] = self.residuals.get(name, 0) + piece

    def _pay(self, flat: np.ndarray, parts: Parts) -> None:
        for name, piece in _cut(flat, parts):
            owed = self.residuals.pop(name, None)
            if owed is not None:
                piece += owed.astype(piece.dtype)

    def filled(self, key: tuple[Parts, object], received: _Received) -> tuple[np.ndarray, Mask]:
        """Return what came, filled where it is to be, and which elements came."""
        values, seen = received.values(), received.seen()
        self.num_values += len(seen)
        self.num_lost += len(seen) - int(seen.sum())
        if self.tolerance.fill == "stale":
            last = self._last.get(key)
            if last is not None:
                values[~seen] = last[~seen]
            self._last[key] = values
        return values, seen


def _check(flat: np.ndarray, parts: Parts) -> None:
    """Check what is to be summed: of other arrays values would be lost, or read as others, without a word."""
    kind = getattr(flat, "dtype", np.dtype("O"))
    if not isinstance(flat, np.ndarray) or flat.ndim != 1 or kind.str not in ("<f2", "<f4", "<f8"):
        raise InputError(
            "sums are of NumPy's arrays of one dimension of float16, float32 or float64, not of "
            f"{type(flat).__name__} of {kind} and shape {np.shape(flat)}; convert and flatten it"
        )
    if len(parts.names) != len(parts.sizes) or sum(parts.sizes) != len(flat):
        raise InputError(
            f"parts have a name and a size each, and add up to {len(flat)} values here, not names {parts.names!s:.60} "
            f"and sizes {parts.sizes!s:.60}; name all of the array"
        )


def _cut(flat: np.ndarray, parts: Parts) -> list[tuple[str, np.ndarray]]:
    """Return each parameter's elements, as views."""
    ends = np.cumsum(parts.sizes)
    return [
        (name, flat[end - size : end]) for name, size, end in zip(parts.names, parts.sizes, ends)
    ]


class _Sum:
    """One sum: what both forms have in common, and the forms."""

    def __init__(self, sums: Sums, parts: Parts, priority: int, count: int) -> None:
        self._sums, self._parts, self._priority, self._count = sums, parts, priority, count
        self._rank = sums.rank
        self._most = sums.rank.endpoint.most_packets

    def direct(self, flat: np.ndarray, sent: list[_Sent]) -> Steps:
        """Every rank sends each other rank its piece, sums its own, and sends the sum to all."""
        size, mine = self._rank.size, self._rank.rank
        others = [(mine + 1 + step) % size for step in range(size - 1)]
        given, piece = flat.copy(), self._piece(flat, mine)
        places = [(one, self._piece(flat, one)) for one in others]
        sent += [self._post(one, given[where], where, (PUSH, 0)) for one, where in places]
        pushed = {one: self._await(one, flat, piece, (PUSH, 0)) for one in others}
        yield _messages_of(pushed)
        total = self._total(given[piece], pushed)
        pulls = {one: self._await(one, flat, where, (PULL, 0)) for one, where in places}
        for one in others:
            self._post(one, total, piece, (PULL, 0))
        yield _messages_of(pulls)
        flat[piece] = total
        for one, received in pulls.items():
            flat[self._piece(flat, one)] = self._sums.filled((self._parts, (PULL, one)), received)[
                0
            ]

    def _total(self, own: np.ndarray, pushed: Mapping[int, _Received]) -> np.ndarray:
        """Add up what came, in rank order."""
        size, total = self._rank.size, np.zeros(0, own.dtype)
        counts = np.zeros(len(own), np.int64)
        for one in range(size):
            values, seen = own, np.True_
            if one in pushed:
                values, seen = self._sums.filled((self._parts, one), pushed[one])
            # Not from zero: minus zero plus zero is plus zero.
            total = total + values if one else values.copy()
            counts += seen
        if self._sums.tolerance.fill == "rescale":
            total = total * (size / counts).astype(total.dtype)
        return total

    def ring(self, flat: np.ndarray, sent: list[_Sent]) -> Steps:
        """Sums travel from rank to rank. Where one is lost, the next begins anew with its own value."""
        size, mine = self._rank.size, self._rank.rank
        following, before = (mine + 1) % size, (mine - 1) % size
        for hop in range(size - 1):
            goes = self._piece(flat, (mine - hop - 1) % size)
            comes = self._piece(flat, (mine - hop - 2) % size)
            sent.append(self._post(following, flat[goes].copy(), goes, (PUSH, hop)))
            received = self._await(before, flat, comes, (PUSH, hop))
            yield received.messages
            flat[comes] = self._sums.filled((self._parts, hop), received)[0] + flat[comes]
        for hop in range(size - 1):
            goes = self._piece(flat, (mine - hop) % size)
            comes = self._piece(flat, (mine - hop - 1) % size)
            self._post(following, flat[goes].copy(), goes, (PULL, hop))
            received = self._await(before, flat, comes, (PULL, hop))
            yield received.messages
            flat[comes] = self._sums.filled((self._parts, (PULL, hop)), received)[0]

    def _piece(self, flat: np.ndarray, rank: int) -> slice:
        """Return which elements a rank sums."""
        size = self._rank.size
        return slice(rank * len(flat) // size, (rank + 1) * len(flat) // size)

    def _post(self, to: int, values: np.ndarray, piece: slice, leg: tuple[int, int]) -> _Sent:
        messages = []
        for number, part in self._messages(values.dtype, piece, leg):
            data = values[part.start - piece.start : part.stop - piece.start]
            shape = self._rank.endpoint.shape(len(data), data.itemsize)
            allowance = self._allowance(shape, part.start, leg[0])
            labels = labelled(
                data, shape, sum(allowance.allowed), self._sums.tolerance, self._priority
            )
            messages.append(self._rank.post(to, number, data, allowance, labels))
        return _Sent(piece.start, values, messages)

    def _await(
        self, source: int, like: np.ndarray, piece: slice, leg: tuple[int, int]
    ) -> _Received:
        messages = []
        for number, part in self._messages(like.dtype, piece, leg):
            shape = self._rank.endpoint.shape(part.stop - part.start, like.itemsize)
            allowance = self._allowance(shape, part.start, leg[0])
            messages.append(self._rank.expect(source, number, like[part], allowance))
        return _Received(like.dtype, messages)

    def _messages(
        self, dtype: np.dtype, piece: slice, leg: tuple[int, int]
    ) -> list[tuple[int, slice]]:
        """Return numbers and elements of the messages that a piece travels in."""
        most = self._most * self._rank.endpoint.shape(1, dtype.itemsize).values
        starts = range(piece.start, piece.stop, most)
        base = ((self._count * 2 + leg[0]) * 2**16 + leg[1]) * 2**16
        return [
            (base + place, slice(start, min(start + most, piece.stop)))
            for place, start in enumerate(starts)
        ]

    def _allowance(self, shape: Shape, start: int, stage: int) -> Allowance:
        """Return what may be missing of elements from ``start`` on: by class of equal bounds."""
        tolerance = self._sums.tolerance
        hops = self._rank.size - 1 if tolerance.form == "ring" else 1
        common = tolerance.pull if stage == PULL else tolerance.push
        if stage == PULL or not set(tolerance.bounds) & set(self._parts.names):
            return uniform(shape, lost_at_most(_shared(common, hops), shape.packets))
        given = {name: tolerance.bounds.get(name, common) for name in self._parts.names}
        bounds = sorted(set(given.values()))
        classes = np.full(shape.packets, len(bounds) - 1)
        end = -start
        for name, size in zip(self._parts.names, self._parts.sizes, strict=True):
            begin, end = end, end + size
            first, last = max(0, begin) // shape.values, -(-max(0, end) // shape.values)
            classes[first:last] = np.minimum(classes[first:last], bounds.index(given[name]))
        counts = np.bincount(classes, minlength=len(bounds))
        return Allowance(
            classes,
            tuple(
                lost_at_most(_shared(one, hops), int(count)) for one, count in zip(bounds, counts)
            ),
        )


def _described(number: int) -> str:
    """Return what a message is for, for complaints: see ``_Sum._messages``."""
    stage = "pull" if number >> 32 & 1 else "push"
    return f"sum {number >> 33} ({stage}, hop {number >> 16 & 0xFFFF}, part {number & 0xFFFF})"


def _messages_of(received: Mapping[int, _Received]) -> list[Incoming]:
    return [message for one in received.values() for message in one.messages]


def _shared(bound: float, hops: int) -> Fraction:
    """Return a hop's share of a bound: losses of hops may fall on different elements, so they add up."""
    return Fraction(repr(float(bound))) / hops
