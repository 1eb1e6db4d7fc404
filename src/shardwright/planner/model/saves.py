"""Which activations live from forward to backward, and at whose expense they are counted.

A storage (a tensor and all views of it) that some operator keeps for backward is charged once: to
its only reader, as that reader lays it out, where there is just one that keeps it; otherwise to its
producer. What one block hands to another always stays, since recomputation starts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    extra: tuple[ExtraBytes, ...]
    kept_below: tuple[bool, ...]
    maker: tuple[int, ...]


def find_saves(graph: OperatorGraph, block: tuple[int, ...]) -> Saves:
    """Walk the graph once; linear in its size."""
    storage = storages(graph)
    savers, own, extra = _savers(graph, storage)
    inputs, outputs, crossing = (tuple([list[int]() for _ in graph.operators]) for _ in range(3))
    for tensor, maker in _made(graph, storage):
        position = graph.operators[maker].outputs.index(tensor)
        if _leaves(graph, block, tensor):
            crossing[maker].append(position)
        elif tensor in own:
            outputs[maker].append(position)
        elif _is_kept_by_its_only_reader(graph, savers, tensor):
            reader, place = savers[tensor][0]
            inputs[reader].append(place)
        elif savers[tensor]:
            outputs[maker].append(position)
    return Saves(
        inputs=inputs,
        outputs=outputs,
        crossing=crossing,
        extra=tuple(extra),
        kept_below=tuple(bool(savers[root]) for root in storage),
        maker=tuple(graph.tensors[root].producer for root in storage),
    )


def _made(graph: OperatorGraph, storage: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Give the tensors that operators make in storages of their own, with these operators."""
    for tensor, spec in enumerate(graph.tensors):
        if spec.producer >= 0 and storage[tensor] == tensor:
            yield tensor, spec.producer


def _leaves(graph: OperatorGraph, block: tuple[int, ...], tensor: int) -> bool:
    """Whether a tensor with a gradient is read in another block than it is made in."""
    spec = graph.tensors[tensor]
    home = block[spec.producer]
    return spec.needs_gradient and any(block[r] != home for r in graph.consumers[tensor])


def _is_kept_by_its_only_reader(
    graph: OperatorGraph, savers: list[list[tuple[int, int]]], tensor: int
) -> bool:
    readers = graph.consumers[tensor]
    return len(readers) == 1 and [readers[0]] == [index for index, _ in savers[tensor]]


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
