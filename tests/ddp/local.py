"""All ranks in one process: the wire of compressed gradients over the local world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.ddp import Compression, Compressor
from shardwright.runtime.local_world import LocalWorld, Traffic, run_locally

T = TypeVar("T")
Gradients = dict[str, Tensor]


class LocalWire:
    """A thread among threads that take turns; nothing can hang."""

    def __init__(self, world: LocalWorld) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self._group = world.group(tuple(range(world.size)))

    def all_reduce(self, buffer: Tensor) -> None:
        self._group.all_reduce(buffer).wait()

    def all_gather(self, piece: Tensor) -> Tensor:
        output = piece.new_empty(self.size * len(piece))
        self._group.all_gather(output, piece).wait()
        return output.view(self.size, -1)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._world.link(self.rank, rank).send(tensor, 0).wait()

    def receive(self, like: Tensor, rank: int) -> Tensor:
        memory = torch.empty_like(like)
        return self._world.link(rank, self.rank).receive(memory, 0).wait()

    def swap(self, tensor: Tensor, rank: int) -> Tensor:
        memory = torch.empty_like(tensor)
        sent = self._world.link(self.rank, rank).send(tensor, 0)
        received = self._world.link(rank, self.rank).receive(memory, 0)
        received.wait()
        sent.wait()
        return memory


def on_ranks(size: int, target: Callable[[LocalWire], T]) -> tuple[list[T], Traffic]:
    return run_locally(lambda world: target(LocalWire(world)), size)


def copied(gradients: Gradients) -> Gradients:
    return {name: one.clone() for name, one in gradients.items()}


def averaged(
    settings: Compression,
    inputs: Sequence[Sequence[Gradients]],
    factors: Gradients | None = None,
) -> tuple[list[list[Gradients]], list[Compressor], Traffic]:
    """Run steps on every rank: ``inputs[step][rank]``. Returns means by step and rank, compressors,
    and what was sent."""

    def target(wire: LocalWire) -> tuple[list[Gradients], Compressor]:
        elements = sum(one.numel() for one in inputs[0][0].values())
        compressor = Compressor(settings, wire, elements)
        if factors:
            compressor.load_state_dict(compressor.state_dict() | {"factor": factors})
        means = []
        for step in inputs:
            gradients = copied(step[wire.rank])
            compressor.average(gradients)
            means.append(gradients)
        return means, compressor

    results, traffic = on_ranks(len(inputs[0]), target)
    means = [[means[step] for means, _ in results] for step in range(len(inputs))]
    return means, [compressor for _, compressor in results], traffic
