"""What lowering a block rested on, and what it did: to be done again without looking at its operators."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from shardwright.core.program import Segment
from shardwright.planner.lower.backward import Links, Prefetched
from shardwright.planner.lower.builder import Finished, Step
from shardwright.planner.lower.parameters import FirstKey, Use, UseKey
from shardwright.planner.lower.pieces import Share
from shardwright.planner.lower.stage import Entry, Holdings

Key = TypeVar("Key")
Item = TypeVar("Item")
Pair = tuple[int, int]


class Closed:
    """A block with its segments finished: those, and per stage its steps, not yet
    synchronised: prologue, forward, backward (its first half where it is split, ``weights`` is the other),
    where that writes each value last, the links it uses.
    ``shares`` are remembered by stage and the gradients of several blocks which it sees synchronised."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, Finished]] = []
        self.prologue: dict[int, Prefetched] = {}
        self.forward: dict[int, Prefetched] = {}
        self.backward: dict[int, Prefetched] = {}
        self.weights: dict[int, list[Step]] = {}
        self.written: dict[int, dict[int, int]] = {}
        self.links: dict[int, Links] = {}
        self.shares: dict[object, Share] = {}


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """What lowering a block rested on, and what it did: per stage entries of prologue and forward; its
    segments as they are before they are finished; gradients ``pending`` to be synchronised and where they
    go; and all that others find of it. ``known``: see ``Blocks``."""

    rests_on: tuple[object, ...]
    entries: tuple[tuple[list[Entry], list[Entry]], ...]
    segments: tuple[tuple[int, Segment], ...]
    pending: tuple[Pair, ...]
    blocks: tuple[int, ...]
    leaves: tuple[Holdings, ...]
    uses: dict[UseKey, Use]
    first_uses: dict[FirstKey, Use]
    taken: dict[int, None]
    turned: tuple[Pair, ...]
    external: frozenset[int]
    lasting: tuple[int, ...]
    cuts: dict[int, int]
    known: dict[object, Closed]
    made: frozenset[int]

    @property
    def numbers(self) -> list[int]:
        """Its segments."""
        return [number for number, _ in self.segments]


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
