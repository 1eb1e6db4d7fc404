"""Make a contest's problem smaller: in order first, then by ``planner.solve.wide.compact``, and of the time points only
those stay at which something can peak.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solve.wide.compact import Compact, compact
from shardwright.planner.solve.wide.problem import Floats, Ints, WideProblem


def compacted(problem: WideProblem) -> Compact:
    """Return the problem without what cannot matter. Exact."""
    smaller = compact(_ordered(problem))
    return replace(smaller, problem=_without_quiet_times(smaller.problem))


def _ordered(problem: WideProblem) -> WideProblem:
    """Return the problem with one edge per pair of nodes, the lower node first."""
    sizes = problem.sizes
    alive = problem.begin < problem.end
    problem = replace(
        problem,
        usage=np.where(np.repeat(alive, sizes), problem.usage, 0.0),
        begin=np.where(alive, problem.begin, 0),
        end=np.where(alive, problem.end, 0),
    )
    one, two = problem.ends.T
    if (one < two).all() and len(np.unique(one * problem.num_nodes + two)) == len(one):
        return problem  # what was compacted before; its cells need not be copied
    pool: list[Floats] = [problem.cells]
    size = len(problem.cells)
    turned: dict[tuple[int, int, int], int] = {}
    tables: dict[tuple[int, int], list[int]] = {}
    for (one, two), table in zip(problem.ends.tolist(), problem.table.tolist(), strict=True):
        rows, columns = int(sizes[one]), int(sizes[two])
        if one > two:
            key = (table, rows, columns)
            if key not in turned:
                whole = problem.cells[table : table + rows * columns].reshape(rows, columns)
                pool.append(whole.T.ravel())
                turned[key] = size
                size += rows * columns
            one, two, table = two, one, turned[key]
        tables.setdefault((one, two), []).append(table)
    cells = np.concatenate(pool)
    summed: list[Floats] = []
    starts: list[int] = []
    for (one, two), parts in tables.items():
        length = int(sizes[one] * sizes[two])
        if len(parts) > 1:
            summed.append(np.sum([cells[part : part + length] for part in parts], axis=0))
            starts.append(size)
            size += length
        else:
            starts.append(parts[0])
    return replace(
        problem,
        ends=np.array(list(tables), dtype=np.int64).reshape(-1, 2),
        table=np.array(starts, dtype=np.int64),
        cells=np.concatenate([cells, *summed]) if summed else cells,
    )


def _without_quiet_times(problem: WideProblem) -> WideProblem:
    """Join time points into runs in which first things only begin, and then only end.

    What is alive at any time of a run is alive at the turn, and the base is largest there.
    """
    moves = (problem.begin < problem.end) & np.array(
        [problem.usage[a:b].any() for a, b in zip(problem.first[:-1], problem.first[1:])],
        dtype=bool,
    )
    length = len(problem.base)
    begins = np.bincount(problem.begin[moves], minlength=length + 1)
    ends = np.bincount(problem.end[moves], minlength=length + 1)
    begins[1:length] += np.diff(problem.base) > 0
    ends[1:length] += np.diff(problem.base) < 0
    piece = np.zeros(length, dtype=np.int64)
    current, has_end = 0, False
    for time in range(1, length):
        has_end = has_end or bool(ends[time])
        if begins[time] and has_end:
            current, has_end = current + 1, False
        piece[time] = current
    return problem if not length else _by_piece(problem, piece, moves)


def _by_piece(problem: WideProblem, piece: Ints, moves: NDArray[np.bool_]) -> WideProblem:
    """Return the problem in which each run of time points is one."""
    base = np.full(int(piece[-1]) + 1, -np.inf)
    np.maximum.at(base, piece, problem.base)
    begin = np.where(moves, piece[problem.begin], 0)
    end = np.where(moves, piece[np.maximum(problem.end, 1) - 1] + 1, 0)
    return replace(problem, base=base, begin=begin, end=end)
