"""Space: where tensors and operators may lie. Only legal configs leave this room.

``choices`` gives the legal configs of an operator from its iteration space (``operators``),
``placements`` the layouts that follow, ``reshard_steps`` the messages between two layouts,
``seed_strategy`` whole named strategies, ``place_parts`` and ``place_modules`` strategies of parts
that run on devices of their own, ``check_strategy`` refuses what is not legal. No prices here, and
no order in time.
"""

from shardwright.planner.space.configs import choices, placements
from shardwright.planner.space.legal import check_strategy
from shardwright.planner.space.placement import (
    ModulePart,
    Part,
    Placement,
    place_modules,
    place_parts,
)
from shardwright.planner.space.redistribute import reshard_steps
from shardwright.planner.space.seeds import Seed, seed_strategy, single_sync

__all__ = [
    "ModulePart",
    "Part",
    "Placement",
    "Seed",
    "check_strategy",
    "choices",
    "place_modules",
    "place_parts",
    "placements",
    "reshard_steps",
    "seed_strategy",
    "single_sync",
]
