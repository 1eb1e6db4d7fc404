"""Compiled kernels of the exact search: dropping dominated choices, and bucket elimination.

Tables lie flat one after another. A table of ``scope`` is row-major over its variables.
"""

# Elements of typed arrays are arrays to the type checker.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.compiled import compiled, inner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Picks = NDArray[np.int16]


@inner
def _is_nowhere_worse(
    one: int, other: int, columns: Floats, first: int, stop: int, tables: tuple[Ints, ...],
    allowed: tuple[Ints, Ints],
) -> bool:  # fmt: skip
    """Whether one choice of a variable costs no more than another, in all columns, whatever the
    neighbours choose. Where column 0 is infinite the other choice is forbidden."""
    base, step, begin, near, stride = tables
    kept, start = allowed
    place = np.empty(32, np.int64)
    for touching in range(first, stop):
        low, high = begin[touching], begin[touching + 1]
        offset = base[touching]
        for d in range(low, high):
            place[d - low] = 0
            offset += kept[start[near[d]]] * stride[d]
        running = True
        while running:
            mine, theirs = offset + one * step[touching], offset + other * step[touching]
            if not np.isinf(columns[0, theirs]):
                for column in range(len(columns)):
                    if columns[column, mine] > columns[column, theirs]:
                        return False
            running = False
            for d in range(high - 1, low - 1, -1):
                begins, now = start[near[d]], place[d - low]
                if begins + now + 1 < start[near[d] + 1] and kept[begins + now + 1] >= 0:
                    place[d - low] += 1
                    offset += (kept[begins + now + 1] - kept[begins + now]) * stride[d]
                    running = True
                    break
                offset += (kept[begins] - kept[begins + now]) * stride[d]
                place[d - low] = 0
    return True


@inner
def _compare(
    v: int, columns: Floats, touched: tuple[int, int], tables: tuple[Ints, ...],
    allowed: tuple[Ints, Ints], loses: NDArray[np.bool_],
) -> int:  # fmt: skip
    """Note which of a variable's choices another is nowhere worse than; return how many it has."""
    kept, start = allowed
    first, stop = touched
    size = 0
    while start[v] + size < start[v + 1] and kept[start[v] + size] >= 0:
        size += 1
    for b in range(size):
        loses[b] = False
        for a in range(size):
            if a == b or loses[a]:
                continue
            one, other = kept[start[v] + a], kept[start[v] + b]
            if _is_nowhere_worse(one, other, columns, first, stop, tables, allowed) and (
                a < b or not _is_nowhere_worse(other, one, columns, first, stop, tables, allowed)
            ):
                loses[b] = True
                break
    return size


@inner
def _widest(start: Ints) -> int:
    """Return how many choices a variable has at most; Numba compiles ``np.max`` of a difference for a second."""
    most = 0
    for v in range(len(start) - 1):
        most = max(most, start[v + 1] - start[v])
    return most


@compiled
def prune(
    columns: Floats, touched: Ints, tables: tuple[Ints, ...], allowed: tuple[Ints, Ints]
) -> None:
    """Drop dominated choices until nothing goes; ``allowed[0]`` lists what stays, then -1.

    Variable v has the choices ``allowed[0][start[v]:start[v + 1]]`` and occurs in the tables
    ``touched[v]:touched[v + 1]`` of ``tables``: base, step of v, and the other variables with
    their strides.
    """
    kept, start = allowed
    begin, near = tables[2], tables[3]
    count = len(start) - 1
    pending = np.ones(count, np.bool_)
    loses = np.zeros(_widest(start) + 1, np.bool_)
    while pending.any():
        for v in range(count):
            if not pending[v]:
                continue
            pending[v] = False
            first, stop = touched[v], touched[v + 1]
            size = _compare(v, columns, (first, stop), tables, allowed, loses)
            place = start[v]
            for b in range(size):
                if not loses[b]:
                    kept[place] = kept[start[v] + b]
                    place += 1
            if place == start[v] + size:
                continue
            for rest in range(place, start[v] + size):
                kept[rest] = -1
            for touching in range(first, stop):
                for d in range(begin[touching], begin[touching + 1]):
                    pending[near[d]] = True


@inner
def _carry(sizes: Ints, moves: Ints, num_tables: int, first: int, stop: int) -> None:
    """Say by how much to move along each of some dims where those behind it begin anew."""
    for t in range(num_tables):
        passed = 0
        for d in range(stop - 1, first - 1, -1):
            place = t * len(sizes) + d
            move = moves[place]
            moves[place] = move - passed
            passed += (sizes[d] - 1) * move


@inner
def _join(sizes: Ints, moves: Ints) -> int:
    """Take neighbouring dims along which two tables both lie in one run as one; return the first that is left."""
    rank = len(sizes)
    first = rank
    for d in range(rank - 1, -1, -1):
        one, two = moves[d], moves[rank + d]
        if first < rank:
            size = sizes[first]
            if one == moves[first] * size and two == moves[rank + first] * size:
                sizes[first] *= sizes[d]
                continue
        first -= 1
        sizes[first], moves[first], moves[rank + first] = sizes[d], one, two
    return first


