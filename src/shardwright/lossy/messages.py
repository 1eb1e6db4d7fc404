"""A message as its sender and as its receiver see it: state machines without clock, socket or chance.

The sender sends every packet once, then END, again and again until it is answered. The receiver
answers with NACK and what is missing, if that is more than the bound allows, or with STOP. All times are
arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.lossy.packets import Bytes, Mask, Shape, Whole, place


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many packets may be missing of each class, and each packet's class."""

    classes: NDArray[np.int64]
    allowed: tuple[int, ...]

    def excess(self, missing: Mask) -> Whole:
        """Return by class how many more packets are missing than may be."""
        counts = np.bincount(self.classes[missing], minlength=len(self.allowed))
        return np.maximum(0, counts - np.array(self.allowed, np.int64))


@dataclass(frozen=True, slots=True)
class Labels:
    """What a sender knows of its packets: which must arrive, and IP's byte of each."""

    important: Mask
    tos: Bytes


class Outgoing:
    """A message to one rank, until that rank has said STOP. Its data must not change until then."""

    def __init__(
        self, to: int, number: int, shape: Shape, data: Bytes, allowance: Allowance, labels: Labels
    ) -> None:
        self.to, self.number, self.shape, self.data = to, number, shape, data
        self.allowance, self.labels = allowance, labels
        self.round = 0
        self.is_done = False
        self.lost: Mask = np.zeros(shape.packets, np.bool_)
        self.num_resent = 0
        self.num_ends = 0
        self.posted = 0.0
        self.not_before = 0.0
        self._queue = np.argsort(~labels.important, kind="stable")
        self._end_due = 0.0

    @property
    def has_data(self) -> bool:
        """Whether there are packets to send."""
        return len(self._queue) > 0

    def take(self, count: int, now: float) -> Whole:
        """Return the next packets to send."""
        taken, self._queue = self._queue[:count], self._queue[count:]
        self._end_due = now
        return taken

    def end_due(self) -> float:
        """Return when END is to be sent."""
        return np.inf if self.is_done or self.has_data else self._end_due

    def ended(self, now: float, repeat_seconds: float) -> None:
        """Note that END was sent: next time it takes twice as long, up to a tenth of a second."""
        self.num_ends += 1
        patience = repeat_seconds * 2 ** min(self.num_ends - 1, 10)
        self._end_due = now + min(patience, max(0.1, repeat_seconds))

    def refused(self, round_: int, missing: Mask) -> None:
        """NACK: send again what is important and of the rest as much as the bound asks for."""
        if self.is_done or self.has_data or round_ != self.round or len(missing) != len(self.lost):
            return  # late: it answers an earlier END
        again = missing & self.labels.important
        lacking = self.allowance.excess(missing & ~again)
        for kind, count in enumerate(lacking):
            others = np.flatnonzero(missing & ~again & (self.allowance.classes == kind))
            again[others[:count]] = True
        self._queue = np.flatnonzero(again)
        self._queue = self._queue[np.argsort(~self.labels.important[self._queue], kind="stable")]
        self.num_resent += len(self._queue)
        self.round += 1
        self.num_ends = 0

    def accepted(self, missing: Mask) -> None:
        """STOP: nothing more is wanted."""
        if not self.is_done and len(missing) == len(self.lost):
            self.is_done, self.lost = True, missing
            self._queue = self._queue[:0]
            self.data = self.data[:0]


class Incoming:
    """A message from one rank. Packets may come before anybody awaits it: it ends when it is allowed to."""

    def __init__(self, source: int, number: int, shape: Shape, memory: Bytes) -> None:
        self.source, self.number, self.shape, self.memory = source, number, shape, memory
        self.seen: Mask = np.zeros(shape.packets, np.bool_)
        self.is_done = False
        self.is_awaited = False
        self.decide_at = np.inf
        self.round = 0
        self.posted = 0.0
        self._allowance: Allowance | None = None
        self._num_seen = 0
        self._num_important = 0
        self._has_ended = False
        self._need = 0

    @property
    def num_missing(self) -> int:
        """Packets that have not come."""
        return self.shape.packets - self._num_seen

    def await_(self, allowance: Allowance, now: float) -> None:
        """Say what may be missing: from now on it may end."""
        self._allowance, self.is_awaited, self.posted = allowance, True, now
        self.decide_at = now if self._has_ended else np.inf
        self._check_whole()

    def take(self, rows: Bytes, which: Whole, offsets: Whole, important: Mask, need: int) -> None:
        """Take data packets, given which rows they are and where their values belong."""
        if self.is_done:
            return
        stride = self.shape.values * self.shape.itemsize
        fresh = place(rows, which, offsets // self.shape.values, stride, self.memory, self.seen)
        self._num_seen += int(fresh.sum())
        self._num_important += int(important[fresh].sum())
        self._need = need
        self._check_whole()

    def end(self, round_: int, need: int, now: float, grace: float) -> None:
        """END has come: decide soon, when what it overtook has had time to come."""
        self._need, self._has_ended = need, True
        if (
            not self.is_done
            and self.is_awaited
            and (round_ > self.round or self.decide_at == np.inf)
        ):
            self.round = max(self.round, round_)
            self.decide_at = now + grace

    def decide(self) -> bool:
        """Return whether what has come is enough; if so the message is done."""
        self.decide_at = np.inf
        if self._allowance is None:
            return False
        missing = ~self.seen
        lacks_important = self._num_important < self._need
        self.is_done = not lacks_important and not self._allowance.excess(missing).any()
        if self.is_done:
            self._blank(missing)
        return self.is_done

    def _check_whole(self) -> None:
        if self.is_awaited and self._num_seen == self.shape.packets:
            self.is_done, self.decide_at = True, np.inf

    def _blank(self, missing: Mask) -> None:
        """Put zeros where nothing came, also where memory was lent with something in it."""
        stride = self.shape.values * self.shape.itemsize
        for index in np.flatnonzero(missing):
            self.memory[index * stride : (index + 1) * stride] = 0


def uniform(shape: Shape, allowed: int) -> Allowance:
    """Return one class for all packets."""
    return Allowance(np.zeros(shape.packets, np.int64), (allowed,))


def bits(mask: Mask) -> Bytes:
    """Return a mask as bytes."""
    return np.packbits(mask)


def mask_of(data: Bytes, packets: int) -> Mask | None:
    """Return a mask from bytes, if they have its length. No bytes are a mask of nothing."""
    if len(data) == 0:
        return np.zeros(packets, np.bool_)
    if len(data) != -(-packets // 8):
        return None
    return np.unpackbits(data, count=packets).astype(np.bool_)


def elements_of(mask: Mask, shape: Shape) -> Mask:
    """Return which elements a mask of packets covers."""
    return np.repeat(mask, shape.values)[: shape.elements]
