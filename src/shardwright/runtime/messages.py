"""Messages of a Program between the ranks of a ``World``.

A message becomes an ``Exchange``: ``issue`` reads its sources, packs them into one flat buffer and
starts the collective; ``complete`` waits for it, unpacks and writes the results. The interpreter
completes an exchange just before the first instruction that needs one of its results. Within a
buffer every rank's part is contiguous, items one after another; results are views of the buffer
where their dim is the first. Items travel in the message's dtype, or in that of their result. What is
cut into flat shards is a row, padded with zeros; the padding travels too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.core.crossing import Piece
from shardwright.core.halo import neighbours
from shardwright.core.layout import FLAT
from shardwright.core.program import Message, Program
from shardwright.core.strategy import Mesh
from shardwright.runtime.collectives import Pending
from shardwright.runtime.world import Channel, Group, Link, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor of a message: how to read and write it, and its local shapes.

    ``target`` returns the memory that the result is to lie in, where that is fixed. ``dtype`` is what
    travels.
    """

    read: Callable[[], Tensor]
    write: Callable[[Tensor, bool], None]
    target: Callable[[], Tensor] | None
    shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    dims: tuple[int, int]
    dtype: torch.dtype

    @property
    def has_place(self) -> bool:
        """Whether a copy of it lies in memory that is fixed: not a row's, whose padded copy is not to stay."""
        return self.target is not None and self.dims[1] != FLAT

    def source(self) -> Tensor:
        """Return the tensor to send."""
        return self.raw().to(self.dtype)

    def row(self) -> Tensor:
        """Return it as one row that is only to be read: a view of what is kept where that will do."""
        tensor = self.read()
        return (tensor if tensor.dtype is self.dtype else tensor.to(self.dtype)).reshape(-1)

    def raw(self) -> Tensor:
        """Return it as it is kept."""
        return self.read().detach()

    def divided(self, pieces: int) -> tuple[Tensor, int]:
        """Return the tensor to split into so many pieces, as it is kept, and along which dim."""
        tensor, dim = self.raw(), self.dims[1]
        return (padded_row(tensor, pieces), 0) if dim == FLAT else (tensor, dim)


def padded_row(tensor: Tensor, pieces: int) -> Tensor:
    """Return a tensor as one row that divides into so many pieces: zeros follow it."""
    return nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % pieces))


