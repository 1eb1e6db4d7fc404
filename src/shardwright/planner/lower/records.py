"""What lowering some operators rested on, and what it did: to be done again without looking at them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from shardwright.core.program import Segment
from shardwright.planner.lower.alike import surroundings
from shardwright.planner.lower.ground import Ground
from shardwright.planner.lower.parameters import FirstKey, Use, UseKey
from shardwright.planner.lower.pieces import Lowered
from shardwright.planner.lower.stage import Holdings, Opened

Key = TypeVar("Key")
Item = TypeVar("Item")
# A block that is known otherwise is lowered again so many operators at a time.
PART = 5


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

    def __init__(self, ground: Ground) -> None:
        parts = [
            [(at, min(at + PART, block.stop)) for at in range(block.start, block.stop, PART)]
            for block in ground.graph.blocks
        ]
        flat = iter(surroundings(ground.graph, [part for several in parts for part in several]))
        self.blocks = ground.blocks
        self.parts = [[next(flat) for _ in several] for several in parts]
        self.shared = frozenset(t for around in self.blocks for t in around.shared)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.of_blocks: list[list[Record]] = [[] for _ in self.blocks]
        self.of_parts: list[list[list[Record]]] = [[[] for _ in several] for several in self.parts]


def since(found: dict[Key, Item], size: int) -> dict[Key, Item]:
    """Return what came to a dict after it had a size."""
    last = list(islice(reversed(found.items()), len(found) - size))
    return dict(reversed(last))


def news(holds: Holdings, held: Holdings) -> Holdings:
    """Return what a mesh holds and did not hold before."""
    first, second, third = (
        {key: one for key, one in now.items() if before.get(key) is not one}
        for now, before in zip(holds, held, strict=True)
    )
    return first, second, third
