"""Which activations lead from which operators to which, equal blocks taken together."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.planner.model.ties import Ties

# Root maker, output position, root readers with input positions.
_Place = tuple[int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One tensor of the tied graph: its root maker and output position, its root readers, and the
    blocks in which it occurs. ``tensor`` is one occurrence.
    """

    tensor: int
    maker: int
    position: int
    readers: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]


def find_flows(graph: OperatorGraph, ties: Ties) -> tuple[Flow, ...]:
    """List every activation that somebody reads; linear in the size of the graph."""
    found: dict[_Place, list[int]] = {}
    sample: dict[_Place, int] = {}
    for index, operator in enumerate(graph.operators):
        for position, tensor in enumerate(operator.outputs):
            if not graph.consumers[tensor]:
                continue
            readers = {
                (ties.root[reader], place)
                for reader in graph.consumers[tensor]
                for place, read in enumerate(graph.operators[reader].inputs)
                if read == tensor
            }
            key: _Place = (ties.root[index], position, tuple(sorted(readers)))
            found.setdefault(key, []).append(ties.block[graph.consumers[tensor][0]])
            sample.setdefault(key, tensor)
    return tuple(
        [
            Flow(
                tensor=sample[key], maker=key[0], position=key[1], readers=key[2],
                blocks=tuple(blocks),
            )
            for key, blocks in found.items()
        ]
    )  # fmt: skip
