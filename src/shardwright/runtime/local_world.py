"""All ranks of a Program in one process: the real executor, each rank a thread, no sockets.

Only one thread runs at a time. A rank that must wait for another passes the turn on to the next
rank that can go on, so that a run is deterministic and torch's global random numbers are safe.
Nothing can hang: when nobody can go on the run ends with what every rank was waiting for. It is
stricter than a real backend, whose races may go unnoticed: buffers that are under way must not
change, and the messages of one link must be received in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.errors import RunError
from shardwright.runtime.collectives import Pending
from shardwright.runtime.turns import Turns, numbers_text
from shardwright.runtime.world import Channel, Group, Link

T = TypeVar("T")
Tag = tuple[int, str, int]


@dataclass(slots=True)
class Sent:
    """What one rank sent by one primitive to groups of one size.

    The payload is that of one call as ``Message.bytes`` counts it, except that an all-gather counts
    the piece which the rank gives.
    """

    messages: int = 0
    elements: int = 0
    bytes: int = 0


# By (rank, primitive, ranks in the group). What ranks agree on outside of the Program (loss,
# gradient norm, gathered results) is primitive "agree".
Traffic = dict[Tag, Sent]


@dataclass(slots=True)
class _Given:
    """A buffer as one rank gave it, and the copy that others read.

    ``is_gone``: the giver has waited for it, and may write it again.
    """

    buffer: Tensor
    copy: Tensor
    where: str
    is_gone: bool = False

    @staticmethod
    def of(buffer: Tensor, where: str) -> _Given:
        copy = buffer.detach().clone()
        _settle(copy)
        return _Given(buffer, copy, where)

    def check_unchanged(self, rank: int) -> None:
        if self.is_gone:
            return
        needed = self.buffer.numel() * self.buffer.element_size()
        kept = self.buffer.untyped_storage().nbytes() >= needed
        if not (kept and _are_same(self.buffer, self.copy)):
            raise RunError(
                f"a buffer must not change while it is under way, but rank {rank} changed what it "
                f"gave in {self.where}; this Program is wrong: please report it with the plan",
                rank=rank,
                instruction=self.where,
            )


@dataclass(slots=True)
class _Meeting:
    """One collective of one group: what has been given so far."""

    given: dict[int, _Given] = field(default_factory=dict)
    kind: tuple[str, str, int] = ("", "", 0)
    num_left: int = 0


@dataclass(slots=True)
class _Letters:
    """One link: what is under way, by its number, and how much was sent and is awaited so far."""

    under_way: dict[int, tuple[int, _Given]] = field(default_factory=dict)
    num_sent: int = 0
    num_awaited: int = 0


def _settle(tensor: Tensor) -> None:
    """Wait until a GPU has made a tensor: the stream of a rank knows nothing of another rank's."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class _Shared:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = Turns(size)
        self.traffic: Traffic = {}
        self.meetings: dict[tuple[object, ...], dict[int, _Meeting]] = {}
        self.letters: dict[tuple[int, int, int, int], _Letters] = {}

    def count(self, rank: int, primitive: str, size: int, buffer: Tensor) -> None:
        sent = self.traffic.setdefault((rank, primitive, size), Sent())
        sent.messages += 1
        sent.elements += buffer.numel()
        sent.bytes += buffer.numel() * buffer.element_size()


class _Waiting:
    """A work in torch's sense: something to wait for."""

    def __init__(
        self, shared: _Shared, rank: int, is_over: Callable[[], bool], reason: Callable[[], str]
    ) -> None:
        self._all = (rank, is_over, reason)
        self._turns = shared.turns

    def wait(self) -> None:
        self._turns.wait(*self._all)


