"""Transfers between meshes: pieces of shards, each sent from one rank to another.

Both ends find their legs by themselves, from the Program. A piece that stays on its rank goes
through the ``mailbox``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.core.program import Message, Program
from shardwright.runtime.collectives import Pending
from shardwright.runtime.messages import Exchange, Groups, Item, tag_of
from shardwright.runtime.world import Channel, Link

if TYPE_CHECKING:
    from shardwright.runtime.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One piece of an item as this rank sends or receives it. Without a link it stays here.

    ``covers``: the box is the whole shard. The box of one dim of a tensor of several is of that as a row.
    """

    link: Link | None
    box: tuple[slice, ...]
    covers: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of a shard that the piece is; a copy where a row is none."""
        if self.covers:
            return tensor
        if len(self.box) != tensor.dim():
            tensor = tensor.reshape(-1)
        return tensor[self.box]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """This rank's legs of a transfer, by item, and the tag of its first item; of which items the pieces are
    terms of a sum.

    Tags are equal on both ends and different for any other transfer of a step, and of other Programs.
    """

    legs: tuple[tuple[Leg, ...], ...]
    tag: int
    sums: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where transfers go, as seen from one device."""

    program: Program
    device: int
    rank_of: Mapping[int, int]
    groups: Groups

    def sending(self, item: int, microbatch: int) -> Route:
        """Return the legs on which this device sends a message."""
        return self._route(item, microbatch, is_send=True)

    def receiving(self, item: int, microbatch: int) -> Route:
        """Return the legs on which this device receives a message."""
        return self._route(item, microbatch, is_send=False)

    def _route(self, item: int, microbatch: int, *, is_send: bool) -> Route:
        program = self.program
        message = program.messages[item]
        channel = (message.mesh, message.destination)
        shards = message.sources if is_send else message.results
        legs: list[tuple[Leg, ...]] = []
        for value, pieces in zip(shards, program.pieces(item), strict=True):
            shape = program.values[value].shape
            ends = [
                (piece.source, piece.destination, piece.taken if is_send else piece.put)
                for piece in pieces
                if self.device == (piece.source if is_send else piece.destination)
            ]
            legs.append(
                tuple(
                    Leg(
                        link=self._link(source, destination, channel),
                        box=tuple(slice(first, first + size) for first, size in box),
                        covers=box == tuple((0, size) for size in shape),
                    )
                    for source, destination, box in ends
                )
            )
        return Route(legs=tuple(legs), tag=self.tag(item, microbatch), sums=program.sums(item))

    def _link(self, source: int, destination: int, channel: Channel) -> Link | None:
        if source == destination:
            return None
        return self.groups.between(self.rank_of[source], self.rank_of[destination], channel)

    def tag(self, item: int, microbatch: int) -> int:
        """Return the tag of a message's first item; equal on both ends, different for all others."""
        return self.groups.first_tag + tag_of(self.program, item, microbatch)


def lasting(
    items: Sequence[Item], message: Message, program: Program, parameters: Parameters
) -> list[Item]:
    """Return what is sent so that nothing changes it under way: until the step ends, where no gradient comes
    back, and by then what it was a view of may have been updated."""
    results = [program.values[one] for one in message.results]
    return [
        item
        if value.role == "gradient" or value.gradient >= 0
        else replace(item, read=parameters.as_it_was(item.read))
        for item, value in zip(items, results, strict=True)
    ]


class Send(Exchange):
    """The sending half of a transfer; the outstanding work is collected by the interpreter."""

    def __init__(self, items: Sequence[Item], route: Route, mailbox: dict[int, Tensor]) -> None:
        super().__init__(items)
        self.route, self.mailbox = route, mailbox
        self.outstanding: list[Pending] = []

    def issue(self) -> None:
        for number, (item, legs) in enumerate(zip(self.items, self.route.legs, strict=True)):
            tensor, tag = item.source(), self.route.tag + number
            for leg in legs:
                piece = leg.of(tensor)
                if leg.link is None:
                    self.mailbox[tag] = piece.clone()
                else:
                    self.outstanding.append(leg.link.send(piece.contiguous(), tag))

    def under_way(self) -> list[Pending]:
        return self.outstanding

    def complete(self) -> None:
        for pending in self.outstanding:
            pending.wait()
        self.outstanding.clear()


class Receive(Exchange):
    """The receiving half. A piece that is contiguous in the item's memory arrives right there, unless it is
    a term of a sum: those arrive beside it, and are added up in the order of the senders."""

    def __init__(
        self,
        items: Sequence[Item],
        route: Route,
        mailbox: dict[int, Tensor],
        device: torch.device,
    ) -> None:
        super().__init__(items)
        self.route, self.mailbox, self.device = route, mailbox, device
        self.arriving: list[tuple[Tensor, list[tuple[Tensor, Pending]]]] = []

    def issue(self) -> None:
        for number, (item, legs) in enumerate(zip(self.items, self.route.legs, strict=True)):
            tag = self.route.tag + number
            if self.route.sums[number]:
                memory = torch.zeros(item.result_shape, dtype=item.dtype, device=self.device)
                terms = [(view := leg.of(memory), self._term(view, leg, tag)) for leg in legs]
                self.arriving.append((memory, terms))
                continue
            if len(legs) == 1 and legs[0].covers and legs[0].link is None:
                self.arriving.append((self.mailbox.pop(tag), []))
                continue
            memory = item.target() if item.target else self._memory(item, legs)
            works = [(view := leg.of(memory), self._receive(view, leg, tag)) for leg in legs]
            self.arriving.append((memory, works))

    def _memory(self, item: Item, legs: Sequence[Leg]) -> Tensor:
        """Return memory for an item. What no piece covers (a term of a sum held elsewhere) is 0."""
        make = torch.empty if legs else torch.zeros
        return make(item.result_shape, dtype=item.dtype, device=self.device)

    def _term(self, view: Tensor, leg: Leg, tag: int) -> Pending:
        if leg.link is None:
            return Pending((), self.mailbox.pop(tag))
        return leg.link.receive(torch.empty_like(view), tag)

    def _receive(self, view: Tensor, leg: Leg, tag: int) -> Pending:
        if leg.link is None:
            return Pending((), self.mailbox.pop(tag))
        if view.is_contiguous():
            return leg.link.receive(view, tag)
        buffer = torch.empty_like(view, memory_format=torch.contiguous_format)
        return leg.link.receive(buffer, tag)

    def under_way(self) -> list[Pending]:
        return [pending for _, works in self.arriving for _, pending in works]

    def complete(self) -> None:
        for item, is_sum, (memory, works) in zip(
            self.items, self.route.sums, self.arriving, strict=True
        ):
            for view, pending in works:
                arrived = pending.wait()
                if is_sum:
                    view += arrived
                elif arrived.data_ptr() != view.data_ptr():
                    view.copy_(arrived)
            item.write(memory, True)
        self.arriving.clear()
