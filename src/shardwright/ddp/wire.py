"""What a method asks of other ranks: blocking messages of flat tensors, in one order on all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.runtime import collectives


class Wire(Protocol):
    """The ranks that train together, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This rank's place."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum in place."""
        ...

    def all_gather(self, piece: Tensor) -> Tensor:
        """Return every rank's piece as a row of one tensor."""
        ...

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send to a rank."""
        ...

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Receive from a rank a tensor of a form that is known."""
        ...

    def swap(self, tensor: Tensor, rank: int) -> Tensor:
        """Send to a rank and receive its tensor of equal form."""
        ...


class GroupWire:
    """A process group of torch."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum in place."""
        collectives.all_reduce(buffer, self.group).wait()

    def all_gather(self, piece: Tensor) -> Tensor:
        """Return every rank's piece as a row of one tensor."""
        output = piece.new_empty(self.size * len(piece))
        collectives.all_gather(output, piece, self.group).wait()
        return output.view(self.size, -1)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send to a rank."""
        collectives.send(tensor, self._global(rank), self.group, 0).wait()

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Receive from a rank a tensor of a form that is known."""
        memory = torch.empty_like(like)
        return collectives.receive(memory, self._global(rank), self.group, 0).wait()

    def swap(self, tensor: Tensor, rank: int) -> Tensor:
        """Send to a rank and receive its tensor of equal form, both at once."""
        theirs = torch.empty_like(tensor)
        return collectives.swap(theirs, tensor, self._global(rank), self.group).wait()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)
