"""How fast a rank sends to another: a window after DCTCP (Alizadeh et al., SIGCOMM 2010), and spacing.

Every packet of a stream to one rank is numbered. The other side says now and then which number it saw
last, how many came and how many bore a mark of congestion. Marks shrink the window by the share that
is marked. Losses do so only where their share is above what is tolerated: a packet that may be
dropped says nothing, but half of all packets lost does, also on networks that cannot mark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.lossy.packets import WRAP
from shardwright.lossy.settings import Transport

GAIN = 1 / 16  # DCTCP's g
TOLERATED_LOSS = 0.05  # at least: a network that loses less is not congested but lossy
STALL_SECONDS = 0.02  # at least; silence for that long says that what is under way is lost
# What may be sent at once where packets are spaced: a thread may wake so much later than it is due, and what the link
# would have carried meanwhile is lost to it.
BURST_BYTES, LATE_SECONDS = 16_384, 0.001


def ahead(later: int, earlier: int) -> int:
    """Return how far a wrapping number is ahead of another; negative if it is behind."""
    return (later - earlier + WRAP // 2) % WRAP - WRAP // 2


@dataclass(slots=True)
class Report:
    """What a receiver says of a stream: last number seen, packets received and marked, a time back."""

    highest: int = 0
    received: int = 0
    marked: int = 0
    echo: int = 0


class Pace:
    """What may be sent to one rank now."""

    def __init__(self, transport: Transport) -> None:
        self.window = float(transport.window)
        self.rate = transport.rate
        self.round_trip = 0.0
        self.sequence = 0
        self._most = transport.most_window
        self._packet_bytes = transport.packet_bytes
        self._last = Report()
        self._alpha, self._loss = 1.0, 0.0
        self._starting = True
        self._round_end = 0
        self._round = [0, 0, 0]  # sent, received, marked
        self._heard = 0.0
        self._burst = max(BURST_BYTES, transport.packet_bytes, LATE_SECONDS * self.rate)
        self._tokens, self._filled = self._burst, 0.0

    @property
    def under_way(self) -> int:
        """Packets sent and not known to have come or to be lost."""
        return ahead(self.sequence, self._last.highest)

    @property
    def repeat_seconds(self) -> float:
        """How long to wait before asking again for an answer."""
        return max(2 * self.round_trip, 0.004)

    def quota(self, now: float) -> int:
        """Return how many packets may be sent now."""
        room = int(self.window) - self.under_way
        if math.isinf(self.rate) or room <= 0:
            return max(0, room)
        gained = (now - self._filled) * self.rate
        self._tokens, self._filled = min(self._burst, self._tokens + gained), now
        return max(0, min(room, int(self._tokens // self._packet_bytes)))

    def due(self, now: float) -> float:
        """Return when more may be sent, or silence counts as loss."""
        if int(self.window) <= self.under_way:
            return self._heard + self._stall_seconds
        if math.isinf(self.rate):
            return now
        lacking = self._packet_bytes - self._tokens - (now - self._filled) * self.rate
        # Long enough for the clock to go on: what lacks may be less than a rounding error.
        return now + max(lacking / self.rate, 1e-5) if lacking > 0 else now

    @property
    def _stall_seconds(self) -> float:
        return max(4 * self.round_trip, STALL_SECONDS)

    def sent(self, count: int, now: float) -> int:
        """Number packets that are sent; return the first number."""
        if self.under_way == 0:
            self._heard = now
        first = self.sequence
        self.sequence = (self.sequence + count) % WRAP
        self._tokens -= count * self._packet_bytes
        return first

    def settle(self) -> None:
        """Nothing is under way any more: all messages have been answered."""
        self._last.highest = self.sequence

    def check_silence(self, now: float) -> None:
        """Give up on what is under way where nothing has been heard of it for long."""
        if self.under_way > 0 and now >= self._heard + self._stall_seconds:
            self._last.highest = self.sequence
            self._starting = False
            self.window = max(2.0, self.window / 2)
            self._heard = now

    def take(self, report: Report, now: float, tolerated: float) -> None:
        """Learn what became of packets."""
        sent = ahead(report.highest, self._last.highest)
        received = ahead(report.received, self._last.received)
        marked = max(0, ahead(report.marked, self._last.marked))
        if received <= 0 or ahead(report.highest, self.sequence) > 0:
            return
        self._heard = now
        trip = (int(now * 1e6) - report.echo) % WRAP / 1e6
        if trip < 60:
            self.round_trip = (
                trip if not self.round_trip else 0.875 * self.round_trip + 0.125 * trip
            )
        highest = report.highest if sent > 0 else self._last.highest
        self._last = Report(highest, report.received, report.marked, report.echo)
        for place, count in enumerate((max(0, sent), received, marked)):
            self._round[place] += count
        self.window += received if self._starting else received / self.window
        self.window = min(self.window, float(self._most))
        if ahead(self._last.highest, self._round_end) >= 0:
            self._end_round(max(tolerated, TOLERATED_LOSS))

    def _end_round(self, tolerated: float) -> None:
        """Once a round trip: shrink the window where the network says that it is full."""
        sent, received, marked = self._round
        lost = max(0.0, 1 - received / sent) if sent else 0.0
        share = marked / received if received else 0.0
        self._alpha = (1 - GAIN) * self._alpha + GAIN * share
        self._loss += (lost - self._loss) / 4
        if share:
            self.window *= 1 - self._alpha / 2
            self._starting = False
        if self._loss > tolerated:
            self.window *= 1 - min(0.5, self._loss)
            self._starting = False
        self.window = max(2.0, self.window)
        self._round, self._round_end = [0, 0, 0], self.sequence
