"""What lowering some operators rested on, and what it did: to be done again without looking at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from shardwright.core.graph import OperatorGraph
from shardwright.core.program import Segment
from shardwright.planner.lower.parameters import FirstKey, Use, UseKey
from shardwright.planner.lower.pieces import Lowered
from shardwright.planner.lower.stage import Holdings, Opened

Key = TypeVar("Key")
Item = TypeVar("Item")
# A block that is known otherwise is lowered again so many operators at a time.
PART = 5


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


@dataclass(frozen=True, slots=True)
class Record:
    """What lowering a range of operators rested on, and what it did."""

    rests_on: tuple[object, ...]
    lowered: Lowered
    blocks: tuple[int, ...]
    opened: tuple[Opened, ...]
    segments: tuple[tuple[int, Segment], ...]
    leaves: tuple[Holdings, ...]
    uses: dict[UseKey, Use]
    first_uses: dict[FirstKey, Use]
    taken: dict[int, None]
    turned: tuple[tuple[int, int], ...]
    external: frozenset[int]
    lasting: tuple[int, ...]
    cuts: dict[int, int]


class Records:
    """What is remembered of one builder: of whole blocks, and of the few operators that a block is
    lowered by where it is not found whole."""

    def __init__(self, graph: OperatorGraph) -> None:
        blocks = [(block.start, block.stop) for block in graph.blocks]
        parts = [
            [(at, min(at + PART, stop)) for at in range(start, stop, PART)]
            for start, stop in blocks
        ]
        flat = iter(_surroundings(graph, [part for several in parts for part in several]))
        self.blocks = _surroundings(graph, blocks)
        self.parts = [[next(flat) for _ in several] for several in parts]
        self.shared = frozenset(t for around in self.blocks for t in around.shared)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.of_blocks: list[list[Record]] = [[] for _ in self.blocks]
        self.of_parts: list[list[list[Record]]] = [[[] for _ in several] for several in self.parts]


def _surroundings(graph: OperatorGraph, ranges: Sequence[tuple[int, int]]) -> list[Surroundings]:
    range_of = {i: n for n, (start, stop) in enumerate(ranges) for i in range(start, stop)}
    reported = {graph.loss, *(tensor for _, tensor in graph.outputs)}
    result: list[Surroundings] = []
    for number, (start, stop) in enumerate(ranges):
        operators = graph.operators[start:stop]
        read = dict.fromkeys(tensor for operator in operators for tensor in operator.inputs)
        made = dict.fromkeys(tensor for operator in operators for tensor in operator.outputs)
        parameters = tuple(t for t in read if graph.tensors[t].role == "parameter")
        alone = {
            tensor
            for tensor in (*read, *made)
            if all(range_of[reader] == number for reader in graph.consumers[tensor])
        }
        inner = {t for t in alone if t in made or graph.tensors[t].role != "activation"}
        others = [t for t in (*read, *made) if t not in parameters]
        finds = tuple([t for t in others if t not in inner and t not in made])
        result.append(
            Surroundings(
                start=start,
                stop=stop,
                parameters=parameters,
                shared=tuple(t for t in parameters if t not in alone),
                finds=finds,
                producers=tuple([p for t in finds if (p := graph.tensors[t].producer) >= 0]),
                leaves=tuple(t for t in dict.fromkeys(others) if t not in inner or t in reported),
            )
        )
    return result


def since(found: dict[Key, Item], size: int) -> dict[Key, Item]:
    """Return what came to a dict after it had a size."""
    last = list(islice(reversed(found.items()), len(found) - size))
    return dict(reversed(last))