@inner
def _sum_two_out(
    pools: tuple[Floats, Floats], tables: tuple[Ints, Ints, Ints, Ints], own: Floats, sizes: Ints,
    found: tuple[Floats, Picks], digits: Ints,
) -> None:  # fmt: skip
    """Do as ``sum_out`` where two tables are left, which is most of the work, run by run."""
    given, made = pools
    pool, place, step, moves = tables
    least, picks = found
    rank, first, size = len(sizes), _join(sizes, moves), len(own)
    _carry(sizes, moves, 2, first, rank - 1)
    one, two = made if pool[0] else given, made if pool[1] else given
    width, along, across = sizes[rank - 1], moves[rank - 1], moves[2 * rank - 1]
    (here, there), index = (place[0], place[1]), 0
    while index < len(least):
        left, right = here, there
        for _ in range(width):
            best, pick, a, b = np.inf, 0, left, right
            for s in range(size):
                total = own[s] + one[np.uint64(a)] + two[np.uint64(b)]
                is_less = total < best
                best = total if is_less else best
                pick = s if is_less else pick
                a += step[0]
                b += step[1]
            least[index], picks[index] = best, pick
            index += 1
            left += along
            right += across
        for d in range(rank - 2, first - 1, -1):
            digits[d] += 1
            if digits[d] < sizes[d]:
                here += moves[d]
                there += moves[rank + d]
                break
            digits[d] = 0


@inner
def sum_out(
    pools: tuple[Floats, Floats], tables: tuple[Ints, Ints, Ints, Ints], num_tables: int,
    own: Floats, sizes: Ints, found: tuple[Floats, Picks], digits: Ints,
) -> None:  # fmt: skip
    """Eliminate a variable whose choices cost ``own``: for all choices of the others, which have
    ``sizes``, in row-major order, find the least sum of its tables, and its choice, of equals the
    lowest.

    Table ``t`` is in ``pools[pool[t]]`` from ``place[t]`` on, a choice further is ``step[t]`` cells and one of
    the other ``d`` is ``moves[t * rank + d]``; places, moves and sizes are written to.
    """
    given, made = pools
    pool, place, step, moves = tables
    least, picks = found
    rank, size = len(sizes), len(own)
    for d in range(rank):
        digits[d] = 0
    if num_tables == 2 and rank > 0:
        _sum_two_out(pools, tables, own, sizes, found, digits)
        return
    _carry(sizes, moves, num_tables, 0, rank)
    for index in range(len(least)):
        best, pick = np.inf, 0
        for s in range(size):
            total = own[s]
            for t in range(num_tables):
                cell = np.uint64(place[t] + s * step[t])  # never counted from the end
                total += made[cell] if pool[t] else given[cell]
            # Without a branch, which nobody could foretell.
            is_less = total < best
            best = total if is_less else best
            pick = s if is_less else pick
        least[index], picks[index] = best, pick
        for d in range(rank - 1, -1, -1):
            digits[d] += 1
            if digits[d] < sizes[d]:
                for t in range(num_tables):
                    place[t] += moves[t * rank + d]
                break
            digits[d] = 0


@compiled
def eliminate(
    cells: Floats, steps: tuple[Ints, ...], tables: tuple[Ints, ...], dims: tuple[Ints, ...],
    picks: NDArray[np.int32], choices: Picks,
) -> float:  # fmt: skip
    """Minimise one sum of tables; write each variable's choice into ``picks``.

    Step i eliminates ``variable[i]`` with ``size[i]`` choices: of each of its ``count[i]`` joint
    choices of the other variables (``dims``: variable, size) it adds up its tables (base, step of
    the variable; strides in ``dims[2]``, table by table) and writes the least to ``out[i]`` on; where
    ``onto[i]`` is not -1, it is added to what an earlier step wrote there.
    """
    variable, size, count, out, first_table, first_dim, first_stride, kept_at, onto = steps
    base, step = tables
    dim_variable, dim_size = dims[:2]
    total = 0.0
    most = 1
    for i in range(len(variable)):
        most = max(most, size[i])
    own, digits = np.zeros(most), np.empty(len(dim_size) + 1, np.int64)
    pool = np.zeros(len(base) + 1, np.int64)
    place, stride, width = base.copy(), dims[2].copy(), dim_size.copy()
    for i in range(len(variable)):
        low, high = first_table[i], first_table[i + 1]
        near = width[first_dim[i] : first_dim[i + 1]]
        begin, kept = out[i], kept_at[i]
        sum_out(
            (cells, cells), (pool, place[low:high], step[low:high], stride[first_stride[i] :]),
            high - low, own[: size[i]], near,
            (cells[begin : begin + count[i]], choices[kept : kept + count[i]]), digits,
        )  # fmt: skip
        if len(near) == 0:
            total += cells[begin]
        elif onto[i] >= 0:
            for cell in range(count[i]):
                cells[onto[i] + cell] += cells[begin + cell]
    for i in range(len(variable) - 1, -1, -1):
        if variable[i] < 0:
            continue
        cell = 0
        for d in range(first_dim[i], first_dim[i + 1]):
            cell = cell * dim_size[d] + picks[dim_variable[d]]
        picks[variable[i]] = choices[kept_at[i] + cell]
    return total
