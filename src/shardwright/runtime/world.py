"""The world: all that an executor asks of other ranks, behind one narrow door.

``TorchWorld`` is ``torch.distributed``, one process per rank. ``local_world.py`` has another one with
all ranks in one process. Every function starts its work and returns a ``Pending``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.runtime import collectives
from shardwright.runtime.collectives import Pending
from shardwright.runtime.cores import settle


class Group(Protocol):
    """Ranks that meet in collectives, in ascending order; one flat buffer each."""

    @property
    def place(self) -> int:
        """Where this rank stands among them."""
        ...

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer over the group, in place."""
        ...

    def all_gather(self, output: Tensor, piece: Tensor) -> Pending:
        """Collect every rank's piece, in group order, into an output. A piece may lie there already."""
        ...

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> Pending:
        """Sum buffers; the r-th rank keeps the r-th of their equal pieces in ``output``."""
        ...

    def all_to_all(self, output: Tensor, pieces: Tensor) -> Pending:
        """Send the r-th of the buffer's equal pieces to the r-th rank; one comes from each."""
        ...


# Tells links between the same two ranks apart: the meshes that a transfer leaves and reaches.
Channel = tuple[int, int]


class Link(Protocol):
    """Transfers from one rank to another. Both ends start them in the same order."""

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Start sending a contiguous tensor; done when it has been received."""
        ...

    def receive(self, memory: Tensor, tag: int) -> Pending:
        """Start receiving into contiguous memory of the tensor's shape and dtype."""
        ...


class World(Protocol):
    """All ranks of a run, as one of them sees them.

    Every rank asks for every group and link of the run, also those it is not in, in the same order.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def group(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of some ranks; equal sets of ranks share one."""
        ...

    def link(self, source: int, destination: int, channel: Channel = (0, 0)) -> Link:
        """Return a way from one rank to another; links of different channels keep no order."""
        ...

    def tags(self, count: int) -> int:
        """Return the first of so many tags of links: those of another caller may still be under way."""
        ...

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer over all ranks, in place: what the executor itself must agree on."""
        ...

    def watch(self, where: Callable[[], str]) -> None:
        """Be told how to ask what this rank is doing."""
        ...

    def close(self) -> None:
        """Give back groups and links."""
        ...


class Tags:
    """Hands out numbers below ``end``, and begins again at 0."""

    def __init__(self, end: int) -> None:
        self._end, self._next = end, 0

    def take(self, count: int) -> int:
        """Return the first of so many."""
        first = self._next if self._next + count <= self._end else 0
        self._next = first + count
        return first


# Of all Programs of this process: messages of one that was given up, or has batches under way, are no other's. An
# ``int`` in torch.
_TAGS = Tags(2**31)


class TorchWorld:
    """The processes of ``torch.distributed``, or this process alone: where there is no group, or it is to be
    ``alone``."""

    def __init__(self, timeout: float = 60.0, *, alone: bool = False) -> None:
        joined = dist.is_initialized() and not alone
        if joined and dist.get_backend() == "gloo":
            settle()
        self.rank: int = dist.get_rank() if joined else 0
        self.size: int = dist.get_world_size() if joined else 1
        self._timeout = timedelta(seconds=timeout)
        self._made: dict[tuple[object, ...], ProcessGroup] = {}
        self._lanes = Lanes()

    def group(self, ranks: tuple[int, ...]) -> Group:
        """Return a group of processes, made once."""
        ordered = tuple(sorted(ranks))
        if len(ordered) == self.size:
            return TorchGroup(_everyone())
        return TorchGroup(self._make(ordered, ordered))

    def link(self, source: int, destination: int, channel: Channel = (0, 0)) -> Link:
        """Return a link: with gloo, whose messages have tags, the world itself or, to lower ranks, another group of it.

        Gloo sends when the receiver has asked, and asks on the connection of its group on which it sends: behind
        all that is still on its way there. So the two ways between two ranks have a connection each.

        With NCCL it is a lane of its own between its two ends, since unmatched sends and receives
        would wait for each other.
        """
        group = _everyone()
        ends = (source, destination)
        if "gloo" in dist.get_backend() and source > destination:
            group = self._make(("back",), tuple(range(self.size)))
        if "nccl" in dist.get_backend() and source != destination:
            lane, everybody = self._lanes.of(ends, channel), tuple(range(self.size))
            if group.bound_device_id is None:
                # Of a group with everybody in it NCCL makes a communicator and a stream for each two
                # ranks that exchange messages, at their first one.
                group = self._make(("lane", *lane), everybody)
            else:  # one communicator for all of a group, in which messages wait for each other
                group = self._make(("link", *ends, *channel), ends)
        return TorchLink(group, ends)

    def _make(self, key: tuple[object, ...], ranks: tuple[int, ...]) -> ProcessGroup:
        if key not in self._made:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            self._made[key] = group  # type: ignore[assignment]
        return self._made[key]

    def tags(self, count: int) -> int:
        """Return the first of so many tags: equal on all processes, which build Programs in the same order."""
        return _TAGS.take(count)

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer over all processes."""
        if self.size == 1:
            return Pending((), buffer)
        return collectives.all_reduce(buffer, _everyone())

    def watch(self, where: Callable[[], str]) -> None:
        """Nobody asks: the status file says it to the launcher."""

    def close(self) -> None:
        """Destroy the groups that were made here, unless the whole world is gone already."""
        for group in self._made.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._made.clear()


class Lanes:
    """Shares few groups among many links: no two links of a lane run between the same two ranks.

    A lane is (whether it goes to higher ranks, which of the channels that its ends have that way). So a
    pipeline of any length, whose neighbours have one channel each way, has two. Equal on all ranks,
    which ask for all links in the same order.
    """

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int], list[Channel]] = {}

    def of(self, ends: tuple[int, int], channel: Channel) -> tuple[bool, int]:
        """Return the lane of a link."""
        known = self._channels.setdefault(ends, [])
        if channel not in known:
            known.append(channel)
        return ends[0] < ends[1], known.index(channel)


class TorchGroup:
    """A process group, with the algorithms of ``collectives``."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @property
    def place(self) -> int:
        """This rank's place."""
        return self.group.rank()

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum in place."""
        return collectives.all_reduce(buffer, self.group)

    def all_gather(self, output: Tensor, piece: Tensor) -> Pending:
        """Collect pieces."""
        return collectives.all_gather(output, piece, self.group)

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> Pending:
        """Sum and keep a piece."""
        return collectives.reduce_scatter(output, whole, self.group)

    def all_to_all(self, output: Tensor, pieces: Tensor) -> Pending:
        """Exchange pieces."""
        return collectives.all_to_all(output, pieces, self.group)


class TorchLink:
    """Point-to-point messages in one direction between two processes."""

    def __init__(self, group: ProcessGroup, ends: tuple[int, int]) -> None:
        self.group = group
        self.source, self.destination = ends

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Send."""
        return collectives.send(tensor, self.destination, self.group, tag)

    def receive(self, memory: Tensor, tag: int) -> Pending:
        """Receive."""
        return collectives.receive(memory, self.source, self.group, tag)


def _everyone() -> ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the world has ended")
    return group
