"""Elimination step by step on arrays, where the tables on the way matter or not all variables go.

``buckets`` plans an elimination once and repeats it for many weightings, compiled, keeping minima only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.errors import InputError
from shardwright.planner.solve.buckets import MAX_CELLS, Floats, Scope


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A table over ``scope``; ``variable`` is that whose elimination made it, -1 for a given one."""

    scope: Scope
    table: Floats
    variable: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """An eliminated variable: all that mentioned it, and the sum of that."""

    variable: int
    scope: Scope
    table: Floats
    told: tuple[Entry, ...]


def eliminate(
    sizes: Sequence[int], tables: Iterable[tuple[Scope, Floats]], order: Iterable[int]
) -> tuple[list[Bucket], list[Entry]]:
    """Minimise over the variables in this order; return their buckets and the tables that are left.

    Scopes ascend. Raises InputError where a bucket would have more than ``MAX_CELLS`` cells.
    """
    entries = [Entry(scope, table) for scope, table in tables]
    buckets: list[Bucket] = []
    for variable in order:
        told = tuple(entry for entry in entries if variable in entry.scope)
        entries = [entry for entry in entries if variable not in entry.scope]
        scope = tuple(sorted({variable}.union(*[entry.scope for entry in told])))
        _check_size([sizes[v] for v in scope])
        table = joined(sizes, ((entry.scope, entry.table) for entry in told), scope)
        axis = scope.index(variable)
        buckets.append(Bucket(variable, scope, table, told))
        entries.append(Entry((*scope[:axis], *scope[axis + 1 :]), table.min(axis=axis), variable))
    return buckets, entries


def _check_size(sizes: Sequence[int]) -> None:
    if math.prod(sizes) > MAX_CELLS:
        raise InputError(
            f"these decisions need tables of at most {MAX_CELLS} cells, this graph one over "
            f"{len(sizes)} decisions; take a plan with fewer mesh axes"
        )


def merged(tables: Iterable[tuple[Scope, Floats]]) -> list[tuple[Scope, Floats]]:
    """Sum tables of equal scope, so that everything afterwards touches fewer."""
    found: dict[Scope, Floats] = {}
    for scope, table in tables:
        known = found.get(scope)
        found[scope] = table if known is None else known + table
    return list(found.items())


def joined(sizes: Sequence[int], parts: Iterable[tuple[Scope, Floats]], scope: Scope) -> Floats:
    """Return the sum of tables over a scope that has all their variables, in the same order."""
    total = np.zeros([sizes[v] for v in scope])
    for own, table in parts:
        total += spread(sizes, own, table, scope)
    return total


def spread(sizes: Sequence[int], own: Scope, table: Floats, scope: Scope) -> Floats:
    """Reshape a table so that it broadcasts over a larger scope."""
    return table.reshape([sizes[v] if v in own else 1 for v in scope])
