"""A network in this process that loses, reorders, repeats and damages packets, as a seed draws it.

Ranks are generators that yield messages they wait for; time is simulated. So every run of a protocol
can be repeated, and one that would hang ends at once with what was waited for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardwright.errors import RunError
from shardwright.lossy.endpoint import Endpoint
from shardwright.lossy.messages import Allowance, Incoming, Labels, Outgoing
from shardwright.lossy.packets import Packets, Shape
from shardwright.lossy.settings import Transport

T = TypeVar("T")
Waiting = Incoming | Outgoing
Steps = Generator[Sequence[Waiting], None, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to packets, as shares of them; ``dead`` are ranks of which nothing comes or goes.

    Control packets suffer like data. ``loss_of`` says of a packet's bytes and IP byte how likely it is
    lost, where that is not the same for all.
    """

    loss: float = 0.0
    reordered: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    delay: float = 1e-4
    dead: frozenset[int] = frozenset()
    loss_of: Callable[[np.ndarray, int], float] | None = None


def unlabelled(shape: Shape) -> Labels:
    """Return labels of packets that are all alike."""
    return Labels(np.zeros(shape.packets, np.bool_), np.zeros(shape.packets, np.uint8))


class LossyRank:
    """One rank of a lossy network, as collectives see it."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        self.endpoint, self._clock = endpoint, clock
        self.rank, self.size = endpoint.rank, endpoint.size

    def post(
        self, to: int, number: int, data: np.ndarray, allowance: Allowance, labels: Labels
    ) -> Outgoing:
        """Begin to send."""
        return self.endpoint.post(to, number, data, allowance, labels, self._clock())

    def expect(self, source: int, number: int, like: np.ndarray, allowance: Allowance) -> Incoming:
        """Begin to await."""
        return self.endpoint.expect(source, number, like, allowance, self._clock())


class LossyNetwork:
    """Ranks and the packets under way between them."""

    def __init__(
        self,
        size: int,
        faults: Faults,
        seed: int,
        transport: Transport | None = None,
        key: bytes = bytes(16),
    ) -> None:
        self.now = 0.0
        self.faults = faults
        self.endpoints = [
            Endpoint(rank, size, key, transport or Transport()) for rank in range(size)
        ]
        self._random = np.random.default_rng(seed)
        self._under_way: list[tuple[float, int, int, np.ndarray, int, int]] = []
        self._count = 0

    def run(self, target: Callable[[LossyRank], Steps[T]]) -> list[T]:
        """Run ``target`` as every rank that is not dead until all are through and all is confirmed."""
        alive = self._alive
        steps = {one: target(LossyRank(self.endpoints[one], lambda: self.now)) for one in alive}
        results: dict[int, T] = {}
        awaited: dict[int, Sequence[Waiting]] = dict.fromkeys(alive, ())
        while awaited or not self._is_quiet():
            for rank in _ready(awaited):
                try:
                    awaited[rank] = next(steps[rank])
                except StopIteration as end:
                    results[rank] = end.value
                    del awaited[rank]
            self._emit()
            if not _ready(awaited) and (awaited or not self._is_quiet()):
                self._advance()
        return [results[one] for one in alive]

    @property
    def _alive(self) -> list[int]:
        return [one for one in range(len(self.endpoints)) if one not in self.faults.dead]

    def _is_quiet(self) -> bool:
        return all(self.endpoints[one].is_quiet for one in self._alive)

    def inject(self, packets: Packets) -> None:
        """Put packets of anybody on the network; nothing happens to them there."""
        for row in range(len(packets)):
            self._deliver(packets, row, self.now)

    def _emit(self) -> None:
        for rank in self._alive:
            while (packets := self.endpoints[rank].emit(self.now)) is not None:
                for row in range(len(packets)):
                    self._send(packets, row)

    def _send(self, packets: Packets, row: int) -> None:
        faults, draw = self.faults, self._random
        loss = faults.loss
        if faults.loss_of is not None:
            loss = faults.loss_of(packets.rows[row], int(packets.tos[row]))
        for _ in range(1 + (draw.random() < faults.repeated)):
            if draw.random() < loss:
                continue
            late = draw.random() * 50 if draw.random() < faults.reordered else 0.0
            if draw.random() < faults.damaged:
                packets.rows[row, draw.integers(packets.lengths[row])] ^= 1 << draw.integers(8)
            self._deliver(packets, row, self.now + faults.delay * (1 + late))

    def _deliver(self, packets: Packets, row: int, time: float) -> None:
        self._count += 1
        bytes_ = packets.rows[row].copy()
        what = (int(packets.to[row]), bytes_, int(packets.lengths[row]), int(packets.tos[row]))
        heapq.heappush(self._under_way, (time, self._count, *what))

    def _advance(self) -> None:
        """Go on to the next moment at which something happens."""
        times = [self.endpoints[one].due(self.now) for one in self._alive]
        times += [self._under_way[0][0]] if self._under_way else []
        moment = min(times, default=np.inf)
        if moment == np.inf:
            raise RunError("ranks must not wait for what nobody sends, but all of them do")
        self.now = max(self.now, moment)
        for rank in self._alive:
            failure = self.endpoints[rank].failed(self.now)
            if failure is not None:
                raise failure
        while self._under_way and self._under_way[0][0] <= self.now:
            _, _, to, bytes_, length, tos = heapq.heappop(self._under_way)
            if to not in self.faults.dead:
                one = (np.array([length]), np.array([to]), np.array([tos], np.uint8))
                self.endpoints[to].take(Packets(bytes_[None], *one), self.now)


def _ready(awaited: Mapping[int, Sequence[Waiting]]) -> list[int]:
    """Return the ranks that can go on."""
    return [one for one, parts in awaited.items() if all(part.is_done for part in parts)]
