"""All messages of one rank: takes packets, says which to send, and when. No clock, socket or chance.

Whoever owns it calls ``take`` with what has come, ``emit`` until nothing is left to send, and both again
at the time ``due`` names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardwright.errors import RunError
from shardwright.lossy.messages import (
    Allowance,
    Incoming,
    Labels,
    Outgoing,
    bits,
    mask_of,
)
from shardwright.lossy.pace import Pace, Report, ahead
from shardwright.lossy.packets import (
    HEADER_BYTES,
    WRAP,
    Bytes,
    PacketKind,
    Packets,
    Shape,
    Whole,
    blank,
    genuine,
    heads_of,
    joined,
    lay,
    seal,
)
from shardwright.lossy.settings import Transport

CONTROL_TOS = 0xE0 | 0x02  # class selector 7; ECN-capable: marked where data would be dropped
MARKED = 0x03  # both of IP's ECN bits: a switch met congestion
FEEDBACK_PACKETS, FEEDBACK_SECONDS = 16, 0.001  # as delayed acknowledgements
REMEMBERED = 4096  # finished messages of each rank, to answer its END again
EARLY_BYTES = (
    2**30
)  # of messages that nobody awaits yet; beyond, packets are dropped, to come again


@dataclass(slots=True)
class Counts:
    """What an endpoint has seen, for reports and tests."""

    sent: int = 0
    sent_bytes: int = 0
    resent: int = 0
    taken: int = 0
    rejected: int = 0
    marked: int = 0
    accepted_missing: int = 0


@dataclass(slots=True)
class _Peer:
    """Another rank: the way there, and what has come from there."""

    pace: Pace
    sent: list[Outgoing] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    unreported: int = 0
    report_due: float = np.inf
    arrived: float = 0.0
    finished: OrderedDict[int, Bytes] = field(default_factory=OrderedDict)
    answers: dict[int, Incoming | None] = field(default_factory=dict)

    def is_ready(self, now: float) -> bool:
        """Whether the turn of a message to it has come."""
        return any(one.not_before <= now for one in self.sent)


class Endpoint:
    """One rank's end of all streams."""

    def __init__(self, rank: int, size: int, key: bytes, transport: Transport) -> None:
        self.rank, self.size, self.transport = rank, size, transport
        self.counts = Counts()
        self.failure: RunError | None = None
        self.num_done = 0
        self.describe: Callable[[int], str] = "message {}".format
        self._key = key
        self._peers = {other: _Peer(Pace(transport)) for other in range(size) if other != rank}
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._early_bytes = 0
        self._turn = 0
        self._tolerated = 0.0

    def shape(self, elements: int, itemsize: int) -> Shape:
        """Return how a message is cut into packets of whole values."""
        return Shape(elements, itemsize, self.payload_bytes // itemsize)

    @property
    def payload_bytes(self) -> int:
        """What a packet carries besides its header; a multiple of the longest value."""
        return (self.transport.packet_bytes - HEADER_BYTES) // 8 * 8

    @property
    def most_packets(self) -> int:
        """How many packets a message may have: what is missing must fit into one answer."""
        return 8 * self.payload_bytes

    def post(
        self,
        to: int,
        number: int,
        data: np.ndarray,
        allowance: Allowance,
        labels: Labels,
        now: float,
    ) -> Outgoing:
        """Begin to send flat data under a number that no earlier message to this rank had."""
        shape = self.shape(len(data), data.itemsize)
        message = Outgoing(to, number, shape, data.view(np.uint8), allowance, labels)
        message.posted, message.not_before = now, now + self._turn_seconds(to, data.nbytes)
        self._tolerated = max(self._tolerated, sum(allowance.allowed) / shape.packets)
        self._peers[to].sent.append(message)
        return message

    def _turn_seconds(self, to: int, num_bytes: int) -> float:
        """Return how long to wait so that ranks which send at once come in turns, none to or from two.

        In its turn a message has the whole line. None is later than if all shared it all the time.
        """
        if math.isinf(self.transport.rate):
            return 0.0
        place = (to - self.rank - 1) % self.size
        return place * num_bytes / self.transport.rate

    def expect(
        self, source: int, number: int, like: np.ndarray, allowance: Allowance, now: float
    ) -> Incoming:
        """Begin to await a message of a form that is known; raises RunError if another one came."""
        message = self._incoming.get((source, number))
        shape = self.shape(len(like), like.itemsize)
        if message is None:
            message = Incoming(source, number, shape, np.zeros(like.nbytes, np.uint8))
            self._incoming[source, number] = message
        else:
            self._early_bytes -= len(message.memory)
        if message.shape != shape:
            raise self._disagreement(message, shape.elements, shape.itemsize)
        message.await_(allowance, now)
        if message.is_done:
            self._finish(message)
        return message

    def _disagreement(self, message: Incoming, elements: int, itemsize: int) -> RunError:
        shape = message.shape
        return RunError(
            f"ranks must exchange equal messages, but {self.describe(message.number)} of rank {message.source} to rank "
            f"{self.rank} has {shape.elements} values of {shape.itemsize} bytes on one side and {elements} of "
            f"{itemsize} on the other; give all ranks the same model and settings",
            rank=self.rank,
        )

    def take(self, packets: Packets, now: float) -> None:
        """Take packets as they came; ``tos`` is IP's byte as it arrived."""
        good = genuine(packets.rows, packets.lengths, self._key)
        heads = heads_of(packets.rows)
        good &= (heads["source"] < self.size) & (heads["source"] != self.rank)
        self.counts.rejected += int(len(packets) - good.sum())
        self.counts.taken += int(good.sum())
        is_data = good & (heads["kind"] == PacketKind.DATA)
        if is_data.any():
            self._take_data(packets, np.flatnonzero(is_data), now)
        for row in np.flatnonzero(good & ~is_data):
            self._take_control(packets.rows[row], heads[row], now)

    def _take_data(self, packets: Packets, which: Whole, now: float) -> None:
        heads = heads_of(packets.rows)[which]
        marks = packets.tos[which] & MARKED == MARKED
        self.counts.marked += int(marks.sum())
        for source in np.unique(heads["source"]):
            mine = heads["source"] == source
            peer = self._peers[int(source)]
            _count(peer, heads[mine], int(marks[mine].sum()), now)
            for number in np.unique(heads["message"][mine]):
                chosen = mine & (heads["message"] == number)
                self._take_part(peer, packets.rows, which[chosen], heads[chosen])

    def _take_part(self, peer: _Peer, rows: Bytes, which: Whole, heads: np.ndarray) -> None:
        """Take packets of one message."""
        first = heads[0]
        source, number = int(first["source"]), int(first["message"])
        if number in peer.finished:
            peer.answers[number] = None
            return
        message = self._incoming.get((source, number)) or self._early(first)
        if message is None:
            return
        shape, said = message.shape, (int(first["elements"]), int(first["itemsize"]))
        if said != (shape.elements, shape.itemsize):
            self.failure = self.failure or self._disagreement(message, *said)
            return
        offsets = heads["offset"].astype(np.int64)
        sizes = np.minimum(shape.values, shape.elements - offsets) * shape.itemsize
        fits = (offsets < shape.elements) & (offsets % shape.values == 0) & (heads["size"] == sizes)
        message.take(
            rows, which[fits], offsets[fits], heads["important"][fits] != 0, int(first["need"])
        )
        if message.is_done:
            self._finish(message)

    def _early(self, head: np.void) -> Incoming | None:
        """Make a message that nobody awaits yet, if there is room."""
        elements, itemsize = int(head["elements"]), int(head["itemsize"])
        if self._early_bytes + elements * itemsize > EARLY_BYTES or itemsize not in (1, 2, 4, 8):
            return None
        shape = self.shape(elements, itemsize)
        message = Incoming(
            int(head["source"]),
            int(head["message"]),
            shape,
            np.zeros(elements * itemsize, np.uint8),
        )
        self._early_bytes += len(message.memory)
        self._incoming[message.source, message.number] = message
        return message

    def _take_control(self, row: Bytes, head: np.void, now: float) -> None:
        peer, number = self._peers[int(head["source"])], int(head["message"])
        kind = int(head["kind"])
        if kind == PacketKind.END:
            self._take_end(peer, head, now)
            return
        report = Report(*(int(head[name]) for name in ("highest", "received", "marked", "echo")))
        peer.pace.take(report, now, self._tolerated)
        message = next((one for one in peer.sent if one.number == number), None)
        if kind == PacketKind.FEEDBACK or message is None:
            return
        missing = mask_of(
            row[HEADER_BYTES : HEADER_BYTES + int(head["size"])], message.shape.packets
        )
        if missing is None:
            return
        if kind == PacketKind.NACK:
            message.refused(int(head["round"]), missing)
        else:
            message.accepted(missing)
            self.counts.resent += message.num_resent
            peer.sent.remove(message)
            if not peer.sent:
                peer.pace.settle()
            self.num_done += 1

    def _take_end(self, peer: _Peer, head: np.void, now: float) -> None:
        number = int(head["message"])
        message = self._incoming.get((int(head["source"]), number))
        if number in peer.finished:
            peer.answers[number] = None
        elif message is not None:
            message.end(int(head["round"]), int(head["need"]), now, self.transport.grace)

    def _finish(self, message: Incoming) -> None:
        self.num_done += 1
        peer = self._peers[message.source]
        del self._incoming[message.source, message.number]
        missing = ~message.seen
        self.counts.accepted_missing += int(missing.sum())
        peer.finished[message.number] = bits(missing) if missing.any() else np.zeros(0, np.uint8)
        if len(peer.finished) > REMEMBERED:
            peer.finished.popitem(last=False)
        peer.answers[message.number] = None

    def emit(self, now: float, most: int = 64) -> Packets | None:
        """Return packets to send now, about ``most``; None where there are none."""
        self._decide(now)
        parts = [*self._control(now)]
        ready = [other for other, peer in self._peers.items() if peer.is_ready(now)]
        self._turn += 1
        room = max(1, most // max(1, len(ready)))
        for place in range(len(ready)):
            other = ready[(place + self._turn) % len(ready)]
            parts += self._data(other, now, room)
        if not parts:
            return None
        packets = joined(parts)
        packets.heads["source"] = self.rank
        packets.heads["size"] = packets.lengths - HEADER_BYTES
        seal(packets, self._key)
        self.counts.sent += len(packets)
        self.counts.sent_bytes += int(packets.lengths.sum())
        return packets

    def _decide(self, now: float) -> None:
        for message in [one for one in self._incoming.values() if one.decide_at <= now]:
            if message.decide():
                self._finish(message)
            else:
                self._peers[message.source].answers[message.number] = message

    def _control(self, now: float) -> list[Packets]:
        """Answers and feedback that are due."""
        parts = []
        for other, peer in self._peers.items():
            for number, message in peer.answers.items():
                if message is None:
                    parts.append(
                        self._answer(other, PacketKind.STOP, number, peer.finished.get(number), now)
                    )
                else:
                    parts.append(
                        self._answer(other, PacketKind.NACK, number, bits(~message.seen), now)
                    )
                    parts[-1].heads["round"] = message.round
            if not peer.answers and (peer.report_due <= now or peer.unreported >= FEEDBACK_PACKETS):
                parts.append(self._answer(other, PacketKind.FEEDBACK, 0, None, now))
            peer.answers.clear()
        return parts

    def _answer(
        self, to: int, kind: PacketKind, number: int, payload: Bytes | None, now: float
    ) -> Packets:
        packets = self._blank(1, to, kind, number)
        if payload is not None:
            packets.rows[0, HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
            packets.lengths[0] += len(payload)
        peer, heads = self._peers[to], packets.heads
        report = peer.report
        heads["highest"], heads["received"] = report.highest, report.received
        # The time that a report lay here is no part of the round trip.
        heads["marked"] = report.marked
        heads["echo"] = (report.echo + int((now - peer.arrived) * 1e6)) % WRAP
        peer.unreported, peer.report_due = 0, np.inf
        return packets

    def _blank(self, count: int, to: int, kind: PacketKind, number: int) -> Packets:
        packets = blank(count, self.transport.packet_bytes)
        packets.to[:], packets.tos[:] = to, CONTROL_TOS
        packets.heads["kind"], packets.heads["message"] = kind, number
        return packets

    def _data(self, other: int, now: float, room: int) -> list[Packets]:
        """Data and ENDs for one rank, as far as its window goes."""
        peer = self._peers[other]
        peer.pace.check_silence(now)
        quota, parts = min(room, peer.pace.quota(now)), []
        for message in peer.sent:
            if message.not_before > now:
                continue
            if message.has_data and quota > 0:
                indices = message.take(quota, now)
                quota -= len(indices)
                parts.append(self._pieces(message, indices, now))
            if message.end_due() <= now:
                end = self._blank(1, other, PacketKind.END, message.number)
                end.heads["round"] = message.round
                end.heads["need"] = message.labels.important.sum()
                message.ended(now, peer.pace.repeat_seconds)
                # Not ahead of its own data: it travels in their queue, but is not dropped first.
                end.tos[:] = int(message.labels.tos[-1]) & 0xFC | 0x02
                parts.append(end)
        return parts

    def _pieces(self, message: Outgoing, indices: Whole, now: float) -> Packets:
        shape, pace = message.shape, self._peers[message.to].pace
        packets = self._blank(len(indices), message.to, PacketKind.DATA, message.number)
        offsets = indices * shape.values
        sizes = np.minimum(shape.values, shape.elements - offsets) * shape.itemsize
        lay(packets.rows, message.data, offsets * shape.itemsize, sizes)
        packets.lengths += sizes
        packets.tos[:] = message.labels.tos[indices]
        heads = packets.heads
        heads["offset"], heads["elements"], heads["itemsize"] = (
            offsets,
            shape.elements,
            shape.itemsize,
        )
        heads["important"] = message.labels.important[indices]
        heads["need"] = message.labels.important.sum()
        first = pace.sent(len(indices), now)
        heads["sequence"] = (first + 1 + np.arange(len(indices))) % WRAP
        heads["time"] = int(now * 1e6) % WRAP
        return packets

    def due(self, now: float) -> float:
        """Return when to call ``emit`` again if nothing comes before."""
        times = [one.decide_at for one in self._incoming.values()]
        for peer in self._peers.values():
            if peer.answers or peer.unreported >= FEEDBACK_PACKETS:
                return now
            times.append(peer.report_due)
            times += [one.end_due() for one in peer.sent]
            waiting = [one.not_before for one in peer.sent if one.has_data]
            if waiting:
                times.append(max(peer.pace.due(now), min(waiting)))
        return min(times, default=np.inf)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that was sent awaits its STOP."""
        return not any(peer.sent for peer in self._peers.values())

    def failed(self, now: float) -> RunError | None:
        """Return what went wrong: ranks disagree, or a message is not through in time."""
        if self.failure is not None:
            return self.failure
        limit = now - self.transport.timeout
        text = "messages must be through within {0:g} s, but {1}; see whether rank {2} still runs and can be reached, or raise timeout"
        for (source, number), one in self._incoming.items():
            if one.is_awaited and one.posted <= limit:
                come = one.shape.packets - one.num_missing
                what = (
                    f"rank {self.rank} has got {come} of {one.shape.packets} packets of {self.describe(number)} of "
                    f"rank {source}"
                )
                return RunError(text.format(self.transport.timeout, what, source), rank=self.rank)
        for other, peer in self._peers.items():
            for one in peer.sent:
                if one.posted <= limit:
                    what = f"rank {other} has not confirmed {self.describe(one.number)} of rank {self.rank}"
                    return RunError(
                        text.format(self.transport.timeout, what, other), rank=self.rank
                    )
        return None


def _count(peer: _Peer, heads: np.ndarray, marked: int, now: float) -> None:
    """Count packets of a stream for the next report."""
    report = peer.report
    further = max(ahead(one, report.highest) for one in heads["sequence"].tolist())
    report.highest = (report.highest + max(0, further)) % WRAP
    report.received = (report.received + len(heads)) % WRAP
    report.marked = (report.marked + marked) % WRAP
    report.echo, peer.arrived = int(heads["time"][-1]), now
    peer.unreported += len(heads)
    peer.report_due = min(peer.report_due, now + FEEDBACK_SECONDS)
