"""Halos between the ranks of a ``World``: rows of the neighbouring shards, there and back.

Every rank sends its first rows to the previous rank and its last rows to the next one; on the way
back their gradients return to the rank that owns them and are added to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.core.halo import Halo, neighbours
from shardwright.runtime.collectives import Pending
from shardwright.runtime.messages import Exchange, Item
from shardwright.runtime.transfers import Routes
from shardwright.runtime.world import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The links to and from a rank that has the next piece, on one side."""

    out: Link
    back: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Shore:
    """A halo as one rank sees it: its neighbours before and after, None at the tensor's edges."""

    halo: Halo
    before: Neighbour | None
    after: Neighbour | None
    tag: int


def find_shore(routes: Routes, item: int, microbatch: int) -> Shore:
    """Return the halo of a message as this device sees it."""
    program, device = routes.program, routes.device
    message = program.messages[item]
    extended = message.results if message.primitive == "halo" else message.sources
    halo = program.values[extended[0]].halos[-1]

    def link(source: int, destination: int) -> Link | None:
        ends = (routes.rank_of[source], routes.rank_of[destination])
        return routes.groups.between(*ends, (message.mesh, message.mesh))

    def side(other: int) -> Neighbour | None:
        out = link(device, other) if other >= 0 else None
        back = link(other, device) if other >= 0 else None
        return Neighbour(out=out, back=back) if out and back else None

    before, after = neighbours(program.meshes[message.mesh], device, halo.axes)
    tag = routes.tag(item, microbatch)
    return Shore(halo=halo, before=side(before), after=side(after), tag=tag)


class _Rows(Exchange):
    """Sends rows to both neighbours and receives as many as they send."""

    def __init__(self, items: Sequence[Item], shore: Shore) -> None:
        super().__init__(items)
        self.shore = shore
        self.sent: list[Pending] = []
        self.arriving: list[Pending | None] = []

    def _swap(self, to_before: Tensor, to_after: Tensor, sizes: tuple[int, int]) -> None:
        """Start sending, and receiving ``sizes`` rows from the one before and the one after."""
        shore = self.shore
        self.arriving = []
        for side, rows in ((shore.before, to_before), (shore.after, to_after)):
            if side is not None and rows.shape[shore.halo.dim]:
                self.sent.append(side.out.send(_own(rows), shore.tag))
        for side, size in zip((shore.before, shore.after), sizes, strict=True):
            pending = None
            if side is not None and size:
                shape = list(to_before.shape)
                shape[shore.halo.dim] = size
                pending = side.back.receive(to_before.new_empty(shape), shore.tag)
            self.arriving.append(pending)

    def under_way(self) -> list[Pending]:
        return [*self.sent, *(pending for pending in self.arriving if pending)]

    def _arrived(self) -> list[Tensor | None]:
        rows = [pending.wait() if pending else None for pending in self.arriving]
        for pending in self.sent:
            pending.wait()
        self.sent.clear()
        self.arriving.clear()
        return rows


class Fetch(_Rows):
    """Extend a shard by its neighbours' rows, and by the fill value at the tensor's edges."""

    def __init__(self, items: Sequence[Item], shore: Shore) -> None:
        super().__init__(items, shore)
        self.extended: Tensor | None = None

    def issue(self) -> None:
        item, halo = self.items[0], self.shore.halo
        tensor = item.source()
        size = tensor.shape[halo.dim]
        first = tensor.narrow(halo.dim, 0, halo.after)
        last = tensor.narrow(halo.dim, size - halo.before, halo.before)
        self._swap(first, last, (halo.before, halo.after))
        self.extended = tensor.new_empty(item.result_shape)
        self.extended.narrow(halo.dim, halo.before, size).copy_(tensor)

    def complete(self) -> None:
        halo = self.shore.halo
        extended = self.extended
        if extended is None:
            raise RuntimeError("halos were completed before they were issued")
        starts = (0, extended.shape[halo.dim] - halo.after)
        edges = zip(self._arrived(), starts, (halo.before, halo.after), strict=True)
        for rows, start, size in edges:
            edge = extended.narrow(halo.dim, start, size)
            if rows is None:
                edge.fill_(halo.fill)
            else:
                edge.copy_(rows)
        self.extended = None
        self.items[0].write(extended, True)


class Return(_Rows):
    """Give the gradients of halos back to their owners, and add those that come to one's own."""

    def __init__(self, items: Sequence[Item], shore: Shore) -> None:
        super().__init__(items, shore)
        self.own: Tensor | None = None

    def issue(self) -> None:
        halo, tensor = self.shore.halo, self.items[0].source()
        size = tensor.shape[halo.dim] - halo.size
        first = tensor.narrow(halo.dim, 0, halo.before)
        last = tensor.narrow(halo.dim, halo.before + size, halo.after)
        self._swap(first, last, (halo.after, halo.before))
        self.own = _own(tensor.narrow(halo.dim, halo.before, size))

    def complete(self) -> None:
        halo = self.shore.halo
        own = self.own
        if own is None:
            raise RuntimeError("halos were completed before they were issued")
        from_before, from_after = self._arrived()
        if from_before is not None:
            own.narrow(halo.dim, 0, halo.after).add_(from_before)
        if from_after is not None:
            own.narrow(halo.dim, own.shape[halo.dim] - halo.before, halo.before).add_(from_after)
        self.own = None
        self.items[0].write(own, True)


EXCHANGES: dict[str, type[_Rows]] = {"halo": Fetch, "halo_sum": Return}


def exchange(routes: Routes, items: Sequence[Item], item: int, microbatch: int) -> Exchange:
    """Return a message as this device takes part in it."""
    shore = find_shore(routes, item, microbatch)
    return EXCHANGES[routes.program.messages[item].primitive](items, shore)


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, so that the tensor itself may be released."""
    return tensor.clone(memory_format=torch.contiguous_format)


def pad(tensor: Tensor, dim: int, before: int, after: int, value: float) -> Tensor:
    """Add rows of a value on both sides of a dim."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (before, after), value=value)


def average_inside(
    tensor: Tensor,
    *args: Any,
    kernel: Callable[..., Tensor],
    outside: tuple[tuple[int, int, int], ...],
    **kwargs: Any,
) -> Tensor:
    """Average over what lies inside the whole image, of a piece whose halos may reach beyond it.

    ``outside`` has (dim, rows before, rows after) of what lies beyond, which is 0.
    """
    inside = torch.ones_like(tensor[:1])
    for dim, before, after in outside:
        inside.narrow(dim, 0, before).zero_()
        inside.narrow(dim, inside.shape[dim] - after, after).zero_()
    return kernel(tensor, *args, **kwargs) / kernel(inside, *args, **kwargs)
