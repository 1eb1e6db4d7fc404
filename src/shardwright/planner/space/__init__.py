"""Space: where tensors and operators may lie. Only legal configs leave this room.

``iterate`` gives an operator's iteration space, ``choices`` its legal configs, ``placements`` the
layouts that follow, ``reshard_steps`` the messages between two layouts, ``find_samples`` the sample
dims, ``seed_strategy`` whole named strategies, ``place_parts`` and ``place_modules`` strategies of
parts that run on devices of their own, ``check_strategy`` refuses what is not legal. No prices here,
and no order in time.
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
from shardwright.planner.space.rules import has_rule, iterate
from shardwright.planner.space.samples import find_samples
from shardwright.planner.space.seeds import Seed, seed_strategy, single_sync

__all__ = [
    "ModulePart",
    "Part",
    "Placement",
    "Seed",
    "check_strategy",
    "choices",
    "find_samples",
    "has_rule",
    "iterate",
    "place_modules",
    "place_parts",
    "placements",
    "reshard_steps",
    "seed_strategy",
    "single_sync",
]
