"""Merges selections on CPUs, unit by unit, in one walk over both in the order of their places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner

Whole = NDArray[np.int64]
Floats = NDArray[Any]  # of 4 or 8 bytes
Pairs = tuple[Whole, Floats]


@compiled
def merge_units(one: Pairs, other: Pairs, counts: Whole, kept: Pairs, rest: Pairs) -> Whole:
    """Add two selections of so many elements of each unit; write the largest of each unit to ``kept``, others to
    ``rest``, and return of how many elements of each unit that is. Both by place; what is missing stays as it is."""
    left, begin, put = np.zeros(len(counts), np.int64), 0, 0
    for unit in range(len(counts)):
        end = begin + counts[unit]
        mine, theirs = (
            (one[0][begin:end], one[1][begin:end]),
            (other[0][begin:end], other[1][begin:end]),
        )
        places, sums = _added(mine, theirs)
        is_kept, at = _largest(sums, counts[unit]), begin
        for nth in range(len(places)):
            if is_kept[nth]:
                kept[0][at], kept[1][at] = places[nth], sums[nth]
                at += 1
            else:
                rest[0][put], rest[1][put] = places[nth], sums[nth]
                put += 1
        left[unit] = len(places) - (at - begin)
        begin = end
    return left


@compiled
def places_among(mine: Whole, others: Whole, counts: Whole) -> NDArray[np.bool_]:
    """Return which places of so many of each unit another selection of these has, too."""
    found, begin = np.zeros(len(mine), np.bool_), 0
    for count in counts:
        here, there = mine[begin : begin + count], others[begin : begin + count]
        order, to = _order(there), 0
        for nth in _order(here):
            while to < count and there[order[to]] < here[nth]:
                to += 1
            found[begin + nth] = to < count and there[order[to]] == here[nth]
        begin += count
    return found


@inner
def _added(mine: Pairs, theirs: Pairs) -> Pairs:
    """Return places of either in order, and what both have there, the former's first."""
    count = len(mine[0])
    places, sums = np.empty(2 * count, np.int64), np.empty(2 * count, mine[1].dtype)
    first, second = _order(mine[0]), _order(theirs[0])
    found = at = to = 0
    while at < count or to < count:
        if to == count or (at < count and mine[0][first[at]] <= theirs[0][second[to]]):
            place, value = mine[0][first[at]], mine[1][first[at]]
            at += 1
        else:
            place, value = theirs[0][second[to]], theirs[1][second[to]]
            to += 1
        if found and places[found - 1] == place:
            sums[found - 1] += value
        else:
            places[found], sums[found] = place, value
            found += 1
    return places[:found], sums[:found]


@inner
def _order(places: Whole) -> Whole:
    """Return in which order they ascend; what was merged does."""
    for at in range(1, len(places)):
        if places[at] < places[at - 1]:
            return np.argsort(places, kind="mergesort")
    return np.arange(len(places))


@inner
def _largest(sums: Floats, count: int) -> NDArray[np.bool_]:
    """Return which are the so many of largest magnitude, of equal ones the first; what is no number is larger than all."""
    is_kept = np.ones(len(sums), np.bool_)
    if len(sums) <= count:
        return is_kept
    sizes = np.empty_like(sums)
    for at in range(len(sums)):
        sizes[at] = np.inf if math.isnan(sums[at]) else abs(sums[at])
    least = _nth(sizes.copy(), len(sizes) - count)
    equal = count
    for at in range(len(sizes)):
        equal -= sizes[at] > least
    for at in range(len(sizes)):
        is_equal = sizes[at] == least
        is_kept[at] = sizes[at] > least or (is_equal and equal > 0)
        equal -= is_equal
    return is_kept


@inner
def _nth(values: Floats, nth: int) -> float:
    """Return the one at a place of the ascending order, which the values lose (Hoare's quickselect). Numba compiles
    ``np.partition`` for ten seconds, which every rank waits for in its first step."""
    low, high, draw = 0, len(values) - 1, 1
    while low < high:
        # Pivots drawn by a linear congruence: in the middle, values that ascend and descend take their square.
        draw = (1103515245 * draw + 12345) % 2**31
        pivot, left, right = values[low + draw % (high - low + 1)], low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while pivot < values[right]:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left, right = left + 1, right - 1
        if nth <= right:
            high = right
        elif nth >= left:
            low = left
        else:
            break
    return values[nth]