class Exchange:
    """One message of one microbatch. At most one issue is under way at a time."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.pending: Pending | None = None

    def issue(self) -> None:
        """Start."""
        raise NotImplementedError

    def complete(self) -> None:
        """Wait for the result and write it."""
        raise NotImplementedError

    def under_way(self) -> list[Pending]:
        """Return what was started and not yet waited for."""
        return [self.pending] if self.pending is not None else []

    def _wait(self) -> Tensor:
        pending, self.pending = self.pending, None
        if pending is None:
            raise RuntimeError("an exchange was completed before it was issued")
        return pending.wait()


class Local(Exchange):
    """A slice or a copy: no communication, done at once."""

    def __init__(self, items: Sequence[Item], pieces: int, place: int) -> None:
        super().__init__(items)
        self.pieces, self.place = pieces, place

    def issue(self) -> None:
        ends = [self._ends(item) for item in self.items]
        copies = [(to, kept) for to, kept in ends if to.data_ptr() != kept.data_ptr()]
        if copies:  # a GPU is given one kernel for all of them
            torch._foreach_copy_([to for to, _ in copies], [kept for _, kept in copies])
        for item, (to, kept) in zip(self.items, ends, strict=True):
            if not item.has_place:
                item.write(to, to is not kept)

    def _ends(self, item: Item) -> tuple[Tensor, Tensor]:
        """Return where this rank's piece goes, and the piece: the same where it can stay."""
        whole, dim = item.divided(self.pieces)
        kept = self._cut(whole, dim)
        if item.target is not None and item.has_place:
            return item.target(), kept
        if dim >= 0:  # a copy, so that the whole tensor can be released
            how = torch.contiguous_format
            return torch.empty_like(kept, dtype=item.dtype, memory_format=how), kept
        return (
            kept if kept.dtype is item.dtype else torch.empty_like(kept, dtype=item.dtype)
        ), kept

    def _cut(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's piece, a view."""
        if dim < 0:
            return tensor
        size = tensor.shape[dim] // self.pieces
        return tensor.narrow(dim, self.place * size, size)

    def complete(self) -> None:
        """Nothing is under way."""


class Collective(Exchange):
    """A message among the ranks of a group; ``order`` lists group ranks in mesh order."""

    def __init__(self, items: Sequence[Item], group: Group, order: Sequence[int]) -> None:
        super().__init__(items)
        self.group = group
        self.size = len(order)
        is_sorted = all(a < b for a, b in pairwise(order))
        self.order = None if is_sorted else torch.tensor(order)

    def _in_mesh_order(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows[self.order.to(rows.device)]

    def _in_group_order(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows[self.order.argsort().to(rows.device)]

    def _split(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a (ranks, elements) matrix whose rows are the pieces along a dim."""
        rows = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0)
        return self._in_group_order(rows.reshape(self.size, -1))

    def _packed(self) -> Tensor:
        """Return all items split, side by side, each copied at most once where order allows."""
        sources = [item.divided(self.size) for item in self.items]
        dtype = self.items[0].dtype
        is_alone = len(sources) == 1 and sources[0][0].dtype is dtype
        if is_alone or self.order is not None:
            parts = [self._split(tensor.to(dtype), dim) for tensor, dim in sources]
            return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).contiguous()
        counts = [tensor.numel() // self.size for tensor, _ in sources]
        whole = sources[0][0].new_empty(self.size, sum(counts), dtype=dtype)
        for (tensor, dim), place in zip(sources, whole.split(counts, dim=1), strict=True):
            rows = tensor.unflatten(dim, (self.size, -1)).movedim(dim, 0)
            place.unflatten(1, rows.shape[1:]).copy_(rows)
        return whole


class Rider(Protocol):
    """A few numbers that are summed behind the elements of a message, which so saves another one."""

    def leave(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's, one row of the message's dtype."""
        ...

    def arrive(self, sums: Sequence[float]) -> None:
        """Take the sums."""
        ...


class AllReduce(Collective):
    rider: Rider | None = None

    def issue(self) -> None:
        parts = [item.row() for item in self.items]
        self._counts = [part.numel() for part in parts]
        if self.rider is not None:
            parts.append(self.rider.leave(parts[0].dtype))
            self._counts.append(parts[-1].numel())
        whole = torch.cat(parts)
        del parts  # of another dtype than what is kept they are copies
        self.pending = self.group.all_reduce(whole)

    def complete(self) -> None:
        parts = self._wait().split(self._counts)
        for item, part in zip(self.items, parts, strict=False):
            item.write(part.view(item.result_shape), True)
        if self.rider is not None:
            self.rider.arrive(parts[-1].tolist())


class AllGather(Collective):
    def issue(self) -> None:
        sources = [item.raw() for item in self.items]
        output = self._output(sources)
        own = output.view(self.size, -1)[self.group.place]
        places = own.split([source.numel() for source in sources])
        pairs = zip(places, sources, strict=True)
        torch._foreach_copy_([place.view_as(source) for place, source in pairs], sources)
        self.pending = self.group.all_gather(output, own)

    def _output(self, sources: Sequence[Tensor]) -> Tensor:
        """The result's own memory where the gathered buffer is just it, else a new buffer."""
        only = self.items[0]
        if only.target and len(self.items) == 1 and only.dims[0] == 0 and self.order is None:
            return only.target().view(-1)
        count = sum(source.numel() for source in sources)
        return sources[0].new_empty(self.size * count, dtype=only.dtype)

    def complete(self) -> None:
        rows = self._in_mesh_order(self._wait().view(self.size, -1))
        start = 0
        for item in self.items:
            count, dim = _count(item.shape), item.dims[0]
            pieces = rows[:, start : start + count].unflatten(1, item.shape)
            if dim == FLAT:
                row = pieces.reshape(-1)[: _count(item.result_shape)]
                item.write(row.view(item.result_shape), item.target is None)
            elif item.target is None:
                item.write(pieces.movedim(0, dim).reshape(item.result_shape), True)
            else:
                memory = item.target()
                if memory.data_ptr() != rows.data_ptr():
                    memory.unflatten(dim, (self.size, -1)).movedim(dim, 0).copy_(pieces)
            start += count


class ReduceScatter(Collective):
    def issue(self) -> None:
        whole = self._packed()
        output = whole.new_empty(whole.shape[1])
        self.pending = self.group.reduce_scatter(output, whole.view(-1))

    def complete(self) -> None:
        flat, start = self._wait(), 0
        for item in self.items:
            count = _count(item.result_shape)
            item.write(flat[start : start + count].view(item.result_shape), True)
            start += count


class AllToAll(Collective):
    def issue(self) -> None:
        whole = self._packed()
        output = torch.empty_like(whole)
        self.pending = self.group.all_to_all(output.view(-1), whole.view(-1))

    def complete(self) -> None:
        rows = self._in_mesh_order(self._wait().view(self.size, -1))
        start = 0
        for item in self.items:
            count = _count(item.shape) // self.size
            gathered, split = item.dims
            shape = list(item.shape)
            shape[split] //= self.size
            pieces = rows[:, start : start + count].reshape(self.size, *shape)
            item.write(pieces.movedim(0, gathered).reshape(item.result_shape), True)
            start += count


COLLECTIVES: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def tag_of(program: Program, item: int, microbatch: int) -> int:
    """Return the tag of the first value of a message; different for all others of a Program."""
    most = max([len(message.sources) for message in program.messages], default=0)
    return (item * (program.ring + 1) + microbatch + 1) * most


def count_tags(program: Program) -> int:
    """Return how many tags a Program's messages have."""
    return tag_of(program, len(program.messages), -1)


class Groups:
    """The groups and links of a Program, made in the same order on every rank; of another Program's
    ``known`` ones, those that fit are used and the others added to them."""

    def __init__(
        self,
        program: Program,
        rank_of: Mapping[int, int],
        world: World,
        known: Groups | None = None,
    ) -> None:
        self._rank_of = rank_of
        self._world = world
        self._groups: dict[tuple[int, ...], Group] = known._groups if known else {}
        self._links: dict[tuple[int, int, Channel], Link] = known._links if known else {}
        self.first_tag = 0
        if world.size == 1:
            return
        self.first_tag = world.tags(count_tags(program))
        self._make_stages(program)
        for item, message in enumerate(program.messages):
            mesh = program.meshes[message.mesh]
            if message.primitive == "transfer":
                channel = (message.mesh, message.destination)
                self._make_links(program.pieces(item), channel)
            elif message.primitive in ("halo", "halo_sum"):
                self._make_links_beside(mesh, message)
            elif message.pairs:
                self._make_links_of_pairs(mesh, message)
            elif message.axes:
                for device in mesh.devices:
                    self._make_group(tuple(sorted(self._ranks(mesh, device, message.axes))))

    def _make_stages(self, program: Program) -> None:
        """Make the groups of stages each of which clips alone."""
        if program.strategy.clips and not program.strategy.pipeline.is_flushed:
            for mesh in program.meshes:
                if len(mesh.devices) > 1:
                    self._make_group(tuple(sorted(self._rank_of[one] for one in mesh.devices)))

    def _make_group(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._groups:
            self._groups[ranks] = self._world.group(ranks)

    def _ranks(self, mesh: Mesh, device: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._rank_of[peer] for peer in mesh.peers(device, axes))

    def _make_links(self, items: Sequence[Sequence[Piece]], channel: Channel) -> None:
        for piece in (piece for pieces in items for piece in pieces):
            ends = (self._rank_of[piece.source], self._rank_of[piece.destination])
            if ends[0] != ends[1] and (*ends, channel) not in self._links:
                self._links[*ends, channel] = self._world.link(*ends, channel)

    def _make_links_beside(self, mesh: Mesh, message: Message) -> None:
        for device in mesh.devices:
            for other in neighbours(mesh, device, message.axes):
                ends = (self._rank_of[device], self._rank_of.get(other, -1))
                key = (*ends, (message.mesh, message.mesh))
                if other >= 0 and key not in self._links:
                    self._links[key] = self._world.link(*ends, key[2])

    def _make_links_of_pairs(self, mesh: Mesh, message: Message) -> None:
        for device in mesh.devices:
            peers, channel = self._ranks(mesh, device, message.axes), (message.mesh, message.mesh)
            for ends in [(peers[one], peers[other]) for one, other in message.pairs]:
                if (*ends, channel) not in self._links:
                    self._links[*ends, channel] = self._world.link(*ends, channel)

    def among(self, mesh: Mesh, device: int, axes: tuple[int, ...]) -> tuple[Group, list[int]]:
        """Return the group a device belongs to along axes, and its group ranks in mesh order."""
        ranks = self._ranks(mesh, device, axes)
        ordered = sorted(ranks)
        return self._groups[tuple(ordered)], [ordered.index(rank) for rank in ranks]

    def between(self, source: int, destination: int, channel: Channel) -> Link | None:
        """Return the link from one rank to another for two meshes, None within one rank."""
        return self._links.get((source, destination, channel))

    def close(self) -> None:
        """Forget all groups; the world gives back what it made for them."""
        self._groups.clear()
        self._links.clear()
        self._world.close()


def piece_of(
    message: Message, mesh: Mesh, coordinate: tuple[int, ...], pieces: int, microbatch: int
) -> tuple[int, int]:
    """Return (number of pieces, which one) a slice takes: of the axes, or of the microbatches."""
    if not message.axes:
        return pieces, max(microbatch, 0)
    count, place = 1, 0
    for axis in message.axes:
        count *= mesh.sizes[axis]
        place = place * mesh.sizes[axis] + coordinate[axis]
    return count, place
