"""What blocks of a graph have to do with the others, and which are alike to lowering, wherever they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from shardwright.core.graph import Block, OperatorGraph
from shardwright.operators.derivatives import base_kind
from shardwright.operators.splitting.samples import Samples, State


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a range of operators has to do with the others: parameters, tensors that it finds and
    leaves."""

    start: int
    stop: int
    parameters: tuple[int, ...]
    shared: tuple[int, ...]  # parameters that others read too
    finds: tuple[int, ...]
    producers: tuple[int, ...]  # that make what it finds
    leaves: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Alike:
    """A block that others of its ``kind`` are like. ``tensors`` are all that it reads or makes, in the
    order of their first mention; operators ``sampleless`` see no samples."""

    kind: int
    number: int
    around: Surroundings
    tensors: tuple[int, ...]
    sampleless: tuple[int, ...]


def surroundings(graph: OperatorGraph) -> list[Surroundings]:
    """Return what every block has to do with the others."""
    reported = {graph.loss, *(tensor for _, tensor in graph.outputs)}
    return [_around(graph, block, reported) for block in graph.blocks]


def _around(graph: OperatorGraph, block: Block, reported: set[int]) -> Surroundings:
    operators = graph.operators[block.start : block.stop]
    read = dict.fromkeys(chain.from_iterable([one.inputs for one in operators]))
    made = dict.fromkeys(chain.from_iterable([one.outputs for one in operators]))
    parameters = tuple([t for t in read if graph.tensors[t].role == "parameter"])
    alone = {t for t in (*read, *made) if _is_read_within(graph, t, block)}
    others = [t for t in dict.fromkeys((*read, *made)) if t not in parameters]
    inner = {t for t in alone if t in made or graph.tensors[t].role != "activation"}
    finds = tuple([t for t in others if t not in inner and t not in made])
    producers = [graph.tensors[t].producer for t in finds]
    return Surroundings(
        start=block.start,
        stop=block.stop,
        parameters=parameters,
        shared=tuple([t for t in parameters if t not in alone]),
        finds=finds,
        producers=tuple([producer for producer in producers if producer >= 0]),
        leaves=tuple([t for t in others if t not in inner or t in reported]),
    )


def _is_read_within(graph: OperatorGraph, tensor: int, block: Block) -> bool:
    """Whether no other block reads a tensor."""
    readers = graph.consumers[tensor]
    return not readers or (block.start <= readers[0] and readers[-1] < block.stop)


def alike_blocks(
    graph: OperatorGraph, samples: Samples, around: Sequence[Surroundings], writes: Sequence[bool]
) -> list[Alike | None]:
    """Return, per block, what makes it like others; None where it is like none.

    ``writes``: operators that write a buffer, or depend on one that is written.
    """
    counts = Counter(block.signature for block in graph.blocks if block.signature)
    kinds: dict[object, int] = {}
    found: list[Alike | None] = [None] * len(graph.blocks)
    for number, block in enumerate(graph.blocks):
        if counts[block.signature] > 1:
            place = _places(graph, around[number])
            key = (block.signature, *_described(graph, samples, around[number], writes, place))
            found[number] = Alike(
                kind=kinds.setdefault(key, len(kinds)),
                number=number,
                around=around[number],
                tensors=tuple(place),
                sampleless=_sampleless(samples, around[number]),
            )
    several = Counter(one.kind for one in found if one is not None)
    return [one if one is not None and several[one.kind] > 1 else None for one in found]


def _sampleless(samples: Samples, around: Surroundings) -> tuple[int, ...]:
    operators = range(around.start, around.stop)
    return tuple([index for index in operators if samples.operator_dim[index] == ""])


def _places(graph: OperatorGraph, around: Surroundings) -> dict[int, int]:
    """Number what a block reads and makes."""
    place: dict[int, int] = {}
    for operator in graph.operators[around.start : around.stop]:
        for tensor in (*operator.inputs, *operator.outputs):
            place.setdefault(tensor, len(place))
    return place


def _described(
    graph: OperatorGraph,
    samples: Samples,
    around: Surroundings,
    writes: Sequence[bool],
    place: dict[int, int],
) -> tuple[object, ...]:
    """Return what lowering a block depends on but for strategies, with tensors by their ``place``."""
    start, stop = around.start, around.stop
    operators = [
        (
            [place[tensor] for tensor in (*operator.inputs, *operator.outputs)],
            samples.operator_dim[index],
            index in samples.prologue and (1, is_cut(graph, samples, operator.outputs)),
            writes[index],
        )
        for index, operator in enumerate(graph.operators[start:stop], start)
    ]
    tensors = [
        (
            spec.shape, spec.dtype, spec.role, spec.needs_gradient,
            samples.state[tensor], samples.tensor_dim[tensor],
            "" if spec.producer < 0 else base_kind(graph.operators[spec.producer].kind),
        )
        for tensor in place
        for spec in [graph.tensors[tensor]]
    ]  # fmt: skip
    roles = (around.parameters, around.shared, around.finds, around.leaves)
    ends = [tuple([place[tensor] for tensor in listed]) for listed in roles]
    return str(operators), tuple(tensors), tuple(ends)


def is_cut(graph: OperatorGraph, samples: Samples, outputs: Sequence[int]) -> bool:
    """Whether pieces of what the prologue makes may be wanted behind it."""
    return any(
        samples.state[tensor] is State.SPLIT
        and not samples.prologue.issuperset(graph.consumers[tensor])
        for tensor in outputs
    )