class LocalWorld:
    """One rank's view of a world whose ranks are threads of this process."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared = shared
        self.rank: int = rank
        self.size: int = shared.size
        self._everyone = LocalGroup(shared, tuple(range(shared.size)), rank, agrees=True)
        self._groups: dict[tuple[int, ...], LocalGroup] = {}

    def watch(self, where: Callable[[], str]) -> None:
        """Be told how to ask what this rank is doing, for messages."""
        self._shared.turns.where[self.rank] = where

    def group(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of some ranks; equal sets of ranks share one."""
        ordered = tuple(sorted(ranks))
        if ordered not in self._groups:
            self._groups[ordered] = LocalGroup(self._shared, ordered, self.rank)
        return self._groups[ordered]

    def link(self, source: int, destination: int, channel: Channel = (0, 0)) -> Link:
        """Return a way from one rank to another."""
        return LocalLink(self._shared, (source, destination), channel)

    def tags(self, count: int) -> int:
        """Links keep the order of their messages: a wrong one is refused."""
        del count
        return 0

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer over all ranks, in place."""
        return self._everyone.all_reduce(buffer)

    def close(self) -> None:
        """There is nothing to give back."""


class LocalGroup:
    """Collectives among threads: sums are taken in rank order."""

    def __init__(
        self, shared: _Shared, ranks: tuple[int, ...], rank: int, *, agrees: bool = False
    ) -> None:
        self._shared, self._ranks, self._rank, self._agrees = shared, ranks, rank, agrees
        self.place = ranks.index(rank) if rank in ranks else -1
        self._count = 0

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum in place."""
        return self._meet("agree" if self._agrees else "all_reduce", buffer, buffer, _sum)

    def all_gather(self, output: Tensor, piece: Tensor) -> Pending:
        """Collect pieces."""
        return self._meet("all_gather", piece, output, torch.cat)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> Pending:
        """Sum and keep a piece."""
        return self._meet("reduce_scatter", whole, output, lambda all_: self._mine(_sum(all_)))

    def all_to_all(self, output: Tensor, pieces: Tensor) -> Pending:
        """Exchange pieces."""

        def take(given: list[Tensor]) -> Tensor:
            return torch.cat([self._mine(one) for one in given])

        return self._meet("all_to_all", pieces, output, take)

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.view(len(self._ranks), -1)[self.place]

    def _meet(
        self,
        primitive: str,
        buffer: Tensor,
        output: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        shared, rank, number = self._shared, self._rank, self._count
        self._count += 1
        meetings = shared.meetings.setdefault((self._agrees, self._ranks), {})
        meeting = meetings.setdefault(number, _Meeting())
        given = _Given.of(buffer, shared.turns.where[rank]())
        kind = (primitive, str(buffer.dtype).removeprefix("torch."), buffer.numel())
        if meeting.given and kind != meeting.kind:
            raise self._disagreement(meeting, kind, given.where)
        meeting.kind = kind
        meeting.given[rank] = given
        shared.count(rank, primitive, len(self._ranks), buffer)

        def finish() -> None:
            given.check_unchanged(rank)
            output.view(-1).copy_(
                combine([meeting.given[one].copy.view(-1) for one in self._ranks])
            )
            _settle(output)
            meeting.num_left += 1
            if meeting.num_left == len(self._ranks):
                del meetings[number]

        waiting = _Waiting(
            shared,
            rank,
            lambda: len(meeting.given) == len(self._ranks),
            lambda: (
                f"{primitive} with ranks {numbers_text([r for r in self._ranks if r not in meeting.given])}"
            ),
        )
        return Pending((waiting,), output, finish)  # type: ignore[arg-type]

    def _disagreement(self, meeting: _Meeting, kind: tuple[str, str, int], where: str) -> RunError:
        first, other = next(iter(meeting.given.items()))
        return RunError(
            f"ranks {numbers_text(self._ranks)} must meet in equal collectives, but rank {first} does "
            f"{_kind_text(meeting.kind)} in {other.where} and rank {self._rank} "
            f"{_kind_text(kind)} in {where}; this Program is wrong: please report it with the plan",
            rank=self._rank,
            instruction=where,
        )


class LocalLink:
    """Messages from one thread to another, in order."""

    def __init__(self, shared: _Shared, ends: tuple[int, int], channel: Channel) -> None:
        self._shared, self._ends = shared, ends
        self._letters = shared.letters.setdefault((*ends, *channel), _Letters())

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Send."""
        shared, letters, (source, destination) = self._shared, self._letters, self._ends
        given, number = _Given.of(tensor, shared.turns.where[source]()), letters.num_sent
        letters.num_sent += 1
        letters.under_way[number] = tag, given
        shared.count(source, "transfer", 2, tensor)

        def finish() -> None:
            given.check_unchanged(source)
            given.is_gone = True

        waiting = _Waiting(
            shared,
            source,
            lambda: letters.num_awaited > number,
            lambda: f"rank {destination} to receive what it sent in {given.where}",
        )
        return Pending((waiting,), tensor, finish)  # type: ignore[arg-type]

    def receive(self, memory: Tensor, tag: int) -> Pending:
        """Receive."""
        shared, letters, (source, destination) = self._shared, self._letters, self._ends
        number = letters.num_awaited
        letters.num_awaited += 1

        def finish() -> None:
            sent, given = letters.under_way.pop(number)
            if sent != tag or given.copy.shape != memory.shape or given.copy.dtype != memory.dtype:
                where = shared.turns.where[destination]()
                raise RunError(
                    f"rank {destination} must receive in the order in which rank {source} sends, "
                    f"but awaits {memory.dtype} {tuple(memory.shape)} in {where} where {source} "
                    f"sent {given.copy.dtype} {tuple(given.copy.shape)} in {given.where}; this "
                    "Program is wrong: please report it with the plan",
                    rank=destination,
                    instruction=where,
                )
            # The sender may write again once it has waited: not before.
            given.check_unchanged(source)
            memory.copy_(given.copy)
            _settle(memory)

        waiting = _Waiting(
            shared,
            destination,
            lambda: letters.num_sent > number,
            lambda: f"rank {source} to send",
        )
        return Pending((waiting,), memory, finish)  # type: ignore[arg-type]


def run_locally(target: Callable[[LocalWorld], T], size: int) -> tuple[list[T], Traffic]:
    """Run ``target`` as every rank of a world in this process; return the results and the traffic.

    Raises what the first failing rank raised, RunError where ranks wait for each other in vain.
    Torch's random numbers and its number of threads are as before afterwards.
    """
    shared = _Shared(size)
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        try:
            shared.turns.begin(rank)
            results[rank] = target(LocalWorld(shared, rank))
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            shared.turns.fail(error)
        finally:
            shared.turns.end(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    with _torch_as_before():
        for thread in threads:
            thread.start()
        shared.turns.pass_on(size - 1)
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as interruption:
            shared.turns.fail(interruption)
            for thread in threads:
                thread.join()
    if shared.turns.failure is not None:
        raise shared.turns.failure
    return [results[rank] for rank in range(size)], shared.traffic


@contextlib.contextmanager
def _torch_as_before() -> Iterator[None]:
    """Run with one thread per rank (pools of their own would multiply), then put all back."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(num_threads)


def _sum(given: list[Tensor]) -> Tensor:
    total = given[0].clone()
    for one in given[1:]:
        total += one
    return total


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal, NaN to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _kind_text(kind: tuple[str, str, int]) -> str:
    return f"{kind[0]} of {kind[2]} elements of {kind[1]}"
