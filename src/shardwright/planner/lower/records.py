"""What lowering a block rested on, and what it did: to be done again without looking at its operators."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from shardwright.core.program import Segment
from shardwright.planner.lower.parameters import FirstKey, Use, UseKey
from shardwright.planner.lower.pieces import Lowered
from shardwright.planner.lower.stage import Holdings

Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Record:
    """What lowering a block rested on, and what it did."""

    rests_on: tuple[object, ...]
    lowered: Lowered
    blocks: tuple[int, ...]
    segments: tuple[tuple[int, Segment], ...]
    leaves: tuple[Holdings, ...]
    uses: dict[UseKey, Use]
    first_uses: dict[FirstKey, Use]
    taken: dict[int, None]
    turned: tuple[tuple[int, int], ...]
    external: frozenset[int]
    lasting: tuple[int, ...]
    cuts: dict[int, int]


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
