"""Which activations live from forward to backward, and at whose expense they are counted.

A storage (a tensor and all views of it) that some operator keeps for backward is charged once: to
its only reader, as that reader lays it out, where there is just one that keeps it; otherwise to its
producer. What one block hands to another always stays, since recomputation starts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.graph import OperatorGraph
from shardwright.operators.derivatives import ExtraBytes, storages
from shardwright.operators.keeping.kept import saved_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Per operator: ``inputs`` positions and ``outputs`` positions whose bytes it pays for, and the
    ``extra`` bytes of its statistics. ``crossing`` are output positions paid for although their own
    block is recomputed. ``kept_below[tensor]``: whether a re-laid-out copy of the tensor would be
    kept too. ``maker[tensor]``: the operator that made its storage, -1 for none.
    """

    inputs: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]
    crossing: Sequence[Sequence[int]]
    extra: Sequence[ExtraBytes]
    kept_below: tuple[bool, ...]
    maker: tuple[int, ...]


def find_saves(graph: OperatorGraph, block: tuple[int, ...]) -> Saves:
    """Walk the graph once; linear in its size."""
    storage = storages(graph)
    savers, own, extra = _savers(graph, storage)
    inputs, outputs, crossing = ([list[int]() for _ in graph.operators] for _ in range(3))
    for tensor, spec in enumerate(graph.tensors):
        maker, readers = spec.producer, graph.consumers[tensor]
        if maker < 0 or storage[tensor] != tensor:
            continue
        position, keepers = graph.operators[maker].outputs.index(tensor), savers[tensor]
        if spec.needs_gradient and any(block[reader] != block[maker] for reader in readers):
            crossing[maker].append(position)
        elif tensor not in own and len(readers) == 1 and [one for one, _ in keepers] == [*readers]:
            inputs[readers[0]].append(keepers[0][1])  # by its only reader
        elif keepers or tensor in own:
            outputs[maker].append(position)
    return Saves(
        inputs=inputs,
        outputs=outputs,
        crossing=crossing,
        extra=extra,
        kept_below=tuple(bool(savers[root]) for root in storage),
        maker=tuple(graph.tensors[root].producer for root in storage),
    )


def _savers(
    graph: OperatorGraph, storage: Sequence[int]
) -> tuple[list[list[tuple[int, int]]], set[int], list[ExtraBytes]]:
    """Return by storage who keeps it (operator and position), which are kept by their makers, and every
    operator's statistics."""
    savers: list[list[tuple[int, int]]] = [[] for _ in graph.tensors]
    own: set[int] = set()
    extra: list[ExtraBytes] = []
    for index, operator in enumerate(graph.operators):
        kept_in, kept_out, more = saved_tensors(graph, operator)
        extra.append(more)
        for position in kept_in:
            savers[storage[operator.inputs[position]]].append((index, position))
        own.update(storage[operator.outputs[position]] for position in kept_out)
    return savers, own, extra
