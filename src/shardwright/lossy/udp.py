"""Messages over UDP: one thread per rank owns the sockets and the endpoint's clock.

Nothing here is decided: the endpoint does that. Ranks find each other through whatever can gather a
value of each rank, such as a process group of torch.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from shardwright.errors import InputError
from shardwright.lossy.batches import BATCH, Sockets
from shardwright.lossy.collectives import Steps
from shardwright.lossy.endpoint import Endpoint
from shardwright.lossy.messages import Allowance, Incoming, Labels, Outgoing
from shardwright.lossy.packets import Packets
from shardwright.lossy.settings import Transport

Gather = Callable[[Any], list[Any]]
Dropper = Callable[[Packets], np.ndarray]
LONGEST_SLEEP = 0.1  # seconds; how often somebody looks whether a message is overdue


class UdpRank:
    """One rank of a network of UDP sockets.

    ``gather`` returns a value of every rank, in order. ``host`` is this host's address in the network
    that gradients take. ``dropper``, for trials, says of packets that came which are lost.
    """

    def __init__(
        self,
        gather: Gather,
        rank: int,
        *,
        host: str = "127.0.0.1",
        transport: Transport | None = None,
        dropper: Dropper | None = None,
    ) -> None:
        transport = transport or Transport()
        self._sockets, said = _introduced(gather, rank, host, transport)
        if any(one[2] != transport for one in said):
            self._sockets.close()
            raise InputError(
                "all ranks must use equal transport settings, but theirs differ; give each the same"
            )
        self._sockets.know([one[0] for one in said])
        self.address = self._sockets.address
        self.rank, self.size = rank, len(said)
        self.endpoint = Endpoint(rank, self.size, said[0][1], transport)
        self._dropper = dropper
        self._gather = gather
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._is_open = True
        self._bell = socket.socketpair()
        for one in self._bell:
            one.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="lossy packets", daemon=True)
        self._thread.start()

    def post(
        self, to: int, number: int, data: np.ndarray, allowance: Allowance, labels: Labels
    ) -> Outgoing:
        """Begin to send."""
        with self._changed:
            message = self.endpoint.post(to, number, data, allowance, labels, time.monotonic())
        self._ring()
        return message

    def expect(self, source: int, number: int, like: np.ndarray, allowance: Allowance) -> Incoming:
        """Begin to await."""
        with self._changed:
            message = self.endpoint.expect(source, number, like, allowance, time.monotonic())
        self._ring()
        return message

    def drive(self, steps: Steps) -> None:
        """Do what a collective does, waiting where it waits. Raises RunError when that takes too long."""
        for messages in steps:
            self.wait(messages)

    def wait(self, messages: Sequence[Incoming | Outgoing]) -> None:
        """Wait until messages are through."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(message.is_done for message in messages)
            )
            if self._failure:
                raise self._failure

    def close(self) -> None:
        """Wait until all that was sent has come, on all ranks, and give the sockets back. All call it."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.endpoint.is_quiet)
        try:
            if self._failure is None:
                self._gather(None)  # until then other ranks may still ask whether something came
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the sockets back at once."""
        self._is_open = False
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for one in (self._sockets, *self._bell):
            one.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # rung already, or closed
            self._bell[1].send(b"!")

    def _serve(self) -> None:
        try:
            while self._is_open:
                self._sleep(self._turn())
        except Exception as error:  # noqa: BLE001  # raised by whoever waits
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _turn(self) -> float:
        """Take what has come and send what is due; return when there is more to do."""
        come = self._sockets.receive()
        if come is not None and self._dropper is not None:
            come = _without(come, self._dropper(come))
        now = time.monotonic()
        with self._changed:
            before = self.endpoint.num_done
            if come is not None:
                self.endpoint.take(come, now)
            packets = self.endpoint.emit(now, BATCH)
            failure = self.endpoint.failed(now)
            due = now if come is not None else self.endpoint.due(now)
            if self.endpoint.num_done > before:
                self._changed.notify_all()
        if packets is not None:
            self._sockets.send(packets)
        if failure is not None:
            self._fail(failure)
        return due

    def _sleep(self, due: float) -> None:
        seconds = min(LONGEST_SLEEP, due - time.monotonic())
        if seconds > 0:
            ready, _, _ = select.select([self._sockets, self._bell[0]], [], [], seconds)
            if self._bell[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    self._bell[0].recv(4096)


def _introduced(
    gather: Gather, rank: int, host: str, transport: Transport
) -> tuple[Sockets, list[tuple[tuple[str, int], bytes, Transport]]]:
    """Open a rank's sockets; return them, and of every rank its address, a key and its settings. Where a rank has no
    sockets all learn of it: the others would wait for it."""
    sockets, refusal = None, ""
    try:
        sockets = Sockets(host, transport.ports, transport.packet_bytes)
    except InputError as error:
        refusal = str(error)
    mine = None if sockets is None else (sockets.address, secrets.token_bytes(16), transport)
    said = gather((refusal, mine))
    if sockets is None:
        raise InputError(refusal)
    refused = [(place, words) for place, (words, _) in enumerate(said) if words]
    if refused:
        sockets.close()
        place, words = refused[0]
        raise InputError(f"rank {place} cannot be reached, and rank {rank} ends with it: {words}")
    return sockets, [one for _, one in said]


def _without(packets: Packets, lost: np.ndarray) -> Packets:
    kept = ~lost
    return Packets(packets.rows[kept], packets.lengths[kept], packets.to[kept], packets.tos[kept])


def seeded_dropper(share: float, seed: int) -> Dropper:
    """Return what loses packets at random, for trials: Linux here may have nothing that does."""
    if not isinstance(share, Real) or not 0 <= share <= 1:
        raise InputError(
            f"packets are lost by a share of them, from 0 to 1, not {share!r:.40}; give 0.01"
        )
    random = np.random.default_rng(seed)
    return lambda packets: random.random(len(packets)) < share
