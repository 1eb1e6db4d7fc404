"""Messages from places along the axes of a mesh to others: each rank has at most one to send, and one to receive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwright.runtime.collectives import Pending
from shardwright.runtime.messages import Exchange, Item
from shardwright.runtime.transfers import Routes
from shardwright.runtime.world import Link


class SendReceive(Exchange):
    """All items in one buffer, out on one link and in on the other; without the latter nothing is written."""

    def __init__(
        self, items: Sequence[Item], out: Link | None, back: Link | None, tag: int
    ) -> None:
        super().__init__(items)
        self.out, self.back, self.tag = out, back, tag
        self.sent: Pending | None = None

    def issue(self) -> None:
        whole = torch.cat([item.row() for item in self.items])
        self.sent = self.out.send(whole, self.tag) if self.out else None
        self.pending = self.back.receive(torch.empty_like(whole), self.tag) if self.back else None

    def under_way(self) -> list[Pending]:
        return [one for one in (self.sent, self.pending) if one is not None]

    def complete(self) -> None:
        if self.back:
            counts = [math.prod(item.result_shape) for item in self.items]
            for item, part in zip(self.items, self._wait().split(counts), strict=True):
                item.write(part.view(item.result_shape), True)
        if self.sent is not None:
            self.sent.wait()
            self.sent = None


def exchange(routes: Routes, items: Sequence[Item], item: int, microbatch: int) -> SendReceive:
    """Return a message as this device takes part in it."""
    message = routes.program.messages[item]
    peers = routes.program.meshes[message.mesh].peers(routes.device, message.axes)
    here, ranks = peers.index(routes.device), [routes.rank_of[peer] for peer in peers]

    def link(sender: int, receiver: int) -> Link | None:
        ends = (ranks[sender], ranks[receiver])
        return routes.groups.between(*ends, (message.mesh, message.mesh))

    out = next((link(*pair) for pair in message.pairs if pair[0] == here), None)
    back = next((link(*pair) for pair in message.pairs if pair[1] == here), None)
    return SendReceive(items, out, back, routes.tag(item, microbatch))
